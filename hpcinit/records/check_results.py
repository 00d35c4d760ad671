"""Results of checks, both of `hpcinit doctor` and of the check that runs before a job's ranks start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, FAIL = "ok", "warning", "fail"
SHARED_MEMORY = "shared memory"  # a name of a check and of a folder
STATUSES = (OK, WARNING, FAIL)  # from best to worst


@dataclass(frozen=True)
class Check:
    """The result of one check.

    about: what was checked, for example 'runs_dir'.
    detail: what the check found.
    advice: what the user should do, or '' if nothing.
    hosts: the faulty nodes, if the check can identify them.
    """

    about: str
    status: str
    detail: str
    advice: str = ""
    hosts: tuple[str, ...] = ()


def worst_status(checks: Iterable[Check]) -> str:
    """Return the worst status in `checks`, or OK if `checks` is empty."""
    return max((check.status for check in checks), key=STATUSES.index, default=OK)


def count_statuses(checks: Iterable[Check]) -> str:
    """Return how many checks have each status, as text: '12 checks: 10 ok, 1 warning, 1 fail'."""
    statuses = [check.status for check in checks]
    parts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)
    return f"{len(statuses)} check{'s' * (len(statuses) != 1)}: {parts}" if statuses else "no checks"
