"""The key dependency: Slurm's own text, as in afterok:4242,singleton, where runs may be named instead of job ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

SINGLETON = "singleton"
TYPES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")  # sbatch(1), --dependency
EXPECTED = (
    "expected Slurm's syntax, such as afterok:JOB, afterany:JOB or singleton, joined by ',' (all) or '?' (any); "
    "JOB is a job id or the name of a run"
)


@dataclass(frozen=True)
class Condition:
    """One type with one job: `type:name+delay`. name: a job id or a run, '' for singleton. delay: '+MINUTES' or ''."""

    type: str
    name: str = ""
    delay: str = ""

    def __str__(self) -> str:
        return f"{self.type}:{self.name}{self.delay}" if self.name else self.type


def separator(text: str) -> str:
    """Return '?' if one fulfilled condition is enough, ',' if all are required."""
    return "?" if "?" in text else ","


def conditions(text: str | None) -> list[Condition]:
    """Return the conditions in `text`, one for each job. It has passed problems()."""
    found = []
    for part in re.split("[,?]", text or ""):
        kind, *names = part.split(":")
        if not names and kind:
            found.append(Condition(kind.lower()))
        for each in names:
            name, delay = re.fullmatch(r"(.*?)(\+\d+)?", each, re.DOTALL).groups()  # type: ignore[union-attr]
            found.append(Condition(kind.lower(), name, delay or ""))
    return found


def problems(text: str | None) -> Iterator[str]:
    """Yield a message for each part that is not in Slurm's form."""
    if text is None:
        return
    if "," in text and "?" in text:
        yield f"dependency is {text!r}: Slurm does not combine ',' (all) and '?' (any); use one of them"
    for part in re.split("[,?]", text):
        kind, *names = part.split(":")
        kind = kind.lower()
        if kind == SINGLETON and not names:
            continue
        if kind not in TYPES:
            types = f"the types are {', '.join((*TYPES, SINGLETON))}"
            near = f"; did you mean afterok:{part}?" if part and not names else f"; {types}"
            yield f"dependency has {part!r}, {EXPECTED}{near}"
        elif not names or not all(name.strip() for name in names):
            yield f"dependency has {part!r} without a job, expected as in {kind}:4242 or {kind}:train-0001"
        elif kind != "after" and (delayed := [name for name in names if re.search(r"\+\d+$", name)]):
            yield f"dependency has {part!r}: only the type after has a delay; use {kind}:{delayed[0].partition('+')[0]}"
