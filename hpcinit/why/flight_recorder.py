"""Read the dumps of torch's flight recorder: what each rank has called in each group, and what of it is pending.

A dump is a pickle (dicts, lists, texts and numbers only) or JSON. Another user may be able to write to its folder, and
a pickle can name any function to be called, so a pickle that names anything is refused.

Fields read from a dump, as written by torch 2.6 to 2.13 (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp):

    entries[]    process_group (name, description), collective_seq_id, p2p_seq_id, is_p2p, profiling_name
                 ('nccl:all_reduce', 'nccl:send 0->1' with ranks of the group), state ('scheduled', 'started',
                 'completed'), retired, record_id, input_sizes, output_sizes, *_dtypes, time_created_ns
    pg_config    group name -> {desc, ranks: '[0, 1]'}; gloo leaves it empty
    pg_status    number of a group on this rank -> last_enqueued_collective
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcinit.records import scratch
from hpcinit.records.safeguards import FLIGHT

MOST_BYTES = 64 << 20  # 2,000 entries with their stacks have some megabytes
NAME = re.compile(r"(?P<prefix>.*?)(?P<rank>\d+)(?:\.(?:json|pkl|pickle))?")
COALESCED = "coalesced"  # the entry that ends a coalesced batch; only its state is updated, the batch's own is not
SCHEDULED, STARTED, DONE = "scheduled", "started", "completed"
FORGOTTEN = "forgotten"  # called so long ago that the recorder has overwritten it

Batch = list[tuple[int, Mapping[str, Any]]]  # the entries of one call, each with its place in the dump
MembersOf = Callable[[int, str], "frozenset[int] | None"]  # of a rank and a group's name


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. members: global ranks; None where no dump lists them (gloo)."""

    name: str
    description: str
    members: frozenset[int] | None = None

    def __str__(self) -> str:
        own = self.description not in ("", "undefined") and self.description
        return f"group {own} ({self.name})" if own and own != self.name else f"group {self.name}"


@dataclass(frozen=True, slots=True)
class Message:
    """The `number`-th message from one rank to another in a group; src and dst are ranks of the group."""

    src: int
    dst: int
    number: int


Operation = tuple[Group, "int | Message"]  # a collective by its number in the group, or a message


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of an operation.

    kinds ('all_reduce', 'send'), input_sizes, output_sizes, input_dtypes, output_dtypes: one item for each part of a
    coalesced batch. order: its place among all calls of the rank, the same for all parts of a batch. created_ns: since
    1970, on the rank's own clock.
    """

    kinds: tuple[str, ...]
    state: str
    order: int
    created_ns: int
    input_sizes: tuple[Any, ...] = ()
    output_sizes: tuple[Any, ...] = ()
    input_dtypes: tuple[Any, ...] = ()
    output_dtypes: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """'all_reduce', or the kinds of a batch: 'all_gather and 2 more'."""
        first, *more = self.kinds
        return f"{first} and {len(more)} more" if more else first


@dataclass(frozen=True)
class Recording:
    """What one rank's dump contains. last: the number of the newest collective called in each group.

    timed: the recorder has seen a call start on the device (TORCH_NCCL_ENABLE_TIMING). complete: it has kept every
    call since the start, so that the messages to a peer can be counted. backends: 'nccl', 'gloo'. pending: the oldest
    unfinished call in each group and to each peer, in the order of the calls.
    """

    rank: int
    last: Mapping[Group, int]
    groups: frozenset[Group]
    pending: Sequence[Operation] = ()
    timed: bool = False
    complete: bool = True
    backends: frozenset[str] = field(default_factory=frozenset)
    _batches: Mapping[Operation, Batch] = field(default_factory=dict, repr=False)
    _calls: dict[Operation, Call] = field(default_factory=dict, repr=False)

    def call(self, operation: Operation) -> Call | None:
        """Return the rank's call of an operation; None where the recorder has none."""
        if operation not in self._calls and operation in self._batches:
            self._calls[operation] = _call(self._batches[operation])
        return self._calls.get(operation)

    @property
    def may_have_forgotten(self) -> bool:
        """Whether an unfinished call may be older than all that the recorder kept."""
        return bool(not self.complete and self.pending and self.pending[0] == next(iter(self._batches), None))


