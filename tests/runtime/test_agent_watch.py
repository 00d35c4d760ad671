"""The watch of torchrun's agents: which it does not report. tests/submit/test_agent_hangs.py has jobs with reports.

The agent is a real process with real children. Each look counts as ten minutes.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(150)

# Arguments: exit status of the rank ('none': no rank, 'runs': it does not end), how the watch is used.
AGENT = """
import subprocess, sys, time
from hpcinit.launch import signal_monitor
from hpcinit.launch.torchrun.agent_watch import AgentWatch
rank, does = sys.argv[1:]
signal_monitor.LOOK_S = 0.05
watch, looks = AgentWatch(), 0
def look(agent, since_s):
    global looks
    if does == "polls":
        watch.polled()
    watch.look(agent, 600.0)
    looks += 1
    if looks == 20:
        print("20 looks", flush=True)
signal_monitor.SignalMonitor(look)
if rank != "none":
    code = "input()" if rank == "runs" else f"exit({rank})"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
if does != "joins":
    watch.polled()
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("rank", "does", "reports"),
    [
        ("runs", "hangs", 0),  # training does not need its agent
        ("none", "polls", 0),  # it restarts its ranks, or waits for other agents
        ("none", "joins", 0),  # other agents start late: their start-up timeout applies
        ("none", "hangs", 1),
        ("3", "hangs", 1),
    ],
)
def test_reports(rank: str, does: str, reports: int) -> None:
    """An agent is reported once, and only if it does nothing and has no running rank. It gets no signal."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", AGENT, rank, does], **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == b"20 looks\n"
            assert process.poll() is None
        finally:
            process.kill()
        assert process.stderr.read().count(b": torchrun's agent (process ") == reports
