"""Findings, what explains them, and the readers of logs: wordings of programs that need a GPU or another launcher."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.base import failure_kinds
from hpcinit.engine import LOCAL
from hpcinit.observe.state import State
from hpcinit.why import diagnosis, foreign_job, ranking, why_command
from hpcinit.why.evidence import Verdict
from hpcinit.why.log_lines import Log
from hpcinit.why.ranking import Finding, Grade

# As torch 2.5 prints it: ProcessGroupNCCL.cpp
TIMEOUT = (
    "[rank{rank}]:[E1122 20:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType={call}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000) ran for 600013 "
    "milliseconds before timing out.\n"
)
ABORTED = "srun: error: n{rank}: task {rank}: Aborted (core dumped)\n"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'


def verdict(text: str) -> Verdict:
    return diagnosis.diagnose(foreign_job.gather([Log(text)]).evidence)


def timeout(rank: int, number: int = 7, call: str = "ALLREDUCE", size: int = 1024) -> str:
    return TIMEOUT.format(rank=rank, number=number, call=call, size=size)


def work(rank: int, group: str = "default_pg") -> str:
    """As torch 2.7 prints it."""
    return (
        f"[rank{rank}]:[E605 11:39:47.7 ProcessGroupNCCL.cpp:2289] [PG ID 0 PG GUID {group} Rank {rank}]  failure detected "
        "by watchdog at work sequence id: 7 PG status: last enqueued work: 7, last completed work: 6\n"
    )


def finding(grade: Grade, *ranks: int, abort: bool = False) -> Finding:
    return Finding(grade, Verdict(grade.name, failure_kinds.UNKNOWN), ranks, abort)


@pytest.mark.parametrize(
    ("findings", "first"),
    [
        ([finding(Grade.KILLED, 0, abort=True), finding(Grade.HUNG)], Grade.HUNG),
        ([finding(Grade.KILLED, 0, abort=True), finding(Grade.STATED, 2)], Grade.STATED),
        ([finding(Grade.STATED, 1), finding(Grade.RAISED, 1)], Grade.RAISED),
        ([finding(Grade.PROVEN, 2), finding(Grade.RAISED, 1)], Grade.PROVEN),
        ([finding(Grade.PROVEN, 2), finding(Grade.EARLY, 2)], Grade.EARLY),
        ([finding(Grade.WAITING, 2), finding(Grade.NODE)], Grade.NODE),
        ([finding(Grade.WAITING, 2), finding(Grade.ENDED)], Grade.WAITING),
        ([finding(Grade.HUNG), finding(Grade.EXITED, 1)], Grade.HUNG),
        ([finding(Grade.KILLED, 0, abort=True), finding(Grade.NODE)], Grade.NODE),
        ([finding(Grade.KILLED, 0), finding(Grade.NODE)], Grade.KILLED),
        ([finding(Grade.STATED, 2), replace(finding(Grade.EARLY, 2), shown=False)], Grade.STATED),
        ([finding(Grade.KILLED, 0, abort=True)], Grade.KILLED),
    ],
)
def test_what_explains_what(findings: list[Finding], first: Grade) -> None:
    """Consequences do not count, whichever reader yields them first."""
    assert ranking.first(findings).grade is first
    assert ranking.first(findings[::-1]).grade is first


def test_the_table_has_every_grade() -> None:
    """The docstring of ranking.py lists the grades in their order."""
    table, *_ = (ranking.__doc__ or "").partition("A verdict is certain")
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == [grade.name for grade in Grade]


@pytest.mark.parametrize(
    ("text", "kind", "rank"),
    [
        (timeout(0) + timeout(1) + timeout(3) + "world size: 4\n" + ABORTED.format(rank=0), "hang", 2),
        (timeout(0) + timeout(1) + timeout(2, 7, "BROADCAST"), "mismatch", 2),
        (timeout(0) + timeout(1) + timeout(2, 5, "BROADCAST"), "mismatch", None),  # perhaps of another group
        ("".join(work(rank) + timeout(rank, 7 - 2 * (rank == 2)) for rank in range(3)), "mismatch", 2),
        ("".join(work(rank, f"{rank // 2}") + timeout(rank, 7 - rank // 2) for rank in range(3)), "hang", None),
        (timeout(0) + timeout(1) + timeout(2, size=9), "mismatch", 2),
        (timeout(0) + timeout(1, 5), "mismatch", None),
        (timeout(0) + timeout(1) + ABORTED.format(rank=1), "hang", None),
        (timeout(0) + timeout(1) + f"[rank2]: {TRACE}".replace("\n  ", "\n[rank2]:   ") + "[rank2]: KeyError: 'x'\n",
         "program", 2),
    ],
)  # fmt: skip
def test_the_call_in_which_each_rank_timed_out(text: str, kind: str, rank: int | None) -> None:
    """The rank that is behind, calls something else, or did not time out; none if no majority differs from it."""
    found = verdict(text)
    assert (found.kind, found.rank) == (kind, rank), found.headline


def test_a_hang_in_the_logs_of_a_run(tmp_path: Path) -> None:
    """The ranks that torch aborted wrote no error record, but their logs have the watchdog's messages."""
    (tmp_path / "logs").mkdir()
    for rank in (0, 1, 3):
        (tmp_path / f"logs/rank-{rank}.log").write_text(f"step 7 loss 2.1\n{timeout(rank)}")
    (tmp_path / "logs/rank-2.log").write_text("step 7 loss 2.1\nreading shard 17\n")
    (tmp_path / "logs/job.log").write_text("".join(ABORTED.format(rank=rank) for rank in (0, 1, 3)))
    for path in (tmp_path / "logs").iterdir():
        os.utime(path, (0, 0))
    found = why_command.explain_run(tmp_path, State("FAILED", "5", LOCAL))
    assert (found.kind, found.rank) == ("hang", 2), found.headline
    assert "the last output of rank 2: reading shard 17" in found.evidence


