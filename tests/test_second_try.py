"""A failed test on real daemons runs again in CI, and the report shows that clearly."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skip_or_fail import skip_or_fail

RERUNS, WORKERS = ("-p", "rerunfailures"), ("-p", "xdist", "-n", "2")
TESTS = """
import pathlib, pytest

def fails_once(name):
    tried = pathlib.Path(name)
    if not tried.exists():
        tried.touch()
        raise AssertionError("the controller took its time")

@pytest.mark.slurm
def test_on_a_cluster(): fails_once("a")

@pytest.mark.chaos(short=True)
def test_always_wrong(): assert "what is" == "wrong"

def test_on_no_daemon(): fails_once("c")
"""


def pytest_run(folder: Path, *words: str, ci: str = "") -> subprocess.CompletedProcess[str]:
    for name in ("pytest_rerunfailures", "xdist"):
        if not importlib.util.find_spec(name):
            skip_or_fail(f"{name} is not installed: pip install '.[test]'")
    (folder / "test_tries.py").write_text(TESTS)
    markers = ["-o", "markers=slurm: a marker\nchaos: another"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of xdist's workers
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take a second each time
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.second_try", *markers, *words],
        cwd=folder, env={**own, "CI": ci, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_second_try_is_reported(tmp_path: Path) -> None:
    """With CI=true a failed test on daemons runs again, a section names it and the reason, and other tests run once."""
    done = pytest_run(tmp_path, *RERUNS, *WORKERS, ci="true")
    assert done.returncode == 1
    assert re.search(r"^=+ 2 failed, 1 passed,.* 2 rerun in", done.stdout, re.M), done.stdout
    section = done.stdout.partition("SECOND TRIES")[2]
    passed = r"test_tries.py::test_on_a_cluster failed in its call, and passed the second time. The first time:\n  "
    assert re.search(passed + r".*test_tries.py:8: AssertionError: the controller took its time\n", section), section
    failed = r"test_tries.py::test_always_wrong failed in its call, and failed again. The first time:\n  "
    assert re.search(failed + r".*test_tries.py:14: AssertionError: assert 'what is' == 'wrong'\n", section), section
    assert "2 tests needed a second try: each is a defect, of the test or of what it tests.\n" in section


def test_nothing_is_run_twice_elsewhere(tmp_path: Path) -> None:
    """Without CI=true a failure is a failure, and no section mentions second tries."""
    done = pytest_run(tmp_path)
    assert re.search(r"^=+ 3 failed in", done.stdout, re.M), done.stdout
    assert "SECOND TRIES" not in done.stdout


def test_what_is_broken_is_not_run_twice_throughout(tmp_path: Path) -> None:
    """A session has at most five second tries, because more failures are not chance."""
    many = "import pytest\n@pytest.mark.slurm\n@pytest.mark.parametrize('n', range(8))\ndef test_broken(n): assert not n + 1\n"
    (tmp_path / "test_many.py").write_text(many)
    done = pytest_run(tmp_path, *RERUNS, "test_many.py", ci="true")
    assert re.search(r"^=+ 8 failed,.* 5 rerun in", done.stdout, re.M), done.stdout


def test_ci_without_the_plugin(tmp_path: Path) -> None:
    """If second tries are impossible, the session ends with an error at the start."""
    done = pytest_run(tmp_path, ci="true")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: CI=true needs pytest-rerunfailures, for second tries: pip install '.[test]'\n" in done.stderr
