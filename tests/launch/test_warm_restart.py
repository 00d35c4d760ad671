"""Warm restart (launch=fork restart.warm=true): the faults and what must follow, with real fork servers and ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil
import pytest

from hpcinit.launch import decider
from hpcinit.launch.decider import Decider, refusal
from hpcinit.launch.server_link import EARLIER_S, IDLE_S, PATIENT_S, SILENT_S, Connection
from hpcinit.records import elastic_restarts, timeline
from hpcinit.records.elastic_restarts import PHASES, Restart
from hpcinit.rendezvous import protocol
from tests import waiting
from tests.conftest import Run
from tests.forking import Node
from tests.minislurm import MiniSlurm
from tests.submit.test_chain import jobs as chain_jobs
from tests.submit.test_chain import states
from tests.submitting import folder_of, job_id_of, submit

# The faults, and what must follow:
#
# - kill -9 of a rank: all ranks start again once, by the same servers, in the same job
# - an exception in a rank, secondary errors in the others: one restart, whose reason is the exception
# - two ranks of two nodes die at the same moment: one restart
# - ranks of one node are done, one of another node fails: all start again
# - a rank fails while the others still end: it is part of the same restart
# - a hang that hang.action=end ends: all ranks start again
# - exit status 2 or 143: no restart
# - the same failure at the same step three times: no third restart, and `why` names the failure
# - no progress: no more restarts than restart.without_progress
# - SIGTERM while the ranks run: no restart, although the ranks fail afterwards
# - SIGTERM between the end and the start: no new rank
# - the stop signal between the end and the start: the new ranks get it
# - another node's server dies during the restart: the step ends, and no rank remains
# - the first node's server dies during the restart: the step ends, and no rank remains
# - a server does not report the end of its ranks: the step ends
# - a rank that the kernel does not end: the step ends: no second set of ranks beside the first
# - scancel, or the time limit, between the end and the start: no new rank; the next job of a chain runs
# - device memory that does not become free: reported, and the step ends after the limit

until = partial(waiting.until, timeout_s=120, pause_s=0.05)

# The decisions, without processes.


def failed(rank: int = 3, step: int = 7, furthest: int = 7, how: str = "Killed", time: float = 1.0) -> Restart:
    return Restart("43.0.0", 1, time, rank, "n2", how, step=step, furthest=furthest)


@pytest.mark.parametrize(
    ("before", "limit", "refused"),
    [
        ([], 2, ""),
        ([failed()], 2, ""),
        ([failed(), failed()], None, "rank 3 failed 3 times with the same error after step 7"),
        ([failed(), failed(rank=2)], None, ""),
        ([failed(), failed(how="Exited with exit code 1")], 3, ""),
        ([failed(step=5), failed(step=6)], 2, "2 restarts in a row made no progress beyond step 7"),
        ([failed(furthest=5), failed(furthest=6)], 2, "rank 3 failed 3 times with the same error"),
        ([failed(step=5, furthest=5), failed(step=6, furthest=6)], 1, ""),
        ([failed(furthest=9, step=9), failed(step=8)], 2, "made no progress beyond step 9"),
    ],
)
def test_whether_the_ranks_start_again(before: list[Restart], limit: int | None, refused: str) -> None:
    """The same failure at the same step three times, and too many restarts without progress, end the restarts."""
    said = refusal(before, failed(), limit)
    assert said.startswith(refused) or refused in said
    assert bool(said) == bool(refused)


def test_steps_that_no_rank_reports_are_no_progress() -> None:
    unknown = failed(step=-1, furthest=-1)
    assert [bool(refusal([unknown] * count, unknown, 2)) for count in range(3)] == [False, False, True]
    assert not refusal([unknown] * 9, unknown, None)


class Servers:
    """A Decider and its orders. decided: the causes of the restarts."""

    def __init__(self, nodes: int = 3, limit_s: float = 60, spares: int = 0) -> None:
        self.decided: list[Restart] = []
        hosts = [f"n{node + 1}" for node in range(nodes + spares)]
        self._decider = Decider(hosts, limit_s, self._decide, nodes, self._lost if spares else None)

    def _lost(self, place: int, host: str) -> Restart:
        return failed(rank=place, how=f"{host} is lost", time=9.0)

    def _decide(self, cause: Restart) -> str:
        self.decided.append(cause)
        return "no more" if len(self.decided) > 2 else ""

    def send(self, node: int, **message: Any) -> list[dict[str, Any]]:
        return list(self._decider(node, {"round": self._decider.round, **message}))

    def fail(self, node: int, final: bool = False, time: float = 1.0) -> list[dict[str, Any]]:
        return self.send(node, failed=failed(rank=node, time=time).to_json(), final=final)


def test_ranks_start_when_no_rank_of_any_node_runs() -> None:
    """Two failures are one restart, whose reason is the first in time; a late message about the old ranks is ignored."""
    servers = Servers()
    assert servers.send(2, ended="") == [], "its ranks are done"
    assert servers.fail(1, time=5.0) == [{"end": 0}]
    assert servers.fail(0, time=4.0) == []
    assert servers.send(1, ended="") == []
    (order,) = servers.send(0, ended="")
    assert (order["start"], order["nodes"]) == (1, [0, 1, 2]) and json.loads(order["why"])["rank"] == 0
    assert servers.decided[0].time == 4.0
    assert servers.send(1, round=0, failed=failed().to_json()) == [] == servers.send(2, round=0, ended="")
    assert servers.fail(2) == [{"end": 1}]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"stop": True}, ""),
        ({"lost": True}, "the fork server on n2 is gone"),
        ({"ended": "rank 3 is still running after SIGKILL"}, "n2: rank 3 is still running after SIGKILL"),
    ],
)
def test_what_ends_the_restarts(message: Mapping[str, Any], why: str) -> None:
    """A stop, a lost server and a node that can start no ranks win over a restart at every point."""
    for reported in range(3):
        servers = Servers()
        servers.fail(1)
        for node in [0, 2][:reported]:
            servers.send(node, ended="")
        (order,) = servers.send(1, **message)
        assert order["over"] == why and not servers.decided
        assert servers.send(1, ended="") == [] == servers.fail(0)


def test_a_spare_node_takes_the_place_of_a_lost_one() -> None:
    """The ranks start when the servers that remain have reported, whatever the lost one reported before. A spare node
    that is lost is replaced, too. If no spare node is left, all ranks end: one may wait for a node without a network."""
    servers = Servers(spares=2)
    assert not [order for node in (3, 4) for order in servers.send(node, ended="")], "they have no ranks"
    assert servers.send(1, lost=True) == [{"end": 0}]
    assert servers.send(0, ended="") == []
    (order,) = servers.send(2, ended="")
    assert order["nodes"] == [0, 3, 2] and json.loads(order["why"])["how"] == "n2 is lost"
    servers.fail(3)
    for node in (0, 2, 4):
        assert servers.send(node, ended="") == []
    patience, order = servers.send(3, lost=True)
    assert patience == {"patience": True} and order["nodes"] == [0, 4, 2], "all others had reported"
    end, order = servers.send(0, lost=True)
    assert end == {"end": 2} and order["over"] == "the fork server on n1 is gone"


def test_a_cut_off_node_notices_it_before_the_first_server_does() -> None:
    """Its ranks end before their replacements start, although the kernels' timers differ by up to IDLE_S."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        first, _ = listener.accept()
    connections = Connection(first, protocol.Lines()), Connection(other, protocol.Lines(), EARLIER_S)
    for seconds in (SILENT_S, PATIENT_S):
        for connection in connections:
            connection.report_silence_after(seconds)
        limits_s = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000 for one in (first, other)]
        assert limits_s[0] - limits_s[1] > IDLE_S + 0.5  # the ranks end within 0.5 s
    for connection in connections:
        connection.close()


