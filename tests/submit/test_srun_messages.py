"""The batch script reads messages of srun and Slurm. The texts are those of Slurm 22.05."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcinit.submit import shell_blocks

KILLED = "srun: error: n2: task 3: Killed"
EXITED = "srun: error: n1: task 0: Exited with exit code 7"
BOTH = "srun: error: n[1-2]: tasks 0,2-3: Exited with exit code 1"
TERMINATED = "srun: error: n3: tasks 4-5: Terminated"
STEP = "slurmstepd: error: *** STEP 15.0 ON n1 CANCELLED AT 2026-11-22T10:00:00 ***"
ABORT = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
OTHER = ["attempt 1", "hpcinit: new attempt: job 15 of a chain starts", "slurmstepd: error: x", "a task: Killed"]


def bash(folder: Path, *commands: str) -> str:
    """Return the output of the commands after the blocks."""
    values = {"hpcinit_nodes": 2}
    blocks = [*shell_blocks.block("srun_messages"), *shell_blocks.block("spare_nodes", values)]
    script = "\n".join([f'hpcinit_log="{folder}/job.log"', *blocks, "hpcinit_from=1", *commands])
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("lines", "failures", "node"),
    [
        ([], [], ""),
        (OTHER, [], ""),
        ([*OTHER, EXITED, KILLED], ["exited n1 7", "signal n2 137"], "n2"),
        ([TERMINATED, EXITED], ["terminated n3 143", "exited n1 7"], "n3"),
        ([BOTH], ["exited n[1-2] 1"], ""),
        ([BOTH, EXITED], ["exited n[1-2] 1", "exited n1 7"], "n1"),
        ([ABORT, STEP, TERMINATED], ["terminated - 143", "terminated - 143", "terminated n3 143"], "n3"),
        (["srun: error: n1: task 0: Segmentation fault (core dumped)"], ["signal n1 139"], "n1"),
        (["srun: error: n1: task 0: Out Of Memory"], ["signal n1 1"], "n1"),
    ],
)
def test_failures_since_the_ranks_started(tmp_path: Path, lines: list[str], failures: list[str], node: str) -> None:
    """Each message is an exit status, a signal or a termination. The node at fault is the first one with a signal."""
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in [KILLED.replace("n2", "n9"), *lines]))
    assert bash(tmp_path, "hpcinit_failures 1").splitlines() == failures
    assert bash(tmp_path, "hpcinit_failed_node").strip() == node


@pytest.mark.parametrize(
    ("lines", "preempted", "status"),
    [
        ([EXITED, TERMINATED], False, 7),
        ([KILLED, TERMINATED], False, 137),
        ([STEP, EXITED], False, 143),  # the time limit, and a rank that fails because of it
        ([EXITED, TERMINATED], True, 143),
        ([], False, 143),
    ],
)
def test_the_status_of_the_rank_that_failed_first(
    tmp_path: Path, lines: list[str], preempted: bool, status: int
) -> None:
    """It is the job's, unless Slurm ended the ranks or printed nothing: then srun's own status is."""
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in ["an earlier line", *lines]))
    is_preempted = f"hpcinit_preempted() {{ {str(preempted).lower()}; }}"
    assert bash(tmp_path, is_preempted, "hpcinit_own_status 143 || echo $?") == f"{status}\n"
    assert bash(tmp_path, is_preempted, "hpcinit_own_status 0 && echo 0") == "0\n"
