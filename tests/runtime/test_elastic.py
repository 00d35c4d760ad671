"""launch=torchrun: agents that meet and restart together, their ranks, their signals."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from hpcinit import elastic as entry
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.launch.torchrun import rendezvous_handler
from hpcinit.launch.torchrun.agent import Start, Workers
from hpcinit.launch.torchrun.rendezvous_handler import AgentRendezvous
from hpcinit.records import elastic_restarts
from hpcinit.records.elastic_restarts import Restart
from hpcinit.records.error_records import ErrorRecord
from hpcinit.records.spec import Program, Spec
from hpcinit.world import World
from tests import waiting
from tests.small_disks import fill, small_disk

until = partial(waiting.until, timeout_s=60, pause_s=0.05)

T = TypeVar("T")
WHY = Restart("43.0.0", 1, 100.0, 3, "n2", "Killed")
ECHO = Restart("43.0.0", 1, 99.0, 0, "n1", "Exited with exit code 1", "RuntimeError: x", secondary=True)
SPEC = Spec("x", "local", 2, 2, Program("script", "x.py"), "/", "nonce")


def agent(rank: int, nodes: int = 2) -> World:
    hosts = tuple(f"n{number}" for number in range(1, nodes + 1))
    return World("slurm", rank, nodes, 0, 1, rank, hosts, "n1", (20000,), "43.0.0")


def parties(
    monkeypatch: pytest.MonkeyPatch, store: Store, timeout_s: float = 20
) -> tuple[list[AgentRendezvous], list[Restart]]:
    """Two agents that have met over `store`, and what the first has begun. Meeting itself is shown by the jobs below."""
    monkeypatch.setattr(rendezvous_handler, "_meet", lambda *_: PrefixStore("x", store))
    begun: list[Restart] = []
    made = [AgentRendezvous(agent(rank), SPEC, lambda: timedelta(seconds=timeout_s), begun.append) for rank in range(2)]
    for one in made:
        one.next_rendezvous()
    return made, begun


def beside(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


# --- how agents restart together


def test_one_agents_failure_is_all_agents_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose ranks run hears that another's have failed; both begin the same start for the same cause, once."""
    (first, second), begun = parties(monkeypatch, HashStore())
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    first.call_for_restart(ECHO)
    second.call_for_restart(WHY)
    assert first.num_nodes_waiting() == 1
    thread = beside(first.next_rendezvous)
    assert second.next_rendezvous().world_size == 2
    thread.join(20)
    assert (first.start, second.start, first.why, second.why, begun) == (1, 1, WHY, WHY, [WHY])
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0


def test_an_agent_that_is_done_still_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one node that have ended well are begun again too when another node's fail."""
    (first, second), _ = parties(monkeypatch, HashStore())
    assert not first.all_done() and not first.all_done()
    second.call_for_restart(WHY)
    assert first.num_nodes_waiting() == 1
    thread = beside(first.next_rendezvous)
    second.next_rendezvous()
    thread.join(20)
    assert not first.all_done(), "in the second start"
    assert second.all_done() and first.all_done()
    thread = beside(first.leave)
    second.leave()
    thread.join(5)
    assert not thread.is_alive(), "the store's owner waits for the others only"


def test_after_the_last_failure_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is done goes, where another has ended for good."""
    (first, second), _ = parties(monkeypatch, HashStore())
    assert not first.all_done()
    second.end()
    assert first.all_done()
    first.leave()


def test_the_agent_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node holds a restart up for the start-up's time, not longer."""
    (first, _), begun = parties(monkeypatch, HashStore(), timeout_s=0.2)
    first.call_for_restart(WHY)
    with pytest.raises(
        BringUpError, match=r"restart 1 inside the job is not begun after 0.2 s: the agents of n2 did not"
    ):
        first.next_rendezvous()
    assert begun == []


