"""The first failure of a run, from recorded evidence: the headline of hpcinit why."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.base.text import brief
from hpcinit.records import causes, error_records, hang_report, job_log
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.hang_report import ELSEWHERE, HangReport, StuckRank, Waiting
from hpcinit.records.heartbeats import STOPPED
from hpcinit.why.diagnosis import diagnose
from hpcinit.why.evidence import Evidence, clocks
from hpcinit.why.hang_verdict import Culprit, HangVerdict
from tests.records.test_job_log import KILLED, LIMIT, LOST, OOM

# As torch 2.13 with gloo writes it.
CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[198.19.240.11]:28071. This is typically caused by a remote worker crashing. Check the logs of the remote worker "
    "before reporting an error."
)
T = 1795267388.0


def error_of(rank: int, error: str, at: float = 0.0, step: int = 41, host: str = "", phase: str = "training") -> Found:
    record = ErrorRecord(T + at, rank, host or f"n{rank // 2 + 1}", error, "", phase, step, "5.0.0")
    return Found(record, T + at)


def first(*found: Found, state: str = "FAILED", log: str = "", **more: object) -> str:
    return diagnose(Evidence(state, found=found, log=job_log.read(log), **more)).headline  # type: ignore[arg-type]


def test_the_cause_and_not_an_earlier_secondary_error() -> None:
    """A secondary error may be written before its cause; its message shows that it is secondary."""
    found = (
        error_of(0, CLOSED, -0.1),
        error_of(3, "ValueError: bad sample 17"),
        error_of(1, CLOSED, 0.8),
        error_of(2, CLOSED, 0.2),
    )
    verdict = diagnose(Evidence("FAILED", found=found))
    clock = time.strftime("%H:%M:%S", time.localtime(T))
    assert verdict.headline == f"rank 3 on n2 failed first, {clock} (step 41): ValueError: bad sample 17"
    assert verdict.secondary == ("3 other ranks: Connection closed by peer, up to 0.8 s later",)


def test_the_phase_is_shown_unless_it_is_training() -> None:
    """The headline shows a phase other than training, and a step if one was reported."""
    assert "(saving, step 41): OSError" in first(
        error_of(0, "OSError: [Errno 28] No space left on device", phase="saving")
    )
    assert "(start-up): ImportError" in first(error_of(0, "ImportError: x", step=-1, phase="start-up"))


def test_a_killed_rank_without_a_record() -> None:
    """srun reports the killed rank first, and the records of the other ranks are secondary."""
    assert first(error_of(0, CLOSED), error_of(2, CLOSED), log=KILLED, step=41) == (
        "rank 1 on n1 was killed by a signal (Killed) first (step 41)"
    )


def test_ranks_whose_parent_was_killed() -> None:
    """srun reports the only task of a node, and the verdict names all of its ranks."""
    log = job_log.read("srun: error: n2: task 1: Killed\n", 2)
    verdict = diagnose(Evidence("FAILED", log=log))
    assert verdict.headline == "ranks 2-3 on n2 were killed by a signal (Killed) first"


def test_a_rank_is_counted_once_as_secondary() -> None:
    """A rank with a secondary error that Slurm ended later counts only for its error."""
    log = job_log.read(KILLED.replace("Killed", "Exited with exit code 1"))
    verdict = diagnose(Evidence("FAILED", found=(error_of(1, "ValueError: x"), error_of(0, CLOSED)), log=log))
    assert verdict.secondary == (
        "1 other rank: Connection closed by peer, up to 0.0 s later",
        "2 ranks terminated afterwards (ranks 2-3)",
    )


def test_a_signal_after_an_error_is_no_cause() -> None:
    """If a rank raised, a rank that was killed later is not the cause."""
    log = "srun: error: n2: task 3: Exited with exit code 1\n" + KILLED
    assert "rank 3 on n2 failed first" in first(error_of(3, "ValueError: x"), log=log)
    assert "rank 3 on n2 failed first" in first(error_of(3, "ValueError: x"), log="srun: error: n1: task 1: Aborted\n")


def test_the_time_limit_and_who_raised_because_of_it() -> None:
    """An error after the time limit is secondary; an error long before it is the cause."""
    at = job_log.read(LIMIT).cancelled
    assert at is not None and at.at is not None
    late = error_of(1, "RuntimeError: interrupted", at.at - T + 1)
    assert first(late, state="TIMEOUT", log=LIMIT, time_min=10).startswith("the time limit of 10 min ended the job, ")
    assert "rank 1 on n1 failed first" in first(
        error_of(1, "ValueError: x", at.at - T - 900), state="TIMEOUT", log=LIMIT
    )


def test_a_lost_node_and_its_reason() -> None:
    """The verdict has Slurm's reason for the node, and advises to exclude it."""
    verdict = diagnose(
        Evidence("NODE_FAIL", found=(error_of(0, CLOSED),), log=job_log.read(LOST), nodes={"n2": "Xid 79"})
    )
    assert verdict.headline == "node n2 was lost: Slurm reports a node failure"
    assert verdict.evidence == ("n2: Xid 79",) and "exclude=n2" in verdict.do


