"""Where this rank is in its work, for the record of an error: one process, one place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

START, TRAINING = "start-up", "training"
_phase, _step = START, -1  # before init, before the first step


def now() -> tuple[str, int]:
    """The phase and the last step that was told, -1 before the first. '' where a group is up, whoever made it, and no
    step was told: then the start-up is over, and more is not known."""
    distributed = sys.modules.get("torch.distributed")
    up = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return "" if up and _phase == START else _phase, _step


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