def test_the_first_agent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store with it: the others say so, and do not take it for a failure of theirs."""
    code = (
        "import datetime, sys, time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)
        (_, second), _ = parties(monkeypatch, store)
        server.kill()
        server.wait()
    with pytest.raises(BringUpError, match=r"the first agent, on n1, is gone: .*; its node's words in the job's log"):
        second.num_nodes_waiting()
    second.end()  # no more than can be done


def test_agents_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the meeting says, and that its ranks are agents."""

    def fails(*_: object) -> None:
        raise BringUpError("1 of 2 ranks are missing: rank 1 never arrived (nobody came from n2)")

    monkeypatch.setattr(rendezvous_handler.join, "join_rendezvous", fails)
    with pytest.raises(
        BringUpError, match=r"did not meet \(a rank here is an agent\): 1 of 2 ranks are missing: rank 1"
    ):
        AgentRendezvous(agent(0), SPEC, lambda: timedelta(seconds=1), lambda _: None)


# --- the ranks of a node


def _plainly(start: Callable[[], T]) -> T:
    return start()


def workers(tmp_path: Path, code: str, count: int = 2) -> Workers:
    starts = [Start({**os.environ, "N": str(number)}, tmp_path / f"{number}.log") for number in range(count)]
    return Workers(["bash", "-c", code], starts, _plainly)


def test_ranks_have_sessions_logs_and_environments_of_their_own(tmp_path: Path) -> None:
    """Logs are appended to, and what a rank has ended with is told by rank."""
    (tmp_path / "0.log").write_text("before\n")
    ranks = workers(tmp_path, 'echo rank $N; exit "$N"')
    pids = ranks.pids()
    until(lambda: len(ranks.ended()) == 2)
    assert ranks.ended() == {0: 0, 1: 1} and len(set(pids.values())) == 2
    assert (tmp_path / "0.log").read_text() == "before\nrank 0\n"


def test_stopping_leaves_nothing(tmp_path: Path) -> None:
    """Ranks that pay no heed to SIGTERM are killed after the grace time, and what they have started with them."""
    ranks = workers(tmp_path, "trap '' TERM; sleep 300 & echo $!; wait; wait")
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    until(lambda: all(log.exists() and log.read_text().strip() for log in logs))
    ranks.stop(0.3)
    assert ranks.ended() == {0: -9, 1: -9}
    children = [int(log.read_text()) for log in logs]
    until(lambda: not any(_runs(pid) for pid in children))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_signal_reaches_a_rank_and_what_it_has_started(tmp_path: Path) -> None:
    """As it would reach a task's process group; ranks that have ended are passed over."""
    ranks = workers(
        tmp_path,
        'test "$N" = 0 && exit; trap "echo usr1" USR1; (trap "echo below" USR1; echo up; sleep 60 & wait); wait',
    )
    until(lambda: 0 in ranks.ended() and "up" in (tmp_path / "1.log").read_text())
    ranks.signal(signal.SIGUSR1)
    try:
        until(lambda: {"usr1", "below"} <= set((tmp_path / "1.log").read_text().split()))
    finally:
        ranks.stop(0.1)


def test_a_group_whose_rank_was_reaped_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a rank that has ended may be another process's group by the time the agent stops the others."""
    ranks = workers(tmp_path, 'test "$N" = 0 && exit; sleep 300')
    until(lambda: 0 in ranks.ended())
    asked: list[tuple[int, str]] = []

    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "reaped"

    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (asked.append((group, state(group))), kill(group, number)))
    ranks.stop(0.5)
    assert asked and all(found != "reaped" for _, found in asked), asked
    assert ranks.ended() == {0: 0, 1: -15}
    asked.clear()
    ranks.stop(0.1)
    ranks.signal(signal.SIGTERM)
    assert asked == [], "all are reaped: there is no group of ours"


