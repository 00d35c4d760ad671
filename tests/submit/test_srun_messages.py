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
JOB = "slurmstepd: error: *** JOB 15 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***"
ABORT = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
OTHER = ["attempt 1", "hpcinit: new attempt: job 15 of a chain starts", "slurmstepd: error: x", "a task: Killed"]


def bash(folder: Path, *commands: str) -> str:
    """Return the output of the commands after the blocks."""
    values = {"hpcinit_nodes": 2}
    blocks = [*shell_blocks.block("srun_messages"), *shell_blocks.block("spare_nodes", values)]
    script = "\n".join([f'hpcinit_log="{folder}/job.log"', "hpcinit_from=1", *blocks, *commands])
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("lines", "failures", "node"),
    [
        ([], [], ""),
        (OTHER, [], ""),
        ([*OTHER, EXITED, KILLED], ["7 n1", "signal n2"], "n2"),
        ([TERMINATED, EXITED], ["terminated n3", "7 n1"], "n3"),
        ([BOTH], ["1 n[1-2]"], ""),
        ([BOTH, EXITED], ["1 n[1-2]", "7 n1"], "n1"),
        ([ABORT, STEP, TERMINATED], ["terminated -", "terminated -", "terminated n3"], "n3"),
        (["srun: error: n1: task 0: Segmentation fault (core dumped)"], ["signal n1"], "n1"),
    ],
)
def test_failures_since_the_ranks_started(tmp_path: Path, lines: list[str], failures: list[str], node: str) -> None:
    """Each message is an exit status, a signal or a termination. The node at fault is the first one with a signal."""
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in [KILLED.replace("n2", "n9"), *lines]))
    assert bash(tmp_path, "hpcinit_failures 1").splitlines() == failures
    assert bash(tmp_path, "hpcinit_failed_node").strip() == node


def test_a_lost_node(tmp_path: Path) -> None:
    """Only messages after the given line count."""
    for line in (JOB, "srun: error: Node failure on n2"):
        (tmp_path / "job.log").write_text(f"one\n{line}\ntwo\n")
        assert bash(tmp_path, "hpcinit_node_failed 1 && echo yes") == "yes\n"
        assert bash(tmp_path, "hpcinit_node_failed 2 || echo no") == "no\n"
