"""The first failure of a run, from recorded evidence: what hpcinit why says first."""

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


def told(rank: int, error: str, at: float = 0.0, step: int = 41, host: str = "", phase: str = "training") -> Found:
    record = ErrorRecord(T + at, rank, host or f"n{rank // 2 + 1}", error, "", phase, step, "5.0.0")
    return Found(record, T + at)


def first(*found: Found, state: str = "FAILED", log: str = "", **more: object) -> str:
    return diagnose(Evidence(state, found=found, log=job_log.read(log), **more)).headline  # type: ignore[arg-type]


def test_the_cause_and_not_the_first_in_time_among_echoes() -> None:
    """An echo may be written before its cause; which is which is told by its words."""
    found = (told(0, CLOSED, -0.1), told(3, "ValueError: bad sample 17"), told(1, CLOSED, 0.8), told(2, CLOSED, 0.2))
    verdict = diagnose(Evidence("FAILED", found=found))
    clock = time.strftime("%H:%M:%S", time.localtime(T))
    assert verdict.headline == f"rank 3 on n2 failed first, {clock} (step 41): ValueError: bad sample 17"
    assert verdict.secondary == ("3 other ranks: Connection closed by peer, up to 0.8 s later",)


def test_the_phase_is_told_where_it_is_not_the_training() -> None:
    assert "(saving, step 41): OSError" in first(told(0, "OSError: [Errno 28] No space left on device", phase="saving"))
    assert "(start-up): ImportError" in first(told(0, "ImportError: x", step=-1, phase="start-up"))


def test_a_rank_that_a_signal_ended_leaves_no_record() -> None:
    """srun names it first; the records of others are echoes."""
    assert first(told(0, CLOSED), told(2, CLOSED), log=KILLED, step=41) == (
        "rank 1 on n1 was ended by a signal (Killed) first (step 41)"
    )


def test_ranks_whose_parent_was_killed() -> None:
    """The one task of a node is all that srun speaks of, and all of its ranks are meant."""
    log = job_log.read("srun: error: n2: task 1: Killed\n", 2)
    verdict = diagnose(Evidence("FAILED", log=log))
    assert verdict.headline == "ranks 2-3 on n2 were ended by a signal (Killed) first"


def test_a_rank_is_counted_once_among_those_that_came_after() -> None:
    """Who has said that a peer is gone, and was ended later, has said it; the others were ended."""
    log = job_log.read(KILLED.replace("Killed", "Exited with exit code 1"))
    verdict = diagnose(Evidence("FAILED", found=(told(1, "ValueError: x"), told(0, CLOSED)), log=log))
    assert verdict.secondary == (
        "1 other rank: Connection closed by peer, up to 0.0 s later",
        "2 ranks ended by Slurm afterwards (ranks 2-3)",
    )


def test_a_signal_after_an_error_is_no_cause() -> None:
    """A rank raised, and another one that waited for it was killed later."""
    log = "srun: error: n2: task 3: Exited with exit code 1\n" + KILLED
    assert "rank 3 on n2 failed first" in first(told(3, "ValueError: x"), log=log)
    assert "rank 3 on n2 failed first" in first(told(3, "ValueError: x"), log="srun: error: n1: task 1: Aborted\n")


def test_the_time_limit_and_who_raised_because_of_it() -> None:
    """What a rank raises on its way out is an echo; what it raised long before is the cause."""
    at = job_log.read(LIMIT).cancelled
    assert at is not None and at.at is not None
    late = told(1, "RuntimeError: interrupted", at.at - T + 1)
    assert first(late, state="TIMEOUT", log=LIMIT, time_min=10).startswith("the time limit of 10 min ended the job, ")
    assert "rank 1 on n1 failed first" in first(told(1, "ValueError: x", at.at - T - 900), state="TIMEOUT", log=LIMIT)


def test_a_lost_node_and_its_reason() -> None:
    verdict = diagnose(Evidence("NODE_FAIL", found=(told(0, CLOSED),), log=job_log.read(LOST), nodes={"n2": "Xid 79"}))
    assert verdict.headline == "node n2 was lost: Slurm says node failure"
    assert verdict.evidence == ("n2: Xid 79",) and "exclude=n2" in verdict.do


def test_the_hosts_memory() -> None:
    """Recorded words: no node of the test cluster confines memory."""
    log = f"{OOM}\n{KILLED}"
    verdict = diagnose(Evidence("OUT_OF_MEMORY", log=job_log.read(log)))
    assert "rank 1 on n1 was killed by the kernel: the node's memory for this job is used up" in verdict.headline
    assert verdict.kind == "host-memory" and "mem_gb" in verdict.do
    assert diagnose(Evidence("OUT_OF_MEMORY")).kind == "host-memory"