def test_what_a_rank_leaves_behind_ends_with_the_others(tmp_path: Path) -> None:
    """A background process of a rank that has ended well is killed when the agent stops its ranks."""
    ranks = workers(tmp_path, 'sleep 299.5 & echo $!; test "$N" = 0 && exit; wait')
    until(lambda: 0 in ranks.ended() and all((tmp_path / f"{n}.log").read_text().strip() for n in range(2)))
    left = int((tmp_path / "0.log").read_text())
    assert _runs(left)
    ranks.stop(0.5)
    until(lambda: not _runs(left))


def test_a_rank_that_cannot_be_started_leaves_none(tmp_path: Path) -> None:
    """The others of its node are ended, and the error is the system's."""
    starts = [Start(dict(os.environ), tmp_path / "0.log"), Start(dict(os.environ), tmp_path / "no/1.log")]
    with pytest.raises(FileNotFoundError, match=r"no/1\.log"):
        Workers(["sleep", "298.5"], starts, _plainly)
    assert b"298.5" not in b"".join(
        path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _runs(int(path.parent.name))
    )


def test_a_rank_whose_log_has_no_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is started all the same, and prints to the log of its agent."""
    with small_disk(tmp_path / "disk", "nr_inodes=1") as place:
        ranks = Workers(["echo", "hello"], [Start(dict(os.environ), place / "0.log")], _plainly)
        until(lambda: ranks.ended() == {0: 0})
    out, err = capfd.readouterr()
    assert out == "hello\n" and "0.log cannot be opened: No space left on device" in err


def test_a_restart_that_cannot_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks start again on a full disk too; two warnings name what is not on record."""
    from hpcinit.launch.torchrun import torchrun_job

    with small_disk(tmp_path / "run", "nr_inodes=4") as place:  # errors/, its file, and no further folder
        (place / "errors").mkdir()
        record = ErrorRecord(1.0, 0, "n1", "ValueError: x", "", job="43.0.0")
        (place / "errors" / record.name).write_text(record.to_json())
        fill(place)
        node = object.__new__(torchrun_job.Node)
        node._folder, node._begins = place, lambda why: "begins"  # type: ignore[method-assign]
        node._begin(Restart("43.0.0", 1, 1.0, 0, "n1", "Killed"))
    err = capsys.readouterr().err
    assert "the old error records' new place cannot be written: " in err and "elastic.jsonl cannot be written: " in err
    assert "hpcinit: begins" in err


def test_a_rank_has_the_cpus_that_it_is_given(tmp_path: Path) -> None:
    """And the agent keeps its own."""
    before = os.sched_getaffinity(0)
    cpu = min(before)
    code = "import os; print(os.sched_getaffinity(0))"
    ranks = Workers([sys.executable, "-c", code], [Start(os.environ, tmp_path / "0.log", frozenset({cpu}))], _plainly)
    until(ranks.ended)
    assert (tmp_path / "0.log").read_text().strip() == str({cpu}) and os.sched_getaffinity(0) == before


def test_no_rank_outlives_its_agent(tmp_path: Path) -> None:
    """An agent that is killed with kill -9 takes its ranks with it, also those that ignore SIGTERM."""
    rank = "import signal, sys, time; from hpcinit.base import process_limits; signal.signal(15, signal.SIG_IGN)\nprocess_limits.die_with_parent(); print('up', flush=True); time.sleep(300)"
    agent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, 'HPCINIT_PARENT': str(os.getpid())}})"
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.kill()
        assert process.stdout.read() == "", "the pipe ends with the last that holds it"


def test_a_rank_whose_agent_is_gone_already() -> None:
    """It died before the rank could ask to be told: the rank does not begin."""
    code = "from hpcinit.base import process_limits; process_limits.die_with_parent(); print('up')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HPCINIT_PARENT": "1"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (137, b"")


# --- signals


