"""The forked ranks of a node, from the fork to the last one's end: signals, reaping, and how the parent ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts import error_records, job_log, runfolder, signals
from hpcinit.facts.forked import Node
from hpcinit.facts.ranges import ranges
from hpcinit.facts.saying import say
from hpcinit.facts.spec import Launch
from hpcinit.runtime.fork import process
from hpcinit.runtime.fork.witness import FORWARDED, Witness

LISTENED = (*FORWARDED, signal.SIGCHLD)
GRACE_S = 0.5  # from SIGTERM to SIGKILL, for ranks whose peer has failed
SAVING_S = 30.0  # for those that were told to end before one of them has ended: the default of Slurm's KillWait
STUCK_S = 10.0  # from SIGKILL on, for a rank that the kernel does not let go


@dataclass
class Rank:
    """rank: of the whole run. status: as os.waitpid has it; None while it runs."""

    rank: int
    pid: int
    status: int | None = None


class Family:
    """The ranks of `here`. In each child fork() returns its local rank, in the parent None; then wait()."""

    def __init__(self, here: Node, launch: Launch, folder: Path, witness: Witness) -> None:
        self._here, self._launch, self._folder, self._witness = here, launch, folder, witness
        self._ranks: list[Rank] = []
        self._first: Rank | None = None  # that ended badly
        self._told = False  # somebody has told the step to end
        self._kill_at: float | None = None
        self._leave_at: float | None = None

    def fork(self, become: Callable[[int, int], None]) -> int | None:
        """become(local_rank, parent): what makes a rank of the child; its signals are blocked until then."""
        parent = os.getpid()
        signals.block(LISTENED)
        sys.stdout.flush()
        sys.stderr.flush()
        for local_rank in range(self._here.ranks_per_node):
            pid = os.fork()
            if pid == 0:
                self._witness.forget()
                become(local_rank, parent)
                signals.unblock(LISTENED)
                return local_rank
            self._ranks.append(Rank(self._here.first + local_rank, pid))
        return None

    def wait(self) -> int:
        """Until the last has ended. Returns what os.waitpid would say of this process, if it ends as it should."""
        came = signals.Descriptor(LISTENED)
        while running := self._running():
            deadline = self._deadline()
            if deadline is not None and time.monotonic() >= deadline:
                if self._leave_at is not None and self._kill_at is None:
                    self._say_stuck(running)
                    break
                self._next(running)
            number = came.wait(1.0 if deadline is None else deadline - time.monotonic())
            if number is not None and number != signal.SIGCHLD:
                self._pass_on(number)
            self._reap()
        self._witness.end()
        return self._status()

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.status is None]

    def _deadline(self) -> float | None:
        return self._kill_at if self._kill_at is not None else self._leave_at

    def _next(self, running: Sequence[Rank]) -> None:
        self._signal(running, signal.SIGKILL)
        self._kill_at, self._leave_at = None, time.monotonic() + STUCK_S

    def _pass_on(self, number: int) -> None:
        self._told = self._told or number in (signal.SIGTERM, signal.SIGINT)
        if not self._witness.saw(number):
            self._signal(self._running(), number)

    def _signal(self, to: Sequence[Rank], number: int) -> None:
        for rank in to:
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(rank.pid, number)  # what it has started, too
                except ProcessLookupError:  # it has no session yet
                    os.kill(rank.pid, number)

    def _reap(self) -> None:
        for rank in self._running():
            if os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(
                    rank.pid, signal.SIGKILL
                )  # what it leaves behind; its number is not given away before waitpid
            rank.status = os.waitpid(rank.pid, 0)[1]
            self._note(rank)

    def _note(self, rank: Rank) -> None:
        """One more has ended: say so if that is bad, and end the others if they are to end with it."""
        bad = rank.status != 0
        if bad and not self._told and (self._first is None or not self._launch.kill_on_bad_exit):
            how = job_log.how(os.waitstatus_to_exitcode(rank.status or 0))
            say(f"error: {self._here.host}: rank {rank.rank}: {how}")
            if quoted := self._quote(rank.rank):
                say(quoted)
        ends_others = bad and self._first is None and self._launch.kill_on_bad_exit
        if bad and self._first is None:
            self._first = rank
        if ends_others and (others := self._running()):
            self._end(others)
        elif self._launch.wait_s and self._deadline() is None and self._running():
            self._kill_at = time.monotonic() + self._launch.wait_s

    def _end(self, others: Sequence[Rank]) -> None:
        if self._told:  # they know, and may be saving
            self._kill_at = time.monotonic() + SAVING_S
            return
        names = ranges(rank.rank for rank in others)
        who, does = ("ranks", "end") if len(others) > 1 else ("rank", "ends")
        say(f"{who} {names} on {self._here.host} {does} with it")
        self._signal(others, signal.SIGTERM)
        self._kill_at = time.monotonic() + GRACE_S

    def _quote(self, rank: int) -> str:
        """The rank's own error, or the last line of its log."""
        found = error_records.read(self._folder / runfolder.ERRORS, f"rank-{rank}.json")
        recent = [one.record.error for one in found if one.record.time > time.time() - 60]
        if recent:
            return f"rank {rank} on {self._here.host} said: {recent[-1].splitlines()[-1][:500]}"
        try:
            with (self._folder / runfolder.RANK_LOG.format(rank=rank)).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"the last line of rank {rank} on {self._here.host}: {lines[-1][:500]}" if lines else ""

    def _say_stuck(self, running: Sequence[Rank]) -> None:
        for rank in running:
            say(
                f"rank {rank.rank} on {self._here.host} (pid {rank.pid}) has not ended {STUCK_S:g} s after SIGKILL, "
                f"its state is {process.stuck(rank.pid)}: it is left to the kernel"
            )

    def _status(self) -> int:
        """Of the first that ended badly; with kill_on_bad_exit=false the highest, as srun has it."""
        if self._launch.kill_on_bad_exit:
            return (self._first.status if self._first else 0) or 0
        return max((rank.status or 0 for rank in self._ranks), key=_number, default=0)


def _number(status: int) -> int:
    """As a shell says it: 128 and the signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_as(status: int) -> int:
    """End this process by the signal that ended the rank, so that Slurm says the same of it; or return its code."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415 - for this end only

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own
    sys.stdout.flush()
    signals.end_by(-code)
    return 128 - code  # not reached
