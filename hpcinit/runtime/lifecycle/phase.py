"""What this rank is doing, for the record of an error, and when silence is expected: one process, one place."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

from hpcinit.rendezvous.process_state import START, DeclaredPhase, state

TRAINING = "training"
LONG = 10  # times hang.after_s: how long a save, a declared phase, or the first step, which may compile, may take


def now() -> tuple[str, int]:
    """The phase and the last step that was told, -1 before the first. '' where a group is up, whoever made it, and no
    step was told: then the start-up is over, and more is not known."""
    distributed = sys.modules.get("torch.distributed")
    up = distributed is not None and distributed.is_available() and distributed.is_initialized()
    mine = state.phase
    return "" if up and mine.name == START else mine.name, mine.step


def told(step: int) -> None:
    """A step of the training has ended."""
    enter(TRAINING, step)


def enter(phase: str, step: int | None = None) -> None:
    state.phase.name = phase
    if step is not None:
        state.phase.step = step


@contextlib.contextmanager
def during(phase: str, limit: timedelta | None = None) -> Iterator[None]:
    """'saving', 'loading', or what the program calls it. While the block runs, silence is not a hang.

    limit: how long at most; None for the caller of is_expected() to decide. An error that leaves the block finds the
    phase still so.
    """
    mine = state.phase
    before = mine.name
    enter(phase)
    declared = DeclaredPhase(time.monotonic(), None if limit is None else limit.total_seconds())
    mine.declared.append(declared)
    try:
        yield
    finally:
        mine.declared.remove(declared)
        mine.ended_s = time.monotonic()
    enter(before)


def silence_is_expected(default_s: float) -> bool:
    """Whether a declared phase is active, and not for longer than its limit, or `default_s` seconds without one."""
    now_s, active = time.monotonic(), state.phase.declared[:]
    return any(now_s - each.began_s < (default_s if each.limit_s is None else each.limit_s) for each in active)


def not_counted(seconds: float) -> None:
    """The process was stopped for so long (SIGSTOP, scontrol suspend): no active phase took that time."""
    for each in state.phase.declared[:]:
        each.began_s += seconds


def last_end() -> float:
    """When the last declared phase ended, by time.monotonic(); 0 before the first."""
    return state.phase.ended_s
