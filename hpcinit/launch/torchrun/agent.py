"""torch's elastic agent with ranks that hpcinit starts. The loop and the rule for restarts are torch's.

The methods with an underscore are those that an extension of SimpleElasticAgent must implement:
https://docs.pytorch.org/docs/stable/elastic/agent.html#extending-the-agent
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from hpcinit.base.supervisor import Child, Supervisor
from hpcinit.launch.torchrun.agent_signals import ENDING, Signals
from hpcinit.launch.torchrun.rendezvous_handler import AgentRendezvous
from hpcinit.records import rank_log
from hpcinit.records.elastic_restarts import Restart

# The ranks of a node as its agent's children: each in its own session, with its own log.


@dataclass(frozen=True)
class Start:
    """What a rank is started with. env: instead of this process's. cpus: for the rank; None: as this process."""

    env: Mapping[str, str]
    log: Path
    cpus: Set[int] | None = None


class Workers(Supervisor):
    """The ranks of a node, started together, by local rank. torch's agent polls for ended ones, and stops all."""

    stuck_s = 3.0  # a rank that the kernel does not end, for a disk or a driver, is left to Slurm

    def __init__(
        self,
        command: Sequence[str],
        starts: Sequence[Start],
        around: Callable[[Callable[[], Child]], Child],
    ) -> None:
        """around: calls its argument, which starts a process. Raise OSError, after stopping those already started."""
        super().__init__()
        try:
            for number, start in enumerate(starts):
                around(partial(self._start, number, command, start))
        except BaseException:
            self.stop(0.0)
            raise

    def pids(self) -> dict[int, int]:
        return {number: child.pid for number, child in self.children.items()}

    def _start(self, number: int, command: Sequence[str], start: Start) -> Child:
        before = os.sched_getaffinity(0)
        with rank_log.opened(start.log) as log:
            try:
                if start.cpus:
                    os.sched_setaffinity(0, start.cpus)  # for this thread, and for what it starts
                return self.start(number, command, start.env, output=log)
            finally:
                if start.cpus:
                    os.sched_setaffinity(0, before)


GRACE_S = 3.0  # from SIGTERM to SIGKILL, for ranks that cannot continue without the failed one
WRONG_REQUEST = 2  # exit status of a rank that would fail again after a restart


class Agent(SimpleElasticAgent):
    """The agent of one node. start: starts its ranks. report: prints the ranks' failures, from their exit statuses
    (-9 for SIGKILL), and which ranks had succeeded before; it returns the cause first."""

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: AgentRendezvous,
        came: Signals,
        start: Callable[[], Workers],
        report: Callable[[dict[int, int], Sequence[int]], Sequence[Restart]],
    ) -> None:
        super().__init__(spec)
        self._agent_rendezvous, self._came, self._start, self._report = rendezvous, came, start, report
        self._ranks: Workers | None = None
        self._stop_received = False
        self.status = 0  # of the rank that failed first in the last round

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ranks, self.status = self._start(), 0
        self._came.collect()
        return self._ranks.pids()

    def _stop_workers(self, worker_group: WorkerGroup, *_: object, **__: object) -> None:
        self._shutdown()

    def _shutdown(self, *_: object, **__: object) -> None:
        """Stop the ranks. torch 2.13 passes a signal and a time, 2.7 is_restart."""
        self._came.stop_collecting()
        if self._ranks is not None:
            self._ranks.stop(GRACE_S)
            self._ranks = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._ranks is not None  # torch starts them before it monitors them
        self._pass_on(self._ranks)
        ended = self._ranks.ended()
        if failures := {rank: status for rank, status in ended.items() if status != 0}:
            return self._of_failures(worker_group, failures, [rank for rank, status in ended.items() if status == 0])
        if len(ended) == worker_group.spec.local_world_size and self._agent_rendezvous.all_done():
            if self._agent_rendezvous.is_over():  # a rank of another node failed, perhaps because these ended early
                self._report({}, list(ended))
            done = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=done)
        return RunResult(WorkerState.HEALTHY)

    def _of_failures(self, worker_group: WorkerGroup, failures: dict[int, int], succeeded: Sequence[int]) -> RunResult:
        self._shutdown()
        first = self._report(failures, succeeded)[0]
        self.status = failures[first.rank % worker_group.spec.local_world_size]
        again = worker_group.spec.max_restarts - self._agent_rendezvous.start
        if self._stop_received or self.status == WRONG_REQUEST:
            again = 0
        # torch counts the restarts that this agent has requested, but the limit is for the restarts of all agents.
        self._remaining_restarts = max(0, again)
        if again > 0:
            self._agent_rendezvous.call_for_restart(first)
        else:
            self._agent_rendezvous.end()
        return RunResult(WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """Leave the store. torch's own barrier would ignore the restarts of other agents; here all ranks are done."""
        self._agent_rendezvous.leave()

    def _pass_on(self, ranks: Workers) -> None:
        for number, forward in self._came.take():
            self._stop_received |= number in ENDING
            if forward:
                ranks.signal(number)