STEPS = "1: step 8 loss 2.1\n1: step 9 loss 2.1\n"
ERROR = "".join(f"1: {line}\n" for line in f"{TRACE}ConnectionError: hub".splitlines())


def test_an_error_that_the_program_handled() -> None:
    """Its rank trains on, so another failure is the cause, or none is."""
    assert verdict(ERROR + STEPS).kind == "none"
    assert verdict(ERROR + STEPS + "srun: error: n1: task 0: Exited with exit code 4\n").rank == 0
    assert verdict(STEPS + ERROR).rank == 1
    nameless = (ERROR + STEPS * 2).replace("1: ", "")
    assert verdict(nameless + "srun: error: n1: task 0: Exited with exit code 1\n").headline.endswith("hub")


def test_the_last_attempt_of_torchrun() -> None:
    """Errors before a restart of the ranks were not the end."""
    restart = "I0304 10:22:31 9 torch/distributed/elastic/agent/server/api.py:7] [default] Restarting worker group\n"
    assert verdict(f"{TRACE}KeyError: 'first'\n{restart}{TRACE}KeyError: 'last'\n").error == "KeyError: 'last'"


@pytest.mark.parametrize(
    ("error", "rank"),
    [("ConnectionResetError: [Errno 104] Connection reset by peer", 1), ("BrokenPipeError: [Errno 32] Broken pipe", 1)],
)
def test_a_broken_connection_of_the_program(error: str, rank: int) -> None:
    """It is secondary only if it was raised in torch.distributed."""
    own = "".join(f"{rank}: {line}\n" for line in f"{TRACE}{error}".splitlines())
    other = "".join(f"0: {line}\n" for line in f"{TRACE}RuntimeError: Connection closed by peer".splitlines())
    assert verdict(other + own).rank == rank
    inside = own.replace("train.py", "/v/site-packages/torch/distributed/distributed_c10d.py")
    assert verdict(inside).kind == "unknown"


