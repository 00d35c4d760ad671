"""python -m tests.minislurm.newer_debian [--suite NAME] COMMAND...: run the command on a newer Debian. Needs root.

Slurm is 24.11 in trixie and 26.05 in forky and sid. forky also has Python 3.14, and sid has Apptainer. Debian is in a folder that debootstrap
makes once. The command sees it as /, with this machine's Python, checkout and /tmp at their usual paths. Other files
that it writes are in memory, so the folder does not change, and several commands can use it at a time. Mounts, network
and processes are in separate namespaces, which end with the command.
"""

import argparse
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.packages import fetch
from tests.minislurm.shell import PATH, run

SUITES = ("trixie", "forky", "sid")
# debootstrap 1.0.128 has no script for forky. Every suite since etch uses that of sid.
SCRIPT = "/usr/share/debootstrap/scripts/sid"
PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "munge", "iproute2",  # a cluster
    "slurmdbd", "mariadb-server",  # accounting
    "git",  # of snapshot=git
    "strace",  # of tests/docs
    "libbz2-1.0", "libexpat1", "libffi8", "libsqlite3-0", "libssl3t64",  # what this machine's Python links to
)  # fmt: skip
MORE_PACKAGES = {
    "forky": (
        "python3",
        "python3.14",
        "python3.14-venv",
        "python3.14-dev",
        "gcc",
        "g++",
        "make",
        "ninja-build",
    ),  # make test-python314
    "sid": ("apptainer", "squashfuse", "fuse-overlayfs"),
}
# What a program needs to install from the network: name servers, and the certificates of this machine.
NETWORK = (Path("/etc/resolv.conf"), Path("/etc/ssl/certs"))

