"""Keeps track of what this rank is doing (its phase), for error records and hang detection."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

from hpcinit.runtime.process_state import START, DeclaredPhase, state

TRAINING = "training"
LONG = 10  # a save, a declared phase, or the first step may take this many times hang.after_s


def now() -> tuple[str, int]:
    """Return the current phase and the last reported training step. The step is -1 if none was reported.

    If a process group exists but no step was reported, the phase is ''.
    """
    distributed = sys.modules.get("torch.distributed")
    up = distributed is not None and distributed.is_available() and distributed.is_initialized()
    mine = state.phase
    return "" if up and mine.name == START else mine.name, mine.step


def step_done(step: int) -> None:
    """Record that a training step has finished."""
    enter(TRAINING, step)
    if state.training_record is not None:
        state.training_record.step(step)


def enter(phase: str, step: int | None = None) -> None:
    state.phase.name = phase
    if step is not None:
        state.phase.step = step


@contextlib.contextmanager
def during(phase: str, limit: timedelta | None = None) -> Iterator[None]:
    """Declare what the rank does in this block: 'saving', 'loading', or a name that the program chose.

    hpcinit reports no hang in the block before the time limit. If the block raises an error, the error record names the
    phase.

    limit: the time limit. None: a default.
    """
    mine = state.phase
    before = mine.name
    enter(phase)
    declared = DeclaredPhase(time.monotonic(), None if limit is None else limit.total_seconds())
    mine.declared.append(declared)
    record = state.training_record
    what = record.switch(phase) if record is not None else ""
    try:
        yield
    finally:
        mine.declared.remove(declared)
        mine.ended_s = time.monotonic()
        if record is not None:
            record.switch(what)
    enter(before)


def silence_is_expected(default_s: float) -> bool:
    """Return whether the rank is in a declared phase that has not exceeded its time limit.

    default_s: the time limit in seconds of a phase without its own limit.
    """
    now_s, active = time.monotonic(), state.phase.declared[:]
    return any(now_s - each.began_s < (default_s if each.limit_s is None else each.limit_s) for each in active)


def not_counted(seconds: float) -> None:
    """Don't count `seconds` as time in the current phases: the process was suspended (SIGSTOP, scontrol suspend)."""
    for each in state.phase.declared[:]:
        each.began_s += seconds


def last_end() -> float:
    """Return when the last declared phase ended, in seconds of time.monotonic(), or 0 if none has ended."""
    return state.phase.ended_s
