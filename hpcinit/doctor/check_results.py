"""The results of the doctor's checks, and whether two clocks differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

OK, WARNING, FAIL = "ok", "warning", "bad"
STATUSES = (OK, WARNING, FAIL)  # from well to worst


@dataclass(frozen=True)
class Check:
    """about: what was looked at, 'runs_dir'. said: what was seen. do: '' where all is well.

    hosts: the nodes that are to blame, where that is known.
    """

    about: str
    grade: str
    said: str
    do: str = ""
    hosts: tuple[str, ...] = ()


def worst_status(checks: Iterable[Check]) -> str:
    return max((check.grade for check in checks), key=STATUSES.index, default=OK)


def count_statuses(checks: Iterable[Check]) -> str:
    """'12 checks: 10 ok, 1 warning, 1 bad'."""
    grades = [check.grade for check in checks]
    parts = ", ".join(f"{grades.count(grade)} {grade}" for grade in STATUSES if grade in grades)
    return f"{len(grades)} check{'s' * (len(grades) != 1)}: {parts}" if grades else "no checks"


# How far another machine's clock is from this one's, from a question and its answer.

# Slurm's credentials (munge) are refused after 300 s. From a second on, times in logs and files of several machines
# tell another order of events than the true one.
LARGE_S, TOO_LARGE_S = 2.0, 60.0
# 'Configuration data as of 2026-11-21T16:13:17': the controller fills the answer and puts its clock there, in whole
# seconds (slurmctld, _fill_ctld_conf); the client prints it in its own time zone.
_AS_OF = re.compile(r"^Configuration data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)$", re.MULTILINE)


class ClockSkew(NamedTuple):
    """seconds: the other clock is ahead by at least so much (behind, if negative); 0 where they may agree."""

    seconds: float

    @property
    def grade(self) -> str:
        far = abs(self.seconds)
        return FAIL if far > TOO_LARGE_S else WARNING if far > LARGE_S else OK

    def __str__(self) -> str:
        if not self.seconds:
            return "no difference"
        return f"{abs(self.seconds):.1f} s {'ahead' if self.seconds > 0 else 'behind'}"


def clock_skew(before: float, after: float, earliest: float, latest: float | None = None) -> ClockSkew:
    """before, after: this machine's clock around the question. The other's was between earliest and latest."""
    latest = earliest if latest is None else latest
    if earliest > after:
        return ClockSkew(earliest - after)
    return ClockSkew(min(0.0, latest - before))


def controllers(text: str) -> float | None:
    """The controller's clock, seconds since 1970, from `scontrol show config`: rounded down to a second."""
    found = _AS_OF.search(text)
    return datetime.fromisoformat(found[1]).timestamp() if found else None