class _Plain(pickle.Unpickler):
    """Unpickle values that need no code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a flight recorder's dump names nothing")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside of it")


def load(data: bytes) -> Mapping[str, Any]:
    """Return the document of a dump, pickled or JSON. Raise ValueError if it is none, or if it would call something."""
    try:
        document = json.loads(data) if data.lstrip()[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except Exception as error:  # pickle raises anything for broken bytes: IndexError, KeyError, MemoryError, ...
        raise ValueError(f"not a flight recorder's dump: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise ValueError("not a flight recorder's dump: it has no entries")
    return document


def recordings(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, Recording]:
    """Return the recordings of all ranks, with each group under one name and one set of members."""
    configs = {rank: _members_by_name(dump) for rank, dump in dumps.items()}
    listed: dict[str, list[frozenset[int]]] = {}
    for config in configs.values():
        for name, members in config.items():
            if members not in listed.setdefault(name, []):
                listed[name].append(members)

    def members_of(rank: int, name: str) -> frozenset[int] | None:
        own = configs[rank].get(name)
        # A rank that has not used a group yet does not list it. Groups made by a split may share a name.
        return own or next((members for members in listed.get(name, ()) if rank in members), None)

    return {rank: _recording(rank, dump, members_of) for rank, dump in dumps.items()}


def _members_by_name(dump: Mapping[str, Any]) -> dict[str, frozenset[int]]:
    config = dump.get("pg_config")
    found = {}
    for name, one in (config if isinstance(config, dict) else {}).items():
        ranks = one.get("ranks") if isinstance(one, dict) else None
        try:
            numbers = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
            members = frozenset(map(int, numbers or ()))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if members:
            found[str(name)] = members
    return found


def _recording(rank: int, dump: Mapping[str, Any], members_of: MembersOf) -> Recording:
    """Made for dumps of thousands of calls: a Call is built only of those that the search looks at."""
    entries = [entry for entry in dump["entries"] if isinstance(entry, dict)]
    groups: dict[str | tuple[str, ...], Group] = {}
    found: dict[tuple[str | tuple[str, ...], bool, int], Batch] = {}
    for place, entry in enumerate(entries):
        words = entry.get("process_group")
        name = tuple(map(str, words)) if isinstance(words, list | tuple) else str(words)
        p2p = bool(entry.get("is_p2p"))
        number = entry.get("p2p_seq_id" if p2p else "collective_seq_id")
        if isinstance(number, int):
            found.setdefault((name, p2p, number), []).append((place, entry))
    batches: dict[Operation, Batch] = {}
    last: dict[Group, int] = {}
    messages: dict[tuple[Group, int, int], list[Batch]] = {}
    for (name, p2p, number), batch in found.items():
        group = groups.get(name)
        if group is None:
            key = _group_name(name)
            group = groups[name] = Group(*key, members_of(rank, key[0]))
        if p2p:
            for pair, message in _messages(batch):
                messages.setdefault((group, *pair), []).append(message)
        else:
            batches[group, number] = batch
            last[group] = max(number, last.get(group, number))
    complete = not entries or not _order(0, entries[0])
    for (group, src, dst), sent in messages.items():
        # Where the recorder has forgotten the first calls, the oldest pending one is taken for its peer's oldest.
        first = 0 if complete else -sum(_state(batch) == DONE for batch in sent)
        batches |= {(group, Message(src, dst, number)): batch for number, batch in enumerate(sent, first)}
    if not complete:
        for group, number in _last_by_status(rank, dump, groups.values(), members_of).items():
            last.setdefault(group, number)
    unused = {Group(name, "", ranks) for name, ranks in _members_by_name(dump).items()}
    used = {group.name for group in groups.values()}
    return Recording(
        rank,
        last,
        frozenset({*groups.values(), *(group for group in unused if group.name not in used)}),
        _pending(batches),
        timed=any(entry.get("state") == STARTED or entry.get("time_discovered_started_ns") for entry in entries),
        complete=complete,
        backends=frozenset(str(entry.get("profiling_name", "")).partition(":")[0] for entry in entries),
        _batches=batches,
    )


def _pending(batches: Mapping[Operation, Batch]) -> list[Operation]:
    found: dict[tuple[Any, ...], tuple[int, Operation]] = {}
    for operation, batch in batches.items():
        if _state(batch) != DONE:
            group, what = operation
            channel = (group, what.src, what.dst) if isinstance(what, Message) else (group,)
            order = _order(*batch[0])
            if channel not in found or order < found[channel][0]:
                found[channel] = (order, operation)
    return [operation for _, operation in sorted(found.values(), key=lambda one: one[0])]


def _group_name(words: str | tuple[str, ...]) -> tuple[str, str]:
    if isinstance(words, tuple) and len(words) == 2:
        return words
    return str(words), ""


def _order(place: int, entry: Mapping[str, Any]) -> int:
    number = entry.get("record_id")
    return number if isinstance(number, int) else place


def _state(batch: Batch) -> str:
    """The state of a call. gloo's recorder never changes it and only marks a finished call as retired."""
    entry = batch[0][1] if len(batch) == 1 else _end(batch)
    state = entry.get("state")
    if state == DONE or (entry.get("retired") and str(entry.get("profiling_name", "")).startswith("gloo:")):
        return DONE
    return STARTED if state == STARTED else SCHEDULED