def test_a_spare_node_that_is_lost() -> None:
    """The ranks continue, and a later failure waits for no report of the lost server."""
    servers = Servers(2, spares=1)
    assert servers.send(2, lost=True) == [{"patience": True}] and servers.send(0, ended="") == []
    assert servers.send(1, ended="") == [{"over": "", "node": 0}]
    servers = Servers(2, spares=1)
    servers.fail(1)
    for node in (0, 1):
        assert servers.send(node, ended="") == []
    assert servers.send(2, lost=True)[1]["nodes"] == [0, 1]


def test_a_lost_node_whose_ranks_have_succeeded() -> None:
    """The others continue, perhaps with the final save of rank 0. If one of them fails, the node must be replaced."""
    for spares in (0, 1):
        servers = Servers(2, spares=spares)
        for node in range(1, 2 + spares):
            servers.send(node, ended="")
        assert not [order for order in servers.send(1, lost=True) if "patience" not in order]
        assert servers.send(0, ended="") == [{"over": "", "node": 0}]
    servers = Servers(2, spares=1)
    servers.send(1, ended="")
    servers.send(1, lost=True)
    assert servers.fail(0) == [{"end": 0}] and servers.send(2, ended="") == []
    (order,) = servers.send(0, ended="")
    assert order["nodes"] == [0, 2]
    servers.send(2, lost=True)
    servers = Servers(2, spares=1)
    servers.send(2, lost=True)
    servers.send(1, ended="")
    servers.send(1, lost=True)
    servers.fail(0)
    assert servers.send(0, ended="") == [{"over": "the fork server on n2 is gone", "node": -1, "gone": "n2"}]


