"""The rendezvous handler for torch's agent: how the agents of all nodes find each other and report failures.

It replaces torch's two handlers. With 'static', an agent does not notice that a rank of another agent has failed. With
'c10d', each agent counts restarts separately, and nodes are sorted by name. Here, the agents use hpcinit's rendezvous,
and then exchange values through torch's store. A *round* is one start of all ranks; the first round is 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from hpcinit.base.errors import BringUpError
from hpcinit.records import elastic_restarts
from hpcinit.records.elastic_restarts import Restart
from hpcinit.records.spec import Spec
from hpcinit.runtime import startup
from hpcinit.runtime.torch_store import open_store
from hpcinit.world import World, ports

LEAVE_S = 10.0  # how long the first agent, which hosts the store, waits until the other agents have left
OVER_S = 1.0  # the same after a failure. Short, because ranks of other agents end only when the first agent exits


class AgentRendezvous(RendezvousHandler):
    """The rendezvous handler of one agent.

    round: the number of the current round.
    why: the failure that led to this round, or None in the first round.

    The constructor and next_rendezvous() raise BringUpError if an agent is missing or the first agent is gone.
    """

    def __init__(
        self,
        agents: World,
        spec: Spec,
        timeout: Callable[[], timedelta],
        record: Callable[[Restart], None],
    ) -> None:
        """Connect to the other agents.

        agents: the World of the agents, in which each agent is a rank.
        timeout: returns how long to wait for all agents.
        record: called by the first agent at each restart, when no rank is running any more.
        """
        self._agents, self._timeout, self._record = agents, timeout, record
        self.round = 0
        self.why: Restart | None = None
        self._store = _join(agents, spec, timeout())
        self._has_started = self._done = False

    # --- called by torch's agent

    def get_backend(self) -> str:
        return "hpcinit"

    def get_run_id(self) -> str:
        return self._agents.job

    @property
    def use_agent_store(self) -> bool:
        return False  # the ranks create their own store, as under srun

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the agents' store for torch.

        From the second call on, first wait until all agents are ready for a new round.
        """
        if self._has_started:
            self._start_next_round()
        self._has_started = True
        here = RendezvousStoreInfo(self._agents.master_addr, self._agents.master_ports[0])
        return RendezvousInfo(self._store, self._agents.rank, self._agents.world_size, here)

    def num_nodes_waiting(self) -> int:
        """Return 1 after a failure, otherwise 0. On 1, torch's agent stops its ranks and calls next_rendezvous()."""
        return int(self._has(f"failed/{self.round}"))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing. No other round can start, because the step ends."""

    def shutdown(self) -> bool:
        return True

    # --- called by hpcinit's agent

    def request_restart(self, why: Restart) -> None:
        """Report the failure of a rank on this node, so that all agents restart their ranks."""
        self._call("set", f"why/{self.round}/{self._agents.rank}", why.to_json())
        self._call("set", f"failed/{self.round}", "")

    def end_run(self) -> None:
        """Report that a rank on this node has failed and that there are no more restarts. Then leave the store."""
        with suppress(BringUpError):
            self._call("set", "over", "")
            self.leave()

    def all_done(self) -> bool:
        """Report that this node's ranks have succeeded.

        Return True if the ranks of all nodes have succeeded, or if a rank has failed and there are no more restarts.
        """
        if not self._done:
            self._call("add", f"done/{self.round}", 1)
            self._done = True
        return bool(self._count(f"done/{self.round}") == self._agents.world_size or self._has("over"))

    def is_over(self) -> bool:
        """Return whether a rank has failed and there are no more restarts."""
        return bool(self._has("over"))

    def leave(self) -> None:
        """Leave the store. The first agent hosts the store, so it waits until the other agents have left.

        It waits at most LEAVE_S seconds, or OVER_S seconds after a failure.
        """
        with suppress(BringUpError):
            self._call("add", "left", 1)
            began = time.monotonic()
            while self._agents.rank == 0 and self._count("left") < self._agents.world_size:
                if time.monotonic() - began > (OVER_S if self._has("over") else LEAVE_S):
                    return
                time.sleep(self._poll_pause_s())

    # ---

    def _start_next_round(self) -> None:
        """Wait until all agents are ready for the next round, and set `why` to the failure that led to it.

        Raise BringUpError if an agent is not ready in time, or if the first agent's announcement cannot be read.
        """
        before, self.round, self._done = self.round, self.round + 1, False
        timeout = self._timeout()
        deadline = time.monotonic() + timeout.total_seconds()
        self._call("set", f"here/{self.round}/{self._agents.rank}", "")
        self._call("add", f"here/{self.round}", 1)
        if self._agents.rank == 0:
            while self._count(f"here/{self.round}") < self._agents.world_size:
                self._wait(deadline, timeout)
            why = elastic_restarts.cause(self._failure_reports(before) or [self._unreadable_report(before)])
            self._record(why)
            self._call("set", f"go/{self.round}", why.to_json())
        while not self._has(f"go/{self.round}"):
            self._wait(deadline + LEAVE_S, timeout)
        announced = self._call("get", f"go/{self.round}")
        self.why = _read_restart(announced)
        if self.why is None:
            raise BringUpError(
                f"cannot read the message about restart {self.round} from the first agent, on "
                f"{self._agents.master_addr}: {announced[:60].decode(errors='replace')!r}. Do all nodes use the same "
                "version of hpcinit?"
            )

    def _failure_reports(self, number: int) -> list[Restart]:
        """Return the failures that the agents reported in round `number`. Skip reports that cannot be read."""
        keys = (f"why/{number}/{rank}" for rank in range(self._agents.world_size))
        found = (_read_restart(self._call("get", key)) for key in keys if self._has(key))
        return [restart for restart in found if restart is not None]

    def _unreadable_report(self, number: int) -> Restart:
        job = elastic_restarts.round_folder(self._agents.job, number)
        return Restart(job, number + 1, time.time(), -1, "an unknown node", "failed, and no agent's report can be read")

    def _wait(self, deadline: float, timeout: timedelta) -> None:
        if time.monotonic() > deadline:
            raise BringUpError(
                f"restart {self.round} inside the job timed out after {timeout.total_seconds():g} s: no agent "
                f"connected from {', '.join(self._missing_agents()) or self._agents.master_addr}. Are the nodes up?"
            )
        time.sleep(self._poll_pause_s())

    def _missing_agents(self) -> list[str]:
        """Return the hosts of the agents that are not ready for this round."""
        everybody = range(self._agents.world_size)
        absent = [rank for rank in everybody if not self._has(f"here/{self.round}/{rank}")]
        known = len(self._agents.hosts) == self._agents.world_size
        return [self._agents.hosts[rank] if known else f"task {rank}" for rank in absent]

    def _poll_pause_s(self) -> float:
        return 0.05 + self._agents.world_size / 5000  # in seconds; all agents poll the first agent's store

    def _has(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def _count(self, key: str) -> int:
        return int(self._call("add", key, 0))

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the method `name` of the store. Raise BringUpError if the store's host, the first agent, is gone."""
        try:
            return getattr(self._store, name)(*arguments)
        except (DistError, RuntimeError) as error:
            where = self._agents.master_addr
            raise BringUpError(
                f"the first agent, on {where}, is gone: {str(error).partition(chr(10))[0]}. Read the "
                "messages of this node in the job's log"
            ) from None


def _read_restart(value: bytes) -> Restart | None:
    """Return the Restart in a value of the store, or None if the value contains none.

    Any process that can reach the store may have written the value.
    """
    try:
        return elastic_restarts.from_json(value.decode(errors="replace"))
    except (ValueError, TypeError, AttributeError):
        return None


def _join(agents: World, spec: Spec, timeout: timedelta) -> Store:
    """Wait until all agents have connected, and return their store."""
    # Use another job name, and so other ports, than the ranks, which use the same host a moment later.
    job = elastic_restarts.agents_folder(agents.job)
    of_agents = replace(agents, job=job, master_ports=ports.of_job(os.environ, job))
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        rendezvous = startup.join_rendezvous(of_agents, spec, timeout)
        if rendezvous is not None:
            rendezvous.report_phase("imported")
        store = open_store(of_agents, rendezvous, deadline)
        if rendezvous is not None:
            rendezvous.report_phase("up")
        startup.leave_rendezvous()
    except BringUpError as error:
        startup.leave_rendezvous(str(error))
        raise BringUpError(
            f"not all torchrun agents (one per node) connected: {error} ('rank' in this message is the number of an "
            "agent)"
        ) from None
    return store
