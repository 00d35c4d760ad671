"""The watch of torchrun's agents: what it must not end, however long it looks. tests/submit/test_agent_hangs.py has jobs.

The agent is a real process with real children. Each look counts as ten minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from hpcinit.base import processes
from tests.runtime.test_fork import frozen  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(150)

# Arguments: nodes, exit status of the rank ('none': no rank, 'runs': it does not end), what the agent does.
AGENT = """
import os, signal, subprocess, sys, time
from hpcinit.base import processes
from hpcinit.launch import signal_monitor
from hpcinit.launch.torchrun.agent_watch import AgentWatch
from hpcinit.records.spec import Program, Spec
nodes, rank, does = int(sys.argv[1]), sys.argv[2], sys.argv[3]
signal_monitor.LOOK_S = 0.05
watch = AgentWatch()
wanted = "T" if does == "stops" else "D" if does.startswith("/") else ""
def look(agent, since_s):
    global wanted
    if wanted and processes.state(agent) != wanted:
        return
    wanted = ""
    if does == "polls":
        watch.polled()
    watch.look(agent, 600.0)
    os.write(1, b".")
signal_monitor.SignalMonitor(look)
if rank != "none":
    child = subprocess.Popen([sys.executable, "-c", "input()" if rank == "runs" else f"exit({rank})"], stdin=subprocess.PIPE)
watch.start(Spec("x", "local", nodes, 1, Program("script", "x.py"), "/", "nonce"))
watch.polled()
if does == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
if does.startswith("/"):
    open(does, "w").write("x")
time.sleep(1000)
"""


@contextmanager
def agent(*words: object) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "SLURMD_NODENAME": "n1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", AGENT, *map(str, words)], env=env, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def looks(stdout: IO[bytes] | None, count: int = 20) -> None:
    """Wait until the watch has looked `count` times."""
    assert stdout is not None
    assert len(stdout.read(count)) == count


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((1, "runs", "hangs"), "a rank still runs"),
        ((1, "none", "polls"), "it restarts its ranks, or waits for other agents"),
        ((2, 0, "hangs"), "its ranks have succeeded, and others may still train"),
    ],
)
def test_not_ended(words: tuple[object, ...], why: str) -> None:
    """An agent whose rank runs, one that polls, and one of two whose ranks succeeded continue."""
    with agent(*words) as process:
        looks(process.stdout)
        assert process.poll() is None, why


@pytest.mark.parametrize("words", [(1, 0, "hangs"), (1, "none", "hangs"), (2, 3, "hangs"), (2, "none", "hangs")])
def test_ended(words: tuple[object, ...]) -> None:
    """The only agent, one whose rank failed and one without ranks are ended, with a message."""
    with agent(*words) as process:
        _, text = process.communicate(timeout=150)
        assert process.returncode == -signal.SIGKILL and b"has done nothing for" in text, text


def test_a_stopped_agent() -> None:
    """An agent that a person has stopped is ended only after it continues and still does nothing."""
    with agent(1, "none", "stops") as process:
        looks(process.stdout)
        assert processes.state(process.pid) == "T"
        process.send_signal(signal.SIGCONT)
        assert process.wait(150) == -signal.SIGKILL


def test_a_file_system_that_does_not_answer(frozen: Path) -> None:  # noqa: F811
    """An agent in an uninterruptible call is reported with its state, and gets no signal."""
    with agent(1, "none", frozen / "x") as process:
        looks(process.stdout)
        pending = Path(f"/proc/{process.pid}/status").read_text().partition("ShdPnd:\t")[2].partition("\n")[0]
        assert int(pending, 16) == 0
        subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)
        _, text = process.communicate(timeout=150)
        assert b", state D (in " in text, text