def test_the_hosts_memory() -> None:
    """Slurm's recorded messages are used because no node of the test cluster limits memory."""
    log = f"{OOM}\n{KILLED}"
    verdict = diagnose(Evidence("OUT_OF_MEMORY", log=job_log.read(log)))
    assert "rank 1 on n1 was killed by the kernel (the node ran out of the memory of this job)" in verdict.headline
    assert verdict.kind == "host-memory" and "mem_gb" in verdict.do
    assert diagnose(Evidence("OUT_OF_MEMORY")).kind == "host-memory"


def test_cancelled_and_preempted() -> None:
    """The headline shows who canceled a job, and at which step a preemption ended it."""
    assert first(state="CANCELLED", who="alice").startswith("the job was canceled by alice (scancel")
    assert first(state="PREEMPTED", step=3) == "preempted: a job of higher priority took the nodes (step 3)"


def test_a_hang_that_was_ended_later() -> None:
    """The cause is the rank that the others wait for, not the time limit that ended the job."""
    report = HangReport(
        rank=1,
        host="n1",
        state=STOPPED,
        silent_s=12.0,
        last_steps=((4, (0, 1, 2, 3)),),
        waiting=(Waiting((0, 2, 3), "all_reduce", "train.py:13 in <module>"),),
        stuck=(StuckRank(1, "n1", 9, STOPPED),),
    )
    verdict = diagnose(Evidence("TIMEOUT", log=job_log.read(LIMIT), hang=report))
    assert verdict.headline.startswith("the training hung: rank 1 on n1 does not respond: process 9 is stopped")
    assert (verdict.rank, verdict.host, verdict.kind) == (1, "n1", "hang")
    assert verdict.evidence == report.lines()[:2] and "another process stopped it" in verdict.do
    record = replace(error_of(0, "the training hangs").record, kind="hang", rank_at_fault=1, host_at_fault="n1")
    alone = diagnose(Evidence("FAILED", found=(Found(record, T),)))
    assert (alone.headline, alone.rank, alone.host) == ("the training hung: the training hangs", 1, "n1")


def test_an_exit_status_without_a_record() -> None:
    """Among exit statuses, the rank without an error record is the cause."""
    log = "srun: error: n2: tasks 2-3: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 7\n"
    assert first(error_of(2, CLOSED), error_of(3, CLOSED), log=log, tails={1: "segments lost"}) == (
        "rank 1 on n1 failed first: exited with exit code 7: segments lost"
    )


def test_only_secondary_errors_and_no_evidence() -> None:
    """Without evidence of a cause, the headline reports that it is unknown."""
    assert first(error_of(0, CLOSED)).startswith("a rank or its node disappeared without an error")
    assert first(state="UNKNOWN", reason="no answer") == "the cause is unknown: Slurm's state is UNKNOWN (no answer)"
    verdict = diagnose(
        Evidence("FAILED", exit_status=127, log=job_log.read("job.sh: line 9: module: command not found\n"))
    )
    assert verdict.headline.endswith(
        "exit status 127 and no rank reported an error: job.sh: line 9: module: command not found"
    )
    assert "cluster.modules" in verdict.do


def test_clocks_of_nodes_that_differ() -> None:
    """The clock of n2 is 2 s ahead, so its error is the first although its time is later."""
    found = (
        replace(error_of(2, "ValueError: first", 2.0, host="n2"), written=T),
        error_of(0, "KeyError: 'second'", 1.0, host="n1"),
    )
    offsets = clocks((one.record.host, one.written - one.record.time) for one in found)
    assert offsets == {"n2": -2.0, "n1": 0.0}
    verdict = diagnose(Evidence("FAILED", found=found, clocks=offsets))
    assert "rank 2 on n2 failed first" in verdict.headline
    assert verdict.evidence == ("rank 0 on n1 1.0 s later: KeyError: 'second'",)
    assert "clocks of the nodes differ by 2.0 s (n2 is ahead)" in verdict.secondary[-1]
    assert clocks([("n1", 0.01), ("n2", 0.2), ("n2", 3.0)]) == {}  # a delayed write does not change the clock


