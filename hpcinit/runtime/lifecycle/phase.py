"""Where this rank is in its work, for the record of an error: one process, one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

START, TRAINING = "start-up", "training"
_phase, _step = START, -1  # before init, before the first step


def now() -> tuple[str, int]:
    """The phase and the last step that was told, -1 before the first."""
    return _phase, _step


def told(step: int) -> None:
    """A step of the training has ended."""
    enter(TRAINING, step)


def enter(phase: str, step: int | None = None) -> None:
    global _phase, _step
    _phase, _step = phase, _step if step is None else step


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """'saving', 'loading'. An error that leaves it finds the phase still so."""
    before = _phase
    enter(phase)
    yield
    enter(before)
