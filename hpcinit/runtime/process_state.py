"""The state of this process as a rank: one object, `state`, instead of global variables in many modules.

A process is one rank in one attempt, with one default process group and one training run. All modules of `runtime`
store such state only here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hpcinit.records import timeline
    from hpcinit.rendezvous.rendezvous_client import RendezvousEndpoint
    from hpcinit.runtime.shared_progress import Slot

START = "start-up"


class SignalWatch(Protocol):
    """The interface of a Watch (runtime/lifecycle/signal_watch.py) that this module needs when the process forks."""

    wanted: set[int]

    def close(self) -> None: ...


class OutputWatch(Protocol):
    """The interface of an OutputWatch (runtime/lifecycle/output_watch.py) that other modules need."""

    def stop(self, failed: bool = False) -> None: ...


class TrainingRecord(Protocol):
    """The methods of a TrainingRecord (runtime/lifecycle/training_record.py) that other modules call."""

    def step(self, step: int) -> None: ...

    def switch(self, what: str) -> str: ...

    def loaded(self, step: int) -> None: ...

    def built(self) -> None: ...


@dataclass
class Timeline:
    """This process's access to the start-up timeline.

    writer: writes the node's file. None before the start and after the last event.
    file: the path of that file.
    opened: whether this process has ever opened the file.
    """

    writer: timeline.Writer | None = None
    file: Path | None = None
    rank: int = -1
    opened: bool = False

    def close(self) -> None:
        """Close this process's copy of the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


@dataclass(eq=False)
class DeclaredPhase:
    """A phase that the program has declared and that has not ended.

    began_s: when it started, in seconds of time.monotonic().
    limit_s: for how many seconds silence does not count as a hang, or None for the default.
    """

    began_s: float
    limit_s: float | None


@dataclass
class Phase:
    """What the program is doing now, for reports.

    name: the phase.
    step: the last training step that was reported, or -1.
    ended_s: when the last declared phase ended, in seconds of time.monotonic().
    """

    name: str = START
    step: int = -1
    declared: list[DeclaredPhase] = field(default_factory=list)
    ended_s: float = 0.0


@dataclass
class LoaderWorkers:
    """The DataLoader workers of this rank. They ignore the signals after which the rank saves and stops.

    rank_pid: the process that called install().
    numbers: the signals after which a rank saves and stops.
    terminated: the process ids of workers that this rank ended itself.
    on_death: a function that is called with torch's error when a worker dies. It returns True if the rank continues
        without the worker.
    """

    rank_pid: int | None = None
    numbers: frozenset[int] = frozenset()
    terminated: set[int] = field(default_factory=set)
    on_death: Callable[[str], bool] | None = None


@dataclass
class ProcessState:
    """All state of this process. The defaults are the values before hpcinit does anything.

    runtime: the Runtime that init() returned. None before init() and after shutdown().
    rendezvous: the current rendezvous.
    rendezvous_count: how many rendezvous this process has had. Ranks with different counts never connect.
    agent_store_rounds: how often torchrun's store was used. Its keys stay after each use.
    stuck_group: why a process group of this process could not be destroyed, or ''.
    checkpoint_group: the group in which ranks agree on a checkpoint.
    claimed: (folder, token) for each checkpoint folder that this process has locked against other jobs.
    damaged: the damage that load() found, by the path of the checkpoint and the id of its save.
    removal: the last thread that removes old checkpoints.
    background_saves: this rank's saves with run.save(wait=False). None before the first.
    output_watch: this rank's OutputWatch, or None before it starts.
    stacks_of: the id of the process that can answer `hpcinit stacks`: this process, its parent, or 0 for none.
    slot: where this rank reports its progress to the fork server. None without restart.warm.
    stopped_early: whether the ranks agreed to stop before the program's end.
    stop_not_recorded: whether the ranks agreed to stop early but no file records it.
    training_record: what rank 0 records for `hpcinit report`, if there is a run folder.
    """

    runtime: Any = None
    rendezvous: RendezvousEndpoint | None = None
    rendezvous_count: int = 0
    agent_store_rounds: int = 0
    stuck_group: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    phase: Phase = field(default_factory=Phase)
    loader_workers: LoaderWorkers = field(default_factory=LoaderWorkers)
    early_signals: set[int] = field(default_factory=set)  # arrived before a Watch listened for them
    watches: set[SignalWatch] = field(default_factory=set)  # those that are not closed
    masks: dict[int, set[int]] = field(default_factory=dict)  # blocked signals of threads that are in fork()
    checkpoint_group: ProcessGroup | None = None
    claimed: set[tuple[Path, str]] = field(default_factory=set)
    damaged: dict[tuple[Path, str], str] = field(default_factory=dict)
    removal: threading.Thread | None = None
    background_saves: Any = None
    output_watch: OutputWatch | None = None
    stacks_of: int = 0
    slot: Slot | None = None
    stopped_early: bool = False
    stop_not_recorded: bool = False
    training_record: TrainingRecord | None = None

    def reset(self) -> None:
        """Reset every field to its default, for tests. Nothing is closed."""
        vars(self).update(vars(ProcessState()))

    def report(self, name: str, value: float | None = None) -> None:
        """Report a value to this rank's fork server, if there is one.

        name: one of shared_progress.NAMES.
        value: a step, or None for the current time.
        """
        if self.slot is not None:
            self.slot.report(name, value)

    def leave_to_the_parent(self) -> None:
        """In a forked child, close the parent's files and connections, and reset what only the parent may use.

        Keep the state that error records need, such as the phase, because the child (for example a DataLoader worker)
        may fail.
        """
        self.runtime = self.background_saves = self.training_record = None
        if self.rendezvous is not None:
            self.rendezvous.forget()
            self.rendezvous = None
        self.timeline.close()
        self.early_signals.clear()
        for watch in list(self.watches):
            watch.close()


state = ProcessState()
os.register_at_fork(after_in_child=state.leave_to_the_parent)
