"""launch=torchrun: an agent that hangs after its ranks have ended is reported, and continues when it can.

The agents are real. Each blocks in state S, as on a FUSE file system that does not answer, until the test writes to a
named pipe. Only the times of the watch are shorter.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from tests.conftest import Run
from tests.submit.test_restart import log
from tests.submitting import folder_of
from tests.waiting import until

# In an agent, time.sleep() blocks while a file names its node: torch's loop sleeps between two looks at its ranks. With "early", the agent blocks before it joins the other agents.
BLOCKS = """
import sys
if sys.orig_argv[2:4] == ["-m", "hpcinit.elastic"]:
    import os, threading, time
    from pathlib import Path
    from hpcinit.launch import signal_monitor
    from hpcinit.launch.torchrun import agent_watch
    signal_monitor.LOOK_S, agent_watch.REPORT_S = 0.5, 2.0
    look = agent_watch.AgentWatch.look
    agent_watch.AgentWatch.look = lambda *given: Path("blocked").exists() and look(*given)
    real, cpus = time.sleep, os.sched_getaffinity
    def block():
        main = threading.current_thread() is threading.main_thread()
        if main and Path(f"block-{os.environ['SLURM_NODEID']}").exists():
            Path("blocked").touch()
            Path("answer").read_text()
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
    os.mkfifo("answer")
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


def unblock(node: int) -> None:
    Path(f"block-{node}").unlink()
    Path("answer").write_text("")


def exit_status(folder: Path) -> int | None:
    """Return the job's exit status; None if it has not ended."""
    with suppress(FileNotFoundError):  # the job has not started
        return json.loads((folder / "exit.json").read_text()).get("exit_status")  # type: ignore[no-any-return]
    return None


AGENT = (
    r"127\.0\.0\.{} *: torchrun's agent \(process \d+, state S.*\) has done nothing for 2 s, and none of its ranks runs"
)


def test_the_only_agent_before_its_ranks(hpcinit: Run) -> None:
    """An agent that a file system blocks before its ranks start is reported once, and then trains."""
    Path("early").touch()
    Path("block-0").touch()
    folder = start(hpcinit, "nodes=1", "ranks_per_node=1")
    until(lambda: re.search(f"warning: {AGENT.format(1)}", log(folder)))
    end(0, 0)
    unblock(0)
    until(lambda: exit_status(folder) is not None, 240)
    assert exit_status(folder) == 0 and len(re.findall(AGENT.format(1), log(folder))) == 1, log(folder)


def test_the_only_agent_after_a_failure(hpcinit: Run) -> None:
    """After the report the agent still reports which rank failed first, and the job ends with that status."""
    folder = start(hpcinit, "nodes=1", "ranks_per_node=2")
    block(0, 2)
    end(0, 0)
    end(1, 3)
    until(lambda: re.search(f"{AGENT.format(1)}.*the job: hpcinit cancel {folder}\n", log(folder)))
    unblock(0)
    until(lambda: exit_status(folder) is not None, 240)
    why = hpcinit("why", folder.name).stdout
    assert exit_status(folder) == 3 and re.match("rank 1 on .* failed first.*SystemExit: 3", why), why


def test_a_restart_after_the_report(hpcinit: Run) -> None:
    """An agent of two that hangs after a failure is reported. When it continues, the ranks restart and succeed."""
    folder = start(hpcinit, "nodes=2", "ranks_per_node=1", "launch.max_restarts=1")
    block(1, 2)
    end(1, 3)
    until(lambda: re.search(AGENT.format(2), log(folder)))
    end(0, 0)
    end(1, 0)
    unblock(1)
    until(lambda: exit_status(folder) is not None, 240)
    assert exit_status(folder) == 0 and "elastic restart 1 of at most 1" in log(folder), log(folder)


def test_an_agent_of_two_after_success(hpcinit: Run) -> None:
    """The agent is reported with the command that ends the job. The other node's rank still runs."""
    folder = start(hpcinit, "nodes=2", "ranks_per_node=1")
    block(1, 2)
    end(1, 0)
    until(lambda: re.search(AGENT.format(2), log(folder)))
    assert f"; ranks of other nodes may still run. If it does not continue, end the job: hpcinit cancel {folder}" in (
        log(folder)
    )
    hpcinit("cancel", str(folder))
    until(lambda: exit_status(folder) is not None)


def test_an_agent_of_two_before_its_start(hpcinit: Run) -> None:
    """The other agent's rendezvous times out, names the node, and ends the job."""
    Path("early").touch()
    Path("block-1").touch()
    folder = start(hpcinit, "nodes=2", "ranks_per_node=1", "comm.timeout_max_s=20")
    until(lambda: exit_status(folder) is not None)
    assert "not all agents of torchrun, one per node, connected" in log(folder) and "127.0.0.2" in log(folder)
