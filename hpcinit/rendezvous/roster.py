"""The roster of ranks: which have connected, the phase each has reached, which are missing; and both sides' base."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpcinit.base.text import rank_names
from hpcinit.rendezvous.protocol import StartupFailure
from hpcinit.slurm import nodelist

# The phases that a rank reports, in this order. 'started': hpcinit.run or init has found rank 0. 'imported': it is in
# init. 'joined': it has connected to torch's store. 'up': the process group works.
PHASES = ("started", "imported", "joined", "up")
LONGEST_LIST = 2_000  # characters of a list of ranks or nodes


@dataclass(slots=True)
class Peer:
    """A rank that has connected. since: when it reached its phase, by time.monotonic()."""

    rank: int
    host: str
    pid: int
    phase: str = PHASES[0]
    since: float = field(default_factory=time.monotonic)
    error: str = ""
    gone: bool = False

    def reached(self, phase: str) -> bool:
        return PHASES.index(self.phase) >= PHASES.index(phase)


class Roster:
    """The list of all ranks of one start. It is not locked: its owner does that.

    Whether all ranks have reached a phase is counted, because every message checks it. Naming the missing ranks
    iterates over all of them.
    """

    def __init__(self, world_size: int, hosts: Sequence[str]) -> None:
        self.world_size = world_size
        self.hosts = hosts
        self.peers: dict[int, Peer] = {}
        self._reached = dict.fromkeys(PHASES, 0)

    def enter(self, peer: Peer) -> None:
        """Add the peer, instead of an earlier one of the same rank."""
        if before := self.peers.get(peer.rank):
            self._count(before.phase, -1)
        self.peers[peer.rank] = peer
        self._count(peer.phase, 1)

    def move(self, peer: Peer, phase: str) -> None:
        """Record the phase. Raise ValueError if it is not one."""
        PHASES.index(phase)
        self._count(peer.phase, -1)
        peer.phase, peer.since = phase, time.monotonic()
        self._count(phase, 1)

    def _count(self, phase: str, change: int) -> None:
        """Add `change` to the counts of `phase` and of all phases before it."""
        for reached in PHASES[: PHASES.index(phase) + 1]:
            self._reached[reached] += change

    def all_reached(self, phase: str) -> bool:
        return self._reached[phase] == self.world_size

    def dead(self) -> list[Peer]:
        """Return the ranks that disconnected before they were up, the first to disconnect first."""
        lost = (peer for peer in self.peers.values() if peer.gone and not peer.reached("up"))
        return sorted(lost, key=lambda peer: peer.since)

    def missing(self, phase: str) -> str:
        """Return '4 of 8 ranks are missing: ranks 4-5 never connected (no rank connected from n3), rank 6 ...' or
        ''."""
        absent = [rank for rank in range(self.world_size) if rank not in self.peers]
        late = [peer for peer in self.peers.values() if not peer.reached(phase)]
        if not absent and not late:
            return ""
        parts = []
        if absent:
            seen = {peer.host for peer in self.peers.values()}
            empty = [host for host in dict.fromkeys(self.hosts) if host not in seen]
            where = f" (no rank connected from {_cut(nodelist.compress(empty))})" if empty else ""
            parts.append(f"{_cut(rank_names(absent))} never connected{where}")
        for peer in sorted(late, key=lambda peer: peer.rank)[:16]:
            waited = time.monotonic() - peer.since
            parts.append(
                f"rank {peer.rank} on {peer.host} (pid {peer.pid}) {peer.phase} {waited:.0f} s ago but got no further"
            )
        if len(late) > 16:
            parts.append(f"and {len(late) - 16} more")
        return f"{len(absent) + len(late)} of {self.world_size} ranks are missing: " + "; ".join(parts)

    def first_missing(self, phase: str) -> tuple[int | None, str]:
        """Return the rank and the host that missing() names first. Return None or '' for one that is not certain: the
        node of an absent rank is unknown here."""
        absent = [rank for rank in range(self.world_size) if rank not in self.peers]
        if absent:
            seen = {peer.host for peer in self.peers.values()}
            empty = [host for host in dict.fromkeys(self.hosts) if host not in seen]
            return (absent[0] if len(absent) == 1 or not empty else None), (empty[0] if empty else "")
        late = [peer for peer in self.peers.values() if not peer.reached(phase)]
        first = min(late, key=lambda peer: peer.rank, default=None)
        return (first.rank, first.host) if first else (None, "")

    def lost(self) -> str:
        """Return 'rank 3 on n2 (pid 77) died during start-up, after phase 'started': ValueError: boom', or ''."""
        first = self.dead()[:1]
        return "".join(
            f"rank {peer.rank} on {peer.host} (pid {peer.pid}) died during start-up, after phase '{peer.phase}'"
            + (f": {peer.error}" if peer.error else "; its own log may show the reason")
            for peer in first
        )


def _cut(text: str) -> str:
    """Shorten the list: a message is one line to every rank, at most protocol.LONGEST_LINE."""
    return text if len(text) <= LONGEST_LIST else f"{text[:LONGEST_LIST].rpartition(',')[0]},..."


# What both sides of a rendezvous do: wait for the other ranks, and receive failures.


class RendezvousEndpoint(ABC):
    """One process's part in the rendezvous.

    address: where rank 0 was found. own_address: of this node, as seen from rank 0. program_port: for the program's own
    rendezvous. failure: why the start-up has failed, '' if it has not. clock_offset_s: add it to a time of this node
    (seconds since 1970) for rank 0's time, within clock_uncertainty_s; None if it was not measured.
    """

    address = ""
    own_address = ""
    program_port = 0
    clock_offset_s: float | None = None
    clock_uncertainty_s: float | None = None

    def __init__(self) -> None:
        self._failure: StartupFailure | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._changed = threading.Condition()
        self._all_connected = False
        self._store_port: int | None = None

    @property
    def failure(self) -> str:
        return self._failure.message if self._failure else ""

    @abstractmethod
    def report_phase(self, phase: str) -> None:
        """Report the phase that this rank has reached: one of PHASES."""

    @abstractmethod
    def missing(self, phase: str) -> str:
        """Return a message about the ranks that have not reached the phase; '' if that is unknown."""

    @abstractmethod
    def fail(self, error: str) -> None:
        """Report to all other ranks why this rank failed."""

    @abstractmethod
    def linger_after_failure(self) -> None:
        """Wait a moment after fail(), so that ranks that connect late get the error. Only rank 0 does something."""

    @abstractmethod
    def close(self) -> None:
        """Leave, without being reported as dead."""

    @abstractmethod
    def forget(self) -> None:
        """Close this process's copies of the sockets; the parent keeps its own."""

    def wait_for_all(self, deadline: float, every_s: float) -> None:
        """Wait until all ranks have connected. Raise BringUpError that names the missing ranks.

        deadline: by time.monotonic(). every_s: the time between two reports of rank 0 about the missing ranks.
        """
        self._wait(lambda: self._all_connected, "started", deadline, every_s)

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        """Return the port of torch's store when all ranks are in init. Raise BringUpError that names the others."""
        self._wait(self._is_store_announced, "imported", deadline, every_s)
        assert self._store_port is not None
        return self._store_port

    def on_failure(self, act: Callable[[str], None] | None) -> None:
        """Call `act` when a rank fails, immediately if one already has. None: stop calling."""
        with self._changed:
            self._on_failure = act
            failure = self._failure
        if act and failure:
            act(failure.message)

    def _is_store_announced(self) -> bool:
        return self._store_port is not None

    def _wait(self, done: Callable[[], bool], phase: str, deadline: float, every_s: float) -> None:
        """Wait until done(). Raise BringUpError after a failure or at the deadline; `phase` is what ranks lack then."""
        reported_at = time.monotonic()
        with self._changed:
            while not (self._failure or done()) and (now := time.monotonic()) <= deadline:
                if now - reported_at > every_s:
                    reported_at = now
                    self._still_waiting(phase)
                self._changed.wait(max(0.05, min(every_s, deadline - now)))
            if done() and not self._failure:
                return
        raise (self._failure or self._too_late(phase)).error()

    @abstractmethod
    def _still_waiting(self, phase: str) -> None:
        """Report the missing ranks, on rank 0."""

    @abstractmethod
    def _too_late(self, phase: str) -> StartupFailure:
        """Return the failure to report when the deadline has passed, on this rank and on connected ranks."""
