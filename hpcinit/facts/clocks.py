"""How far another machine's clock is from this one's, from a question and its answer."""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

from hpcinit.facts.checkup import BAD, OK, WARNING

# Slurm's credentials (munge) are refused after 300 s. From a second on, times in logs and files of several machines
# tell another order of events than the true one.
LARGE_S, TOO_LARGE_S = 2.0, 60.0
# 'Configuration data as of 2026-11-21T16:13:17': the controller fills the answer and puts its clock there, in whole
# seconds (slurmctld, _fill_ctld_conf); the client prints it in its own time zone.
_AS_OF = re.compile(r"^Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)$", re.MULTILINE)


class Skew(NamedTuple):
    """seconds: the other clock is ahead by at least so much (behind, if negative); 0 where they may agree."""

    seconds: float

    @property
    def grade(self) -> str:
        far = abs(self.seconds)
        return BAD if far > TOO_LARGE_S else WARNING if far > LARGE_S else OK

    def __str__(self) -> str:
        if not self.seconds:
            return "no difference"
        return f"{abs(self.seconds):.1f} s {'ahead' if self.seconds > 0 else 'behind'}"


def skew(before: float, after: float, earliest: float, latest: float | None = None) -> Skew:
    """before, after: this machine's clock around the question. The other's was between earliest and latest."""
    latest = earliest if latest is None else latest
    if earliest > after:
        return Skew(earliest - after)
    return Skew(min(0.0, latest - before))


def controllers(text: str) -> float | None:
    """The controller's clock, seconds since 1970, from `scontrol show config`: rounded down to a second."""
    found = _AS_OF.search(text)
    return datetime.fromisoformat(found[1]).timestamp() if found else None