def _kind(entry: Mapping[str, Any]) -> str:
    """'all_reduce' of 'nccl:all_reduce'."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2] or "a collective"


def _end(batch: Batch) -> Mapping[str, Any]:
    """The entry that has the state of a batch."""
    return next((entry for _, entry in batch if _kind(entry) == COALESCED), batch[-1][1])


def _call(batch: Batch) -> Call:
    """One call of the entries with one number: a single one, or the parts of a coalesced batch and its end."""
    parts = [entry for _, entry in batch if _kind(entry) != COALESCED] or [batch[-1][1]]
    return Call(
        kinds=tuple(_kind(part).partition(" ")[0] for part in parts),
        state=_state(batch),
        order=min(_order(place, entry) for place, entry in batch),
        created_ns=min(_integer(part.get("time_created_ns")) for part in parts),
        input_sizes=tuple(_plain(part.get("input_sizes")) for part in parts),
        output_sizes=tuple(_plain(part.get("output_sizes")) for part in parts),
        input_dtypes=tuple(_plain(part.get("input_dtypes")) for part in parts),
        output_dtypes=tuple(_plain(part.get("output_dtypes")) for part in parts),
    )


def _plain(value: Any) -> Any:
    """Nested lists as tuples, which can be compared and counted."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    return value if isinstance(value, str | int | None) else repr(value)


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


PAIR = re.compile(r"(?:send|recv) (\d+)(->|<-)(\d+)")


def _messages(batch: Batch) -> Iterator[tuple[tuple[int, int], Batch]]:
    """((src, dst), entries) for each send and receive of a batch. The device executes the batch as one, so all its
    parts have the place of the first and the state of the end."""
    ends = [(batch[0][0], {**entry, "record_id": _order(*batch[0])}) for _, entry in batch if _kind(entry) == COALESCED]
    for place, entry in batch:
        if found := PAIR.fullmatch(_kind(entry)):
            left, right = int(found[1]), int(found[3])
            yield (left, right) if found[2] == "->" else (right, left), [*ends, (place, entry)]


def _last_by_status(
    rank: int, dump: Mapping[str, Any], known: Iterable[Group], members_of: MembersOf
) -> dict[Group, int]:
    """The newest collective of groups whose calls the recorder has forgotten, from pg_status.

    Its keys count the rank's own groups as they were made, and torch names groups by a number that grows likewise.
    """
    status, names = dump.get("pg_status"), sorted(_members_by_name(dump), key=lambda name: (len(name), name))
    if not isinstance(status, dict) or len(status) != len(names) or not all(name.isdigit() for name in names):
        return {}
    numbers = sorted(status, key=lambda key: (len(str(key)), str(key)))
    by_name = {group.name: group for group in known}
    found = {}
    for name, key in zip(names, numbers, strict=True):
        last = status[key].get("last_enqueued_collective") if isinstance(status[key], dict) else None
        if isinstance(last, int) and last > 0:
            found[by_name.get(name) or Group(name, "", members_of(rank, name))] = last
    return found


def read_attempt(run: Path, job_id: str, restart: object) -> dict[int, Mapping[str, Any]]:
    """Return the dumps flight/JOB.STEP.RESTART.rank_N of an attempt, by rank. Skip files that cannot be read."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in sorted((run / FLIGHT).glob("*.rank_*")):
        attempt, _, rank = path.name.rpartition(".rank_")
        job, _, rest = attempt.partition(".")
        mine = ("_" in job_id or job == scratch.folder_name(job_id)) and (
            restart is None or rest.rpartition(".")[2] in ("", str(restart))
        )
        document = _read(path) if mine and rank.isdigit() else None
        if document is not None:
            found[int(rank)] = document
    return found


def read_folder(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the dumps in a folder by rank, the number at the end of each name; {} where there is none.

    Of files with several prefixes (of several attempts, say) those with the newest file count.
    """
    found: dict[str, list[tuple[float, int, Path]]] = {}
    try:
        for path in sorted(folder.iterdir()):
            match = NAME.fullmatch(path.name)
            if match and path.is_file():
                found.setdefault(match["prefix"], []).append((path.stat().st_mtime, int(match["rank"]), path))
    except OSError:
        return {}
    for files in sorted(found.values(), key=max, reverse=True):
        dumps = {rank: document for _, rank, path in files if (document := _read(path)) is not None}
        if dumps:
            return dumps
    return {}


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        return load(path.read_bytes()) if path.stat().st_size <= MOST_BYTES else None
    except (OSError, ValueError):
        return None
