"""In CI, tests that failed run again at the end, one by one, and the output shows that clearly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, pathlib, pytest

def test_under_load():
    tried = pathlib.Path("tried")
    if not tried.exists():
        tried.touch()
        raise AssertionError("the controller took its time")
    assert "PYTEST_XDIST_WORKER" not in os.environ  # the second time no other test runs beside it

def test_sound(): pathlib.Path("sound").open("a").write("ran ")
"""
WRONG = "\ndef test_always_wrong(): assert 'what is' == 'wrong'\n"


def run(folder: Path, tests: str, ci: str = "true") -> subprocess.CompletedProcess[str]:
    (folder / "test_tries.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of xdist's workers
    own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take a second each time
    return subprocess.run(
        [sys.executable, "-m", "tests.second_try", "-p", "xdist", "-n", "2", "test_tries.py"],
        cwd=folder, env={**own, "CI": ci, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_second_try_at_the_end(tmp_path: Path) -> None:
    """With CI=true a failed test runs again without the others, and a section at the end names it."""
    done = run(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^=+ 1 failed, 1 passed(, \d+ warnings?)? in", done.stdout, re.M), done.stdout
    assert re.search(r"^=+ 1 passed, 1 deselected(, \d+ warnings?)? in", done.stdout, re.M), done.stdout
    assert "the controller took its time" in done.stdout
    assert "!!! SECOND TRIES, ONE BY ONE\n  test_tries.py::test_under_load\n" in done.stdout
    assert done.stdout.endswith(
        "!!! PASSED THE SECOND TIME: each is a defect, of the test or of what it tests\n  test_tries.py::test_under_load\n"
    )
    assert (tmp_path / "sound").read_text() == "ran "


def test_a_broken_test_fails_again(tmp_path: Path) -> None:
    """A test that always fails ends the run with status 1, although another one passed the second time."""
    done = run(tmp_path, TESTS + WRONG)
    assert done.returncode == 1
    assert re.search(r"^=+ 1 failed, 1 passed, 1 deselected(, \d+ warnings?)? in", done.stdout, re.M), done.stdout
    assert "PASSED THE SECOND TIME" not in done.stdout


@pytest.mark.parametrize(
    ("tests", "ci"),
    [(TESTS + WRONG, ""), ("import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_broken(n): assert not n + 1\n", "true")],
    ids=["not in CI", "more than chance"],
)  # fmt: skip
def test_no_second_try(tmp_path: Path, tests: str, ci: str) -> None:
    """Without CI=true, and with more failures than chance makes, no test runs twice."""
    done = run(tmp_path, tests, ci)
    assert done.returncode == 1
    assert "SECOND" not in done.stdout
    assert len(re.findall(r"^=+ .* in [\d.]+s", done.stdout, re.M)) == 1, done.stdout
