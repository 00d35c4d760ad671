"""Each node is checked before its ranks start: GPU memory that others use, and a check that hangs or fails."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from hpcinit.node import node_check
from hpcinit.records.spec import NodeCheck, Program, Spec
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, log
from tests.submitting import folder_of, job_id_of, printed, submit


def printed_lines(folder: Path) -> str:
    path = folder / "logs/rank-0.log"  # with launch=torchrun, only a rank that starts has one
    return path.read_text() if path.exists() else ""


# FAKE: prints what nvidia-smi would print on n1 if a process of another user filled half of a GPU. There is no GPU here.
FAKE_SMI = """#!/bin/sh
[ "$SLURMD_NODENAME" = n1 ] && used=60000 || used=4
case $1 in
  *query-gpu*) echo "GPU-fake, 00000000:3B:00.0, $used, 81559, Enabled, 0, 345, 1980, 2619, 2619, 1, 5, 16, 16, 0x1, 0x1, Disabled, None" ;;
  *) [ $used = 4 ] || echo "GPU-fake, 1, 59000, /opt/other/train" ;;
esac
"""


@pytest.fixture
def occupied(tmp_path: Path) -> str:
    """Return the override that puts the FAKE nvidia-smi first on the job's PATH."""
    command = tmp_path / "fake/nvidia-smi"
    command.parent.mkdir()
    command.write_text(FAKE_SMI)
    command.chmod(0o755)
    return f"+job.env.PATH={command.parent}:{os.environ['PATH']}"


GPU = ("ranks_per_node=1", "gpus_per_node=1", "check_node.action=replace", "check_node.timeout_s=150")
IN_USE = "57.6 of 79.6 GiB of GPU-fake are in use by /opt/other/train (process 1, "


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "launch", ["srun", *(pytest.param(launch, marks=pytest.mark.more) for launch in ("fork", "torchrun"))]
)
def test_a_node_whose_gpu_is_occupied(hpcinit: Run, idle_slurm: MiniSlurm, occupied: str, launch: str) -> None:
    """With a FAKE nvidia-smi: without a spare node the ranks exit, and `why` names the node and the process."""
    words = ["nodes=2", *GPU, occupied, f"launch={launch}", "+cluster.sbatch.nodelist='n1,n2'", "wait=true"]
    done = submit(hpcinit, idle_slurm, *words, "--", "echo", "started", timeout=300)
    folder = folder_of(done)
    assert done.returncode != 0 and "started" not in printed_lines(folder)
    text = log(folder) + printed_lines(folder)
    assert f"error: n1 cannot be used: {IN_USE}" in text and "report the node to the site" in text
    why = hpcinit("why", folder.name, env=idle_slurm.env).stdout
    assert "n1 cannot be used" in why and "n1" in why.splitlines()[0], why


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_spare_node_replaces_it(hpcinit: Run, idle_slurm: MiniSlurm, occupied: str) -> None:
    """With a FAKE nvidia-smi and spare_nodes=1 the ranks start on the other nodes of the same job."""
    words = ["nodes=1", *GPU, occupied, "spare_nodes=1", "+cluster.sbatch.nodelist='n1,n2'"]
    done = submit(hpcinit, idle_slurm, *words, "--", "bash", "-c", "echo started on $SLURMD_NODENAME", timeout=300)
    folder = folder_of(done)
    assert finish(idle_slurm, job_id_of(done), 200) == "COMPLETED", log(folder)
    assert "node_fail on n1: restarting the ranks in the same job, without n1" in log(folder)
    assert printed(folder, 0) == "started on n2\n"


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_sharing_and_report_never_end_a_job(hpcinit: Run, idle_slurm: MiniSlurm, occupied: str) -> None:
    """With a FAKE nvidia-smi: if the site shares GPUs (MPS), or by default, the node is only reported."""
    for words in (["+job.env.CUDA_MPS_PIPE_DIRECTORY=/tmp/mps"], ["check_node.action=report"]):
        place = ["nodes=1", *GPU, occupied, "+cluster.sbatch.nodelist=n1", "again=true", "wait=true"]
        done = submit(hpcinit, idle_slurm, *place, *words, "--", "echo", "started", timeout=300)
        folder = folder_of(done)
        assert done.returncode == 0 and printed(folder, 0) == "started\n", log(folder)
        assert f"hpcinit: n1: {IN_USE}" in printed_lines(folder)


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_check_that_hangs_or_fails_does_not_end_the_job(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, occupied: str
) -> None:
    """The ranks start without the check if it is too slow, or if it crashes."""
    smi = tmp_path / "fake/nvidia-smi"
    smi.write_text("#!/bin/sh\nsleep 300\n")
    place = ["nodes=1", "ranks_per_node=1", "gpus_per_node=1", occupied, "wait=true"]
    done = submit(hpcinit, idle_slurm, *place, "check_node.timeout_s=1", "--", "echo", "started", timeout=300)
    assert done.returncode == 0 and printed(folder_of(done), 0) == "started\n"
    assert "the check of the node" not in printed_lines(folder_of(done)), "a slow node must not change a job's output"
    replace = ["again=true", "check_node.timeout_s=1", "check_node.action=replace"]
    done = submit(hpcinit, idle_slurm, *place, *replace, "--", "echo", "started", timeout=300)
    assert done.returncode == 0 and printed(folder_of(done), 0) == "started\n"
    assert "the node check did not finish within 1 s; the ranks start without its result" in printed_lines(
        folder_of(done)
    )
    assert not [pid for pid in idle_slurm.pids("n1") if "sleep 300" in command_line(pid)]
    smi.write_text("#!/bin/sh\nkill -9 $PPID\n")
    again = ["again=true", "check_node.timeout_s=150"]
    done = submit(hpcinit, idle_slurm, *place, *again, "--", "echo", "started", timeout=300)
    assert done.returncode == 0 and printed(folder_of(done), 0) == "started\n"
    assert "the check of the node failed: it ended without an answer" in printed_lines(folder_of(done))


SPEC = Spec("x", "here", 1, 1, Program("command", "true"), "/", "nonce", check_node=NodeCheck("replace"))
HERE = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": "here", "SLURM_PROCID": "0"}
HERE["SLURM_LOCALID"] = "0"


@pytest.mark.parametrize("more", [{}, {"HPCINIT_ENGINE": "1"}])
def test_no_check_outside_of_a_step(more: dict[str, str]) -> None:
    """Without a slurmstepd above it, a process with the environment of a task checks nothing."""
    assert node_check.start(SPEC, {**HERE, **more}) is None


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""