def test_two_at_about_the_same_time() -> None:
    """Two errors at about the same time make the first uncertain, and the same error of several ranks is one line."""
    verdict = diagnose(
        Evidence(
            "FAILED",
            found=(error_of(0, "KeyError: 'a'"), error_of(2, "ValueError: b", 0.2), error_of(3, "KeyError: 'a'", 1)),
        )
    )
    assert verdict.evidence == (
        "the same error on rank 3",
        "rank 2 on n2 0.2 s later: ValueError: b",
    )
    assert verdict.headline.startswith("probably rank 0") and "rank 2 failed at the same time" in verdict.doubt


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "cuda-memory", "fsdp"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "host-memory", "mem_gb"),
        ("OSError: [Errno 28] No space left on device", "disk", "free disk space"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "disk", "df -h"),
        ("RuntimeError: basic_ios::clear: iostream error", "disk", "df -h"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "import", "cluster.venv"),
        ("RuntimeError: The server socket has failed to bind. EADDRINUSE", "port", "at the next start"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "no-gpu", "cluster.venv"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no-gpu", "cluster.venv"),
        ("FloatingPointError: loss is nan", "not-a-number", "learning rate"),
        ("RuntimeError: CUDA error: device-side assert triggered", "program", "CUDA_LAUNCH_BLOCKING"),
        ("ValueError: x", "program", "traceback"),
        ("SystemExit: 3", "program", "sys.exit"),
    ],
)  # fmt: skip
def test_the_advice_for_an_error(error: str, kind: str, advice: str) -> None:
    """Messages of other programs lead to a kind and to advice, and are not secondary."""
    found = causes.kind(error)
    assert found[0] == kind and advice in found[1] and not causes.is_secondary_text(error)


@pytest.mark.parametrize(
    "error",
    [
        CLOSED,
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Terminated.",
        "SystemExit: 143",
    ],
)
def test_a_secondary_error_is_recognized(error: str) -> None:
    """Messages that another rank's failure causes count as secondary."""
    assert causes.is_secondary_text(error)


def test_records_of_an_earlier_attempt_are_ignored(tmp_path: Path) -> None:
    """Records of another restart or another job of the chain are ignored, and so are incomplete files."""
    for rank, job in enumerate(("7.0.0", "8.0.0", "8.0.1", "torchrun-x")):
        record = ErrorRecord(T, rank, "n1", "KeyError: 1", "", job=job)
        (tmp_path / record.name).write_text(record.to_json())
        os.utime(tmp_path / record.name, (T, T))
    (tmp_path / "rank-9.json").write_text('{"time": 1')
    (tmp_path / "rank-8.json").write_text('{"time": 1.0, "rank": 8, "host": "n1", "error": "E", "traceback": ""}')
    found = list(error_records.read(tmp_path))
    assert sorted(one.record.rank for one in found) == [0, 1, 2, 3, 8] and found[0].written == T
    kept = error_records.of_last_attempt(found, "8", 1)
    assert sorted(one.record.rank for one in kept) == [2, 3, 8]


def test_an_error_is_one_line() -> None:
    """brief() returns the first line without the module, of limited length."""
    assert brief("\nhpcinit.base.errors.Failure: no\nmore") == "Failure: no"
    assert len(brief("x" * 999)) < 300
    try:
        compile('print("hi"', "train.py", "exec")
    except SyntaxError as error:
        assert brief("".join(traceback.format_exception_only(error))) == "SyntaxError: '(' was never closed"


def test_a_node_on_which_srun_starts_nothing() -> None:
    """The node where srun could not start a task is the cause, not the ranks that srun ended because of it."""
    log = (
        "srun: error: Task launch for StepId=10.0 failed on node n2: Communication connection failure\n"
        "srun: error: Application launch failed: Communication connection failure\n"
        "srun: Job step aborted: Waiting up to 5 seconds for job step to finish.\nsrun: error: n1: task 0: Killed\n"
    )
    verdict = diagnose(Evidence("FAILED", log=job_log.read(log)))
    assert verdict.headline == "srun could not start the ranks on n2: slurmd did not answer there"
    assert (verdict.kind, verdict.host) == ("node", "n2") and verdict.do.endswith("cluster.sbatch.exclude=n2")


def test_a_collective_that_timed_out_has_the_flight_recorders_culprit() -> None:
    """All errors at NCCL's timeout are secondary; torch's dumps show the rank that the others waited for."""
    timed_out = "RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42)"
    line = "rank 1 has not called all_reduce number 42 of the default group, in which ranks 0,2-3 wait"
    culprit = Culprit(1, "n1", "not-called", "0", "default_pg", "all_reduce", 42, (0, 2, 3), line)
    found = HangVerdict((culprit,), (0, 2, 3))
    verdict = diagnose(Evidence("FAILED", found=(error_of(0, timed_out), error_of(2, timed_out)), flight=found))
    assert (verdict.headline, verdict.rank, verdict.host) == (f"a collective hung: {line}", 1, "n1")
    assert verdict.kind == "hang" and verdict.flight == found and "torchfrtrace" in verdict.do
    stuck = (StuckRank(1, "n1", 9, ELSEWHERE, "train.py:9"),)
    report = HangReport(1, "n1", waiting=(Waiting((0, 2), "all_reduce"),), stuck=stuck)
    hang = diagnose(Evidence("FAILED", hang=report, flight=found))
    assert hang.headline.startswith("the training hung: rank 1")
    assert hang.evidence == (*report.lines()[:2], f"flight recorder: {line}")
    other = diagnose(Evidence("FAILED", hang=replace(report, rank=0, stuck=()), flight=found))
    assert (other.headline, other.rank) == (f"a collective hung: {line}", 1)  # the dumps are the proof
    waits_for_gpus = HangReport(stuck=tuple(StuckRank(rank, "n1", 9, ELSEWHERE, "train.py:9") for rank in range(4)))
    assert diagnose(Evidence("FAILED", hang=waits_for_gpus, flight=found)).rank == 1
    busy = diagnose(Evidence("CANCELLED", hang=waits_for_gpus))
    assert (busy.kind, busy.rank) == ("cancelled", None) and "nothing to fix" not in busy.do


