"""What `make coverage` counts: also what runs in processes that a test starts, and those end with os._exit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.leaving_out import leave_out

ROOT = Path(__file__).parent.parent
# Lines that run in a process of their own: the command itself, the local engine, its step, a rank.
ELSEWHERE = ("hpcinit/submission/submit.py", "hpcinit/local/engine.py", "hpcinit/local/step.py", "hpcinit/run.py")


def test_processes_that_a_test_starts_are_counted(tmp_path: Path) -> None:
    """A submission on this machine, started as a test does it, leaves lines of all of its processes."""
    if importlib.util.find_spec("coverage") is None:
        leave_out("coverage is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
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
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    files = json.loads((tmp_path / "found.json").read_text())["files"]
    found = {f"hpcinit/{name.rpartition('/hpcinit/')[2]}": file["summary"] for name, file in files.items()}
    for name in ELSEWHERE:
        assert found[name]["percent_covered"] > 40, (name, found[name])
