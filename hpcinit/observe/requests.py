"""What a run was submitted with: when, the program's arguments, and what differs between runs of the same program."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError
from hpcinit.observe import state
from hpcinit.records import run_folder

MOST_CHARACTERS = 100


class Submission(NamedTuple):
    """submitted: seconds since 1970, or None. settings: a hash of those in the folder's spec.json."""

    submitted: float | None = None
    program: str = ""
    arguments: tuple[str, ...] = ()
    settings: str = ""
    folder: Path = Path()


def read(path: Path) -> Submission:
    """Return the submission of the run or task in `path`; without a usable submission.json, an empty one."""
    try:
        record = state.last_submission(path)
        program = record["program"]
        return Submission(submitted(path), program[0], tuple(program[1:]), record["settings"], path)
    except (RequestError, KeyError, TypeError, IndexError):
        return Submission()


def submitted(path: Path) -> float | None:
    """Return when the run or task in `path` was submitted, in seconds since 1970; None without a submission.json."""
    try:
        at = state.last_submission(path).get("submitted")
    except RequestError:
        return None
    return at if isinstance(at, int | float) else None


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
        settings = _different({submissions[number].settings: submissions[number].folder for number in numbers})
        same = defaultdict[tuple[str, tuple[str, ...]], list[int]](list)  # runs that differ in nothing
        for number in numbers:
            same[submissions[number].settings, submissions[number].arguments].append(number)
        texts = {key: dict.fromkeys([*settings[key[0]], *_options(key[1])]) for key in same}
        counts = Counter(text for key, own in texts.items() for text in own for _ in same[key])
        for key, own in texts.items():
            shown = _shortened(" ".join(text for text in own if counts[text] < len(numbers)))
            for number in same[key]:
                found[number] = shown
    return found


def _different(folders: Mapping[str, Path]) -> dict[str, list[str]]:
    """Return 'key=value' for each setting that differs, by the hash of the settings. folders: one for each hash."""
    if len(folders) == 1:
        return {settings: [] for settings in folders}
    from hpcinit.records.spec import OF_ONE_RUN  # noqa: PLC0415 - only for runs whose settings differ

    specs = {settings: _spec(folder) for settings, folder in folders.items()}
    first = next(iter(specs.values()))
    keys = {key for one in specs.values() for key in one} - OF_ONE_RUN
    keys = {key for key in keys if any(one.get(key) != first.get(key) for one in specs.values())}
    return {
        settings: [f"{key}={value}" for key, value in _flat({key: one[key] for key in one if key in keys})]
        for settings, one in specs.items()
    }


def _spec(folder: Path) -> dict[str, Any]:
    try:
        document = safe_files.read_json(folder / run_folder.SPEC)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


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
