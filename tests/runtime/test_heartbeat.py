"""Hang reports: real ranks over gloo, one of which does not enter the collective."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hpcinit.records import hang_report, heartbeats, run_folder
from hpcinit.records.heartbeats import NodeHeartbeats, RankHeartbeat
from tests.runtime.spawned import ranks
from tests.runtime.test_stopping import END
from tests.waiting import until

TRAIN = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
import hpcinit
from hpcinit.records.spec import Hang
run = hpcinit.init(backend="gloo")
object.__setattr__(run, "folder", Path(os.environ["FOLDER"]))
object.__setattr__(run.plan, "hang", Hang(after_s=2, action=os.environ.get("ACTION", "report")))
def read(step):
    while step == 20 and run.rank == 2 and not Path("go").exists():
        time.sleep(0.05)
for step in range(40):
    time.sleep(0.02 if step < 20 else 0.1)  # long enough afterwards for the thread to look again
    read(step)
    dist.all_reduce(torch.ones(1))
    run.progress(step, 40)
print("done", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "errors").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, value in (("FOLDER", tmp_path), ("TMPDIR", tmp_path / "disk"), ("HPCINIT_RUN", "")):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def report(folder: Path) -> str:
    return next((path.read_text() for path in folder.glob(f"hang/*/{hang_report.REPORT}")), "")


def lines_of(*given: object, **more: object) -> tuple[str, ...]:
    return hang_report.report(*given, **more).lines()  # type: ignore[arg-type]


def test_the_rank_outside_the_collective_is_named(folder: Path) -> None:
    """The other ranks wait in all_reduce while it is in the program's function; later all continue."""
    with ranks(TRAIN + END, 3, folder) as found:
        until(lambda: report(folder).count("\n") >= 3)
        text = report(folder)
        (record,) = (json.loads(path.read_text()) for path in folder.glob(f"hang/*/{hang_report.RECORD}"))
        (folder / "go").touch()
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0, 0], ends
    assert hang_report.from_document(record).lines() == tuple(text.splitlines())
    assert (record["rank"], record["state"]) == (2, hang_report.ELSEWHERE)
    assert "no step for " in text and "ranks 0-2 last finished step 19" in text
    assert "ranks 0-1 wait in all_reduce, called at <string>:16 in <module>" in text
    assert "is not in a collective: it is at <string>:12 in read" in text and "rank 2 on " in text
    assert sum("the training hangs" in output for _, output in ends) == 1  # by one rank, not by all
    assert "rank 2 continues" in ends[2][1]
    assert record["host"] == os.uname().nodename, "for hpcinit.after"
    assert not list(folder.glob("hang/*/*"))


def test_a_stopped_process_is_detected_by_other_ranks(folder: Path) -> None:
    """Its own thread does not run, so the first running rank of the node reports the process state."""
    with ranks(TRAIN.replace("step == 20", "step == 99") + END, 3, folder) as found:
        until(lambda: "up in" in (folder / "rank-0.log").read_text())
        until(lambda: bool(list(folder.glob("heartbeats/*/*.json"))))
        found[0].process.send_signal(signal.SIGSTOP)
        until(lambda: "does not respond" in report(folder))
        text = report(folder)
        found[0].process.send_signal(signal.SIGCONT)
        assert [rank.end()[0] for rank in found] == [0, 0, 0]
    pid = found[0].process.pid
    assert f"does not respond: process {pid} is stopped" in text and "ranks 1-2 wait in all_reduce" in text


def test_a_hang_can_end_the_ranks(folder: Path) -> None:
    """With hang.action=end the first rank exits with the status for hangs, and one error record has the report.

    A rank may detect that its peers have exited before it exits itself: then its collective fails.
    """
    with ranks(TRAIN, 3, folder, ACTION="end", HPCINIT_RUN="") as found:
        statuses = [rank.end()[0] for rank in found]
    assert run_folder.HUNG in statuses and set(statuses) <= {run_folder.HUNG, 1}, statuses
    assert any(f"rank {rank} exits after" in (folder / f"rank-{rank}.log").read_text() for rank in range(3))


