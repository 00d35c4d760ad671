"""Reads how a run was submitted: when, what the user typed, and how runs of the same program differ."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcinit.base.errors import RequestError
from hpcinit.records import job_record

MOST_CHARACTERS = 300  # most characters of the text that distinguishes a run
NOT_SHOWN = ("name", "wait", "again")  # `name` is in the name of the run folder; the others do not describe the run


class Submission(NamedTuple):
    """What the user submitted, and when.

    submitted: seconds since 1970, or None if unknown.
    program, arguments: the program and its arguments.
    typed: what the user typed before `--`.
    """

    submitted: float | None = None
    program: str = ""
    arguments: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()


def read(path: Path) -> Submission:
    """Return how the run or task in `path` was submitted. The result is empty if submission.json can't be used."""
    try:
        record = job_record.last_submission(path)
        program = record["program"]
        words = record.get("typed", [])  # a run of an older version has none
        return Submission(submitted(path), program[0], tuple(program[1:]), tuple(map(str, words)))
    except (RequestError, KeyError, TypeError, IndexError):
        return Submission()


def submitted(path: Path) -> float | None:
    """Return when the run or task in `path` was submitted, in seconds since 1970, or None if that isn't recorded."""
    try:
        at = job_record.last_submission(path).get("submitted")
    except RequestError:
        return None
    return at if isinstance(at, int | float) else None


def distinguish(submissions: Sequence[Submission]) -> list[str]:
    """Return, for each run, the options and arguments that are not the same in all runs of the same program.

    If there is only one run of a program, return everything that the user typed.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(submissions):
        groups[one.program].append(number)
    found = [""] * len(submissions)
    for program, numbers in groups.items():
        if len(numbers) == 1:
            found[numbers[0]] = _shortened(typed(submissions[numbers[0]]))
            continue
        texts = {number: dict.fromkeys(_texts(submissions[number])) for number in numbers} if program else {}
        counts = Counter(text for own in texts.values() for text in own)
        for number, own in texts.items():
            found[number] = _shortened(" ".join(text for text in own if counts[text] < len(numbers)))
    return found


def typed(submission: Submission) -> str:
    """Return what the user typed, such as 'nodes=8 -- train.py --lr 0.1'."""
    program = shlex.join(filter(None, [submission.program, *submission.arguments]))
    before = shlex.join(_shown(submission.typed))
    return f"{before} -- {program}" if before and program else before or program


def parameters(given: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """Return the values that distinguish one task of a sweep, by name, such as {"lr": "0.1"}.

    given: the overrides that differ between the tasks, such as "+lr=0.1".
    arguments: the arguments of the task's program.

    With the Hydra launcher, only the program's arguments differ, such as lr=0.1. Arguments for Hydra itself (hydra.*)
    are skipped.
    """
    pairs = [word.lstrip("+~").partition("=") for word in given if "=" in word]
    found = {name: value for name, _, value in pairs if name != "job.args"}
    if len(found) < len(pairs):
        pairs = [one.lstrip("+~").partition("=") for one in arguments if "=" in one and not one.startswith("-")]
        found |= {name: value for name, _, value in pairs if not name.startswith(("hydra.", "hydra/"))}
    return found


def _shown(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0] not in NOT_SHOWN]


def _texts(submission: Submission) -> Iterator[str]:
    yield from _options(_shown(submission.typed))
    yield from _options(submission.arguments)


def _options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments. An option and its value are one text, such as '--lr 0.1'."""
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        takes_value = one.startswith("-") and "=" not in one and rest and not rest[0].startswith("--")
        yield shlex.join([one, rest.pop(0)] if takes_value else [one])


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."
