"""launch=torchrun: the agents' rendezvous and restarts, their ranks, their signals."""

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
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

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


def two_agents(
    monkeypatch: pytest.MonkeyPatch, store: Store, timeout_s: float = 20
) -> tuple[list[AgentRendezvous], list[Restart]]:
    """Return two agents that share `store`, and the restarts that the first one recorded. Jobs show the real rendezvous."""
    monkeypatch.setattr(rendezvous_handler, "_join", lambda *_: PrefixStore("x", store))
    begun: list[Restart] = []
    made = [AgentRendezvous(agent(rank), SPEC, lambda: timedelta(seconds=timeout_s), begun.append) for rank in range(2)]
    for one in made:
        one.next_rendezvous()
    return made, begun


def in_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


# --- how agents restart together


def test_one_agents_failure_is_all_agents_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent with running ranks learns that another's have failed; both do the same restart for the same cause, once."""
    (first, second), begun = two_agents(monkeypatch, HashStore())
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    first.request_restart(ECHO)
    second.request_restart(WHY)
    assert first.num_nodes_waiting() == 1
    thread = in_thread(first.next_rendezvous)
    assert second.next_rendezvous().world_size == 2
    thread.join(20)
    assert (first.round, second.round, first.why, second.why, begun) == (1, 1, WHY, WHY, [WHY])
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0


def test_an_agent_that_is_done_still_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have already succeeded restart too when another node's ranks fail."""
    (first, second), _ = two_agents(monkeypatch, HashStore())
    assert not first.all_done() and not first.all_done()
    second.request_restart(WHY)
    assert first.num_nodes_waiting() == 1
    thread = in_thread(first.next_rendezvous)
    second.next_rendezvous()
    thread.join(20)
    assert not first.all_done(), "in the second round"
    assert second.all_done() and first.all_done()
    thread = in_thread(first.leave)
    second.leave()
    thread.join(5)
    assert not thread.is_alive(), "the first agent waits for the others only"


def test_after_the_last_failure_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is done leaves if another one has ended without a restart."""
    (first, second), _ = two_agents(monkeypatch, HashStore())
    assert not first.all_done()
    second.end_run()
    assert first.all_done()
    first.leave()


def test_the_agent_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node delays a restart for the start-up timeout, not longer."""
    (first, _), begun = two_agents(monkeypatch, HashStore(), timeout_s=0.2)
    first.request_restart(WHY)
    with pytest.raises(
        BringUpError, match=r"restart 1 inside the job timed out after 0.2 s: no agent connected from n2. Are"
    ):
        first.next_rendezvous()
    assert begun == []


def test_the_first_agent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first agent is gone with its store, the others report that, not a failure of a rank."""
    code = (
        "import datetime, sys, time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)
        (_, second), _ = two_agents(monkeypatch, store)
        server.kill()
        server.wait()
    with pytest.raises(
        BringUpError, match=r"the first agent, on n1, is gone: .*. Read the messages of this node in the job's log"
    ):
        second.num_nodes_waiting()
    second.end_run()  # must not raise


def test_agents_that_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the rendezvous's, with the note that its ranks are agents."""

    def fails(*_: object) -> None:
        raise BringUpError("1 of 2 ranks are missing: rank 1 never connected (no rank connected from n2)")

    monkeypatch.setattr(rendezvous_handler.startup, "join_rendezvous", fails)
    with pytest.raises(
        BringUpError, match=r"^not all torchrun agents \(one per node\) connected: 1 of 2 ranks are missing: rank 1"
    ):
        AgentRendezvous(agent(0), SPEC, lambda: timedelta(seconds=1), lambda _: None)


# --- the ranks of a node


def _plainly(start: Callable[[], T]) -> T:
    return start()


def workers(tmp_path: Path, code: str, count: int = 2) -> Workers:
    starts = [Start({**os.environ, "N": str(number)}, tmp_path / f"{number}.log") for number in range(count)]
    return Workers(["bash", "-c", code], starts, _plainly)