# Output of Python 3.11's faulthandler in a rank that waited in all_gather_object, shortened.
STACK = """main thread 0x00007f6b1f0a8740
Current thread 0x00007f6ae7fff6c0 (most recent call first):
  File "/x/hpcinit/runtime/lifecycle/heartbeat.py", line 111 in _dump
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f6b1f0a8740 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4033 in all_gather
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3108 in all_gather_object
  File "/home/me/train.py", line 57 in evaluate
  File "/home/me/train.py", line 90 in <module>
"""


def test_a_stack_is_parsed() -> None:
    """The parser finds torch's outermost function, and the program's line."""
    assert hang_report.place(STACK) == hang_report.Place("all_gather_object", "train.py:57 in evaluate")
    backward = STACK.replace('distributed_c10d.py", line 3108 in all_gather_object', 'x.py", line 1 in y').replace(
        'distributed/distributed_c10d.py", line 4033 in all_gather',
        'autograd/graph.py", line 865 in _engine_run_backward',
    )
    assert hang_report.place(backward).waits_in == "backward"
    assert hang_report.place("") == hang_report.Place("", "")
    ours = STACK.replace("/home/me/train.py", "/home/me/hpcinit/hpcinit/jobs/train_gpt.py")
    assert hang_report.place(ours).at == "train_gpt.py:57 in evaluate", "a job of hpcinit is a program too"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("gone", "process 7 has exited"),
        ("in the kernel", "process 7 waits in the kernel for a disk or a driver"),
        ("mute", "holds the GIL"),
        ("", "process 7 wrote no stack"),
    ],
)
def test_ranks_that_do_not_respond(state: str, words: str) -> None:
    """Each is reported with the process state that its node sees."""
    lines = lines_of([NodeHeartbeats("n1", 100.0, (RankHeartbeat(0, 7, 3, 9.0, state),))], {}, now_s=100.0, size=1)
    # The step that a process without a running thread wrote last is an old one.
    assert lines[0] == ("no step for 9 s" if state else "no step for 9 s; rank 0 last finished step 3")
    assert lines[1].startswith("rank 0 on n1 does not respond: ") and words in lines[1]


def test_a_silent_node_is_named(tmp_path: Path) -> None:
    """A silent node has an old file; a truncated file counts as missing."""
    node = NodeHeartbeats("n2", 1000.0, (RankHeartbeat(2, 7, 3, 9.0), RankHeartbeat(3, 8, 3, 9.0)))
    (tmp_path / "n2.json").write_text(node.to_json())
    (tmp_path / "n3.json").write_text('{"host": ')
    (tmp_path / "n4.json").write_text(json.dumps({"host": "n4"}))
    assert heartbeats.read(tmp_path) == [node]
    assert "node n2 has sent no heartbeat for 500 s; it runs ranks 2-3" in lines_of([node], {}, now_s=1500.0, size=4)
    assert lines_of([], {}, now_s=0.0, size=0) == ("no rank has reported a step yet",)


def test_a_frozen_node_is_named_at_once() -> None:
    """A node is frozen if none of its ranks has written a stack and none was seen as stopped. A node with fresh
    heartbeats, or with a single rank, which may itself be stopped, does not count as frozen."""
    well, ill = (
        (RankHeartbeat(2, 7, 3, 9.0), RankHeartbeat(3, 8, 3, 9.0)),
        (RankHeartbeat(2, 7, 3, 9.0, "stopped"), RankHeartbeat(3, 8, 3, 9.0)),
    )
    frozen = "node n2 has sent no heartbeat for 16 s; it runs ranks 2-3"
    assert frozen in lines_of([NodeHeartbeats("n2", 1000.0, well)], {}, 1016.0, 4, fresh_s=15.0)
    for node, now_s, stacks in (
        (NodeHeartbeats("n2", 1000.0, well), 1014.0, {}),
        (NodeHeartbeats("n2", 1000.0, ill), 1016.0, {}),
        (NodeHeartbeats("n2", 1000.0, well[:1]), 1016.0, {}),
        (NodeHeartbeats("n2", 1000.0, well), 1016.0, {3: hang_report.Place("", "")}),
    ):
        lines = lines_of([node], stacks, now_s, 4, fresh_s=15.0)
        assert not any("has sent no heartbeat" in line for line in lines)
        assert any(line.startswith("rank 2 on n2 does not respond: ") for line in lines)


