"""Each node is checked before its ranks start: leftovers of ended jobs, and GPU memory that others use.

The nodes of the test cluster share the machine's /proc and /dev/shm, so a leftover belongs to the node in its environment.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from hpcinit.node import leftovers, node_check, node_findings
from hpcinit.records.node_facts import Node
from hpcinit.records.spec import NodeCheck, Program, Spec
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, log
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

SEGMENT = f"torch_{2**22 + os.getpid()}_1_1"
WORDS = ("nodes=1", "ranks_per_node=1", "gpus_per_node=0", "check_node.timeout_s=150", "+cluster.sbatch.nodelist=n1")
# Leave Slurm's session and process tree, as a daemon does, so that the end of the job does not end this process.
ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def orphan_of(slurm: MiniSlurm, folder: Path, stack: ExitStack) -> tuple[int, str]:
    """Return the process and the job of an orphan: a task's child that outlived its job on n1. `stack` kills it."""
    (folder / "orphan.py").write_text(ORPHAN)
    told = folder / "pid"
    task = f"srun '{sys.executable}' {folder}/orphan.py {told}"
    job = slurm.run("sbatch", "--parsable", "-wn1", f"--output={folder}/orphan.log", f"--wrap={task}").strip()
    assert finish(slurm, job, 150) == "COMPLETED"
    pid = int(told.read_text())
    stack.enter_context(suppress(ProcessLookupError))
    stack.callback(os.kill, pid, signal.SIGKILL)
    assert alive(pid)
    return pid, job


@pytest.fixture
def orphan(idle_slurm: MiniSlurm, tmp_path: Path) -> Iterator[tuple[int, str]]:
    with ExitStack() as stack:
        yield orphan_of(idle_slurm, tmp_path, stack)


@pytest.fixture
def segment(idle_slurm: MiniSlurm) -> Iterator[Path]:
    """Yield a file as torch leaves it in n1's /dev/shm: this user's, of a process that has ended, older than the job."""
    slurmd = (idle_slurm.directory / "run/n1.pid").read_text().strip()  # lives as long as the node, unlike a task
    path = Path(f"/proc/{slurmd}/root/dev/shm/{SEGMENT}")
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - 3600,) * 2)
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "launch", ["srun", *(pytest.param(launch, marks=pytest.mark.more) for launch in ("fork", "torchrun"))]
)
def test_leftovers_of_ended_jobs_are_reported(
    hpcinit: Run, idle_slurm: MiniSlurm, orphan: tuple[int, str], segment: Path, launch: str
) -> None:
    """An orphan process and a file in /dev/shm of ended jobs are reported before the program starts, and stay."""
    pid, job = orphan
    done = submit(hpcinit, idle_slurm, *WORDS, f"launch={launch}", "wait=true", "--", "true", timeout=300)
    folder = folder_of(done)
    assert done.returncode == 0, done.stderr + log(folder)
    text = log(folder) + printed_lines(folder)
    assert re.search(rf"^hpcinit: n1: process {pid} \(\S+\) of job {job}, which has ended, still runs; if ", text, re.M)
    assert re.search(rf"^hpcinit: n1: files of torch or NCCL in /dev/shm, .* \(/dev/shm/{SEGMENT}.*GB\); ", text, re.M)
    assert alive(pid) and segment.exists()


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_file_in_use_is_not_reported(hpcinit: Run, idle_slurm: MiniSlurm, segment: Path) -> None:
    """A file in /dev/shm that a process maps is not reported."""
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        folder = folder_of(submit(hpcinit, idle_slurm, *WORDS, "wait=true", "--", "true", timeout=300))
    assert "/dev/shm" not in printed_lines(folder)


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
    assert f"error: n1 cannot be used: {IN_USE}" in text and "expected a free GPU" in text
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
    assert "the node check did not finish within 1 s; the ranks start without it" in printed_lines(folder_of(done))
    assert not [pid for pid in idle_slurm.pids("n1") if "sleep 300" in command_line(pid)]
    smi.write_text("#!/bin/sh\nkill -9 $PPID\n")
    again = ["again=true", "check_node.timeout_s=150"]
    done = submit(hpcinit, idle_slurm, *place, *again, "--", "echo", "started", timeout=300)
    assert done.returncode == 0 and printed(folder_of(done), 0) == "started\n"
    assert "the check of the node failed: it ended without an answer" in printed_lines(folder_of(done))