def test_a_refused_restart_after_a_lost_node_names_no_node() -> None:
    """Each server ends with the status that its ranks had: the one of the lost node cannot."""
    servers = Servers(2, spares=1)
    servers.decided = [failed(), failed()]
    servers.send(1, lost=True)
    servers.send(2, ended="")
    assert servers.send(0, ended="") == [{"over": "no more", "node": -1}]


def test_a_server_that_does_not_report_in_time() -> None:
    servers = Servers(limit_s=0.0)
    servers.fail(1)
    servers.send(0, ended="")
    (order,) = servers.send(0)
    assert order["over"] == "n2, n3 did not report within 0 s that its ranks have ended"


def test_the_end_without_a_restart() -> None:
    """Success on all nodes, a final exit status, and a refusal. The order names the node whose status counts."""
    servers = Servers(2)
    assert servers.send(0, ended="") == [] and servers.send(1, ended="") == [{"over": "", "node": 0}]
    servers = Servers(2)
    servers.fail(1, final=True)
    servers.send(1, ended="")
    (order,) = servers.send(0, ended="")
    assert order["node"] == 1 and not servers.decided and 2 in decider.FINAL
    servers = Servers(1)
    for _ in range(2):
        servers.fail(0)
        assert "start" in servers.send(0, ended="")[0]
    servers.fail(0)
    assert servers.send(0, ended="") == [{"over": "no more", "node": 0}]


# One node: a fork server and its ranks, which do not import torch.

RANK = """
import json, os, signal, sys, time
from hpcinit.runtime.process_state import state
rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def others():
    open(f"up-{start}-{rank}", "w").write(str(os.getpid()))
    while not os.path.exists(f"up-{start}-{1 - rank}"): time.sleep(0.02)
print("start", start, flush=True)
"""


def warm(folder: Path, code: str, **options: Any) -> Node:
    return Node(folder, RANK + code, 2, kill_on_bad_exit=True, warm=True, **options)


@pytest.mark.parametrize("status", decider.FINAL)
def test_an_exit_status_that_asks_for_no_restart(tmp_path: Path, status: int) -> None:
    node = warm(tmp_path, f"others()\nif rank: sys.exit({status})\ntime.sleep(60)")
    ended_with, said = node.end()
    assert ended_with == status and "no more warm restarts: ranks that exit with status 2 or 143" in said
    assert not list(elastic_restarts.read(tmp_path))


def test_a_program_that_always_fails_at_step_7(tmp_path: Path) -> None:
    """Two restarts with the step of a rank that SIGKILL ended; then the server ends as the rank did."""
    node = warm(tmp_path, "state.report('step', 7)\nothers()\nif rank: os.kill(os.getpid(), 9)\ntime.sleep(60)",
                without_progress=None)  # fmt: skip
    ended_with, said = node.end()
    assert ended_with == -9 and node.log(1).count("start") == 3 + 2, "three starts, and two messages"
    assert "no more warm restarts: rank 1 failed 3 times with the same error after step 7\n" in said
    assert [(one.rank, one.step, one.furthest) for one in elastic_restarts.read(tmp_path)] == [(1, 7, 7)] * 2
    assert "warm restart 2 of job" in node.log(0)