def test_ranks_without_any_record_are_named() -> None:
    """Ranks without a node file and without a stack are named: their node was frozen before its first write."""
    node = NodeHeartbeats("n1", 100.0, (RankHeartbeat(0, 7, 3, 9.0),))
    lines = lines_of([node], {0: hang_report.Place("all_reduce", "train.py:9 in step")}, now_s=100.0, size=3)
    assert lines[1:] == (
        "rank 0 waits in all_reduce, called at train.py:9 in step",
        "ranks 1-2 sent no heartbeat and wrote no stack",
    )
    assert "rank 1 sent no heartbeat and wrote no stack" in lines_of([node], {}, now_s=100.0, size=2)


def test_the_host_at_fault_is_the_first_that_the_report_names() -> None:
    """A silent node is first, then the lowest rank outside a collective; none if all ranks wait."""
    waits, works = hang_report.Place("all_reduce", "train.py:9 in step"), hang_report.Place("", "train.py:5 in read")
    first = NodeHeartbeats("n1", 1000.0, (RankHeartbeat(0, 7, 3, 9.0), RankHeartbeat(1, 8, 3, 9.0)))
    second = NodeHeartbeats("n2", 1000.0, (RankHeartbeat(2, 7, 3, 9.0), RankHeartbeat(3, 8, 3, 9.0)))
    old = NodeHeartbeats("n2", 900.0, second.heartbeats)
    for nodes, stacks, host in (
        ([first, second], {0: waits, 1: waits, 2: waits, 3: works}, "n2"),
        ([first, second], {0: waits, 1: works, 2: works}, "n1"),
        ([first, second], {0: waits, 1: waits, 3: waits}, "n2"),
        ([first, old], {0: works, 1: waits}, "n2"),
        ([first, second], dict.fromkeys(range(4), waits), ""),
        ([], {}, ""),
    ):
        found = hang_report.report(nodes, stacks, 1001.0, 4)
        assert found.host == host
        lines = " ".join(found.lines())
        assert bool(host) == bool(re.search(rf"(rank \d+ on|node) {host or 'n'}", lines))


# Code that runs at step 20 on all ranks, instead of a read that blocks on rank 2.
PHASES = """
from datetime import timedelta
import hpcinit.train.checkpoint
def read(step):
    if step == 20:
        print("long", flush=True)
        AT_20
"""


def at_20(code: str) -> str:
    head, _, rest = TRAIN.partition("def read(step):\n")
    return head + PHASES.replace("AT_20", code) + rest[rest.index("for step in") :]


@pytest.mark.parametrize(
    "code",
    [
        "hpcinit.train.checkpoint.save = lambda *a, **k: time.sleep(8); run.save(None, 'x', step)",  # a slow disk
        "hpcinit.train.checkpoint.load = lambda *a, **k: time.sleep(8); run.load(None, 'x')",
        "with run.phase('evaluating'): time.sleep(8)",
    ],
)
def test_a_long_phase_is_no_hang(folder: Path, code: str) -> None:
    """Four times hang.after_s without a step in a save, a load or an evaluation: hang.action=end does not end it."""
    with ranks(at_20(code) + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], ends
    assert not any("hangs" in output for _, output in ends) and not report(folder)


