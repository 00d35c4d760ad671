"""What a run was submitted with: when, the program's arguments, and what differs between runs of the same program."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.observe import state
from hpcinit.records import run_folder

SKIPPED = {"format", "name", "nonce", "program"}  # keys of the spec that differ between all runs, or are shown anyway
MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Submission:
    """submitted: seconds since 1970, or None."""

    submitted: float | None = None
    program: str = ""
    arguments: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)

    def texts(self, keys: Collection[str]) -> list[str]:
        """Return 'key=value' of each setting below these keys of the spec, and the arguments: an option and its value
        are one text."""
        settings = _flat({key: value for key, value in self.spec.items() if key in keys})
        return [*(f"{key}={value}" for key, value in settings), *_options(self.arguments)]


@cache  # a submission does not change, and `status` needs it several times
def read(path: Path) -> Submission:
    """Read the submission of the run or task in `path`; fields that are not readable stay empty."""
    try:
        at = state.submission(path).get("submitted")
        with open(f"{path}/{run_folder.SPEC}", "rb", buffering=0) as file:  # noqa: PTH123 - many runs
            spec = json.loads(file.read())
        program = spec["program"]
        arguments = tuple(map(str, program.get("args", ())))
        return Submission(at if isinstance(at, int | float) else None, str(program["target"]), arguments, spec)
    except (RequestError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return Submission()


def distinguish(submissions: Sequence[Submission]) -> list[str]:
    """Return for each run the arguments and settings that differ from other runs of the same program.

    For the only run of a program, return the program with all its arguments.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(submissions):
        groups[one.program].append(number)
    found = [""] * len(submissions)
    for program, numbers in groups.items():
        if len(numbers) == 1:
            [number] = numbers
            found[number] = _shortened(shlex.join([program, *submissions[number].arguments]) if program else "")
            continue
        keys = _different([submissions[number].spec for number in numbers])
        texts = {number: dict.fromkeys(submissions[number].texts(keys)) for number in numbers}
        counts = Counter(text for own in texts.values() for text in own)
        for number, own in texts.items():
            found[number] = _shortened(" ".join(text for text in own if counts[text] < len(numbers)))
    return found


def _different(specs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the keys whose value is not the same in all specs. Flattening all values of 1,000 specs is slow."""
    keys = {key for one in specs for key in one} - SKIPPED
    return {key for key in keys if any(one.get(key) != specs[0].get(key) for one in specs)}


def _options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield '--lr 0.1' for the two arguments '--lr' and '0.1', and every other argument alone."""
    rest = list(arguments)
    while rest:
        one = rest.pop(0)
        takes_value = one.startswith("-") and "=" not in one and rest and not rest[0].startswith("--")
        yield shlex.join([one, rest.pop(0)] if takes_value else [one])


def _flat(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."
