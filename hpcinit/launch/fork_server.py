"""The fork server of a node, with launch=fork: forks the node's ranks, sets them up, and supervises them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcinit.base import processes, signals
from hpcinit.base.console import say
from hpcinit.base.errors import HpcinitError
from hpcinit.base.supervisor import Child, Supervisor
from hpcinit.base.text import ranges
from hpcinit.launch import rank_binding
from hpcinit.launch.signal_monitor import FORWARDED, SignalMonitor
from hpcinit.launch.warm_restart import STOPPING, WarmRestarts
from hpcinit.records import job_log, rank_log, run_folder
from hpcinit.records.spec import Launch, Spec
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.runtime import program, startup
from hpcinit.runtime.lifecycle import signal_watch
from hpcinit.world import World, launchers
from hpcinit.world.launchers.slurm_step import ForkNode, fork_environment

HANDLED = (*FORWARDED, signal.SIGCHLD)
GRACE_S = 0.5  # time from SIGTERM to SIGKILL for ranks, if another rank has failed
NEW_S = 1.0  # a signal this soon after a fork may have been sent before the fork
SAVING_S = 30.0  # time until SIGKILL for ranks that may be saving after a stop signal: Slurm's default KillWait
STUCK_S = 10.0  # how long to wait after SIGKILL for a rank that is stuck in the kernel


class ForkSupervisor(Supervisor):
    """Supervises the ranks of the node `here`. The keys of `children` are rank numbers.

    fork() returns the local rank in each child and None in the parent, which must then call wait().
    """

    def __init__(
        self,
        here: ForkNode,
        launch: Launch,
        folder: Path,
        monitor: SignalMonitor,
        restarts: WarmRestarts | None = None,
    ) -> None:
        """Create the supervisor.

        restarts: the warm restarts of this step, or None without restart.warm.
        """
        super().__init__()
        self._restarts = restarts
        self.ended_by_order = False  # the first server ordered to end the ranks, because another node's rank failed
        self._forked_at = 0.0
        self.stuck_s = STUCK_S
        self._here, self._launch, self._folder, self._monitor = here, launch, folder, monitor
        self._first_failed: Child | None = None  # the first rank that failed
        self._terminated: set[int] = set()  # ranks that got SIGTERM because another one failed
        self.stop_received = False  # a stop signal has arrived

    def fork(self, become: Callable[[int, int], None]) -> int | None:
        """Fork the ranks. Return the local rank in each child, and None in the parent.

        become: a function that makes the child a rank. Its arguments are the local rank and the parent's process id.
        Until it returns, signals are blocked in the child.
        """
        parent = os.getpid()
        signals.block(HANDLED)
        sys.stdout.flush()
        sys.stderr.flush()
        for local_rank in range(self._here.ranks_per_node):
            if self.fork_child(self._here.first + local_rank):
                self._monitor.forget()
                if self._restarts is not None:
                    self._restarts.forget()
                become(local_rank, parent)
                signals.unblock(HANDLED)
                return local_rank
        self._forked_at = time.monotonic()
        return None

    def wait(self) -> int:
        """Wait until all ranks have ended.

        Return the exit status of the rank that failed first (-9 for SIGKILL), or 0 if none failed.
        """
        received = signals.Descriptor(HANDLED)
        self.supervise(received.wait if self._restarts is None else partial(self._restarts.wait, self, received))
        received.close()
        return self._exit_status()

    def on_signal(self, number: int) -> bool:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._say_succeeded()
            self.stop_received = True
        received = self._monitor.also_received(number)
        # Even if the monitor got the signal, ranks that a restart has just forked may not have got it.
        new = self._restarts is not None and time.monotonic() - self._forked_at < NEW_S
        if not received or new:
            self.signal(number)
        if self._restarts is not None and number in STOPPING:
            self._restarts.stop()
        return False

    def end_ranks(self) -> None:
        """End the ranks, so that all nodes can start new ranks.

        After a stop signal, do nothing, because the ranks may be saving.
        """
        if not self.stop_received and self.left():
            self.ended_by_order = True
            self._terminate_running()

    def on_exit(self, child: Child) -> bool:
        """Report a rank that failed. If kill_on_bad_exit is set, end the other ranks."""
        child.signal(signal.SIGKILL)  # processes that the rank left running
        child.reap()
        if not self.ended_by_order:
            self._report_exit(child)
        if self._restarts is not None and child.code:
            self._restarts.report_failure(child, child.number in self._terminated)
        return False

    def on_stuck(self, running: Sequence[Child]) -> None:
        for child in running:
            say(
                f"rank {child.number} on {self._here.host} (pid {child.pid}) is still running {self.stuck_s:g} s after "
                f"SIGKILL, in state {processes.stuck(child.pid)}; hpcinit no longer waits for this rank"
            )

    def _say_succeeded(self) -> None:
        """Print which ranks ended with status 0 before another rank failed. `hpcinit why` needs this information."""
        if self._first_failed is None and not self.stop_received and self.left():
            for child in self.children.values():
                if child.code == 0:
                    say(f"{self._here.host}: rank {child.number}: {job_log.SUCCEEDED}")

    def _report_exit(self, child: Child) -> None:
        """If a rank failed, print its exit code or signal. End the other ranks if kill_on_bad_exit is set."""
        bad = child.code != 0
        if bad:
            self._say_succeeded()
        if bad and not self.stop_received and (self._first_failed is None or not self._launch.kill_on_bad_exit):
            say(f"error: {self._here.host}: rank {child.number}: {job_log.how(child.code or 0)}")
        ends_others = bad and self._first_failed is None and self._launch.kill_on_bad_exit
        if bad and self._first_failed is None:
            self._first_failed = child
        if ends_others and (others := self.left()):
            self._end_others(others)
        elif self._launch.wait_s and self.deadline() is None and self.left():
            self.kill_in(self._launch.wait_s)

    def _end_others(self, others: Sequence[Child]) -> None:
        """Terminate the remaining ranks. After a stop signal, give them time to save."""
        if self.stop_received:  # the signal has also reached the ranks, and they may be saving
            self.kill_in(SAVING_S)
            return
        names = ranges(child.number for child in others)
        who = "ranks" if len(others) > 1 else "rank"
        say(f"stopping {who} {names} on {self._here.host} too, because of that failure")
        self._terminate_running()

    def _terminate_running(self) -> None:
        self._terminated |= {child.number for child in self.running()}
        self.terminate(GRACE_S)

    def _exit_status(self) -> int:
        """Return the exit status of the rank that failed first.

        With kill_on_bad_exit=false, return the highest exit status, as srun does.
        """
        if self._launch.kill_on_bad_exit:
            return (self._first_failed.code if self._first_failed else 0) or 0
        return max((child.code or 0 for child in self.children.values()), key=_shell_status, default=0)


def _shell_status(code: int) -> int:
    """Return the exit status that a shell reports: 128 plus the number of the signal if `code` is negative."""
    return code if code >= 0 else 128 - code


def end_as(code: int) -> int:
    """Return `code`, a rank's exit status. If it is negative, end this process by the signal that ended the rank.

    Slurm then reports this signal.
    """
    if code >= 0:
        return code
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # noqa: PLC0415 - only needed here

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # this process needs no core file: the rank has written one
    sys.stdout.flush()
    signals.end_by(-code)
    return 128 - code  # not reached


# Before the fork: the fork server reports on behalf of its ranks, which do not exist yet.


def announce_prefork(here: ForkNode, spec: Spec, folder: Path) -> None:
    """Write the fork server's start-up events to the timeline of each of its ranks.

    Then the timeline lists the ranks even if an import hangs before the fork.
    """
    for local_rank in range(here.ranks_per_node):
        startup.announce(_world_of(here, spec, local_rank), folder)


def fail_prefork(here: ForkNode, spec: Spec, folder: Path, error: HpcinitError) -> None:
    """Record an error of the fork server as an error of the node's first rank, which does not exist yet.

    If Slurm does not end the other ranks (kill_on_bad_exit=false), also report the error to them. Do nothing on a spare
    node, which has no ranks.
    """
    if not here.ranks_per_node:
        return
    world = _world_of(here, spec, 0)
    with contextlib.suppress(OSError), (folder / run_folder.RANK_LOG.format(rank=world.rank)).open("a") as log:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__, file=log)
        log.write(f"hpcinit: error: {error}\n")
    program.record(error, world)
    if not spec.launch.kill_on_bad_exit:  # with kill_on_bad_exit, Slurm ends all ranks
        timeout = spec.comm.timeout.start_up(world.nodes, left_of_job(os.environ, time.time()))
        with contextlib.suppress(HpcinitError):
            startup.join_rendezvous(world, spec, timeout)
            startup.leave_rendezvous(str(error))


def _world_of(here: ForkNode, spec: Spec, local_rank: int) -> World:
    return launchers.read(fork_environment(os.environ, here, local_rank, os.getpid(), spec.launch.cpus))


# After the fork: each child gets its session, log, environment, CPUs, threads and random numbers.


def become_child(
    here: ForkNode,
    spec: Spec,
    folder: Path,
    local_rank: int,
    parent: int,
    cpus: list[set[int]] | None,
    restarts: WarmRestarts | None = None,
) -> None:
    """Turn this process, a newly forked child, into the local rank `local_rank` of the node `here`.

    folder: the run folder.
    parent: the process id of the fork server.
    cpus: the CPUs of each local rank, or None to keep the parent's.
    restarts: the warm restarts of this step, or None.
    """
    os.setsid()
    processes.die_with_parent(parent)
    rank = here.first + local_rank
    _redirect_streams(folder / run_folder.RANK_LOG.format(rank=rank))
    env = fork_environment(os.environ, here, local_rank, os.getpid(), spec.launch.cpus)
    more = restarts.become_child(local_rank) if restarts is not None else {}
    _replace_environment({**env, **rank_binding.devices(spec.launch, local_rank, env), **more})
    if cpus is not None:
        rank_binding.apply(cpus[local_rank])
    _set_thread_count(None if cpus is None else len(cpus[local_rank]))
    _reseed_numpy()
    if spec.stop.signal and spec.program.kind != "command":
        signal_watch.hold(signal.Signals[f"SIG{spec.stop.signal}"])


def _redirect_streams(path: Path) -> None:
    """Append stdout and stderr to the file `path`, like srun's --open-mode=append, and make stdin empty.

    If the file can't be opened, keep the parent's stdout and stderr.
    """
    with rank_log.opened(path) as log, open(os.devnull, "rb") as nothing:  # noqa: PTH123 - no path
        os.dup2(nothing.fileno(), 0)
        if log is not None:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)


def _replace_environment(env: Mapping[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})


def _set_thread_count(cpus: int | None) -> None:
    """Make torch use `cpus` threads, unless OMP_NUM_THREADS is set.

    Otherwise torch would use as many threads as the fork server has CPUs.
    """
    torch = sys.modules.get("torch")
    if torch is not None and cpus is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cpus)


def _reseed_numpy() -> None:
    """Reseed NumPy's global generator if NumPy is imported. Otherwise all ranks would draw the same numbers.

    Python's generator reseeds itself after a fork. torch's generator has the same seed in every process anyway.
    """
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed()