def test_cancelled_and_preempted() -> None:
    assert first(state="CANCELLED", who="alice").startswith("the job was cancelled by alice: scancel")
    assert first(state="PREEMPTED", step=3) == "a job of higher priority took the nodes (step 3)"


def test_a_hang_that_somebody_ended() -> None:
    """The report names the rank that the others wait for; the end that Slurm tells of is not the cause."""
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
    assert verdict.headline.startswith("the training hung: rank 1 on n1 cannot be asked: process 9 is stopped")
    assert (verdict.rank, verdict.host, verdict.kind) == (1, "n1", "hang")
    assert verdict.evidence == report.lines()[:2] and "somebody stopped that process" in verdict.do
    record = replace(told(0, "the training hangs").record, kind="hang", hang=json.loads(report.to_json()))
    alone = diagnose(Evidence("FAILED", found=(Found(record, T),)))
    assert (alone.headline, alone.rank, alone.do) == (verdict.headline, 1, verdict.do)


def test_an_exit_status_without_a_record() -> None:
    log = "srun: error: n2: tasks 2-3: Exited with exit code 1\nsrun: error: n1: task 1: Exited with exit code 7\n"
    assert first(told(2, CLOSED), told(3, CLOSED), log=log, tails={1: "segments lost"}) == (
        "rank 1 on n1 ended first, exited with exit code 7: segments lost"
    )


def test_only_echoes_and_nothing_at_all() -> None:
    """Nothing is made up."""
    assert first(told(0, CLOSED)).startswith("a rank or its node went away without a word")
    assert first(state="UNKNOWN", reason="no answer") == "nothing says why: Slurm's state is UNKNOWN (no answer)"
    verdict = diagnose(
        Evidence("FAILED", exit_status=127, log=job_log.read("job.sh: line 9: module: command not found\n"))
    )
    assert verdict.headline.endswith(
        "exit status 127 and no rank left an error: job.sh: line 9: module: command not found"
    )
    assert "cluster.modules" in verdict.do


def test_clocks_of_nodes_that_differ() -> None:
    """n2 is 2 s ahead: its error, which came first, has the later time."""
    found = (
        replace(told(2, "ValueError: first", 2.0, host="n2"), written=T),
        told(0, "KeyError: 'second'", 1.0, host="n1"),
    )
    offsets = clocks((one.record.host, one.written - one.record.time) for one in found)
    assert offsets == {"n2": -2.0, "n1": 0.0}
    verdict = diagnose(Evidence("FAILED", found=found, clocks=offsets))
    assert "rank 2 on n2 failed first" in verdict.headline
    assert verdict.evidence == ("rank 0 on n1 1.0 s later: KeyError: 'second'",)
    assert "clocks of the nodes differ by 2.0 s (n2 is ahead)" in verdict.secondary[-1]
    assert clocks([("n1", 0.01), ("n2", 0.2), ("n2", 3.0)]) == {}  # a file that came late is no clock


def test_two_at_about_the_same_time() -> None:
    """What cannot be told apart is said so; the same error of many ranks is one line."""
    verdict = diagnose(
        Evidence("FAILED", found=(told(0, "KeyError: 'a'"), told(2, "ValueError: b", 0.2), told(3, "KeyError: 'a'", 1)))
    )
    assert verdict.evidence == (
        "the same error on rank 3",
        "rank 2 on n2 0.2 s later, which may as well have come first: ValueError: b",
    )


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "cuda-memory", "fsdp"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "host-memory", "mem_gb"),
        ("OSError: [Errno 28] No space left on device", "disk", "make room"),
        ("RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598", "disk", "df -h"),
        ("RuntimeError: basic_ios::clear: iostream error", "disk", "df -h"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "import", "cluster.venv"),
        ("RuntimeError: The server socket has failed to bind. EADDRINUSE", "port", "submit again"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "no-gpu", "cluster.venv"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no-gpu", "cluster.venv"),
        ("FloatingPointError: loss is nan", "not-a-number", "learning rate"),
        ("RuntimeError: CUDA error: device-side assert triggered", "gpu", "CUDA_LAUNCH_BLOCKING"),
        ("ValueError: x", "program", "traceback"),
        ("SystemExit: 3", "program", "sys.exit"),
    ],
)  # fmt: skip
def test_what_to_do(error: str, kind: str, word: str) -> None:
    found = causes.kind(error)
    assert found[0] == kind and word in found[1] and not causes.is_secondary_text(error)


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
def test_an_echo_is_known(error: str) -> None:
    assert causes.is_secondary_text(error)