SPEC = Spec("x", "here", 1, 1, Program("command", "true"), "/", "nonce", check_node=NodeCheck("replace"))
HERE = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": "here", "SLURM_PROCID": "0"}
HERE["SLURM_LOCALID"] = "0"


@contextmanager
def task_of(env: Mapping[str, str]) -> Iterator[int]:
    """Run a process with this environment, as a task of a step has it."""
    task = subprocess.Popen(["sleep", "600"], env={**env, "PATH": os.environ["PATH"]})
    try:
        until(lambda: "sleep" in Path(f"/proc/{task.pid}/comm").read_text())
        yield task.pid
        assert task.poll() is None, "it was killed"
    finally:
        task.kill()
        task.wait()


@pytest.fixture
def own_segment() -> Iterator[Path]:
    """Yield a file as torch leaves it in this process's /dev/shm."""
    path = Path("/dev/shm", SEGMENT)
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - 3600,) * 2)
    yield path
    path.unlink()


def lines_about_processes(env: Mapping[str, str]) -> list[str]:
    processes, _ = leftovers.find(env, 30)
    checks = node_findings.node_findings(Node(processes=processes), (), (), 1)
    return [f"{check.detail}; {check.advice}" for check in checks]


def test_without_a_reply_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_segment: Path) -> None:
    """If Slurm gives no reply about the user's jobs, no process is reported."""
    with task_of({**HERE, "SLURM_JOB_ID": "6"}) as pid:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert [task.pid for task in leftovers._tasks(HERE)] == [pid]
        assert lines_about_processes(HERE) == [] and own_segment.exists()


@pytest.mark.slurm
def test_a_job_that_slurm_does_not_know(slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a job that neither scontrol nor sacct knows may be a leftover: the line states that."""
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    here = {**HERE, "SLURM_JOB_ID": "4000000", "SLURM_CONF": slurm.env["SLURM_CONF"]}
    with task_of({**here, "SLURM_JOB_ID": "4000001"}) as pid:
        assert lines_about_processes(here) == [
            f"process {pid} (sleep) has the environment of job 4000001, which Slurm no longer reports; is it a "
            "leftover?"
        ]


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_CLUSTER_NAME": "another"},
        {"SLURM_CONF": "/another/slurm.conf"},
        {"SLURMD_NODENAME": "n2"},
        {"SLURM_PROCID": ""},
        {"HPCINIT_ENGINE": "1"},
    ],
)
def test_processes_that_are_no_tasks_of_this_node(other: dict[str, str]) -> None:
    """A process of another cluster or node, of cluster=local, or without a rank is not a leftover of a job."""
    task = {**HERE, "SLURM_JOB_ID": "6"}
    with task_of(task):
        assert len(list(leftovers._tasks(HERE))) == 1
    with task_of({key: value for key, value in {**task, **other}.items() if value}):
        assert list(leftovers._tasks(HERE)) == []


def test_another_network_namespace() -> None:
    """A process in another network namespace runs on another node, even if all its variables are equal."""
    env = {**HERE, "SLURM_JOB_ID": "6", "PATH": os.environ["PATH"]}
    command = ["unshare", "--user", "--map-root-user", "--net", "sleep", "600"]
    with subprocess.Popen(command, env=env) as task:
        until(lambda: "sleep" in Path(f"/proc/{task.pid}/comm").read_text())
        try:
            assert list(leftovers._tasks(HERE)) == []
        finally:
            task.kill()


@pytest.mark.parametrize("more", [{}, {"HPCINIT_ENGINE": "1"}])
def test_no_check_outside_of_a_step(more: dict[str, str]) -> None:
    """Without a slurmstepd above it, a process with the environment of a task checks nothing."""
    assert node_check.start(SPEC, {**HERE, **more}) is None


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""