WAITS = """
if start == 0:
    others()
    if rank:
        open("busy", "w").write(str(os.getpid()))
        os.kill(os.getpid(), 9)
    time.sleep(60)
while "WANTED" in os.environ and signal.SIGUSR1 not in state.early_signals:  # run.should_stop() returns it
    time.sleep(0.02)
print("through", flush=True)
"""


@pytest.fixture
def busy(tmp_path: Path) -> dict[str, str]:
    """A PATH with a FAKE nvidia-smi that lists the process in the file `busy`, as long as it exists."""
    command = tmp_path / "bin/nvidia-smi"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\ncat {tmp_path}/busy 2>/dev/null\nexit 0\n")
    command.chmod(0o755)
    return {"PATH": f"{command.parent}:{os.environ['PATH']}"}


def output_has(node: Node, text: str) -> None:
    """Read the server's output up to a line with this text."""
    assert node.process.stdout is not None
    for line in node.process.stdout:
        if text in line:
            return
    raise AssertionError(f"no line with {text!r}")


def test_ranks_start_when_the_memory_of_the_killed_ones_is_free(tmp_path: Path, busy: dict[str, str]) -> None:
    """The stop signal that arrives while no rank runs reaches the new ranks."""
    node = warm(tmp_path, WAITS, env={**busy, "WANTED": "1"}, signal="USR1")
    output_has(node, "waiting up to 50 s until the driver frees the GPU memory of exited ranks")
    assert "start 1" not in node.log(0)
    os.kill(node.process.pid, signal.SIGUSR1)
    (tmp_path / "busy").unlink()
    assert node.end()[0] == 0
    assert all("start 1" in node.log(rank) and "through" in node.log(rank) for rank in range(2))


def test_sigterm_between_the_end_and_the_start(tmp_path: Path, busy: dict[str, str]) -> None:
    """A stop wins: no new rank is forked, and the server ends as the failed rank did."""
    node = warm(tmp_path, WAITS, env=busy)
    output_has(node, "waiting up to 50 s")
    os.kill(node.process.pid, signal.SIGTERM)
    assert node.end()[0] == -9
    assert not any("start 1" in node.log(rank) for rank in range(2))
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.glob("up-*"))


def test_a_stop_signal_that_ends_nvidia_smi_too(tmp_path: Path, busy: dict[str, str]) -> None:
    """Slurm sends it to all processes of the step. The memory then counts as not free, and no restart is recorded."""
    command = tmp_path / "bin/nvidia-smi"
    command.write_text(command.read_text().replace("exit 0", "test -e stop && kill -TERM $PPID $$\nexit 0"))
    node = warm(tmp_path, WAITS, env=busy)
    output_has(node, "waiting up to 50 s")
    (tmp_path / "stop").touch()
    assert node.end()[0] == -9
    assert not list(elastic_restarts.read(tmp_path)) and not any("start 1" in node.log(rank) for rank in range(2))


def test_memory_that_does_not_become_free(tmp_path: Path, busy: dict[str, str]) -> None:
    code = "import sys; from hpcinit.launch import warm_restart; warm_restart.MEMORY_S = 1.0; from hpcinit import fork; sys.exit(fork.main(sys.argv[1:]))"
    ended_with, said = warm(tmp_path, WAITS, env=busy, entry=["-c", code]).end()
    assert ended_with == -9 and "the ranks still use GPU memory 1 s after they ended" in said
    assert not list(elastic_restarts.read(tmp_path))


def test_sigterm_while_the_ranks_run(tmp_path: Path) -> None:
    """The ranks fail because of the signal, and are not started again."""
    node = warm(
        tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\nothers()\nopen('go', 'w')\ntime.sleep(60)"
    )
    until((tmp_path / "go").exists)
    os.kill(node.process.pid, signal.SIGTERM)
    assert node.end()[0] == 1 and not list(elastic_restarts.read(tmp_path))


def test_a_rank_that_ignores_sigterm(tmp_path: Path) -> None:
    code = (
        "if start == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    others()\n"
        "    if rank: os._exit(1)\n    time.sleep(60)\n"
    )
    assert warm(tmp_path, code).end()[0] == 0 and len(list(elastic_restarts.read(tmp_path))) == 1