def test_records_of_an_earlier_attempt_are_left_out(tmp_path: Path) -> None:
    """A requeued job has the same id and another restart; a chain other ids. Half a file is none."""
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
    assert brief("\nhpcinit.base.errors.Failure: no\nmore") == "Failure: no"
    assert len(brief("x" * 999)) < 300
    try:
        compile('print("hi"', "train.py", "exec")
    except SyntaxError as error:
        assert brief("".join(traceback.format_exception_only(error))) == "SyntaxError: '(' was never closed"


def test_a_node_on_which_srun_starts_nothing() -> None:
    """srun's words, recorded with Slurm 22.05.8: what it ends elsewhere because of it comes after."""
    log = (
        "srun: error: Task launch for StepId=10.0 failed on node n2: Communication connection failure\n"
        "srun: error: Application launch failed: Communication connection failure\n"
        "srun: Job step aborted: Waiting up to 5 seconds for job step to finish.\nsrun: error: n1: task 0: Killed\n"
    )
    verdict = diagnose(Evidence("FAILED", log=job_log.read(log)))
    assert verdict.headline == "srun could not start the ranks on n2: its slurmd gave no answer"
    assert (verdict.kind, verdict.host) == ("node", "n2") and verdict.do.endswith("cluster.sbatch.exclude=n2")


def test_a_collective_that_timed_out_has_the_flight_recorders_culprit() -> None:
    """All ranks end at NCCL's timeout, as echoes; the rank they waited for is in torch's own dumps."""
    timed_out = "RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42)"
    line = "rank 1 has not called all_reduce number 42 of the default group, in which ranks 0,2-3 wait"
    culprit = Culprit(1, "n1", "not-called", "0", "default_pg", "all_reduce", 42, (0, 2, 3), line)
    found = HangVerdict((culprit,), (0, 2, 3))
    verdict = diagnose(Evidence("FAILED", found=(told(0, timed_out), told(2, timed_out)), flight=found))
    assert (verdict.headline, verdict.rank, verdict.host) == (f"a collective hung: {line}", 1, "n1")
    assert verdict.kind == "hang" and verdict.flight == found and "torchfrtrace" in verdict.do
    hang = diagnose(
        Evidence(
            "FAILED", hang=HangReport(1, "n1", stuck=(StuckRank(1, "n1", 9, ELSEWHERE, "train.py:9"),)), flight=found
        )
    )
    assert hang.headline.startswith("the training hung: rank 1")
    assert hang.evidence == ("no rank has told a step yet", f"flight recorder: {line}")


def test_a_bus_error_is_a_disk() -> None:
    """It comes of any full disk with mapped files: /tmp as well as /dev/shm, and not of data loaders alone."""
    verdict = diagnose(Evidence("FAILED", log=job_log.read("srun: error: n2: task 1: Bus error\n")))
    assert verdict.headline == "rank 1 on n2 was ended by a signal (Bus error) first"
    assert "look at /tmp, TMPDIR and /dev/shm on that node (df -h" in verdict.do and "data loader" not in verdict.do


def test_errors_of_hpcinit_are_known_by_their_fields() -> None:
    """A consequence of another rank's failure by its kind; a cause by what the message quotes, or else by its kind."""
    lost = replace(told(0, "words").record, kind="peer-lost", rank_at_fault=2)
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
        {"hang": ["no mapping"]},
        {"host": []},
    ],
)
def test_a_record_with_values_of_other_types_is_left_out(tmp_path: Path, change: dict[str, object]) -> None:
    """Whoever wrote it, no reader gets a value that it does not expect; keys of later versions do no harm."""
    document = json.loads(told(3, "ValueError: x").record.to_json())
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
def test_a_torn_report_of_a_hang_costs_its_fields_only(tmp_path: Path, text: str) -> None:
    """Its text is shown, as that of a version that wrote no fields; where that is missing too there is no report."""
    folder = tmp_path / "hang/5.0.0"
    folder.mkdir(parents=True)
    (folder / hang_report.RECORD).write_text(text)
    assert hang_report.left(tmp_path, "5", 0) is None
    (folder / hang_report.REPORT).write_text("no step for 90 s\nrank 2 on n2 is stopped\n")
    found = hang_report.left(tmp_path, "5", 0)
    assert found is not None and found.lines() == ("no step for 90 s", "rank 2 on n2 is stopped")
    verdict = diagnose(Evidence("FAILED", hang=found))
    assert (verdict.headline, verdict.kind, verdict.rank) == ("the training hung: no step for 90 s", "hang", None)
