"""Reads dumps of torch's flight recorder within limits of time and memory, because another user may have written them.

The reader keeps only the newest calls, and only the fields that the verdict needs.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcinit.base.text import MOST_RANKS
from hpcinit.why import plain_pickle
from hpcinit.why.plain_pickle import FORGOTTEN, Forgotten, Incomplete

MOST_S = 30.0  # CPU time for reading all dumps; reading 200 MB takes 3 s
MOST_BYTES = 256 << 20  # largest file; 2,000 entries with their stacks take some megabytes
MOST_MEMORY = 256 << 20  # bytes of memory that reading a file may use, in addition to the file itself
MOST_ENTRIES, FEWEST_ENTRIES = 20_000, 500  # how many entries are kept per file, at 600 bytes each
ALL_ENTRIES = 150_000  # how many entries are kept of all files together, but at least FEWEST_ENTRIES per file
FEW_BYTES = 300  # the reader skips entries only if a dump has more than this many bytes per kept entry
MOST_JSON = 32 << 20  # largest JSON file in bytes; 20,000 entries take 14 MB, because JSON has no stacks
MOST_TEXT, MOST_VALUES = 4_096, 100_000  # most characters of a text; most numbers in the sizes of one call
NO_DUMP = "it is not a dump"  # neither a pickle nor JSON
KNOWN_FORMATS = 2  # torch 2.4 to 2.13 writes formats 2.2 to 2.10
NUMBERS = ("record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "seq_id", "is_p2p", "retired", "timeout_ms")
TIMES = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
TEXTS = ("process_group", "pg_name", "profiling_name", "state")
SHAPES = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
FIELDS = {*NUMBERS, *TIMES, *TEXTS, *SHAPES}
_RANKS = re.compile(r"[\[(][0-9,\s]*[\])]")


class ReadLimits:
    """Limits for reading all dumps: the CPU time, and how many calls per dump are kept."""

    def __init__(self, files: int = 1, most_s: float = MOST_S) -> None:
        self.most_s = most_s
        self.end = time.process_time() + most_s
        self.entries = min(MOST_ENTRIES, max(FEWEST_ENTRIES, ALL_ENTRIES // max(files, 1)))

    def checker(self) -> Callable[[], None]:
        """Return a function that raises ValueError when reading a file has taken too much time or memory."""
        most = _memory() + MOST_MEMORY

        def check() -> None:
            if time.process_time() > self.end:
                raise ValueError(f"reading the dumps takes more than {self.most_s:g} s of CPU time")
            if _memory() > most:
                raise ValueError(f"reading it takes more than {MOST_MEMORY >> 20} MB of memory")

        return check


def _memory() -> int:
    """Return how many bytes of memory this process uses."""
    with Path("/proc/self/statm").open("rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read(path: Path, limits: ReadLimits) -> dict[str, Any]:
    """Read a dump and return the part that the verdict needs.

    Raise ValueError if the dump is damaged, and OSError if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO does not block
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a regular file")
        if state.st_size > MOST_BYTES:
            raise ValueError(f"it is {state.st_size >> 20} MB, expected at most {MOST_BYTES >> 20} MB")
        limits.checker()()
        data = file.read(state.st_size)
        if not data:
            raise ValueError("it is empty")
        if data[:64].lstrip()[:1] not in (b"\x80", b"{", b"(", b"}"):  # first bytes of pickles and of JSON
            raise ValueError(NO_DUMP)
        return load(data, limits)