@pytest.mark.parametrize(
    ("text", "kind", "rank"),
    [
        # pdsh of DeepSpeed, and a logger that prefixes each line
        ("".join(f"gpu-07: {line}\n" for line in f"{TRACE}ValueError: x".splitlines()), "program", None),
        ("".join(f"10:00:01 [rank=3] app: {line}\n" for line in f"{TRACE}ValueError: x".splitlines()), "program", 3),
        ("train.sh: line 3: torchrun: command not found\n", "script", None),
        ("train.sh: line 3:  8156 Segmentation fault (core dumped) python train.py\n", "signal", None),
        ("=   RANK 3 PID 4242 RUNNING AT n1\n=   KILLED BY SIGNAL: 9 (Killed)\n", "signal", 3),
        ("subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.\n", "signal", None),
        ("=>> PBS: job killed: walltime 3604 exceeded limit 3600\n", "time-limit", None),
        ("[ 1.0] Out of memory: Killed process 4242 (python)\n", "host-memory", None),
        (f"{TRACE}RuntimeError: unable to write to file </torch_7_1>\n", "shared-memory", None),
        ("something has failed\n", "unknown", None),
        # torch's decorator @record puts the traceback into the table of torchrun
        ("  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 7)\n  traceback : Traceback (most recent call last):\n"
         '    File "train.py", line 9, in main\n  KeyError: 7\n', "program", 3),
        ("0: ValueError: Caught ValueError in DataLoader worker process 0.\n0: Original Traceback (most recent call last):\n"
         '0:   File "data.py", line 9, in read\n0: OSError: [Errno 28] No space left on device\n', "disk", 0),
        (f"ERROR trainer [rank 5] training failed\n{TRACE}ValueError: x\n", "program", 5),
        # Composer prints the output of each rank; MPICH and Open MPI report who called MPI_Abort
        (f"----------Begin global rank 2 STDERR----------\n{TRACE}KeyError: 1\n"
         "----------End global rank 2 STDERR----------\n", "program", 2),
        ("Rank 2 crashed with exit code 3.\n", "program", 2),
        ("Abort(1) on node 3 (rank 3 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1)\n", "program", 3),
        ("[rank3]: Fatal Python error: Segmentation fault\n", "signal", 3),
        ("srun: error: n2: task 3: Exited with exit code 137\n", "signal", 3),
        ("slurmstepd: error: pyxis: container start failed with error code: 1\n", "script", None),
    ],
)  # fmt: skip
def test_other_programs(text: str, kind: str, rank: int | None) -> None:
    """Messages of launchers, shells and schedulers; what no reader recognizes is unknown, not 'no failure'."""
    found = verdict(text)
    assert (found.kind, found.rank) == (kind, rank), found.headline


def test_stacks_of_py_spy(tmp_path: Path) -> None:
    """One file of each rank: the one that is not in a collective is named."""
    waits = "    all_reduce (torch/distributed/distributed_c10d.py:2810)\n    step (train.py:61)\n"
    for rank in range(3):
        frames = waits if rank != 1 else "    read (data.py:18)\n    step (train.py:44)\n"
        (tmp_path / f"rank-{rank}.txt").write_text(f'Process 9: python\nThread 9 (idle): "MainThread"\n{frames}')
    found = foreign_job.find(str(tmp_path))
    assert found is not None
    assert diagnosis.diagnose(found.logs.evidence).rank == 1


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (
            "ncclInvalidUsage: x\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
            "no-gpu",
        ),
        ("ncclUnhandledCudaError: x\nLast error:\nFailed to CUDA calloc async 608 bytes", "cuda-memory"),
        ("ncclUnhandledCudaError: x\nLast error:\nCuda failure 999 'unknown error'", "gpu"),
        ("ncclUnhandledCudaError: x\nLast error:\nCuda failure 1 'invalid argument'", "program"),
        ("ncclSystemError: x\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<7> failed", "network"),
        ("ncclInternalError: Internal check failed.", "unknown"),
    ],
)
def test_the_reason_that_nccl_gives(reason: str, kind: str) -> None:
    """NCCL's own result and its last error decide, not that it is an error of NCCL."""
    found = verdict(f"{TRACE}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275\n{reason}\n")
    assert found.kind == kind, found.headline
    assert ("exclude" in found.do) == (kind == "network")


CHAIN = (
    'Traceback (most recent call last):\n  File "/w/save.py", line 3, in write\n    file.write(data)\n'
    "OSError: [Errno 28] No space left on device\n\n{}\n\n"
    'Traceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\n    save(state)\nsave.SaveError: step 40\n'
)


def test_the_kind_of_a_direct_cause() -> None:
    """`raise ... from error` has the kind of the error; an error that was handled before shows nothing."""
    direct = verdict(CHAIN.format("The above exception was the direct cause of the following exception:"))
    assert direct.kind == failure_kinds.DISK and "save.SaveError: step 40" in direct.headline
    handled = verdict(CHAIN.format("During handling of the above exception, another exception occurred:"))
    assert handled.kind == failure_kinds.PROGRAM


def test_an_error_of_a_thread_counts_less_than_that_of_its_process() -> None:
    """A thread of torch loses its connection before the traceback that ends the process is printed."""
    thread = "Exception in thread Thread-5:\n" + TRACE.replace("train", "thread") + "{}\n"
    own = TRACE + "ValueError: bad batch\n"
    lost = "ConnectionRefusedError: [Errno 111] Connection refused"
    assert "bad batch" in verdict(thread.format(lost) + own).headline
    assert verdict(thread.format("OSError: [Errno 28] No space left on device") + own).kind == failure_kinds.DISK
    assert "refused" in verdict(thread.format(lost)).headline
