"""What this process has done as a rank: one mutable object, `state`, in place of global variables of many modules.

A process is one rank, with one start, one default process group and one training. The modules of `runtime` keep what
follows from that here and nowhere else; the counters of connections.quick_switching are the exception.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hpcinit.records import timeline
    from hpcinit.rendezvous.join import Rendezvous
    from hpcinit.runtime.lifecycle.signal_watch import Watch
    from hpcinit.runtime.runtime import Runtime

START = "start-up"


@dataclass
class Timeline:
    """writer: of the node's file, None before the start and after its last event. opened: a process has one start."""

    writer: timeline.Writer | None = None
    rank: int = -1
    opened: bool = False

    def close(self) -> None:
        """Close this process's copy of the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


@dataclass(eq=False)
class DeclaredPhase:
    """A phase that is active. began_s: by time.monotonic(). limit_s: how long silence is expected; None: default."""

    began_s: float
    limit_s: float | None


@dataclass
class Phase:
    """name, step: the phase and the last step reported, -1 before the first. ended_s: when the last declared phase
    ended, by time.monotonic()."""

    name: str = START
    step: int = -1
    declared: list[DeclaredPhase] = field(default_factory=list)
    ended_s: float = 0.0


@dataclass
class LoaderWorkers:
    """rank_pid: the process in which install() was called. numbers: signals that ask a rank to save and stop.

    terminated: process ids of protected processes that this rank ended itself. on_death: called with torch's error;
    True if the rank goes on without the worker.
    """

    rank_pid: int | None = None
    numbers: frozenset[int] = frozenset()
    terminated: set[int] = field(default_factory=set)
    on_death: Callable[[str], bool] | None = None


@dataclass
class ProcessState:
    """All of it, each field with the value that it has before hpcinit does anything.

    runtime: what init() returned, None before it and after shutdown(). rendezvous: the current one, and how many there
    were: the number keeps ranks of two generations apart. nonce_file: the secret's file that this process read or
    created. agent_store_rounds: how often torchrun's store was used; its keys stay. stuck_group: why a process group of
    this process could not be destroyed, '' if none was stuck. checkpoint_group: in which ranks agree on a checkpoint.
    claimed: (folder, token) of the checkpoint folders that this process claimed. damaged: (checkpoint, its save) and
    what load() found wrong with its content. removal: the last thread that removes old checkpoints. stopped_early: the
    ranks agreed to stop before the program's end; stop_not_recorded: and no file says so.
    """

    runtime: Runtime | None = None
    rendezvous: Rendezvous | None = None
    rendezvous_count: int = 0
    nonce_file: Path | None = None
    agent_store_rounds: int = 0
    stuck_group: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    phase: Phase = field(default_factory=Phase)
    loader_workers: LoaderWorkers = field(default_factory=LoaderWorkers)
    early_signals: set[int] = field(default_factory=set)  # that were delivered before anything watched for them
    watches: set[Watch] = field(default_factory=set)  # that are not closed
    masks: dict[int, set[int]] = field(default_factory=dict)  # blocked signals of the threads that fork just now
    checkpoint_group: ProcessGroup | None = None
    claimed: set[tuple[Path, str]] = field(default_factory=set)
    damaged: dict[tuple[Path, str], str] = field(default_factory=dict)
    removal: threading.Thread | None = None
    stopped_early: bool = False
    stop_not_recorded: bool = False

    def reset(self) -> None:
        """Set every field to its first value, for tests. It closes nothing."""
        vars(self).update(vars(ProcessState()))

    def leave_to_the_parent(self) -> None:
        """In a forked child: drop what is the parent's without telling its peers, and close the copies of its files.

        What only describes the past stays, such as the phase: a child that is a data loader fails in it too.
        """
        self.runtime = None
        if self.rendezvous is not None:
            self.rendezvous.forget()
            self.rendezvous = None
        self.timeline.close()
        self.early_signals.clear()
        for watch in list(self.watches):
            watch.close()


state = ProcessState()
os.register_at_fork(after_in_child=state.leave_to_the_parent)
