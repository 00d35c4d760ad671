"""What this machine lacks for a cluster, and how Debian and Ubuntu get it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.shell import PATH, run

# command that must be there: Debian package that has it
BASE = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge",
    "ip": "iproute2", "unshare": "util-linux", "setsid": "util-linux",
}  # fmt: skip
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
# What other tests use; a cluster does without. MPICH's Hydra comes with mpich: the package hydra cracks passwords.
OTHERS = {
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
    "zsh": "zsh",
    "fish": "fish",
    "modulecmd": "environment-modules",
}
# The browser that the report is tried in: Debian's alone, half of what chromium needs. Ubuntu has none as a package.
BROWSERS = ("chromium-headless-shell", "chromium")

POLICY = Path("/usr/sbin/policy-rc.d")
# Everything a cluster does to the kernel, in namespaces that vanish with the command.
REHEARSAL = """
set -e
ip link add one type veth peer name two
ip link add br0 type bridge
mount -t tmpfs none /dev/shm
"""


def missing(accounting: bool = False) -> list[str]:
    """What stands between this machine and a cluster, one line each; empty when nothing does."""
    lacks = _lacking(BASE | ACCOUNTING if accounting else BASE)
    found = [f"Debian package {package}" for package in lacks]
    if os.geteuid() != 0:
        return ["root (namespaces and daemons need it)", *found]
    if not {"iproute2", "util-linux"} & set(lacks):
        try:
            run(["unshare", "--net", "--uts", "--mount", "sh", "-c", REHEARSAL])
        except MiniSlurmError as error:
            said = str(error).splitlines()[-1].strip()
            found.append(f"the right to make namespaces and links (in a container: --privileged): {said}")
    return found


def _lacking(wanted: dict[str, str]) -> list[str]:
    lacks = [package for command, package in wanted.items() if not shutil.which(command, path=PATH)]
    return list(dict.fromkeys(lacks))


def install() -> list[str]:
    """Installs the packages that the tests miss here, with apt-get; says which. Leaves no daemon running.

    Debian's packages make /etc/slurm, /etc/munge and /etc/mysql; the clusters made here use none of them.
    """
    packages = _lacking(BASE | ACCOUNTING | OTHERS)
    if packages:
        fetch(packages)
        _disable_services(packages)
    if not any(shutil.which(browser, path=PATH) for browser in BROWSERS) and _is_debian():
        try:
            fetch([BROWSERS[0]])
            packages.append(BROWSERS[0])
        except MiniSlurmError as error:  # one test needs it, and says so
            print(f"not installed: {error}", flush=True)
    return packages


def _is_debian() -> bool:
    release = Path("/etc/os-release")
    return release.exists() and "ID=debian" in release.read_text().splitlines()


def fetch(packages: list[str]) -> None:
    """apt-get install, and no service started."""
    if os.geteuid() != 0:
        raise MiniSlurmError(f"not root: cannot install {' '.join(packages)}")
    if not shutil.which("apt-get", path=PATH):
        raise MiniSlurmError(f"no apt-get here: install what holds {' '.join(packages)} on this system")
    with _services_stay_off():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", *command], env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, check=False
            )
            if done.returncode:
                raise MiniSlurmError(f"apt-get {' '.join(command)}: exit status {done.returncode}")


@contextmanager
def _services_stay_off() -> Iterator[None]:
    """While packages are installed, Debian asks this file whether it may start a service: 101 is no."""
    if POLICY.exists():  # as in Debian's and Ubuntu's container images
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _disable_services(packages: list[str]) -> None:
    """So that the next boot does not start them either; only those that were installed just now."""
    services = {"slurmctld": "slurmctld", "slurmd": "slurmd", "munge": "munge", "slurmdbd": "slurmdbd",
                "mariadb-server": "mariadb"}  # fmt: skip
    units = [services[package] for package in packages if package in services]
    if units and Path("/run/systemd/system").is_dir():
        subprocess.run(["systemctl", "disable", "--now", *units], check=False)
