"""`make coverage` also counts lines in processes that a test starts, although those exit with os._exit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests import waiting
from tests.skip_or_fail import skip_or_fail
from tests.unmeasured import ON_SLURM

ROOT = Path(__file__).parent.parent
# Lines that run in separate processes: the command itself, the local engine, its step, a rank.
ELSEWHERE = (
    "hpcinit/submit/transaction.py",
    "hpcinit/engine/local_job.py",
    "hpcinit/engine/local_step.py",
    "hpcinit/run.py",
)


def processes_with(variable: str, value: str) -> list[int]:
    """Return the running processes that have this environment variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_processes_that_a_test_starts_are_counted(tmp_path: Path) -> None:
    """A local submission, started as a test does it, leaves lines of all its processes."""
    if importlib.util.find_spec("coverage") is None:
        skip_or_fail("coverage is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    env["TESTED_IN"] = str(tmp_path)
    submit = [sys.executable, "-m", "hpcinit", "submit", "wait=true", "--", "true"]
    test = tmp_path / "as_a_test_does.py"
    test.write_text(f"import subprocess; subprocess.run({submit!r}, check=True)")
    coverage = [sys.executable, "-m", "coverage"]
    rc, data = f"--rcfile={ROOT / 'pyproject.toml'}", f"--data-file={tmp_path / 'coverage/data'}"
    for words in (
        ["run", rc, data, str(test)],
        ["combine", "--quiet", rc, data],
        ["json", "--quiet", rc, data, "-o", str(tmp_path / "found.json")],
    ):
        done = subprocess.run([*coverage, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        waiting.until(lambda: not processes_with("TESTED_IN", str(tmp_path)))  # the engine writes its lines at its exit
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    files = json.loads((tmp_path / "found.json").read_text())["files"]
    found = {f"hpcinit/{name.rpartition('/hpcinit/')[2]}": file["summary"] for name, file in files.items()}
    for name in ELSEWHERE:
        assert found[name]["percent_covered"] > 40, (name, found[name])


def session(tmp_path: Path, mark: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with two tests that start a process; the first has the mark, the second does not."""
    start = 'subprocess.run([sys.executable, "-c", "import os; print(os.environ.get(\'COVERAGE_PROCESS_CONFIG\'))"], check=True)'
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    unmeasured(reason)\n    slurm\n")
    (tmp_path / "test_two.py").write_text(
        f"import subprocess, sys, pytest\n"
        f"@pytest.fixture(scope='module')\ndef started(): {start}\n"
        f"@{mark}\ndef test_first(started): {start}\ndef test_second(): {start}\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COVERAGE_"))}
    # This process is not measured: coverage.py would read its arguments as a config.
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    code = (
        "import os, sys, pytest; os.environ['COVERAGE_PROCESS_CONFIG'] = '[run]'; sys.exit(pytest.main(sys.argv[1:]))"
    )
    words = ["-p", "tests.unmeasured", "-p", "no:cacheprovider", "-s", "-q"]
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("mark", ["pytest.mark.unmeasured('looks at its environment')", "pytest.mark.slurm"])
def test_an_unmeasured_test_starts_its_processes_without_coverage(tmp_path: Path, mark: str) -> None:
    """A test with the mark and its fixtures lack the variable; the next test has it again."""
    done = session(tmp_path, mark)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.lstrip(".") for line in done.stdout.splitlines()[:3]] == ["None", "None", "[run]"]


def test_a_test_is_not_left_unmeasured_without_a_reason(tmp_path: Path) -> None:
    """A mark without a reason ends the session with the test's name and what is missing."""
    done = session(tmp_path, "pytest.mark.unmeasured")
    assert done.returncode == 4
    assert (
        "test_two.py::test_first: @pytest.mark.unmeasured has no reason, expected one: unmeasured('why')" in done.stderr
    )


def test_files_on_slurm_that_are_measured_are_there() -> None:
    """The list names existing files."""
    assert [name for name in ON_SLURM if not (ROOT / name).is_file()] == []
