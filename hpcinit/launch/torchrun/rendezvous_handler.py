"""How the agents of all nodes meet, and hear of each other's failures: a rendezvous handler for torch's agent.

In place of torch's 'static' (no agent hears that another one's rank has failed) and 'c10d' (each agent counts restarts
for itself, and nodes are sorted by name). The agents meet at hpcinit's rendezvous and keep torch's store. A *start* is
one start of all ranks, from 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from hpcinit.base.errors import BringUpError
from hpcinit.records import elastic_restarts
from hpcinit.records.elastic_restarts import Restart
from hpcinit.records.spec import Spec
from hpcinit.rendezvous import join
from hpcinit.rendezvous.store import open_store
from hpcinit.world import World, network

LEAVE_S = 10.0  # the first agent has the store, and waits so long for the others to have read their last


class AgentRendezvous(RendezvousHandler):
    """Of one agent. start: which start of the ranks this is. why: what failed before it, None for the first.

    Raises BringUpError, as next_rendezvous() does, where agents are missing or the first one is gone.
    """

    def __init__(
        self, agents: World, spec: Spec, timeout: Callable[[], timedelta], begin: Callable[[Restart], None]
    ) -> None:
        """agents: their world, a rank for each. timeout: from now until all have come. begin: called by the first agent
        at each restart, when no rank runs any more."""
        self._agents, self._timeout, self._begin = agents, timeout, begin
        self.start = 0
        self.why: Restart | None = None
        self._store = _meet(agents, spec, timeout())
        self._met = self._done = False

    # --- what torch's agent asks

    def get_backend(self) -> str:
        return "hpcinit"

    def get_run_id(self) -> str:
        return self._agents.job

    @property
    def use_agent_store(self) -> bool:
        return False  # the ranks make their own, as under srun

    def next_rendezvous(self) -> RendezvousInfo:
        if self._met:
            self._rendezvous_again()
        self._met = True
        here = RendezvousStoreInfo(self._agents.master_addr, self._agents.master_ports[0])
        return RendezvousInfo(self._store, self._agents.rank, self._agents.world_size, here)

    def num_nodes_waiting(self) -> int:
        """More than 0 makes the agent stop its ranks and come to next_rendezvous()."""
        return int(self._has(f"failed/{self.start}"))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is no other start to come: the step ends."""

    def shutdown(self) -> bool:
        return True

    # --- what ours asks

    def call_for_restart(self, why: Restart) -> None:
        """A rank here has failed: all agents are to come to next_rendezvous()."""
        self._call("set", f"why/{self.start}/{self._agents.rank}", why.to_json())
        self._call("set", f"failed/{self.start}", "")

    def end(self) -> None:
        """A rank here has failed, for the last time."""
        with suppress(BringUpError):
            self._call("set", "over", "")

    def all_done(self) -> bool:
        """This node's ranks have ended well: whether those of all nodes have, or no more is to come of them."""
        if not self._done:
            self._call("add", f"done/{self.start}", 1)
            self._done = True
        return bool(self._count(f"done/{self.start}") == self._agents.world_size or self._has("over"))

    def leave(self) -> None:
        """After the last question."""
        with suppress(BringUpError):
            self._call("add", "left", 1)
            deadline = time.monotonic() + LEAVE_S
            while self._agents.rank == 0 and self._count("left") < self._agents.world_size and not self._has("over"):
                if time.monotonic() > deadline:
                    return
                time.sleep(self._pause())

    # ---

    def _rendezvous_again(self) -> None:
        before, self.start, self._done = self.start, self.start + 1, False
        timeout = self._timeout()
        deadline = time.monotonic() + timeout.total_seconds()
        self._call("set", f"here/{self.start}/{self._agents.rank}", "")
        self._call("add", f"here/{self.start}", 1)
        if self._agents.rank == 0:
            while self._count(f"here/{self.start}") < self._agents.world_size:
                self._wait(deadline, timeout)
            why = elastic_restarts.cause(self._reasons(before) or [self._unknown(before)])
            self._begin(why)
            self._call("set", f"go/{self.start}", why.to_json())
        while not self._has(f"go/{self.start}"):
            self._wait(deadline + LEAVE_S, timeout)
        announced = self._call("get", f"go/{self.start}")
        self.why = _read(announced)
        if self.why is None:
            raise BringUpError(
                f"the first agent, on {self._agents.master_addr}, announced restart {self.start} in a way that is not "
                f"understood: {announced[:60].decode(errors='replace')!r}; do all nodes have the same hpcinit?"
            )

    def _reasons(self, start: int) -> list[Restart]:
        """What each agent with a failure has said of it, as far as it can be read."""
        keys = (f"why/{start}/{rank}" for rank in range(self._agents.world_size))
        found = (_read(self._call("get", key)) for key in keys if self._has(key))
        return [restart for restart in found if restart is not None]

    def _unknown(self, start: int) -> Restart:
        job = elastic_restarts.round_folder(self._agents.job, start)
        return Restart(job, start + 1, time.time(), -1, "an unknown node", "failed, and no agent's reason can be read")

    def _wait(self, deadline: float, timeout: timedelta) -> None:
        if time.monotonic() > deadline:
            raise BringUpError(
                f"restart {self.start} inside the job is not begun after {timeout.total_seconds():g} s: the agents of "
                f"{', '.join(self._missing()) or self._agents.master_addr} did not come to it; are their nodes there?"
            )
        time.sleep(self._pause())

    def _missing(self) -> list[str]:
        everybody = range(self._agents.world_size)
        absent = [rank for rank in everybody if not self._has(f"here/{self.start}/{rank}")]
        known = len(self._agents.hosts) == self._agents.world_size
        return [self._agents.hosts[rank] if known else f"task {rank}" for rank in absent]

    def _pause(self) -> float:
        return 0.05 + self._agents.world_size / 5000  # s; all ask the first agent's store

    def _has(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def _count(self, key: str) -> int:
        return int(self._call("add", key, 0))

    def _call(self, name: str, *words: object) -> Any:
        try:
            return getattr(self._store, name)(*words)
        except (DistError, RuntimeError) as error:
            where = self._agents.master_addr
            raise BringUpError(
                f"the first agent, on {where}, is gone: {str(error).partition(chr(10))[0]}; its node's words in the "
                "job's log say why"
            ) from None


def _read(value: bytes) -> Restart | None:
    """Return the restart that a value of the store describes. Anyone who reaches the store may have written it."""
    try:
        return elastic_restarts.from_json(value.decode(errors="replace"))
    except (ValueError, TypeError, AttributeError):
        return None


def _meet(agents: World, spec: Spec, timeout: timedelta) -> Store:
    """The agents' store, as soon as all of them have come."""
    job = elastic_restarts.agents_folder(agents.job)  # not the ranks' own, which meet at the same host a moment later
    of_agents = replace(agents, job=job, master_ports=network.candidate_ports(job))
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        rendezvous = join.join_rendezvous(of_agents, spec, timeout)
        if rendezvous is not None:
            rendezvous.report_phase("imported")
        store = open_store(of_agents, rendezvous, deadline)
        if rendezvous is not None:
            rendezvous.report_phase("up")
        join.leave_rendezvous()
    except BringUpError as error:
        join.leave_rendezvous(str(error))
        raise BringUpError(f"the agents of the nodes did not meet (a rank here is an agent): {error}") from None
    return store
