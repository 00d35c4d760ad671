"""The loop of docs/long-runs.md works as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/long-runs.md"


def steps(total: int, folder: Path) -> list[int]:
    """Run the page's program with `total` steps as a single rank, and return the steps that it trained."""
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    for before, after in (
        ("STEPS = 1000", f"STEPS = {total}"),
        ("wrapped.step()", "wrapped.step(); print('trained', step)"),
    ):
        assert before in program
        program = program.replace(before, after)
    (folder / "loop.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "hpcinit.run", "loop.py"], cwd=folder, env=os.environ | {"HPCINIT_STARTED_BY": "single"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(step) for step in re.findall(r"^trained (\d+)$", done.stdout, re.MULTILINE)]


def test_the_loop_saves_and_resumes(tmp_path: Path) -> None:
    """A second start continues with the step after the checkpoint."""
    assert steps(200, tmp_path) == list(range(200))
    assert steps(300, tmp_path) == list(range(200, 300))
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved[-1] == "step-00000300"