def load(data: bytes, limits: ReadLimits | None = None) -> dict[str, Any]:
    """Return the part of a dump that the verdict needs: version, groups and newest calls.

    Raise ValueError if the dump is damaged.

    data: the content of the dump, a pickle or JSON.
    """
    limits = limits or ReadLimits()
    try:
        found = _load_json(data, limits) if data[:64].lstrip()[:1] == b"{" else _load_pickle(data, limits)
    except Incomplete:
        raise ValueError(
            f"not a flight recorder's dump: it ends after {len(data)} bytes. The rank is still writing it, or "
            "ended before the dump was complete"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a flight recorder's dump: {error}") from None
    major = re.match(r"\d{1,9}", str(found.get("version", "")))
    if major and int(major[0]) > KNOWN_FORMATS:
        raise ValueError(
            f"its format is {found['version']}, but this hpcinit reads only formats up to {KNOWN_FORMATS}.x"
        )
    return found


def _load_pickle(data: bytes, limits: ReadLimits) -> dict[str, Any]:
    check = limits.checker()
    for skip in (len(data) > FEW_BYTES * limits.entries, False):
        reader = plain_pickle.Reader(data, "entries", limits.entries, _entry, check, unneeded="frames", skip=skip)
        try:
            document, entries, before = reader.read()
            found = document.get("entries")
            if isinstance(found, tuple) or (isinstance(found, list) and found):
                entries, before = [_entry(one) for one in found[-limits.entries :]], max(len(found) - limits.entries, 0)
            elif found is not None and not isinstance(found, list):
                raise ValueError("it has no entries")
            return _document(document, None if found is None else entries, before, check)
        except Forgotten:
            continue
    raise ValueError(plain_pickle.MALFORMED)


def _document(
    fields: Mapping[Any, Any], entries: Sequence[dict[str, Any] | None] | None, before: int, check: Callable[[], None]
) -> dict[str, Any]:
    """Return the part of a dump that the verdict needs. Raise ValueError if `fields` is not the content of a dump.

    before: the number of entries older than `entries`.
    """
    if entries is None and not {"version", "pg_config", "pg_status"} <= fields.keys():
        raise ValueError("it has no entries")
    kept = []
    for place, entry in enumerate(entries or (), before):
        if entry is not None:
            if before:  # a record_id shows that there were older entries
                entry.setdefault("record_id", place)
            kept.append(entry)
    found: dict[str, Any] = {"entries": kept}
    for name in ("version", "written_ns"):
        if isinstance(fields.get(name), str | int):
            found[name] = _plain(fields[name])
    if isinstance(config := fields.get("pg_config"), dict):
        found["pg_config"] = dict(_groups(config, check))
    if isinstance(status := fields.get("pg_status"), dict):
        found["pg_status"] = {
            str(_plain(key)): {_plain(name): _plain(value) for name, value in one.items() if _is_scalar(value)}
            for key, one in status.items()
            if isinstance(one, dict)
        }
    return found


def _groups(config: Mapping[Any, Any], check: Callable[[], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name, the description and the ranks of each group."""
    for name, one in config.items():
        check()
        description, ranks = (one.get("desc"), one.get("ranks")) if isinstance(one, dict) else ("", one)
        if FORGOTTEN in (description, ranks):
            raise Forgotten
        if isinstance(ranks, str):
            ranks = _ranks(ranks)
        elif isinstance(ranks, list | tuple) and len(ranks) <= MOST_RANKS:
            ranks = tuple(rank for rank in ranks if isinstance(rank, int))
        else:
            ranks = None
        yield str(_plain(name)), {"desc": _plain(description) if isinstance(description, str) else "", "ranks": ranks}


@lru_cache(maxsize=256)  # all ranks list the group of all ranks
def _ranks(text: str) -> tuple[int, ...] | None:
    """Return the numbers in '[0, 1]', or None for any other text."""
    if len(text) > 9 * MOST_RANKS or not _RANKS.fullmatch(text):
        return None
    numbers = re.findall(r"\d+", text)
    return tuple(map(int, numbers)) if all(len(number) < 8 for number in numbers) else None


def _entry(raw: object) -> dict[str, Any] | None:
    """Return the fields of an entry that the verdict needs, or None if `raw` is not an entry."""
    if not isinstance(raw, dict):
        return None
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in FIELDS or value is None:
            continue
        if (plain := _plain(value)) is not None:
            found[name] = plain
    return found


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float)


_shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # equal sizes share one object, which saves memory


def _plain(value: Any) -> Any:
    """Return a number, a string of at most MOST_TEXT characters, or a tuple for a list.

    Return None for any other value, and for a number that is too large.
    """
    kind = value.__class__
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else None
    if kind is str:
        return value[:MOST_TEXT]
    if kind is list or kind is tuple:
        if len(_shared) > MOST_ENTRIES:
            _shared.clear()
        found = _nested(value, [MOST_VALUES])
        return _shared.setdefault(found, found)
    if value is FORGOTTEN:
        raise Forgotten
    return value if kind is bool or kind is float else None


def _nested(values: Sequence[Any], left: list[int]) -> tuple[Any, ...]:
    """Return nested lists as tuples. Raise ValueError if they are too large.

    left: a list with one number: how many more lists and values are allowed. The function decreases this number.
    """
    left[0] -= len(values) + 1
    if left[0] < 0:
        raise ValueError(f"the tensor sizes of a call have more than {MOST_VALUES} values")
    return tuple([_nested(one, left) if isinstance(one, list | tuple) else _plain(one) for one in values])


def _load_json(data: bytes, limits: ReadLimits) -> dict[str, Any]:
    if len(data) > MOST_JSON:
        raise ValueError(f"it is a JSON file of {len(data) >> 20} MB, expected at most {MOST_JSON >> 20} MB")
    check = limits.checker()
    try:
        fields = json.loads(data.decode(errors="replace"))
    except json.JSONDecodeError as error:
        is_whole = data[-64:].rstrip().endswith(b"}")
        raise (ValueError(f"it is not JSON: {error.msg}") if is_whole else Incomplete()) from None
    entries = fields.get("entries")
    if not isinstance(entries, list | None):
        raise ValueError("it has no entries")
    kept = None if entries is None else [_entry(one) for one in entries[-limits.entries :]]
    return _document(fields, kept, len(entries or ()) - len(kept or ()), check)