def test_ranks_have_sessions_logs_and_environments_of_their_own(tmp_path: Path) -> None:
    """Logs are appended to, and exit statuses are reported by rank."""
    (tmp_path / "0.log").write_text("before\n")
    ranks = workers(tmp_path, 'echo rank $N; exit "$N"')
    pids = ranks.pids()
    until(lambda: len(ranks.ended()) == 2)
    assert ranks.ended() == {0: 0, 1: 1} and len(set(pids.values())) == 2
    assert (tmp_path / "0.log").read_text() == "before\nrank 0\n"


def test_stopping_leaves_nothing(tmp_path: Path) -> None:
    """Ranks that ignore SIGTERM are killed after the grace time, with the processes they have started."""
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
    """A signal reaches a rank's process group; ranks that have ended are skipped."""
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
    assert asked == [], "all are reaped, so no group may be signaled"


def test_background_processes_end_with_the_ranks(tmp_path: Path) -> None:
    """A background process of a rank that succeeded is killed when the agent stops its ranks."""
    ranks = workers(tmp_path, 'sleep 299.5 & echo $!; test "$N" = 0 && exit; wait')
    until(lambda: 0 in ranks.ended() and all((tmp_path / f"{n}.log").read_text().strip() for n in range(2)))
    left = int((tmp_path / "0.log").read_text())
    assert _runs(left)
    ranks.stop(0.5)
    until(lambda: not _runs(left))


def test_a_rank_that_cannot_be_started_leaves_none(tmp_path: Path) -> None:
    """If a rank cannot be started, the others of its node are ended, and the error is the system's."""
    starts = [Start(dict(os.environ), tmp_path / "0.log"), Start(dict(os.environ), tmp_path / "no/1.log")]
    with pytest.raises(FileNotFoundError, match=r"no/1\.log"):
        Workers(["sleep", "298.5"], starts, _plainly)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended in between
            assert not _runs(int(path.parent.name)) or b"298.5" not in path.read_bytes()


def test_a_rank_whose_log_has_no_room(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank whose log cannot be opened starts anyway, and prints to the log of its agent."""
    with small_disk(tmp_path / "disk", "nr_inodes=1") as place:
        ranks = Workers(["echo", "hello"], [Start(dict(os.environ), place / "0.log")], _plainly)
        until(lambda: ranks.ended() == {0: 0})
    out, err = capfd.readouterr()
    assert out == "hello\n" and "0.log: No space left on device; the output of" in err


@pytest.mark.more
def test_a_restart_that_cannot_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks start again on a full disk too; two warnings name what is not recorded."""
    from hpcinit.launch.torchrun.agent import Node

    with small_disk(tmp_path / "run", "nr_inodes=4") as place:  # errors/, its file, and no further folder
        (place / "errors").mkdir()
        record = ErrorRecord(1.0, 0, "n1", "ValueError: x", "", job="43.0.0")
        (place / "errors" / record.name).write_text(record.to_json())
        fill(place)
        node = object.__new__(Node)
        node._folder, node._restart_message = place, lambda why: "restart message"  # type: ignore[method-assign]
        node._record_restart(Restart("43.0.0", 1, 1.0, 0, "n1", "Killed"))
    err = capsys.readouterr().err
    assert "the folder of old error records cannot be written: " in err and "elastic.jsonl cannot be written: " in err
    assert "hpcinit: restart message" in err


def test_a_rank_has_the_cpus_that_it_is_given(tmp_path: Path) -> None:
    """Ranks get their CPUs, and the agent keeps its own."""
    before = os.sched_getaffinity(0)
    cpu = min(before)
    code = "import os; print(os.sched_getaffinity(0))"
    ranks = Workers([sys.executable, "-c", code], [Start(os.environ, tmp_path / "0.log", frozenset({cpu}))], _plainly)
    until(ranks.ended)
    assert (tmp_path / "0.log").read_text().strip() == str({cpu}) and os.sched_getaffinity(0) == before


def test_no_rank_outlives_its_agent(tmp_path: Path) -> None:
    """An agent that is killed with kill -9 takes its ranks with it, also those that ignore SIGTERM."""
    rank = "import signal, sys, time; from hpcinit.base import processes; signal.signal(15, signal.SIG_IGN)\nprocesses.die_with_agent(); print('up', flush=True); time.sleep(300)"
    agent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, 'HPCINIT_PARENT': str(os.getpid())}})"
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.kill()
        assert process.stdout.read() == "", "the pipe closes with its last process"