def test_a_phase_beyond_its_limit_is_a_hang(folder: Path) -> None:
    """Beyond the phase's limit the ranks are reported and ended, as in a step, if one waits for another."""
    waits = "time.sleep(600) if run.rank else dist.all_reduce(torch.ones(1))"
    code = at_20(f"with run.phase('evaluating', timedelta(seconds=4)): {waits}")
    with ranks(code + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    assert run_folder.HUNG in [status for status, _ in ends] and {status for status, _ in ends} <= {
        run_folder.HUNG,
        1,
    }, ends
    assert "in read" in "".join(output for _, output in ends)


def test_a_phase_does_not_hide_later_hangs(folder: Path) -> None:
    """A save of 4 s does not count as a step of 4 s: the next hang is found after hang.after_s, not after 20 s."""
    code = at_20("with run.phase('x'): time.sleep(4)\n    if step == 30 and run.rank: time.sleep(600)")
    with ranks(code + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    output = next(output for status, output in ends if status == run_folder.HUNG)
    after_s = float(output.partition("exits after ")[2].partition(" s")[0])
    assert after_s < 15, output


def test_ranks_that_work_are_not_ended(folder: Path) -> None:
    """Four times hang.after_s without a step and without a collective: the ranks work, for example on data."""
    with ranks(at_20("time.sleep(9)") + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], ends
    assert sum("the ranks continue despite hang.action=end" in output for _, output in ends) == 1, ends


def test_ranks_that_work_and_then_hang_are_ended(folder: Path) -> None:
    """A rank waits for another one only after the report of the silence: hpcinit looks again."""
    code = at_20("time.sleep(5); time.sleep(600 * run.rank)")
    with ranks(code + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    assert run_folder.HUNG in [status for status, _ in ends], ends
    assert sum("the ranks continue despite hang.action=end" in output for _, output in ends) == 1, ends
    assert len(list(folder.glob(f"hang/*/{hang_report.ENDS}"))) == 1


def test_the_dumps_show_who_waits(folder: Path) -> None:
    """Rank 0 waits in C++, as every rank with a GPU does: no stack shows a collective, and the dumps prove rank 1."""
    wait = "os.environ['HPCINIT_RUN'] = os.environ['FOLDER']; "  # init would look for a spec there
    wait += "time.sleep(600) if run.rank else dist.all_reduce(torch.ones(1), async_op=True).wait()"
    with ranks(at_20(wait) + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    assert run_folder.HUNG in [status for status, _ in ends], ends
    records = [json.loads(path.read_text()) for path in folder.glob("errors/*.json")]
    assert any("the dumps show that the others wait for rank 1" in one["error"] for one in records), records


def test_the_first_step_may_take_long(folder: Path) -> None:
    """A step 0 reported before the loop and then 8 s of compiling is no hang: no step has been measured yet."""
    code = TRAIN.replace("for step in range(40):", "run.progress(0, 40)\ntime.sleep(8)\nfor step in range(20):")
    with ranks(code + END, 2, folder, ACTION="end") as found:
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], ends


def test_a_job_that_is_suspended_does_not_hang(folder: Path) -> None:
    """A suspension of all ranks for 7 s (SIGSTOP, SIGCONT) is not reported, even if the next step is slow; a later hang
    is."""
    code = TRAIN.replace("step == 20 and", "step == 35 and").replace(
        "    read(step)\n", "    if time.monotonic() - before > 5:\n        time.sleep(1.9)\n    read(step)\n", 1
    )
    code = code.replace("    time.sleep(0.02 if", "    before = time.monotonic()\n    time.sleep(0.02 if")
    with ranks(code, 3, folder, ACTION="end") as found:
        until(lambda: "up in" in (folder / "rank-0.log").read_text() and bool(list(folder.glob("heartbeats/*/*.json"))))
        for number, wait_s in ((signal.SIGSTOP, 7.0), (signal.SIGCONT, 0.0)):
            for rank in found:
                rank.process.send_signal(number)
            time.sleep(wait_s)
        resumed = time.monotonic()
        statuses = [rank.end()[0] for rank in found]
        took = time.monotonic() - resumed
    assert run_folder.HUNG in statuses and set(statuses) <= {run_folder.HUNG, 1}, statuses
    (line,) = re.findall(r"s; .* last finished step (\d+)", report(folder))
    assert int(line) >= 34 and took < 25, "the hang of the program itself, and no earlier one"
