"""What rank 0 did after its start-up, and when: timeline/JOB/training.json, next to the start-up events of all ranks.

The file contains spans of time without gaps between them. In a long run, old spans are merged, so the file stays small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcinit.base import safe_files

FILE = "training.json"
# What rank 0 did. Any other name is a phase that the program declared.
BUILD, FIRST, STEPS, SAVING, LOADING = "building", "first step", "steps", "saving", "loading"
MOST = 200  # spans in the file
BLOCK = 10  # this many old spans are merged into one span of each kind


class Span(NamedTuple):
    """A period of time in which rank 0 did one thing. Times are in seconds since 1970.

    The field `end` is 0 if it is unknown.

    first, last: for training steps, the number of finished steps at the start and at the end of the span. For saving
        and loading, the step of the checkpoint. -1 if unknown.
    number: the number of steps, saves, or merged spans in this span.
    """

    what: str
    begin: float
    end: float = 0.0
    first: int = -1
    last: int = -1
    number: int = 1


class SpanRecord:
    """Collects the spans of one rank.

    In all methods, `now` is the current time in seconds since 1970.
    """

    def __init__(self, now: float) -> None:
        self.spans: list[Span] = []
        self._open = Span(BUILD, now, number=0)

    @property
    def what(self) -> str:
        """Return what the rank is doing now."""
        return self._open.what

    def switch(self, what: str, now: float, step: int = -1) -> None:
        """End the current span and start a new one.

        step: the step of the checkpoint for a save or a load, else -1.
        """
        if now > self._open.begin:
            self.spans.append(self._open._replace(end=now))
        before = self._open
        last = before.last if before.what == STEPS else self._last()
        at = last if what == STEPS else step
        self._open = Span(what, now, 0.0, at, at, 0 if what == STEPS else 1)
        if len(self.spans) > MOST:
            self.spans = [*_merged(self.spans[: MOST // 2]), *self.spans[MOST // 2 :]]

    def _last(self) -> int:
        return next((span.last for span in reversed(self.spans) if span.what == STEPS), -1)

    def loaded(self, step: int) -> None:
        """Record the step of the checkpoint that was loaded in the current span."""
        self._open = self._open._replace(first=step, last=step)

    def step(self, step: int, now: float) -> None:
        """Record that a training step is finished.

        step: how many steps are finished, or -1 if the program does not report a number.
        """
        mine = self._open
        if mine.what == STEPS:
            self._open = mine._replace(end=now, last=step, number=mine.number + 1)
        elif mine.what in (BUILD, FIRST):  # the first step of this start has ended
            if mine.what == BUILD:
                self._open = mine._replace(what=FIRST, number=1)
            self.switch(STEPS, now)
            self._open = self._open._replace(first=step, last=step, end=now)

    def to_json(self) -> str:
        return json.dumps({"spans": [*self.spans, self._open]}) + "\n"


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """In each block of BLOCK spans, merge the spans of the same kind. Total times and steps stay the same."""
    for at in range(0, len(spans), BLOCK):
        block = spans[at : at + BLOCK]
        begin = block[0].begin
        for what in dict.fromkeys(span.what for span in block):
            own = [span for span in block if span.what == what]
            end = begin + sum(span.end - span.begin for span in own)
            yield Span(what, begin, end, own[0].first, own[-1].last, sum(span.number for span in own))
            begin = end


def read(folder: Path) -> tuple[Span, ...]:
    """Return the spans of the attempt whose timeline is in `folder`, or () if there is no readable file."""
    try:
        found = [Span(*one) for one in safe_files.read_json(folder / FILE)["spans"]]
        return tuple(one for one in found if isinstance(one.what, str) and one.begin + one.end + one.last >= 0)
    except (OSError, ValueError, KeyError, TypeError):
        return ()