def test_a_bus_error_is_a_disk() -> None:
    """The advice names every disk that can have mapped files, /tmp as well as /dev/shm."""
    verdict = diagnose(Evidence("FAILED", log=job_log.read("srun: error: n2: task 1: Bus error\n")))
    assert verdict.headline == "rank 1 on n2 was killed by a signal (Bus error) first"
    assert "run df -h on that node for /tmp, TMPDIR and /dev/shm" in verdict.do and "data loader" not in verdict.do


def test_errors_of_hpcinit_are_recognized_by_their_fields() -> None:
    """Its kind shows that an error is secondary; the quoted text, or else its kind, shows the cause."""
    lost = replace(error_of(0, "text").record, kind="peer-lost", rank_at_fault=2)
    assert causes.is_secondary(lost) and causes.secondary_name(lost) == "died during start-up"
    late = replace(lost, kind="start-up")
    assert not causes.is_secondary(late) and causes.of_record(late)[0] == "start-up"
    quotes = replace(lost, kind="program", error="cannot write", quoted="[Errno 28] No space left on device")
    assert causes.of_record(quotes)[0] == "disk"
    assert causes.is_secondary(replace(quotes, quoted=CLOSED))
    ours = replace(lost, kind="program", error="Connection closed by peer; No space left on device", quoted="")
    assert not causes.is_secondary(ours) and causes.of_record(ours)[0] == "program"
    assert causes.of_record(replace(ours, kind="of a later version"))[0] == "program"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 7},
        {"quoted": None},
        {"time": "now"},
        {"rank": None},
        {"rank_at_fault": "2"},
        {"host": []},
    ],
)
def test_a_record_with_values_of_other_types_is_ignored(tmp_path: Path, change: dict[str, object]) -> None:
    """A record with a value of a wrong type is skipped; keys of later versions are ignored."""
    document = json.loads(error_of(3, "ValueError: x").record.to_json())
    (tmp_path / "rank-3.json").write_text(json.dumps({**document, "of_a_later_version": 1}))
    assert [one.record.rank for one in error_records.read(tmp_path)] == [3]
    (tmp_path / "rank-3.json").write_text(json.dumps({**document, **change}))
    assert list(error_records.read(tmp_path)) == []


WHOLE = HangReport(
    rank=2,
    host="n2",
    state=STOPPED,
    silent_s=90.25,
    last_steps=((41, (0, 1)), (42, (2,))),
    waiting=(Waiting((0, 1), "all_reduce", "train.py:57 in step"),),
    unheard=(5, 6),
    silent_nodes=(hang_report.SilentNode("n4", 500.0, (3, 4)),),
    stuck=(StuckRank(2, "n2", 72, STOPPED),),
)


def test_the_report_of_a_hang_is_read_back_as_it_was_written() -> None:
    """A hang report survives a round trip through JSON, and keys of later versions are ignored."""
    assert hang_report.from_document(json.loads(WHOLE.to_json())) == WHOLE
    assert hang_report.from_document({"rank": 1, "of_a_later_version": {}}) == HangReport(rank=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"rank": ',
        "[]",
        "7",
        '{"rank": "2"}',
        '{"host": 7}',
        '{"silent_s": "long"}',
        '{"stuck": [7]}',
        '{"stuck": 7}',
        '{"last_steps": [[1]]}',
        '{"waiting": [{"ranks": "0-3"}]}',
        '{"silent_nodes": [{"host": null}]}',
        '{"unheard": 5}',
        '{"text": [1]}',
        "[" * 100_000,
    ],
)
def test_an_unreadable_hang_report(tmp_path: Path, text: str) -> None:
    """If report.json cannot be read, there is no report."""
    folder = tmp_path / "hang/5.0.0"
    folder.mkdir(parents=True)
    (folder / hang_report.RECORD).write_text(text)
    assert hang_report.left(tmp_path, "5", 0) is None