def heard(kind: str, *numbers: int) -> str:
    """What an agent makes of signals that its parent sends; kind: where they come from."""
    code = f"""
import os, sys, time
from hpcinit.launch.torchrun.agent_signals import Signals
came = Signals(under_slurm={kind == "slurm"})
if {kind != "early"}:
    came.begin()
print("up", flush=True)
found, deadline = [], time.monotonic() + 30
while len(found) < {len(numbers)} and time.monotonic() < deadline:
    found += came.take()
    time.sleep(0.01)
print([(one.number.name, one.pass_on) for one in found])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)
        rest = process.stdout.read()
    return rest.strip() or str(process.returncode)


def test_who_has_had_a_signal_already() -> None:
    """Slurm's signals reach every process of a step: what comes from slurmstepd is not passed on a second time."""
    both = (signal.SIGUSR1, signal.SIGTERM)
    assert heard("slurm", *both) == "[('SIGUSR1', False), ('SIGTERM', False)]"
    assert heard("local", *both) == "[('SIGUSR1', True), ('SIGTERM', True)]"


def test_without_ranks_a_signal_ends_the_agent() -> None:
    """While agents meet there is nobody to save anything; a warning before the time limit ends nothing."""
    assert heard("early", signal.SIGUSR1, signal.SIGTERM) == "-15"


# --- what is refused


def test_messages_of_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another argument than a spec, another number of agents than nodes, a Python without torch."""
    for words in ([], ["x.py"], ["spec.json", "more"]):
        with pytest.raises(RequestError, match=r"expected a run folder's spec\.json and nothing else"):
            entry.main(words)
    with pytest.raises(
        RequestError, match=r"is of 2 nodes, and slurm started 3 agents on 3 nodes; expected one on each: .*job\.sh"
    ):
        entry._refuse_another_size(SPEC, agent(0, nodes=3), tmp_path / "spec.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"launch=torchrun needs torch, and .*python.* lacks it"):
        entry.main(["spec.json"])


# --- values of the agents' store that no agent wrote


ODD = ["", "{", "null", "[]", "3", "NaN", '{"job": 1}', "[" * 100_000, '"\\ud800"', '{"clock": ' + "9" * 5000 + "}"]
WRONG = [None, True, -1, 10**30, "", "\ud800", [], {}, float("nan"), float("inf"), 0.5]


@pytest.mark.parametrize("seed", range(20))
def test_a_reason_of_another_kind_ends_no_agent(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever stands in the store as the reason of a failure, both agents restart, for a reason that can be printed."""
    chance = random.Random(seed)
    store = HashStore()
    (first, second), begun = parties(monkeypatch, store)
    document = {**json.loads(WHY.to_json()), **{chance.choice(list(vars(WHY))): chance.choice(WRONG)}}
    odd = chance.choice(ODD) if seed % 2 else json.dumps(document)
    for rank in range(2):
        PrefixStore("x", store).set(f"why/0/{rank}", odd)
    PrefixStore("x", store).set("failed/0", "")
    thread = beside(first.next_rendezvous)
    second.next_rendezvous()
    thread.join(20)
    assert first.start == second.start == 1 and str(second.why) and begun == [first.why] == [second.why]


def test_a_restart_that_cannot_be_read_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that cannot read what the first one announces stops with a message about it."""
    store = HashStore()
    (_, second), _ = parties(monkeypatch, store)
    PrefixStore("x", store).set("go/1", "{}")
    with pytest.raises(BringUpError, match=r"the first agent, on n1, announced restart 1 .* '\{\}'"):
        second.next_rendezvous()


def test_1000_lines_of_another_kind_are_no_restart() -> None:
    """from_json() makes a Restart of the right types of any text, or raises one of the errors that it documents."""
    chance = random.Random(16)
    for _ in range(1000):
        document = json.loads(WHY.to_json())
        for name in chance.sample([*document, "extra"], chance.randrange(4)):
            document[name] = chance.choice(WRONG)
        line = json.dumps(document)
        line = line[: chance.randrange(len(line))] if chance.random() < 0.1 else line
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            found = elastic_restarts.from_json(line if chance.random() < 0.9 else chance.choice(ODD))
            assert (
                f"{found}{found.job}".encode()
                and math.isfinite(found.time)
                and found.rank + found.number + found.step > -9
            )