@pytest.mark.parametrize("dies", ["os.kill(os.getpid(), 9)", "sys.exit(1)"])
def test_what_a_rank_has_started_ends_before_the_next_start(tmp_path: Path, dies: str) -> None:
    """A worker in the rank's group, a daemon in its own session, and the daemon's child. They ignore SIGTERM. A process
    of this user that no rank has started lives on."""
    sleeper = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE, start_new_session=True)
    code = f"""
import subprocess
def launched(**options):
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **options)
    started.stdout.readline()
    return started.pid
code = {sleeper!r}
if start == 0:
    pids = [launched()]
    parent = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); time.sleep(600)"
    daemon = subprocess.Popen([sys.executable, "-c", parent, code], stdout=subprocess.PIPE, start_new_session=True)
    pids += [daemon.pid, int(daemon.stdout.readline())]
    open(f"pids-{{rank}}", "w").write(" ".join(map(str, pids)))
    others()
    if rank: {dies}
    time.sleep(60)
left = [pid for other in range(2) for pid in open(f"pids-{{other}}").read().split() if os.path.exists(f"/proc/{{pid}}")]
print("left", left, flush=True)
"""
    node = warm(tmp_path, code)
    try:
        ended_with, said = node.end()
        assert ended_with == 0, said
        assert all(node.log(rank).splitlines()[-1] == "left []" for rank in range(2)), node.log(0) + node.log(1)
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()


# Two nodes of the local engine: the servers' connections.

DIES = """
import os, time
from pathlib import Path
from hpcinit.world import launchers
world, start = launchers.read(os.environ), os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", start, world.job.partition(".")[2], world.warnings, flush=True)
def all_have(name):
    Path(f"{name}-{start}-{world.rank}").write_text(f"{os.getpid()} {os.getppid()}")
    while len(list(Path().glob(f"{name}-{start}-*"))) < world.world_size: time.sleep(0.02)
all_have("up")
"""
WORDS = ["cluster=local", "nodes=2", "ranks_per_node=2", "launch=fork", "launch.preload=[]", "restart.warm=true"]


def log_of(folder: Path) -> str:
    return (folder / "logs/job.log").read_text()


