"""How far rank 0's clock is ahead of this rank's, from the messages of the meeting that are sent in any case.

Rank 0 stamps its answers with [when it had read the guest's message, when it sent the answer]. Nothing arrives before
it is sent, so each message bounds the difference from one side: 'heard at D what was sent at G' says that rank 0 is at
most D - G ahead, 'read at G what was stamped D' that it is at least D - G ahead. The middle of the bounds is the
offset, half their distance the uncertainty: NTP's estimate (RFC 5905, section 8) with the tightest bound of each
direction in the place of one round trip.
"""

from __future__ import annotations

import math
import time
from typing import Any

LATEST = 1e11  # seconds since 1970: the year 5138


def now() -> float:
    """Seconds since 1970."""
    return time.time()


class Offset:
    """Seconds that rank 0's clock is ahead of ours."""

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf

    def learn(self, sent: float | None, stamp: object, read: float) -> None:
        """sent: when we sent what `stamp` answers, None if it answers nothing. stamp: [heard, said] of rank 0.

        A stamp that is none is ignored: nobody's start-up fails for it.
        """
        if not (isinstance(stamp, list) and len(stamp) == 2 and all(map(_is_time, stamp))):
            return
        heard, said = stamp
        if sent is not None:
            self._most = min(self._most, heard - sent)
        self._least = max(self._least, said - read)

    @property
    def known(self) -> tuple[float, float] | None:
        """(offset, uncertainty): add the offset to a time of this node for rank 0's. None before an answer has come."""
        if math.isinf(self._least) or math.isinf(self._most):
            return None
        # Bounds that cross: one of the clocks was set meanwhile, or drifts. Their gap is what we do not know.
        return (self._least + self._most) / 2, abs(self._most - self._least) / 2


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST


def stamp(heard: float) -> dict[str, Any]:
    """What rank 0 puts into an answer: `heard` is when the message that it answers was read."""
    return {"clock": [heard, now()]}
