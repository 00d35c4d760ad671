"""The roster of ranks: which have connected, how far each has come, which are missing; and what both sides share."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hpcinit.base.text import ranges
from hpcinit.rendezvous.start_failure import StartupFailure
from hpcinit.slurm import nodelist

# In this order a rank tells them. 'started': hpcinit.run or init has found rank 0. 'imported': it is in
# init. 'joined': torch's store has answered. 'up': the process group works.
PHASES = ("started", "imported", "joined", "up")
LONGEST_LIST = 2_000  # characters, of ranks or of nodes


@dataclass(slots=True)
class Peer:
    """One rank that came in."""

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
    """The list of all ranks of one start. Not locked: its owner does that.

    What is asked at each message (has everybody got so far?) is counted; words about who has not take a walk.
    """

    def __init__(self, world_size: int, hosts: Sequence[str]) -> None:
        self.world_size = world_size
        self.hosts = hosts
        self.peers: dict[int, Peer] = {}
        self._reached = dict.fromkeys(PHASES, 0)

    def enter(self, peer: Peer) -> None:
        """Instead of the peer of this rank that was there before, if there was one."""
        if before := self.peers.get(peer.rank):
            self._count(before.phase, -1)
        self.peers[peer.rank] = peer
        self._count(peer.phase, 1)

    def move(self, peer: Peer, phase: str) -> None:
        """Raises ValueError for what is no phase."""
        PHASES.index(phase)
        self._count(peer.phase, -1)
        peer.phase, peer.since = phase, time.monotonic()
        self._count(phase, 1)

    def _count(self, phase: str, change: int) -> None:
        for reached in PHASES[: PHASES.index(phase) + 1]:
            self._reached[reached] += change

    def all_reached(self, phase: str) -> bool:
        return self._reached[phase] == self.world_size

    def dead(self) -> list[Peer]:
        """Those who left before they were up, the first to leave first."""
        lost = (g for g in self.peers.values() if g.gone and not g.reached("up"))
        return sorted(lost, key=lambda peer: peer.since)

    def missing(self, phase: str) -> str:
        """'4 of 8 ranks are missing: ranks 4-5 never arrived (nobody came from n3), rank 6 on n4 ...' or ''."""
        absent = [rank for rank in range(self.world_size) if rank not in self.peers]
        late = [g for g in self.peers.values() if not g.reached(phase)]
        if not absent and not late:
            return ""
        parts = []
        if absent:
            seen = {peer.host for peer in self.peers.values()}
            empty = [host for host in dict.fromkeys(self.hosts) if host not in seen]
            where = f" (nobody came from {_cut(nodelist.compress(empty))})" if empty else ""
            parts.append(f"{_cut(ranks(absent))} never arrived{where}")
        for peer in sorted(late, key=lambda peer: peer.rank)[:16]:
            waited = time.monotonic() - peer.since
            parts.append(
                f"rank {peer.rank} on {peer.host} (pid {peer.pid}) {peer.phase} {waited:.0f} s ago and no further"
            )
        if len(late) > 16:
            parts.append(f"and {len(late) - 16} more")
        return f"{len(absent) + len(late)} of {self.world_size} ranks are missing: " + "; ".join(parts)

    def first_missing(self, phase: str) -> tuple[int | None, str]:
        """Return the rank and the host that missing() names first. Either is None or '' where it is not certain that
        they belong together: which node an absent rank would be on is not known here."""
        absent = [rank for rank in range(self.world_size) if rank not in self.peers]
        if absent:
            seen = {peer.host for peer in self.peers.values()}
            empty = [host for host in dict.fromkeys(self.hosts) if host not in seen]
            return (absent[0] if len(absent) == 1 or not empty else None), (empty[0] if empty else "")
        late = [peer for peer in self.peers.values() if not peer.reached(phase)]
        first = min(late, key=lambda peer: peer.rank, default=None)
        return (first.rank, first.host) if first else (None, "")

    def lost(self) -> str:
        """'rank 3 on n2 (pid 77) died when it had started: ValueError: boom', or ''."""
        first = self.dead()[:1]
        return "".join(
            f"rank {g.rank} on {g.host} (pid {g.pid}) died during start-up, when it had {g.phase}"
            + (f": {g.error}" if g.error else "; its own log may say why")
            for g in first
        )


def ranks(numbers: Iterable[int]) -> str:
    """'rank 3', 'ranks 4-6,9'."""
    text = ranges(numbers)
    return f"rank{'' if text.isdecimal() else 's'} {text}"


def _cut(text: str) -> str:
    """What is told is a line to every rank: wire.LONGEST_LINE."""
    return text if len(text) <= LONGEST_LIST else f"{text[:LONGEST_LIST].rpartition(',')[0]},..."


# What both sides of a rendezvous do: wait for what the others do, and hear of what goes wrong.


class RendezvousEndpoint(ABC):
    """One process's part in the rendezvous.

    address: where rank 0 was met. own_address: of this node, as seen from there. program_port: for a program's own
    rendezvous. failure: why the start-up has failed, '' while it has not. clock_offset_s: to be added to a time of this
    node (seconds since 1970) for rank 0's, right to within clock_uncertainty_s; None where it was not learnt.
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
        self._all_came = False
        self._store_port: int | None = None

    @property
    def failure(self) -> str:
        return self._failure.message if self._failure else ""

    @abstractmethod
    def report_phase(self, phase: str) -> None:
        """How far this rank has got: one of PHASES."""

    @abstractmethod
    def missing(self, phase: str) -> str:
        """Who has not got that far; '' if that cannot be told."""

    @abstractmethod
    def fail(self, error: str) -> None:
        """This rank raised: tell all others why. This rank knows."""

    @abstractmethod
    def linger_after_failure(self) -> None:
        """After fail(): give those who have not come yet a moment to hear of it. Rank 0 alone has something to do."""

    @abstractmethod
    def close(self) -> None:
        """Leave in peace: nobody takes it for a death."""

    @abstractmethod
    def forget(self) -> None:
        """Close this process's copies of the sockets; they live on in the parent."""

    def wait_for_all(self, deadline: float, every_s: float) -> None:
        """Until all ranks have come. Raises BringUpError that names who has not.

        deadline: on the monotonic clock. every_s: rank 0 says so often for whom it waits.
        """
        self._wait(lambda: self._all_came, "started", deadline, every_s)

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        """Until all ranks are in init; the port of torch's store. Raises BringUpError that names who is not."""
        self._wait(self._is_store_announced, "imported", deadline, every_s)
        assert self._store_port is not None
        return self._store_port

    def on_failure(self, act: Callable[[str], None] | None) -> None:
        """Call `act` when a rank fails, at once if one has already; None: nobody looks any more."""
        with self._changed:
            self._on_failure = act
            failure = self._failure
        if act and failure:
            act(failure.message)

    def _is_store_announced(self) -> bool:
        return self._store_port is not None

    def _wait(self, done: Callable[[], bool], phase: str, deadline: float, every_s: float) -> None:
        said = time.monotonic()
        with self._changed:
            while not (self._failure or done()) and (now := time.monotonic()) <= deadline:
                if now - said > every_s:
                    said = now
                    self._still_waiting(phase)
                self._changed.wait(max(0.05, min(every_s, deadline - now)))
            if done() and not self._failure:
                return
        raise (self._failure or self._too_late(phase)).error()

    @abstractmethod
    def _still_waiting(self, phase: str) -> None:
        """Say so, or leave it to rank 0."""

    @abstractmethod
    def _too_late(self, phase: str) -> StartupFailure:
        """The deadline has passed: what to report, for this rank and whoever listens."""
