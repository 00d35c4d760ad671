"""Check what a release would contain, from clean clones of the last commit: `make release-check`.

    python -m tests.release [--skip CHECK ...] [--out FOLDER]

It builds the sdist and the wheel twice, and compares them with each other and with the files of git. It checks the metadata,
installs both archives with each supported Python of this machine, and runs the demo. Exit status: 0, or 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.release import archives, installed

ROOT = Path(__file__).parents[2]
# Tests of the login node that need no checkout, only the installed package and tests/.
TESTS = (
    "tests/config/test_compose.py", "tests/config/test_default_cluster.py", "tests/discover", "tests/submit/test_plan.py",
    "tests/submit/test_script.py",
)  # fmt: skip
NEED = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")


def tag() -> str:
    """Return the tag of the last commit, or ''."""
    command = ["git", "describe", "--tags", "--exact-match"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def twine(build: archives.Build) -> Iterable[str]:
    """Return the problems that twine finds: metadata that PyPI refuses, a README that it cannot show."""
    command = [sys.executable, "-m", "twine", "check", "--strict", build.sdist, build.wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [done.stdout + done.stderr] if done.returncode else []


def install(archive: Path, python: str, folder: Path) -> Iterable[str]:
    """Install the archive in an empty environment, use its commands, and run TESTS there."""
    venv, place = folder / "venv", folder / "place"
    installed.install(archive, python, venv)
    place.mkdir()
    installed.check_commands(venv, place)
    # hpcinit/ is not beside the tests, so they import it from the environment.
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__", "corpus", "gpu"))
    shutil.copy(ROOT / "pyproject.toml", place)
    pip = [sys.executable, "-m", "pip", "--python", venv, "install", "--quiet", "--disable-pip-version-check", *NEED]
    subprocess.run(pip, check=True)
    installed.check_origin(venv, place)
    done = installed.run(
        venv, place, ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slurm", *TESTS]
    )
    return [(done.stdout + done.stderr)[-6000:]] if done.returncode else []


def demo(wheel: Path, folder: Path) -> Iterable[str]:
    """Run the training of `make demo` with the wheel in an environment that has this one's torch."""
    venv = folder / "venv"
    installed.install(wheel, sys.executable, venv, "--no-deps")
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "torch.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    installed.check_origin(venv, folder)
    words = ["submit", "cluster=local", "nodes=2", "ranks_per_node=2", "job=train_gpt", "wait=true"]
    done = installed.run(venv, folder, ["hpcinit", *words])
    return [(done.stdout + done.stderr)[-3000:]] if done.returncode else []


def check(name: str, problems: Callable[[], Iterable[str]]) -> bool:
    """Print the result of a check, and return whether it found nothing."""
    start = time.monotonic()
    try:
        found = list(problems())
    except (AssertionError, subprocess.SubprocessError) as error:
        found = [f"{type(error).__name__}: {error}"]
    print(
        f"{'FAILED' if found else 'ok':<7}{name} ({time.monotonic() - start:.0f} s)",
        *found,
        sep="\n       ",
        flush=True,
    )
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", default=[], choices=("install", "demo"), help="for a quick look")
    parser.add_argument("--out", type=Path, help="a new folder, for the archives if no check has failed")
    options = parser.parse_args()
    if changed := subprocess.check_output(["git", "status", "--porcelain"], cwd=ROOT, text=True).splitlines():
        print(f"note: {len(changed)} files are not committed, and not checked", flush=True)
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcinit-release-")))
        build = archives.build(top / "first", ROOT, 0o022)
        again = archives.build(top / "a second place", ROOT, 0o077)
        of_tag = tag()
        print(
            f"{build.sdist.name}, {build.wheel.name}, {f'tag {of_tag}' if of_tag else 'no tag: not a release'}",
            flush=True,
        )
        results = [
            check("two builds are equal", lambda: archives.different(build, again)),
            check("every file of git, and no other", lambda: archives.wrong_files(build)),
            check("metadata", lambda: archives.wrong_metadata(build, installed.SUPPORTED, of_tag)),
            check("twine check --strict", lambda: twine(build)),
        ]
        pythons = [] if "install" in options.skip else [sys.executable, *installed.other_pythons()]
        for number, (python, archive) in enumerate((p, a) for p in pythons for a in (build.wheel, build.sdist)):
            version = subprocess.check_output([python, "-V"], text=True).strip()
            folder = top / f"install-{number}"
            folder.mkdir()
            results.append(check(f"{archive.name}: {version}", lambda: install(archive, python, folder)))  # noqa: B023
        if "demo" not in options.skip:
            (folder := top / "demo").mkdir()
            results.append(check("demo, with the wheel", lambda: demo(build.wheel, folder)))
        if all(results) and options.out:
            options.out.mkdir(parents=True)
            for archive in (build.sdist, build.wheel):
                shutil.copy(archive, options.out)
    return int(not all(results))


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    raise SystemExit(main())
