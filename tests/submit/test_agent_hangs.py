"""launch=torchrun: an agent that hangs after its ranks have ended is reported, and ended where no training can continue.

The agents are real and block in a lock, as in a deadlock. Only the two times of the watch are shorter.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.submit.test_restart import log
from tests.submitting import folder_of
from tests.waiting import until

# In an agent, time.sleep() blocks forever while a file names its node: torch's loop sleeps between two looks at its
# ranks. With "early", the agent blocks before it joins the other agents.
BLOCKS = """
import sys
if sys.orig_argv[2:4] == ["-m", "hpcinit.elastic"]:
    import os, threading, time
    from pathlib import Path
    from hpcinit.launch import signal_monitor
    from hpcinit.launch.torchrun import agent_watch
    signal_monitor.LOOK_S, agent_watch.REPORT_S, agent_watch.END_S = 0.5, 2.0, 4.0
    agent_watch.max = lambda limit_s, start_up_s: limit_s
    look = agent_watch.AgentWatch.look
    agent_watch.AgentWatch.look = lambda *given: Path("blocked").exists() and look(*given)
    real, cpus = time.sleep, os.sched_getaffinity
    def block():
        main = threading.current_thread() is threading.main_thread()
        if main and Path(f"block-{os.environ['SLURM_NODEID']}").exists():
            Path("blocked").touch()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    def sleep(seconds):
        real(seconds)
        block()
    def affinity(pid):
        if Path("early").exists():
            block()
        return cpus(pid)
    time.sleep, os.sched_getaffinity = sleep, affinity
"""
# Each rank waits until its agent is blocked, and then for the file end-RANK, whose text is its exit status.
RANK = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
Path(f"up-{rank}").touch()
while not (end := Path(f"end-{rank}")).exists() or not end.read_text():
    time.sleep(0.1)
sys.exit(int(end.read_text()))
"""


def start(hpcinit: Run, *words: str) -> Path:
    """Submit RANK with agents that can be blocked. Return the run folder."""
    here = Path.cwd()
    (here / "sitecustomize.py").write_text(BLOCKS)
    (here / "rank.py").write_text(RANK)
    local = ("cluster=local", "launch=torchrun")
    done = hpcinit("submit", *local, f"+job.env.PYTHONPATH={here}", *words, "--", "rank.py")
    assert done.returncode == 0, done.stderr
    return folder_of(done)


def block(node: int, ranks: int) -> None:
    until(lambda: all(Path(f"up-{rank}").exists() for rank in range(ranks)), 240)
    Path(f"block-{node}").touch()
    until(lambda: Path("blocked").exists())


def end(rank: int, status: int) -> None:
    Path(f"end-{rank}").write_text(str(status))


def ended(folder: Path) -> bool:
    with suppress(FileNotFoundError):  # the job has not started
        return '"exit_status"' in (folder / "exit.json").read_text()
    return False


AGENT = r"127\.0\.0\.{} *: torchrun's agent \(process \d+, state S.*\) has done nothing for {} s, and none of its ranks runs"


@pytest.mark.parametrize("statuses", [(), (0,), (0, 3)])
def test_the_only_agent(hpcinit: Run, statuses: tuple[int, ...]) -> None:
    """The job ends with a message that names node and agent: before the ranks start, after success, after a failure."""
    if not statuses:
        Path("early").touch()
        Path("block-0").touch()
    folder = start(hpcinit, "nodes=1", f"ranks_per_node={len(statuses) or 1}")
    if statuses:
        block(0, len(statuses))
    for rank, status in enumerate(statuses):
        end(rank, status)
    until(lambda: ended(folder))
    text, why = log(folder), hpcinit("why", folder.name).stdout
    assert re.search(f"warning: {AGENT.format(1, 2)}.*hpcinit ends it after 4 s.*: hpcinit cancel {folder}\n", text), (
        text
    )
    assert re.search(f"error: {AGENT.format(1, 4)}.*: hpcinit ends it\n", text), text
    first = "rank 1 on 127.0.0.1 failed first.*SystemExit: 3" if any(statuses) else f"rank 0 on {AGENT.format(1, 4)}"
    assert re.match(first.replace(r" on 127\.0\.0\.1 *", r" on 127\.0\.0\.1 failed first.* 127\.0\.0\.1"), why), why


def test_an_agent_of_two_after_a_failure(hpcinit: Run) -> None:
    """The job ends although the other node's rank still waits for the failed one, and has restarts left."""
    folder = start(hpcinit, "nodes=2", "ranks_per_node=1", "launch.max_restarts=1")
    block(1, 2)
    end(1, 3)
    until(lambda: ended(folder))
    assert re.search(f"error: {AGENT.format(2, 4)}.*: hpcinit ends it\n", log(folder)), log(folder)


def test_an_agent_of_two_after_success(hpcinit: Run) -> None:
    """The agent is reported with the command that ends the job. It is not ended, so the other node's rank still runs."""
    folder = start(hpcinit, "nodes=2", "ranks_per_node=1")
    block(1, 2)
    end(1, 0)
    until(lambda: re.search(AGENT.format(2, 2), log(folder)))
    assert f"; ranks of other nodes may still run. To end the job now: hpcinit cancel {folder}" in log(folder)
    done = hpcinit("cancel", str(folder))
    until(lambda: ended(folder))
    assert "hpcinit ends it" not in log(folder), (log(folder), done)


def test_an_agent_of_two_before_its_start(hpcinit: Run) -> None:
    """The other agent's rendezvous times out, names the node, and ends the job."""
    Path("early").touch()
    Path("block-1").touch()
    folder = start(hpcinit, "nodes=2", "ranks_per_node=1", "comm.timeout_max_s=20")
    until(lambda: ended(folder))
    assert "not all agents of torchrun, one per node, connected" in log(folder) and "127.0.0.2" in log(folder)
