"""The state of this process as a rank: one mutable object, `state`, instead of global variables in many modules.

A process is one rank with one start, one default process group and one training run. The modules of `runtime` keep such
state only here.
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
    """The part of a Watch (runtime/lifecycle/signal_watch.py) that a fork needs: its signals, and its end."""

    wanted: set[int]

    def close(self) -> None: ...


class OutputWatch(Protocol):
    """The part of an OutputWatch (runtime/lifecycle/output_watch.py) that the end of a program needs."""

    def stop(self, failed: bool = False) -> None: ...


class TrainingRecord(Protocol):
    """What the calls of a program need of a TrainingRecord (runtime/lifecycle/training_record.py)."""

    def step(self, step: int) -> None: ...

    def switch(self, what: str) -> str: ...

    def loaded(self, step: int) -> None: ...

    def built(self) -> None: ...


@dataclass
class Timeline:
    """This process's part of the start-up timeline.

    writer: of the node's file, or None before the start and after the last event. file: its path. opened: whether this
    process has opened it.
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
    """An active phase. began_s: by time.monotonic(). limit_s: how long silence is expected; None: the default."""

    began_s: float
    limit_s: float | None


@dataclass
class Phase:
    """What the program does now, for reports.

    name: the phase. step: the last one reported, or -1. ended_s: when the last declared phase ended, by
    time.monotonic().
    """

    name: str = START
    step: int = -1
    declared: list[DeclaredPhase] = field(default_factory=list)
    ended_s: float = 0.0


@dataclass
class LoaderWorkers:
    """The DataLoader workers of this rank. They ignore the signals that make it save.

    rank_pid: the process in which install() was called. numbers: the signals that make a rank save and stop.
    terminated: ids of protected processes that this rank ended itself. on_death: called with torch's error; returns
    True if the rank continues without the worker.
    """

    rank_pid: int | None = None
    numbers: frozenset[int] = frozenset()
    terminated: set[int] = field(default_factory=set)
    on_death: Callable[[str], bool] | None = None


@dataclass
class ProcessState:
    """All state of this process. The defaults are the values before hpcinit does anything.

    runtime: the Runtime that init() returned, or None before it and after shutdown(). Its class uses this module.
    rendezvous: the current one. rendezvous_count: how many there were, to distinguish ranks of different ones.
    agent_store_rounds: how often torchrun's store was used; its keys remain.
    stuck_group: why a process group of this process could not be destroyed, or ''.
    checkpoint_group: the group in which ranks agree on a checkpoint.
    claimed: (folder, token) of the checkpoint folders that this process claimed.
    damaged: (checkpoint, its save) -> what load() found wrong in it.
    removal: the last thread that removes old checkpoints.
    background_saves: this rank's, of run.save(wait=False); None before the first. Its class uses this module.
    output_watch: this rank's, or None before it starts.
    stacks_of: the process that answers `hpcinit stacks`: this one, its parent before a fork, or 0 for none.
    slot: where a rank of a fork server with restart.warm reports its progress, None for other ranks.
    stopped_early: the ranks agreed to stop before the program's end. stop_not_recorded: and no file records it.
    training_record: of rank 0 in a run folder, for `hpcinit report`.
    """

    runtime: Any = None
    rendezvous: RendezvousEndpoint | None = None
    rendezvous_count: int = 0
    agent_store_rounds: int = 0
    stuck_group: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    phase: Phase = field(default_factory=Phase)
    loader_workers: LoaderWorkers = field(default_factory=LoaderWorkers)
    early_signals: set[int] = field(default_factory=set)  # delivered before a watch was open
    watches: set[SignalWatch] = field(default_factory=set)  # not closed
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
        """Reset every field to its default, for tests. It closes nothing."""
        vars(self).update(vars(ProcessState()))

    def report(self, name: str, value: float | None = None) -> None:
        """Report a value of shared_progress.NAMES to this rank's fork server, if that wants it."""
        if self.slot is not None:
            self.slot.report(name, value)

    def leave_to_the_parent(self) -> None:
        """In a forked child, drop what belongs to the parent: close its files, and send nothing to its peers.

        Keep state that only describes the past, such as the phase, because a data loader's child can fail in it too.
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