def processes_of(folder: Path) -> list[int]:
    """Return those of the ranks, and of their servers, that still exist."""
    found = {int(pid) for path in folder.glob("up-*") for pid in path.read_text().split()}
    return [pid for pid in found if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_every_rank_of_all_nodes_starts_again(hpcinit: Run, tmp_path: Path) -> None:
    """First two ranks of two nodes die at the same moment, then a rank of one node raises when the other node's are
    done. The servers remain, and the program has warnings about no variable."""
    code = DIES + (
        "if start == '0' and world.rank in (0, 3): os.kill(os.getpid(), 9)\n"
        "if start == '0': time.sleep(60)\n"
        "if start == '1' and world.rank > 1: time.sleep(2)\n"
        "if start == '1' and world.rank == 2: raise ValueError('boom')\n"
    )
    (tmp_path / "dies.py").write_text(code)
    done = hpcinit("submit", *WORDS, "wait=true", "--", "dies.py", timeout=240)
    folder = folder_of(done)
    assert done.returncode == 0, log_of(folder)
    for rank in range(4):
        lines = (folder / f"logs/rank-{rank}.log").read_text().splitlines()
        assert [line for line in lines if line.startswith("start")] == [
            "start 0 0.0 ()",
            "start 1 0e1.0 ()",
            "start 2 0e2.0 ()",
        ]
    first, second = elastic_restarts.read(folder)
    assert first.how == "Killed" and first.rank in (0, 3)
    assert (second.rank, second.host, second.error) == (2, "127.0.0.2", "ValueError: boom")
    assert [path.relative_to(folder).parts[1][:7] for path in folder.glob("errors/**/*.json")] == ["before-"]
    for node in range(2):  # the same server, and new ranks
        pids = [(tmp_path / f"up-{start}-{2 * node}").read_text().split() for start in range(3)]
        assert len({server for _, server in pids}) == 1 and len({rank for rank, _ in pids}) == 3
    assert "2 restarts inside the job" in hpcinit("status", folder.name).stdout
    for attempt in timeline.read(folder)[1:]:
        for rank in attempt.ranks:
            assert list(rank.events)[:3] == ["allocated", "started", "forked"]
            # The kernel counts the start of a process in ticks of 10 ms.
            assert all(after > before - 0.02 for before, after in pairwise(rank.events.values())), rank.events
    assert not processes_of(tmp_path)


def test_a_killed_rank_leaves_no_folder_on_the_disk_of_the_node(tmp_path: Path) -> None:
    """The next start removes it, and not only the next job."""
    (tmp_path / "disk").mkdir()
    code = (
        "from pathlib import Path\nfrom hpcinit.records import scratch\nfrom hpcinit.world import launchers\n"
        "base = scratch.base(os.environ)\n"
        "if start == 0:\n    scratch.take(base, launchers.read(os.environ).job + '.own')\n    others()\n"
        "    if rank: os.kill(os.getpid(), 9)\n    time.sleep(60)\n"
        "print([path.name for path in base.iterdir() if '.own' in path.name])\n"
    )
    node = warm(tmp_path, code, env={"TMPDIR": str(tmp_path / "disk")})
    assert node.end()[0] == 0 and node.log(0).splitlines()[-1] == "[]" == node.log(1).splitlines()[-1]


@pytest.mark.parametrize("node", [0, 1])
def test_a_server_that_dies_between_the_end_and_the_start(
    hpcinit: Run, tmp_path: Path, busy: dict[str, str], node: int
) -> None:
    """The job ends, no rank starts again, and no process remains."""
    code = DIES + (
        "if world.rank == 1:\n    Path('busy').write_text(str(os.getpid()))\n    os.kill(os.getpid(), 9)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "dies.py").write_text(code)
    folder = folder_of(hpcinit("submit", *WORDS, "--", "dies.py", env=busy))
    until(lambda: "waiting up to 50 s until the driver frees the GPU memory" in log_of(folder))
    os.kill(int((tmp_path / f"up-0-{2 * node}").read_text().split()[1]), signal.SIGKILL)
    until(lambda: '"exit_status"' in (folder / "exit.json").read_text())
    until(lambda: not processes_of(tmp_path))
    assert not list(elastic_restarts.read(folder)) and not list(tmp_path.glob("up-1-*"))


def test_a_rank_that_fails_before_the_other_node_has_forked(hpcinit: Run, tmp_path: Path, busy: dict[str, str]) -> None:
    """The second server gets the orders to start ranks and to end them at the same moment, because it was stopped. Its
    new ranks end, and all start again."""
    code = DIES.replace(
        'all_have("up")', 'Path(f"up-{start}-{world.rank}").write_text(f"{os.getpid()} {os.getppid()}")'
    )
    code += (
        "if start == '0' and world.rank == 0:\n    while len(list(Path().glob('up-0-*'))) < 4: time.sleep(0.02)\n"
        "    Path('busy').write_text(str(os.getpid()))\n    os.kill(os.getpid(), 9)\n"
        "if start == '1' and world.rank == 0:\n    os.kill(os.getpid(), 9)\n"
        "if start != '2': time.sleep(600)\n"
    )
    (tmp_path / "dies.py").write_text(code)
    folder = folder_of(hpcinit("submit", *WORDS, "--", "dies.py", env=busy))
    until(lambda: "waiting up to 50 s until the driver frees the GPU memory" in log_of(folder))
    second = int((tmp_path / "up-0-2").read_text().split()[1])
    until(lambda: not [child for child in psutil.Process(second).children() if child.name().startswith("rank")])
    until(
        lambda: not any(psutil.pid_exists(int((tmp_path / f"up-0-{rank}").read_text().split()[0])) for rank in (2, 3))
    )
    time.sleep(1)  # it has reported that its ranks have ended
    os.kill(second, signal.SIGSTOP)
    (tmp_path / "busy").unlink()
    until(lambda: (tmp_path / "up-1-0").exists() and log_of(folder).count("rank 0: Killed") == 2)
    os.kill(second, signal.SIGCONT)
    until(lambda: '"exit_status"' in (folder / "exit.json").read_text())
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == 0, log_of(folder)
    assert len(list(elastic_restarts.read(folder))) == 2 and not processes_of(tmp_path)


def test_a_rank_that_exits_with_143_because_another_one_failed(hpcinit: Run, tmp_path: Path) -> None:
    """Its status is an answer to the SIGTERM of its fork server, which the first server has not ordered yet: that one
    was stopped. All ranks start again."""
    code = DIES + (
        "if start == '0':\n    import signal\n    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))\n"
        "    all_have('ready')\n    time.sleep(600)\n"
    )
    (tmp_path / "dies.py").write_text(code)
    folder = folder_of(hpcinit("submit", *WORDS, "--", "dies.py"))
    until(lambda: len(list(tmp_path.glob("ready-0-*"))) == 4)
    (_, first), (rank, _), (other, _) = (map(int, (tmp_path / f"ready-0-{n}").read_text().split()) for n in (0, 2, 3))
    os.kill(first, signal.SIGSTOP)
    os.kill(other, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(rank))
    os.kill(first, signal.SIGCONT)
    until(lambda: '"exit_status"' in (folder / "exit.json").read_text())
    (restart,) = elastic_restarts.read(folder)
    assert (restart.rank, restart.how) == (3, "Killed"), log_of(folder)


HANGS = """
import os, signal, time, hpcinit
with hpcinit.session() as run:
    for step in range(1, 10):
        if run.rank == 1 and step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        run.progress(step, 10)
        run.should_stop()
        time.sleep(0.1)
"""


def test_a_hang_that_hpcinit_ends(hpcinit: Run, tmp_path: Path) -> None:
    """With hang.action=end and a rank that the others wait for, the ranks end with status 76 and start again."""
    (tmp_path / "train.py").write_text(HANGS)
    words = ["cluster=local", "nodes=1", "ranks_per_node=2", "launch=fork", "restart.warm=true", "wait=true"]
    done = hpcinit("submit", *words, "hang.after_s=5", "hang.action=end", "--", "train.py", timeout=240)
    folder = folder_of(done)
    (restart,) = elastic_restarts.read(folder)
    assert done.returncode == 0 and restart.how == "Exited with exit code 76" and restart.step == 4
    assert "warm restart 1" in log_of(folder) and "training hangs" in (folder / "logs/rank-0.log").read_text()


# The real Slurm: a training run that saves, and the losses of an undisturbed one.

TRAINS = """
import os, signal, sys, time
import torch, hpcinit
KILLS = {int(step): int(rank) for step, rank in (pair.split(":") for pair in sys.argv[2:])}
with hpcinit.session() as run:
    torch.manual_seed(1)
    wrapped = run.wrap(torch.nn.Linear(8, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loaded = run.load(wrapped, sys.argv[1])
    for step in range(loaded.step if loaded else 0, 12):
        generator = torch.Generator().manual_seed(1000 * step + run.rank)
        loss = wrapped(torch.randn(4, 8, generator=generator)).square().mean()
        wrapped.backward(loss)
        wrapped.step()
        run.progress(step + 1, 12, loss=loss.item())
        print("loss", step + 1, f"{loss.item():.9f}", flush=True)
        if run.should_stop(): break
        if KILLS.get(step + 1) == run.rank and not os.path.exists(f"killed-{step}"):
            if "always" not in os.environ: open(f"killed-{step}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        run.save(wrapped, sys.argv[1], step + 1, keep=2)
"""


def losses(folder: Path, rank: int) -> dict[int, set[float]]:
    """Return the losses of each step in a rank's log."""
    found: dict[int, set[float]] = {}
    for line in (folder / f"logs/rank-{rank}.log").read_text().splitlines():
        if line.startswith("loss "):
            _, step, loss = line.split()
            found.setdefault(int(step), set()).add(float(loss))
    return found


@pytest.mark.slurm
def test_kill_9_in_a_training_run_on_four_nodes(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Two ranks of two nodes are killed at different steps. The job continues without a new step of Slurm, and computes
    the same losses at every step as a run without a kill, but for the order of sums."""
    (tmp_path / "train.py").write_text(TRAINS)
    words = ["nodes=4", "ranks_per_node=2", "parallel=ddp", "launch=fork", "wait=true", "--", "train.py"]
    plain = folder_of(submit(hpcinit, idle_slurm, *words, "plain", timeout=500))
    done = submit(hpcinit, idle_slurm, "restart.warm=true", *words, "killed", "4:5", "8:0", timeout=500)
    folder = folder_of(done)
    assert done.returncode == 0, log_of(folder)
    restarts = list(elastic_restarts.read(folder))
    assert [(one.rank, one.how, one.step, one.furthest) for one in restarts] == [
        (5, "Killed", 4, 4),
        (0, "Killed", 8, 8),
    ]
    assert all(set(one.phases) == set(PHASES) for one in restarts), restarts
    for rank in range(8):
        undisturbed = losses(plain, rank)
        assert len(undisturbed) == 12 == len(losses(folder, rank))
        for step, found in losses(folder, rank).items():  # DDP's buckets sum in another order after a restart
            assert [*found] == pytest.approx([*undisturbed[step]] * len(found), rel=1e-5), step
    assert {attempt.job.partition(".")[2] for attempt in timeline.read(folder)} == {"0.0", "0e1.0", "0e2.0"}
    assert (
        "2 restarts inside the job: rank 5 on n3: Killed (step 4"
        in hpcinit("why", folder.name, env=idle_slurm.env).stdout
    )


@pytest.mark.slurm
def test_why_names_the_program_that_always_fails(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The rank fails at step 7 in each of three starts; then the job ends with its status."""
    (tmp_path / "train.py").write_text(
        TRAINS.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('boom')")
    )
    words = ["nodes=2", "ranks_per_node=2", "parallel=ddp", "launch=fork", "restart.warm=true", "wait=true"]
    done = submit(hpcinit, idle_slurm, *words, "+job.env.always=1", "--", "train.py", "always", "7:3", timeout=400)
    folder = folder_of(done)
    assert done.returncode == 1 and [one.step for one in elastic_restarts.read(folder)] == [7, 7], log_of(folder)
    assert "no more warm restarts: rank 3 failed 3 times with the same error after step 7" in log_of(folder)
    why = hpcinit("why", folder.name, env=idle_slurm.env).stdout
    assert why.startswith("rank 3 on n2 failed first") and "(step 7): ValueError: boom\n" in why, why


def submit_restarting(
    hpcinit: Run, slurm: MiniSlurm, place: Path, busy: dict[str, str], code: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """Submit `code` below DIES in `place`. Wait until the job waits for the memory of rank 1, which has killed itself."""
    (place / "dies.py").write_text(DIES + code)
    path = f"{busy['PATH'].partition(':')[0]}:{slurm.env.get('PATH', os.environ['PATH'])}"
    words = ("cluster=mini", *WORDS[1:], *words, f"+job.env.PATH={path}", "--", "dies.py")
    done = hpcinit("submit", *words, env={**slurm.env, "PATH": path})
    folder = folder_of(done)
    until(lambda: (folder / "logs/job.log").exists() and "waiting up to 50 s" in log_of(folder))
    return done


KILLED = "if world.rank == 1:\n    Path('busy').write_text(str(os.getpid()))\n    os.kill(os.getpid(), 9)\n"


@pytest.mark.slurm
def test_scancel_during_a_restart(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, busy: dict[str, str]) -> None:
    """No rank starts again, and no process remains."""
    done = submit_restarting(hpcinit, idle_slurm, tmp_path, busy, f"{KILLED}time.sleep(600)\n")
    idle_slurm.run("scancel", job_id_of(done))
    until(lambda: not processes_of(tmp_path))
    assert not list(elastic_restarts.read(folder_of(done))) and not list(tmp_path.glob("up-1-*"))


@pytest.mark.slurm
@pytest.mark.more
def test_the_time_limit_during_a_restart(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, busy: dict[str, str]
) -> None:
    """No rank of the first job starts again. The next job of the chain runs, and completes."""
    code = "if not Path('next').exists():\n    time.sleep(40)\n" + indent(KILLED, "    ") + "    time.sleep(600)\n"
    done = submit_restarting(hpcinit, idle_slurm, tmp_path, busy, code, "chain=2", "time_min=1")
    (tmp_path / "next").touch()
    folder = folder_of(done)
    ids = chain_jobs(folder)
    until(lambda: states(idle_slurm, ids) == ["TIMEOUT", "COMPLETED"])
    assert not list(elastic_restarts.read(folder)) and not list(tmp_path.glob("up-1-*"))
    assert not processes_of(tmp_path)
