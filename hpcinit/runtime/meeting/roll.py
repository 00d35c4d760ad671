"""Who has come, how far each got, and how to say who has not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcinit.facts.ranges import ranges
from hpcinit.slurm import nodelist

# In this order a rank tells them. 'started': hpcinit.run or init has found the door. 'imported': it is in
# init. 'joined': torch's store has answered. 'up': the process group works.
PHASES = ("started", "imported", "joined", "up")
LONGEST_LIST = 2_000  # characters, of ranks or of nodes


@dataclass(slots=True)
class Guest:
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


class Roll:
    """The list of all ranks of one start. Not locked: its owner does that.

    What is asked at each message (has everybody got so far?) is counted; words about who has not take a walk.
    """

    def __init__(self, world_size: int, hosts: Sequence[str]) -> None:
        self.world_size = world_size
        self.hosts = hosts
        self.guests: dict[int, Guest] = {}
        self._reached = dict.fromkeys(PHASES, 0)

    def enter(self, guest: Guest) -> None:
        """In the place of the guest of this rank that was there before, if there was one."""
        if before := self.guests.get(guest.rank):
            self._count(before.phase, -1)
        self.guests[guest.rank] = guest
        self._count(guest.phase, 1)

    def move(self, guest: Guest, phase: str) -> None:
        """Raises ValueError for what is no phase."""
        PHASES.index(phase)
        self._count(guest.phase, -1)
        guest.phase, guest.since = phase, time.monotonic()
        self._count(phase, 1)

    def _count(self, phase: str, change: int) -> None:
        for reached in PHASES[: PHASES.index(phase) + 1]:
            self._reached[reached] += change

    def all_reached(self, phase: str) -> bool:
        return self._reached[phase] == self.world_size

    def dead(self) -> list[Guest]:
        """Those who left before they were up, the first to leave first."""
        lost = (g for g in self.guests.values() if g.gone and not g.reached("up"))
        return sorted(lost, key=lambda guest: guest.since)

    def missing(self, phase: str) -> str:
        """'4 of 8 ranks are missing: ranks 4-5 never arrived (nobody came from n3), rank 6 on n4 ...' or ''."""
        absent = [rank for rank in range(self.world_size) if rank not in self.guests]
        late = [g for g in self.guests.values() if not g.reached(phase)]
        if not absent and not late:
            return ""
        parts = []
        if absent:
            seen = {guest.host for guest in self.guests.values()}
            empty = [host for host in dict.fromkeys(self.hosts) if host not in seen]
            where = f" (nobody came from {_cut(nodelist.compress(empty))})" if empty else ""
            parts.append(f"{_cut(ranks(absent))} never arrived{where}")
        for guest in sorted(late, key=lambda guest: guest.rank)[:16]:
            waited = time.monotonic() - guest.since
            parts.append(
                f"rank {guest.rank} on {guest.host} (pid {guest.pid}) {guest.phase} {waited:.0f} s ago and no further"
            )
        if len(late) > 16:
            parts.append(f"and {len(late) - 16} more")
        return f"{len(absent) + len(late)} of {self.world_size} ranks are missing: " + "; ".join(parts)

    def first_missing(self, phase: str) -> tuple[int | None, str]:
        """Return the rank and the host that missing() names first. Either is None or '' where it is not certain that
        they belong together: which node an absent rank would be on is not known here."""
        absent = [rank for rank in range(self.world_size) if rank not in self.guests]
        if absent:
            seen = {guest.host for guest in self.guests.values()}
            empty = [host for host in dict.fromkeys(self.hosts) if host not in seen]
            return (absent[0] if len(absent) == 1 or not empty else None), (empty[0] if empty else "")
        late = [guest for guest in self.guests.values() if not guest.reached(phase)]
        first = min(late, key=lambda guest: guest.rank, default=None)
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
