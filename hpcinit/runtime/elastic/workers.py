"""The ranks of a node as its agent's children: each in its own session, with its own log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts import children, rank_log

LOOK_S = 0.02


@dataclass(frozen=True)
class Start:
    """What a rank is started with. env: in place of this process's. cpus: that it may use; None: as this process."""

    env: Mapping[str, str]
    log: Path
    cpus: Set[int] | None = None


class Workers:
    """Started together. Numbers are local ranks.

    A rank that has ended is not reaped before stop() has signalled its process group: until then the kernel gives its
    number, which is also the group's, to no other process.
    """

    def __init__(
        self,
        command: Sequence[str],
        starts: Sequence[Start],
        around: Callable[[Callable[[], subprocess.Popen[bytes]]], subprocess.Popen[bytes]],
    ) -> None:
        """around: calls what it is given, which starts a process. Raises OSError; none is left running then."""
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for start in starts:
                self._processes.append(around(lambda start=start: _start(command, start)))  # type: ignore[misc]
        except BaseException:
            self.stop(0.0)
            raise

    def pids(self) -> dict[int, int]:
        return {number: process.pid for number, process in enumerate(self._processes)}

    def ended(self) -> dict[int, int]:
        """Exit status by rank of those that have ended; -9 for one that SIGKILL has ended."""
        found = ((number, children.status(process)) for number, process in enumerate(self._processes))
        return {number: status for number, status in found if status is not None}

    def signal(self, number: int) -> None:
        """To those that run, and to what they have started."""
        for process in self._processes:
            if children.status(process) is None:
                children.signal_group(process, number)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, and after the grace time SIGKILL to whatever is left of any rank."""
        if len(self.ended()) < len(self._processes):
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and len(self.ended()) < len(self._processes):
                time.sleep(LOOK_S)
        for process in self._processes:
            children.signal_group(process, signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # in the kernel, for a disk or a driver: Slurm's to deal with
                process.wait(max(grace_s, 1.0))


def _start(command: Sequence[str], start: Start) -> subprocess.Popen[bytes]:
    before = os.sched_getaffinity(0)
    with rank_log.opened(start.log) as log:
        try:
            if start.cpus:
                os.sched_setaffinity(0, start.cpus)  # of this thread, and of what it starts
            return subprocess.Popen(
                command, env=dict(start.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            if start.cpus:
                os.sched_setaffinity(0, before)
