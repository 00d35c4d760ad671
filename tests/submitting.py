"""Submit jobs to the real test cluster."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.conftest import Run
from tests.minislurm import MiniSlurm


def submit(hpcinit: Run, slurm: MiniSlurm, *words: str, **options: float) -> subprocess.CompletedProcess[str]:
    """Run `hpcinit submit cluster=mini ...` on this cluster."""
    return hpcinit("submit", "cluster=mini", *words, env=slurm.env, **options)


def folder_of(done: subprocess.CompletedProcess[str]) -> Path:
    assert "run folder: " in done.stdout, done.stderr
    return Path(done.stdout.partition("run folder: ")[2].partition("\n")[0])


def job_id_of(done: subprocess.CompletedProcess[str]) -> str:
    return job_of(folder_of(done))


def job_of(folder: Path) -> str:
    record: dict[str, str] = json.loads((folder / "submission.json").read_text())
    return record["job_id"]


def printed(folder: Path, rank: int) -> str:
    """Return the output of a rank's program: its log without hpcinit's own lines."""
    text = (folder / f"logs/rank-{rank}.log").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("hpcinit: "))


def scripts_of(printed: str) -> str:
    """Return the scripts that a dry run printed, without the files that follow each script in comments."""
    text, found = re.subn(r"\n# End of the script\..*\n(?:#(?!!).*\n)*", "", printed)
    assert found >= 1, printed
    return text
