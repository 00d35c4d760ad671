"""Reports an agent that hangs after its ranks have ended. The agent's signal monitor, a separate process, checks this.

torch's loop polls the agents' store several times per second, even while it waits for other agents. An agent that stops
polling does not see its ranks end, and the job would continue without ranks until its time limit.

The agent is only reported, not ended. A check cannot distinguish a deadlock from a file server that answers after an
hour; in that case the agent restarts its ranks. The monitor counts checks instead of seconds, because no checks happen
while the job is suspended.
"""

from __future__ import annotations

import mmap
import os
import shlex

from hpcinit.base import processes
from hpcinit.base.console import say
from hpcinit.records import run_folder
from hpcinit.world import launchers

REPORT_S = 300.0  # seconds since the last poll, or since the last rank ended


class AgentWatch:
    """Detects an agent that has stopped polling its store.

    Create it before the signal monitor, which calls look(). The agent calls polled().
    """

    def __init__(self) -> None:
        self._polls = memoryview(mmap.mmap(-1, 8)).cast("Q")  # shared with the monitor
        self._seen = 0
        self._silent_s = 0.0

    def polled(self) -> None:
        """Record that the agent is about to use the store. The agent is watched from the first call on."""
        self._polls[0] += 1

    def look(self, agent: int, since_s: float) -> None:
        """Report the agent if it has hung for REPORT_S seconds.

        agent: the agent's process id.
        since_s: seconds since the last call.
        """
        polls = self._polls[0]
        if polls == 0 or polls != self._seen or not _ranks_ended(agent):
            self._seen, self._silent_s = polls, 0.0
            return
        before, self._silent_s = self._silent_s, self._silent_s + since_s
        if before < REPORT_S <= self._silent_s:
            world = launchers.read(os.environ)
            others = "; ranks of other nodes may still run" if world.world_size > 1 else ""
            run = shlex.quote(os.environ.get(run_folder.ENV_FOLDER, "RUN"))
            say(
                f"warning: {world.host}: torchrun's agent (process {agent}, state {processes.stuck(agent)}) has done "
                f"nothing for {self._silent_s:g} s, and none of its ranks runs; expected it to start them or to report "
                f"their end{others}. If it does not continue, end the job: hpcinit cancel {run}"
            )


def _ranks_ended(agent: int) -> bool:
    """Return whether all children of the agent have ended, or False if that is unknown."""
    found = processes.children(agent)
    if os.getpid() not in found:  # the kernel does not list the processes
        return False
    fields = [processes.stat(child) for child in found if child != os.getpid()]
    # A zombie with more than one thread (num_threads) is still running: only its first thread has ended.
    return all(one and one[0] == "Z" and int(one[20 - 3]) <= 1 for one in fields)
