"""What the doctor finds: checks, each with a grade, and what to do where it is not well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, BAD = "ok", "warning", "bad"
GRADES = (OK, WARNING, BAD)  # from well to worst


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


def worst(checks: Iterable[Check]) -> str:
    return max((check.grade for check in checks), key=GRADES.index, default=OK)


def count(checks: Iterable[Check]) -> str:
    """'12 checks: 10 ok, 1 warning, 1 bad'."""
    grades = [check.grade for check in checks]
    parts = ", ".join(f"{grades.count(grade)} {grade}" for grade in GRADES if grade in grades)
    return f"{len(grades)} check{'s' * (len(grades) != 1)}: {parts}" if grades else "no checks"
