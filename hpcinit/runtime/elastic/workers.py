"""The ranks of a node as its agent's children: each in its own session, with its own log."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpcinit.facts import rank_log
from hpcinit.facts.supervisor import Child, Supervisor


@dataclass(frozen=True)
class Start:
    """What a rank is started with. env: in place of this process's. cpus: that it may use; None: as this process."""

    env: Mapping[str, str]
    log: Path
    cpus: Set[int] | None = None


class Workers(Supervisor):
    """Started together. Numbers are local ranks. torch's agent asks for those that have ended, and stops all."""

    def __init__(
        self,
        command: Sequence[str],
        starts: Sequence[Start],
        around: Callable[[Callable[[], Child]], Child],
    ) -> None:
        """around: calls what it is given, which starts a process. Raises OSError; none is left running then."""
        super().__init__()
        try:
            for number, start in enumerate(starts):
                around(partial(self._start, number, command, start))
        except BaseException:
            self.stop(0.0)
            raise

    def pids(self) -> dict[int, int]:
        return {number: child.pid for number, child in self.children.items()}

    def stop(self, grace_s: float, reap_s: float | None = None) -> None:
        """One that is in the kernel, for a disk or a driver, is left to Slurm."""
        super().stop(grace_s, max(grace_s, 1.0) if reap_s is None else reap_s)

    def _start(self, number: int, command: Sequence[str], start: Start) -> Child:
        before = os.sched_getaffinity(0)
        with rank_log.opened(start.log) as log:
            try:
                if start.cpus:
                    os.sched_setaffinity(0, start.cpus)  # of this thread, and of what it starts
                return self.start(number, command, start.env, output=log)
            finally:
                if start.cpus:
                    os.sched_setaffinity(0, before)