def test_a_rank_whose_agent_is_gone_already() -> None:
    """If the agent died before the rank could register for it, the rank does not start."""
    code = "from hpcinit.base import processes; processes.die_with_agent(); print('up')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HPCINIT_PARENT": "1"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (137, b"")


# --- signals


def reaction(kind: str, *numbers: int) -> str:
    """Return an agent's reaction to signals of its parent. kind: who sends them."""
    code = f"""
import os, sys, time
from hpcinit.launch.torchrun.agent_signals import Signals
received = Signals(under_slurm={kind == "slurm"})
if {kind != "early"}:
    received.collect()
print("up", flush=True)
found, deadline = [], time.monotonic() + 30
while len(found) < {len(numbers)} and time.monotonic() < deadline:
    found += received.take()
    time.sleep(0.01)
print([(one.number.name, one.forward) for one in found])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)
        rest = process.stdout.read()
    return rest.strip() or str(process.returncode)


def test_who_has_had_a_signal_already() -> None:
    """Slurm's signals reach every process of a step, so the agent does not forward signals of slurmstepd."""
    both = (signal.SIGUSR1, signal.SIGTERM)
    assert reaction("slurm", *both) == "[('SIGUSR1', False), ('SIGTERM', False)]"
    assert reaction("local", *both) == "[('SIGUSR1', True), ('SIGTERM', True)]"


def test_without_ranks_a_signal_ends_the_agent() -> None:
    """During the rendezvous SIGTERM ends an agent, because no rank has to save; a warning signal does not."""
    assert reaction("early", signal.SIGUSR1, signal.SIGTERM) == "-15"


# --- refusals


def test_messages_of_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong argument, a wrong number of agents and a Python without torch are refused."""
    for words in ([], ["x.py"], ["spec.json", "more"]):
        with pytest.raises(RequestError, match=r"expected one argument, a run folder's spec\.json: "):
            entry.main(words)
    with pytest.raises(
        RequestError, match=r"slurm started 3 agents on 3 nodes, expected 2 agents, one per node: submit .*job\.sh"
    ):
        entry._check_agent_count(SPEC, agent(0, nodes=3), tmp_path / "spec.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"launch=torchrun needs torch, but .*python.* does not have it"):
        entry.main(["spec.json"])


# --- invalid values in the agents' store


ODD = ["", "{", "null", "[]", "3", "NaN", '{"job": 1}', "[" * 100_000, '"\\ud800"', '{"clock": ' + "9" * 5000 + "}"]
WRONG = [None, True, -1, 10**30, "", "\ud800", [], {}, float("nan"), float("inf"), 0.5]


@pytest.mark.parametrize("seed", range(20))
def test_an_invalid_reason_ends_no_agent(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """For any value in the store as the reason of a failure, both agents restart, with a printable reason."""
    chance = random.Random(seed)
    store = HashStore()
    (first, second), begun = two_agents(monkeypatch, store)
    document = {**json.loads(WHY.to_json()), **{chance.choice(list(vars(WHY))): chance.choice(WRONG)}}
    odd = chance.choice(ODD) if seed % 2 else json.dumps(document)
    for rank in range(2):
        PrefixStore("x", store).set(f"why/0/{rank}", odd)
    PrefixStore("x", store).set("failed/0", "")
    thread = in_thread(first.next_rendezvous)
    second.next_rendezvous()
    thread.join(20)
    assert first.round == second.round == 1 and str(second.why) and begun == [first.why] == [second.why]


def test_a_restart_that_cannot_be_read_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that cannot read the first one's announcement stops with an error that shows it."""
    store = HashStore()
    (_, second), _ = two_agents(monkeypatch, store)
    PrefixStore("x", store).set("go/1", "{}")
    with pytest.raises(
        BringUpError, match=r"cannot read the message about restart 1 from the first agent, on n1: '\{\}'"
    ):
        second.next_rendezvous()


def test_1000_invalid_restart_records() -> None:
    """from_json() makes a Restart of the right types from any text, or raises one of its documented errors."""
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
