"""What a run prints before the program's own output: two short lines. The rest is in a file of the run folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm.cluster import MiniSlurm
from tests.submitting import folder_of, submit

PROGRAM = """
import hpcinit
with hpcinit.session() as run:
    print("first line of the program", flush=True)
"""
ROOT = Path(__file__).parents[2]


def before_the_program(log: str) -> list[str]:
    assert "first line of the program" in log, log
    return [line for line in log.partition("first line of the program")[0].splitlines() if not line.startswith("[W")]


@pytest.mark.slurm
def test_two_short_lines(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """In the logs of the job and the ranks, at most two lines of under 100 characters precede the program's output.

    torch's own warnings about names of hosts are not counted.
    """
    (tmp_path / "train.py").write_text(PROGRAM)
    done = submit(hpcinit, slurm, "ranks_per_node=2", "gpus_per_node=0", "launch=fork", "wait=true", "--", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = folder_of(done)
    shown = before_the_program((folder / "logs/rank-0.log").read_text())
    assert len(shown) == 2 and all(len(line) < 100 for line in shown), shown
    assert shown[0] == "hpcinit: set 7 environment variables, listed in startup.txt of the run folder"
    assert shown[1].startswith("hpcinit: 2 ranks on 1 node (slurm), gloo on cpu, up in ")
    assert before_the_program((folder / "logs/rank-1.log").read_text()) == []
    assert (folder / "logs/job.log").read_text() == ""
    settings = (folder / "startup.txt").read_text()
    for part in (
        "\n  TORCH_FR_BUFFER_SIZE=2000\n",
        "\nimported before the fork: torch ",
        "\nstart-up timeout ",
        "rank 0 at ",
    ):
        assert part in settings, settings


def test_programs_that_do_not_use_hpcinit(hpcinit: Run, tmp_path: Path) -> None:
    """One line precedes the output of a command, whose process replaces that of hpcinit after the file is written."""
    done = hpcinit(
        "submit", "cluster=local", "ranks_per_node=2", "wait=true", "--", "echo", "first line of the program"
    )
    folder = folder_of(done)
    assert len(before_the_program((folder / "logs/rank-0.log").read_text())) == 1
    assert "  TORCH_FR_BUFFER_SIZE=2000\n" in (folder / "startup.txt").read_text()


def test_without_slurm_the_launcher_is_local(hpcinit: Run, tmp_path: Path) -> None:
    """On a machine without Slurm the log and the report name the local engine."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = hpcinit("submit", "cluster=local", "ranks_per_node=2", "launch=fork", "wait=true", "--", "train.py")
    assert "hpcinit: 2 ranks on 1 node (local), gloo on cpu, up in " in done.stdout
    assert "2 ranks on 1 node (local), started " in hpcinit("report", str(folder_of(done))).stdout


def test_the_demo_ends_with_the_next_commands(hpcinit: Run) -> None:
    """The commands that `make demo` prints last exist, with their options."""
    recipe = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    printed = [line.split() for line in recipe.splitlines() if line.startswith('echo "  hpcinit ')]
    commands = [words[3:] for words in printed]
    assert [words[0] for words in commands] == ["discover", "submit", "submit"] and "dry_run=true" in commands[1]
    assert "--name" in commands[0] and "--name" in hpcinit("discover", "--help").stdout
