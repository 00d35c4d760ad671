"""The forked ranks of a node, from the fork to the end of the last one: signals, reaping, exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcinit.base import signals
from hpcinit.base.console import say
from hpcinit.base.errors import HpcinitError
from hpcinit.base.supervisor import Child, Supervisor
from hpcinit.base.text import ranges
from hpcinit.launch import process_title
from hpcinit.launch.signal_monitor import FORWARDED, SignalMonitor
from hpcinit.records import error_records, job_log, run_folder
from hpcinit.records.spec import Launch, Spec
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.rendezvous import join, startup_events
from hpcinit.runtime import program
from hpcinit.world import World, forked, launchers
from hpcinit.world.forked import Node

LISTENED = (*FORWARDED, signal.SIGCHLD)
GRACE_S = 0.5  # from SIGTERM to SIGKILL, for ranks whose peer has failed
SAVING_S = 30.0  # for those that were told to end before one of them has ended: the default of Slurm's KillWait
STUCK_S = 10.0  # from SIGKILL on, for a rank that the kernel does not let go


class ForkSupervisor(Supervisor):
    """The ranks of `here`, by their number in the run. In each child fork() returns its local rank, in the parent None;
    then wait()."""

    def __init__(self, here: Node, launch: Launch, folder: Path, monitor: SignalMonitor) -> None:
        super().__init__()
        self.stuck_s = STUCK_S
        self._here, self._launch, self._folder, self._monitor = here, launch, folder, monitor
        self._first: Child | None = None  # that ended badly
        self._told = False  # somebody has told the step to end

    def fork(self, become: Callable[[int, int], None]) -> int | None:
        """become(local_rank, parent): what makes a rank of the child; its signals are blocked until then."""
        parent = os.getpid()
        signals.block(LISTENED)
        sys.stdout.flush()
        sys.stderr.flush()
        for local_rank in range(self._here.ranks_per_node):
            if self.fork_child(self._here.first + local_rank):
                self._monitor.forget()
                become(local_rank, parent)
                signals.unblock(LISTENED)
                return local_rank
        return None

    def wait(self) -> int:
        """Until the last has ended. Returns the exit status that this process should end with; -9 for SIGKILL."""
        self.supervise(signals.Descriptor(LISTENED).wait)
        self._monitor.end()
        return self._status()

    def on_signal(self, number: int) -> bool:
        self._told = self._told or number in (signal.SIGTERM, signal.SIGINT)
        if not self._monitor.saw(number):
            self.signal(number)
        return False

    def on_exit(self, child: Child) -> bool:
        """One more has ended: say so if that is bad, and end the others if they are to end with it."""
        child.signal(signal.SIGKILL)  # what it leaves behind
        child.reap()
        self._note(child)
        return False

    def on_stuck(self, running: Sequence[Child]) -> None:
        for child in running:
            say(
                f"rank {child.number} on {self._here.host} (pid {child.pid}) has not ended {self.stuck_s:g} s after "
                f"SIGKILL, its state is {process_title.stuck(child.pid)}: it is left to the kernel"
            )

    def _note(self, child: Child) -> None:
        bad = child.code != 0
        if bad and not self._told and (self._first is None or not self._launch.kill_on_bad_exit):
            say(f"error: {self._here.host}: rank {child.number}: {job_log.how(child.code or 0)}")
            if quoted := self._quote(child.number):
                say(quoted)
        ends_others = bad and self._first is None and self._launch.kill_on_bad_exit
        if bad and self._first is None:
            self._first = child
        if ends_others and (others := self.left()):
            self._end(others)
        elif self._launch.wait_s and self.deadline() is None and self.left():
            self.kill_in(self._launch.wait_s)

    def _end(self, others: Sequence[Child]) -> None:
        if self._told:  # they know, and may be saving
            self.kill_in(SAVING_S)
            return
        names = ranges(child.number for child in others)
        who, does = ("ranks", "end") if len(others) > 1 else ("rank", "ends")
        say(f"{who} {names} on {self._here.host} {does} with it")
        self.signal(signal.SIGTERM)
        self.kill_in(GRACE_S)

    def _quote(self, rank: int) -> str:
        """The rank's own error, or the last line of its log."""
        found = error_records.read(self._folder / run_folder.ERRORS, f"rank-{rank}.json")
        recent = [one.record.error for one in found if one.record.time > time.time() - 60]
        if recent:
            return f"rank {rank} on {self._here.host} said: {recent[-1].splitlines()[-1][:500]}"
        try:
            with (self._folder / run_folder.RANK_LOG.format(rank=rank)).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"the last line of rank {rank} on {self._here.host}: {lines[-1][:500]}" if lines else ""

    def _status(self) -> int:
        """Of the first that ended badly; with kill_on_bad_exit=false the highest, as srun has it."""
        if self._launch.kill_on_bad_exit:
            return (self._first.code if self._first else 0) or 0
        return max((child.code or 0 for child in self.children.values()), key=_number, default=0)


def _number(code: int) -> int:
    """As a shell says it: 128 and the signal."""
    return code if code >= 0 else 128 - code


def end_as(code: int) -> int:
    """End this process by the signal that ended the rank, so that Slurm says the same of it; or return its code."""
    if code >= 0:
        return code
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415 - for this end only

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own
    sys.stdout.flush()
    signals.end_by(-code)
    return 128 - code  # not reached


# A node's ranks before they are forked: what others are told of them while their parent imports, and if that fails.


def announce_prefork(here: Node, spec: Spec, folder: Path) -> None:
    """In the timeline: they have come as far as their parent. One that hangs in an import is found there."""
    for local_rank in range(here.ranks_per_node):
        startup_events.announce(_world(here, spec, local_rank), folder)


def fail_prefork(here: Node, spec: Spec, folder: Path, error: HpcinitError) -> None:
    """As the first of them would: leave the error in its log and its record, and tell it to others that go on."""
    world = _world(here, spec, 0)
    with contextlib.suppress(OSError), (folder / run_folder.RANK_LOG.format(rank=world.rank)).open("a") as log:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__, file=log)
        log.write(f"hpcinit: error: {error}\n")
    program.record(error, world)
    if not spec.launch.kill_on_bad_exit:  # else Slurm ends them, and no rank is to wait for rank 0
        timeout = spec.comm.timeout.start_up(world.nodes, left_of_job(os.environ, time.time()))
        with contextlib.suppress(HpcinitError):
            join.join_rendezvous(world, spec, timeout)
            join.leave_rendezvous(str(error))


def _world(here: Node, spec: Spec, local_rank: int) -> World:
    return launchers.read(forked.environment(os.environ, here, local_rank, os.getpid(), spec.launch.cpus))
