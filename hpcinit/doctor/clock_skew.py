"""Measures how far another machine's clock is ahead or behind, using the times of a query and of its answer."""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

from hpcinit.records.check_results import FAIL, OK, WARNING

# munge refuses credentials that are 300 s old. A skew of seconds puts events in the logs of several machines in the
# wrong order.
LARGE_S, TOO_LARGE_S = 2.0, 60.0
# 'Configuration data as of 2026-11-21T16:13:17' is the controller's clock in whole seconds, which the client prints in
# its own time zone (slurmctld, _fill_ctld_conf).
_AS_OF = re.compile(r"^Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)$", re.MULTILINE)


class ClockSkew(NamedTuple):
    """The difference between another machine's clock and this machine's.

    seconds: the smallest difference that the measured times allow. Positive if the other clock is ahead, negative if it
        is behind, and 0 if the clocks may agree.
    """

    seconds: float

    @property
    def status(self) -> str:
        far = abs(self.seconds)
        return FAIL if far > TOO_LARGE_S else WARNING if far > LARGE_S else OK

    def __str__(self) -> str:
        if not self.seconds:
            return "no difference"
        return f"{abs(self.seconds):.1f} s {'ahead' if self.seconds > 0 else 'behind'}"


def clock_skew(before: float, after: float, earliest: float, latest: float | None = None) -> ClockSkew:
    """Return the skew of another machine's clock that showed a time between `earliest` and `latest` during a query.

    before, after: this machine's clock before and after the query.
    latest: if None, it is the same as `earliest`.
    """
    latest = earliest if latest is None else latest
    if earliest > after:
        return ClockSkew(earliest - after)
    return ClockSkew(min(0.0, latest - before))


def controller_clock(text: str) -> float | None:
    """Return the time on the controller's clock, in seconds since 1970, or None if the text does not contain it.

    text: the output of `scontrol show config`.
    """
    found = _AS_OF.search(text)
    return datetime.fromisoformat(found[1]).timestamp() if found else None
