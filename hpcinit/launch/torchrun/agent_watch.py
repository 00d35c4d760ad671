"""Detects an agent that hangs after its ranks have ended. Its signal monitor, a separate process, looks.

torch's loop polls the agents' store several times per second, also while it waits for other agents. An agent that
stops polling does not see its ranks end, and the job would continue without ranks until its time limit.

Invariant: no agent is ended while training may continue or while the agent may restart its ranks. An agent that hangs:

- whose ranks still run: nothing happens, because training does not need it
- whose ranks have all succeeded: ranks of other nodes may still train, and would end with this agent
- in state D or T: a file server that answers again, or a debugger, lets it continue
- that may restart its ranks: it polls while it waits, and END_S is longer than a file system is usually away

So it is ended only after END_S and the start-up timeout, if one of its ranks failed, it has none, or it is the only
agent. The other cases are reported. Looks are counted, not seconds: a suspended job has none.
"""

from __future__ import annotations

import mmap
import os
import shlex
import signal
from dataclasses import replace

from hpcinit.base import processes
from hpcinit.base.console import say
from hpcinit.base.errors import Failure
from hpcinit.records import run_folder
from hpcinit.records.spec import Spec
from hpcinit.world import launchers

REPORT_S, END_S = 300.0, 1800.0  # since the last poll, or since the last rank ended
_POLLS, _LIMIT_S, _NODES, _RANKS = range(4)  # in the shared memory


class AgentWatch:
    """Create it before the signal monitor, which calls look(). The agent calls the other methods."""

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 32)).cast("Q")
        self._seen = 0
        self._silent_s = 0.0

    def start(self, spec: Spec) -> None:
        """Set what depends on the spec. A single agent waits for no other, so it is watched before its first poll."""
        limit_s = int(spec.comm.timeout.start_up(spec.nodes).total_seconds())
        self._shared[_LIMIT_S], self._shared[_NODES], self._shared[_RANKS] = limit_s, spec.nodes, spec.ranks_per_node
        self._shared[_POLLS] += spec.nodes == 1

    def polled(self) -> None:
        """Record that the agent is about to use the store."""
        self._shared[_POLLS] += 1

    def look(self, agent: int, since_s: float) -> None:
        """Report the agent, or end it. since_s: time since the last look."""
        polls, statuses = self._shared[_POLLS], _statuses(agent)
        if polls == 0 or polls != self._seen or statuses is None:
            self._seen, self._silent_s = polls, 0.0
            return
        before, self._silent_s = self._silent_s, self._silent_s + since_s
        limit_s = max(END_S, float(self._shared[_LIMIT_S]))
        useless = self._shared[_NODES] == 1 or not statuses or any(statuses)
        world = launchers.read(os.environ)
        what = (
            f"{world.host}: torchrun's agent (process {agent}, state {processes.stuck(agent)}) has done nothing for "
            f"{self._silent_s:g} s, and none of its ranks runs; expected it to start them or to report their end"
        )
        if before < REPORT_S <= self._silent_s:
            then = f"hpcinit ends it after {limit_s:g} s" if useless else "ranks of other nodes may still run"
            run = shlex.quote(os.environ.get(run_folder.ENV_FOLDER, "RUN"))
            say(f"warning: {what}; {then}. To end the job now: hpcinit cancel {run}")
        if useless and self._silent_s >= limit_s and processes.state(agent) in {"S", "R"}:
            from hpcinit.runtime import program  # noqa: PLC0415 - the monitor is a small process

            say(f"error: {what}: hpcinit ends it")
            program.record(Failure(what), replace(world, rank=world.rank * self._shared[_RANKS]))
            if self._shared[_POLLS] == polls:  # the report may have waited for the same file server as the agent
                os.kill(agent, signal.SIGKILL)


def _statuses(agent: int) -> list[int] | None:
    """Return the wait statuses of the agent's ranks, which have all ended; None if one runs or that is unknown."""
    found = processes.children(agent)
    if os.getpid() not in found:  # the kernel does not list them
        return None
    fields = [processes.stat(child) for child in found if child != os.getpid()]
    # A zombie with more than one thread (num_threads) still runs: only its first thread has ended.
    if not all(one and one[0] == "Z" and int(one[20 - 3]) <= 1 for one in fields):
        return None
    return [int(one[52 - 3]) for one in fields]
