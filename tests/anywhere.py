"""Run the tests that depend on where the checkout is, in clones in other places: `make test-anywhere`.

    python -m tests.anywhere [PLACE ...]    default: all places
    python -m tests.anywhere --all tmp      every test, not only those in FILES

Each clone has its own copy of .venv, so that it can be read only where the clone can. What is not committed is not tested.
Exit status: 0, or 1 if a test failed in a place. Without root it does what a user can, and prints what it skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.other_user import python_for
from tests.workers import number_of_workers

ROOT = Path(__file__).parents[1]
# Tests that act as another user, mount a file system, print or quote paths, or install the package.
FILES = (
    "chaos/test_full_disks.py", "chaos/test_submission_faults.py", "config/test_places.py", "discover/test_discover.py",
    "local/test_engine.py", "observe/test_state.py", "records/test_safeguards.py", "rendezvous/test_nonce.py",
    "rendezvous/test_rendezvous_attacks.py", "runtime/test_full_disks.py", "submit/test_once_as_a_user.py",
    "submit/test_ownership.py", "submit/test_script.py", "submit/test_secrets.py", "submit/test_snapshot.py",
    "test_every_command.py", "test_examples.py", "test_gpu_suite.py", "test_no_home.py", "test_package.py",
    "test_readme.py", "test_sbatch.py", "test_wheel.py", "test_world_command.py",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A clone. user: who runs the tests; '' for this user. memory_gb: the limit of its control group, or 0. load: busy
    processes beside the tests."""

    folder: Path
    user: str = ""
    memory_gb: int = 0
    load: int = 0
    env: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def in_tmp(name: str = "hpcinit", **more: int) -> Iterator[Place]:
    """Yield a folder below /tmp."""
    with tempfile.TemporaryDirectory(prefix="hpcinit-anywhere-", dir="/tmp") as top:
        Path(top).chmod(0o755)
        yield Place(Path(top) / name, **more)


@contextlib.contextmanager
def in_home() -> Iterator[Place]:
    """Yield a folder below this user's home, which other users cannot enter."""
    with tempfile.TemporaryDirectory(prefix="hpcinit-anywhere-", dir=Path.home()) as top:
        yield Place(Path(top) / "hpcinit")


@contextlib.contextmanager
def of_a_user() -> Iterator[Place]:
    """Yield a folder in the home of a new user, who runs the tests. Needs root."""
    name = f"anywhere{secrets.randbelow(10**6)}"
    with tempfile.TemporaryDirectory(prefix="hpcinit-home-", dir="/home") as home:
        subprocess.run(["useradd", "--no-create-home", f"--home-dir={home}", "--shell=/bin/bash", name], check=True)
        try:
            entry = pwd.getpwnam(name)
            os.chown(home, entry.pw_uid, entry.pw_gid)
            yield Place(Path(home) / "hpcinit", name, env={"HOME": home, "USER": name, "LOGNAME": name})
        finally:
            subprocess.run(["userdel", name], check=True, capture_output=True)


PLACES = {
    "tmp": in_tmp,
    "home": in_home,
    "user": of_a_user,
    "space": lambda: in_tmp("a checkout"),
    "8gb": lambda: in_tmp(memory_gb=8),
    "loaded": lambda: in_tmp(load=2 * (os.cpu_count() or 1)),
}
NEED_ROOT = ("user", "8gb")


def as_user(name: str) -> list[str]:
    """Return the start of a command that runs the rest of it as this user; '' for the current one."""
    return ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups"] if name else []


def make_clone(place: Place, python: str) -> None:
    """Clone the checkout, and copy the packages of its .venv into one of the clone's own."""
    subprocess.run(["git", "clone", "--quiet", ROOT, place.folder], check=True)
    venv = place.folder / ".venv"
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)
    own = next((venv / "lib").glob("python*/site-packages"))
    shutil.rmtree(own)
    subprocess.run(["cp", "-a", "--reflink=auto", sysconfig.get_path("purelib"), own], check=True)
    # The editable installation is a file with the checkout's path.
    for path in own.glob("*.pth"):
        if path.read_text().strip() == str(ROOT):
            path.write_text(str(place.folder))
    for script in Path(sys.prefix, "bin").iterdir():
        target = venv / "bin" / script.name
        if not target.exists() and not script.is_symlink():
            first, end, rest = script.read_bytes().partition(b"\n")
            if first[:2] == b"#!":
                rest = rest.replace(os.fsencode(sys.prefix), os.fsencode(venv))
            if os.fsencode(sys.prefix) in first:  # like pip: the kernel divides the first line at blanks
                first = b"#!/bin/sh\n'''exec' \"%s/bin/python\" \"$0\" \"$@\"\n' '''" % os.fsencode(venv)
            target.write_bytes(first + end + rest)
            target.chmod(0o755)
    for stamp in ("job", "dev"):
        (venv / stamp).touch()
    if place.user:
        subprocess.run(["chown", "-R", f"{place.user}:", place.folder], check=True)


@contextlib.contextmanager
def memory_limit(place: Place) -> Iterator[list[str]]:
    """Yield the start of a command that runs the rest of it with the place's memory limit."""
    if not place.memory_gb:
        yield []
        return
    first = Path("/sys/fs/cgroup/memory")
    top, name = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    group = top / f"hpcinit-anywhere-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(place.memory_gb * 10**9))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        with contextlib.suppress(OSError):  # a daemon of a test may still end
            group.rmdir()


def run_tests(place: Place, words: Sequence[str]) -> int:
    """Run pytest in the clone and return its exit status."""
    gb = place.memory_gb or 10**6
    workers = min(
        int(subprocess.check_output([sys.executable, "-m", "tests.workers"], cwd=ROOT)), number_of_workers(10**3, gb)
    )
    python = str(place.folder / ".venv/bin/python")
    env = {
        **os.environ,
        "CI": "",
        "PATH": f"{place.folder}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        **place.env,
    }
    for name in ("PYTHONPATH", "PYENV_ROOT"):  # pyenv may be in a folder that the user cannot enter
        env.pop(name, None)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(place.load)]
    try:
        with memory_limit(place) as limited:
            command = [*limited, *as_user(place.user), python, "-m", "pytest", "-q", "-n", str(workers), *words]
            return subprocess.run(command, cwd=place.folder, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", choices=[*PLACES, []], help=f"some of: {', '.join(PLACES)}")
    parser.add_argument("--all", action="store_true", help="run every test, not only those that depend on the place")
    options = parser.parse_args()
    words = [] if options.all else [f"tests/{name}" for name in FILES]
    results = {}
    for name in options.places or PLACES:
        if name in NEED_ROOT and os.geteuid() != 0:
            results[name] = "skipped: needs root"
            continue
        began = time.monotonic()
        with PLACES[name]() as place:
            python = python_for(as_user(place.user))
            if not python:
                results[name] = (
                    f"skipped: no Python {sys.version_info.major}.{sys.version_info.minor} that a user can run"
                )
                continue
            print(f"\n=== {name}: {place.folder}", flush=True)
            make_clone(place, python)
            status = run_tests(place, words)
        results[name] = f"{'passed' if status == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s"
    print("\n=== results", *(f"{name:<8}{result}" for name, result in results.items()), sep="\n")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