# In $1, `tree` is Debian and `mnt` an empty folder; $2 is /etc/hosts and $3 the working folder. Then follow the folders
# and files to show, up to '--', and the command. The shell stays as the first process of its namespace, and becomes the
# parent of the daemons that tests leave behind.
ENTER = """
set -e
cd "$1"; hosts=$2; cwd=$3; shift 3
mount -t tmpfs -o mode=755 minislurm mnt
mkdir mnt/new mnt/work mnt/root
mount -t overlay -o lowerdir=tree,upperdir=mnt/new,workdir=mnt/work minislurm mnt/root
mount -t proc proc mnt/root/proc
mount -t sysfs sysfs mnt/root/sys
mount --rbind /sys/fs/cgroup mnt/root/sys/fs/cgroup
mount --rbind /dev mnt/root/dev
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "mnt/root$1"; else mkdir -p "mnt/root${1%/*}"; : > "mnt/root$1"; fi
    mount --rbind "$1" "mnt/root$1"
    shift
done
shift
printf '%s\n' "$hosts" > mnt/root/etc/hosts
mkdir -p "mnt/root$HOME"
ip link set lo up
cd mnt/root
mkdir -p old
pivot_root . old  # not chroot, in which the kernel permits no user namespaces, which Apptainer uses
umount -l old
exec sh -c 'cd "$0"; "$@"; exit $?' "$cwd" "$@"
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.minislurm.newer_debian", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0], help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=cache(), help="default: %(default)s")
    parser.add_argument("--mirror", help="where Debian's packages are; default: where apt has them from")
    parser.add_argument(
        "--network", action="store_true", help="the command uses this machine's network, to install packages"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        folder = made(options.suite, options.cache.absolute(), options.mirror)
    except MiniSlurmError as error:
        sys.exit(f"minislurm: {error}")
    enter(folder, options.command or ["slurmctld", "-V"], network=options.network)


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcinit"


# --- the folder


def made(suite: str, cache: Path, mirror: str | None = None) -> Path:
    """Return the folder with the suite, after making it if needed. It is made atomically."""
    folder = folder_in(cache, suite)
    if os.geteuid() != 0:
        raise MiniSlurmError("not root, which the mounts and the folder's devices and owners need")
    cache.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(cache):
        if not folder.exists():
            for left in cache.glob(f"{folder.name}.part-*"):  # a make that was killed left it
                shutil.rmtree(left)
            _make(suite, folder, mirror)
    return folder


def folder_in(cache: Path, suite: str) -> Path:
    """Return the folder, whose name depends on the list of packages."""
    return cache / f"{suite}-{zlib.crc32(' '.join(packages(suite)).encode()):08x}"


def packages(suite: str) -> tuple[str, ...]:
    return (*PACKAGES, *MORE_PACKAGES.get(suite, ()))


def _make(suite: str, folder: Path, mirror: str | None) -> None:
    if not shutil.which("debootstrap", path=PATH):
        fetch(["debootstrap"])
    mirror = mirror or apts_mirror()
    print(f"{folder}: Debian {suite} from {mirror}, only this time", flush=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        part.chmod(0o755)
        (part / "mnt").mkdir()
        _debootstrap(suite, part / "tree", mirror)
        shutil.rmtree(part / "tree/var/cache/apt/archives")  # packages that are installed
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part)
        raise


def _debootstrap(suite: str, tree: Path, mirror: str) -> None:
    """Run debootstrap. --force-check-gpg is needed because a machine without Debian's keys would check nothing."""
    log = tree.parent / "debootstrap.out"
    # It runs in a mount namespace, because it mounts /proc and /sys in the tree and leaves them if it is interrupted.
    command = ["unshare", "--mount", "debootstrap", "--force-check-gpg", "--variant=minbase"]
    with log.open("wb") as out:
        done = subprocess.run(
            [*command, f"--include={','.join(packages(suite))}", suite, str(tree), mirror, SCRIPT],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False, close_fds=False,
            env={**os.environ, **_apts_proxies(), "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip
    if done.returncode:
        lines = [*_end(log), *_end(tree / "debootstrap/debootstrap.log")]
        raise MiniSlurmError("\n  ".join([f"debootstrap: exit status {done.returncode}", *lines]))


def _end(log: Path, lines: int = 8) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []


def apts_mirror() -> str:
    """Return the first Debian archive of apt's configuration, except security and other vendors'."""
    ask = ["indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    sites = run(["apt-get", *ask]).split() if shutil.which("apt-get", path=PATH) else []
    if not sites:
        raise MiniSlurmError("apt has no archive of Debian here (or no lists: apt-get update); give --mirror URL")
    return sites[0]


def _apts_proxies() -> dict[str, str]:
    """Return apt's proxies as variables for wget, which debootstrap uses and which does not read apt's configuration."""
    proxies = {}
    for scheme in ("http", "https") if shutil.which("apt-config", path=PATH) else ():
        proxy = run(["apt-config", "--format", "%v%n", "dump", f"Acquire::{scheme}::Proxy"]).strip()
        if proxy and proxy != "DIRECT":
            proxies[f"{scheme}_proxy"] = proxy
    return proxies


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.set_inheritable(descriptor, True)  # a debootstrap whose parent was killed keeps the lock until it ends
        yield
    finally:
        os.close(descriptor)


# --- the command


def enter(folder: Path, command: list[str], *, network: bool = False) -> NoReturn:
    """Replace this process with the command."""
    hosts = f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {socket.gethostname()}"
    alone = ["unshare", "--mount", *([] if network else ["--net"]), "--pid", "--fork", "--kill-child"]
    shown = [str(path) for path in (*visible(), *(NETWORK if network else ()))]
    os.environ["PATH"] = PATH
    os.execvp(
        "unshare",
        [*alone, "sh", "-c", ENTER, "sh", str(folder), hosts, str(Path.cwd()), *shown, "--", *command],
    )


def visible() -> list[Path]:
    """Return the paths of this machine that the command sees: the checkout, /tmp, and this Python."""
    prefixes = [path for path in (sys.prefix, sys.base_prefix) if path != "/usr"]  # a distribution's own Python
    modules = [path for path in map(Path, sys.path) if path.is_dir()]
    python = [*map(Path, prefixes), *modules, *_hops(Path(sys.executable))]
    wanted = [*python, Path.cwd(), Path(tempfile.gettempdir())]
    # Each path with and without its links resolved, because a venv may refer to either.
    paths = {path.absolute() for path in wanted} | {path.resolve() for path in wanted}
    return sorted(path for path in paths if not paths & set(path.parents))


def _hops(path: Path) -> Iterator[Path]:
    """Yield the links to the interpreter, such as .venv/bin/python, /usr/bin/python3 and /usr/bin/python3.11."""
    while path.is_symlink():
        yield path
        path = path.parent / path.readlink()
    yield path


if __name__ == "__main__":
    main()
