"""Reads dumps of torch's flight recorder: what each rank has called in each group, and which calls are unfinished.

A dump is a pickle (only dicts, lists, strings and numbers) or JSON. Loading a pickle can run code, and another user may
have written it. So hpcinit refuses a pickle that names a function or class.

hpcinit reads the following fields of a dump. Each field may be missing. torch 2.4 to 2.13 writes them in formats 2.2 to
2.10 (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp):

    entries[]    process_group (name, description), pg_id, collective_seq_id, p2p_seq_id, is_p2p, profiling_name
                 ('nccl:all_reduce', 'nccl:send 0->1' with ranks of the group), state ('scheduled', 'started',
                 'completed'), retired, record_id, input_sizes, output_sizes, *_dtypes, time_created_ns, timeout_ms.
                 JSON has no 'entries' for a rank that has made no call. A batch of sends and receives ends with
                 a further entry, whose is_p2p is false.
    pg_config    group name -> {desc, ranks: '[0, 1]'}, with the ranks in the group's order. It lists only groups that
                 the rank has used. gloo leaves it empty.
    pg_status    pg_id -> last_enqueued_collective, a string in JSON. This number also counts sends and receives,
                 although gloo writes no entries for them
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcinit.base.text import MOST_RANKS
from hpcinit.records import scratch
from hpcinit.records.safeguards import FLIGHT
from hpcinit.why import dump_reader

SUFFIX = r"(?:\.(?:json|pkl|pickle|pt|bin|dump|trace))?"
NAME = re.compile(rf"(?P<prefix>.*?)(?P<rank>\d{{1,6}}){SUFFIX}")
NAMED_RANK = re.compile(r"(?P<prefix>.*rank[_.=-]?)(?P<rank>\d{1,6})(?!\d).*", re.IGNORECASE)  # trace_rank3_of_8.json
DEPTHS = ("*", "*/*", "*/*/*")  # dumps may be in folders for attempts, and in folders for nodes below these
UNREADABLE = "unreadable"  # key for the reason why a file cannot be read
WRITTEN_NS = "written_ns"  # key for the time when a file was written, in nanoseconds since 1970
# The kind of the entry that ends a coalesced batch. torch updates the state of this entry only, not of the parts. Since
# torch 2.7, the kind can also be 'ALLGATHER_coalesced'.
COALESCED = "coalesced"
MOST_PENDING = 64  # most unfinished calls per rank that are used; a dump of another program may list thousands
SMALLEST = 3  # every recorder keeps at least this many calls
# If a dump has this many calls before the oldest unfinished one, assume that only finished calls were overwritten.
FEW = 64
SETTLE_S = 10.0  # ranks write their dumps within this time of each other
SCHEDULED, STARTED, DONE = "scheduled", "started", "completed"
CUT = -1  # number of a batch of which the recorder has overwritten some parts
FORGOTTEN = "forgotten"  # state of a call that the recorder may have overwritten

Batch = list[tuple[int, Mapping[str, Any]]]  # the entries of one call, each with its index in the dump
GroupOf = Callable[[int, str], "Group"]  # returns the group with a name, as a rank knows it


@dataclass(frozen=True, slots=True)
class Group:
    """A process group.

    members: the global ranks of its members, or None if no dump lists them (gloo).
    order: the members in the order of their ranks in the group.
    """

    name: str
    description: str = field(default="", compare=False)
    members: frozenset[int] | None = None
    order: tuple[int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        own = self.description not in ("", "undefined") and self.description
        return f"group {own} ({self.name})" if own and own != self.name else f"group {self.name}"


@dataclass(frozen=True, slots=True)
class Message:
    """The `number`-th message from one rank to another in a group.

    src, dst: the sender and the receiver, as ranks of the group.
    """

    src: int
    dst: int
    number: int


Operation = tuple[Group, "int | Message"]  # a collective by its number in the group, or a message


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective, a send or a receive, or of a batch of these.

    kinds, input_sizes, output_sizes, input_dtypes, output_dtypes: one item for each part of the batch. A kind is, for
        example, 'all_reduce' or 'send'.
    order: the number of the call among all calls of the rank. All parts of a batch have the same number.
    created_ns: when it was called, in nanoseconds since 1970, by the rank's own clock.
    failed_ns: the end of the call's timeout, if torch gave up on the unfinished call; else 0.
    """

    kinds: tuple[str, ...]
    state: str
    order: int
    created_ns: int
    failed_ns: int = 0
    input_sizes: tuple[Any, ...] = ()
    output_sizes: tuple[Any, ...] = ()
    input_dtypes: tuple[Any, ...] = ()
    output_dtypes: tuple[Any, ...] = ()
    cut: bool = False

    @property
    def name(self) -> str:
        """Return the kind of the call, such as 'all_reduce', or 'all_gather and 2 more' for a batch."""
        first, *more = self.kinds
        return f"{first} and {len(more)} more" if more else first


@dataclass(frozen=True)
class Recording:
    """The content of one rank's dump.

    last: for each group, the number of the newest collective that the rank has called.
    timed: whether a call in the dump has a recorded start on the device (TORCH_NCCL_ENABLE_TIMING).
    untimed: whether a call in the dump has finished without a recorded start.
    complete: whether the dump contains every call since the start. If not, messages to a peer cannot be counted.
    backends: such as 'nccl' and 'gloo'.
    pending: the oldest unfinished call in each group and to each peer, in the order of the calls.
    places: for each group, the pairs (this rank, its peer) of the rank's messages, as ranks of the group.
    written_ns: when the dump was written, or 0 if unknown.
    kept: the number of entries in the dump.
    """

    rank: int
    last: Mapping[Group, int]
    groups: frozenset[Group]
    pending: Sequence[Operation] = ()
    timed: bool = False
    untimed: bool = False
    complete: bool = True
    backends: frozenset[str] = field(default_factory=frozenset)
    places: Mapping[Group, set[tuple[int, int]]] = field(default_factory=dict)
    written_ns: int = 0
    kept: int = 0
    _batches: Mapping[Operation, Batch] = field(default_factory=dict, repr=False)
    _calls: dict[Operation, Call] = field(default_factory=dict, repr=False)

    def call(self, operation: Operation) -> Call | None:
        """Return the rank's call in this operation, or None if the dump does not contain it."""
        if operation not in self._calls and (batch := self._batches.get(operation)):
            cut = not self.complete and not batch[0][0] and _is_end(batch[-1][1])
            self._calls[operation] = replace(_call(batch), cut=cut)
        return self._calls.get(operation)

    def operations(self) -> Iterable[Operation]:
        """Return all operations that the recorder contains."""
        return self._batches.keys()

    def collectives(self) -> list[tuple[int, Group]]:
        """Return, for each recorded collective, its position among the rank's calls, and its group."""
        return [(_order(*batch[0]), group) for (group, what), batch in self._batches.items() if isinstance(what, int)]

    @property
    def may_have_forgotten(self) -> bool:
        """Return whether the recorder may have overwritten the entry of an unfinished call.

        An old call may be unfinished although newer calls have finished, because the device has several streams.
        """
        older = self._batches[self.pending[0]][0][0] if self.pending else self.kept
        return not self.complete and older < FEW


def load(data: bytes) -> Mapping[str, Any]:
    """Return the content of a dump, which is a pickle or JSON.

    Raise ValueError if it is neither, or if loading the pickle would run code.
    """
    return dump_reader.load(data)


def recordings(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, Recording]:
    """Return what the readable dumps contain, by rank. Each group has the same name and members on all ranks."""
    dumps = {rank: dump for rank, dump in dumps.items() if UNREADABLE not in dump}
    configs = {rank: _configured(dump) for rank, dump in dumps.items()}
    listed: dict[str, list[Group]] = {}
    for group in (group for config in configs.values() for group in config.values()):
        if group not in listed.setdefault(group.name, []):
            listed[group.name].append(group)

    def group_of(rank: int, name: str) -> Group:
        # A rank that has not used a group yet does not list it. Groups made by a split share a name.
        found = configs[rank].get(name) or next(
            (one for one in listed.get(name, ()) if rank in (one.members or ())), None
        )
        return found or Group(name)

    entries = {rank: _entries(dump) for rank, dump in dumps.items()}
    if _batches_are_counted(entries.values()):
        entries = {rank: _without_batches(found) for rank, found in entries.items()}
    return {rank: _recording(rank, dump, entries[rank], configs[rank], group_of) for rank, dump in dumps.items()}


def _entries(dump: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of a dump. Set is_p2p for the entry that ends a batch of sends and receives.

    torch does not set it there, but gives this entry the same numbers as the messages of the batch.
    """
    entries: list[Mapping[str, Any]] = []
    parts: dict[str, tuple[int, int]] = {}
    for entry in (entry for entry in dump["entries"] if isinstance(entry, dict)):
        group, ended = str(entry.get("process_group")), False
        if _is_message(entry):
            parts[group] = _numbers(entry)
        else:
            ended = parts.pop(group, None) == _numbers(entry) and _is_end(entry)
        entries.append({**entry, "is_p2p": True} if ended else entry)
    return entries


def _batches_are_counted(dumps: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
    """Return whether torch counted each batch of sends and receives as a collective, as torch 2.4 does.

    The same collective can then have different numbers on two ranks.
    """
    steps = Counter(step for entries in dumps for step in _batch_steps(entries))
    return bool(steps[1]) and not steps[0]


def _batch_steps(entries: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield, for each batch of sends and receives, by how much it increased collective_seq_id."""
    calls: dict[str, list[tuple[int, int]]] = {}  # the numbers of the last two calls in each group
    for entry in entries:
        group, numbers = str(entry.get("process_group")), _numbers(entry)
        last = calls.setdefault(group, [] if _order(0, entries[0]) else [(0, 0)])
        if not last or last[-1] != numbers:
            last.append(numbers)
        if _is_message(entry) and _is_end(entry) and len(last) > 1:
            yield numbers[0] - last[-2][0]


def _without_batches(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries with new numbers, which do not count batches of messages as collectives."""
    batches: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    before: dict[str, tuple[int, int]] = {}
    numbered: list[Mapping[str, Any]] = []
    for entry in entries:
        group, numbers = str(entry.get("process_group")), _numbers(entry)
        last = before.get(group, (0, 0))
        if _is_message(entry):
            batches[group] += numbers[0] == last[0] + 1
            calls[group] += numbers != last
        before[group] = numbers
        numbered.append({**entry, "collective_seq_id": numbers[0] - batches[group], "p2p_seq_id": calls[group]})
    return numbered


def _numbers(entry: Mapping[str, Any]) -> tuple[int, int]:
    return _number(entry.get("collective_seq_id")) or 0, _number(entry.get("p2p_seq_id")) or 0


def _is_message(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is a send or receive, or belongs to a batch of them."""
    known = entry.get("is_p2p")
    return known if isinstance(known, bool) else bool(PAIR.fullmatch(_kind(entry)))


def omit_finished_calls(documents: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the dumps omit finished calls (TORCH_INCLUDE_ONLY_ACTIVE).

    Such dumps do not show whether a rank has finished a call or never made it.

    A full recorder also lacks old finished calls. But the numbers of its calls have no gaps, and all full recorders
    have the same number of calls.
    """
    dumps = [_entries(document) for document in documents if UNREADABLE not in document]
    if any(_state([(0, entry)]) == DONE for entries in dumps for entry in entries):
        return False
    orders = [[_order(*one) for one in enumerate(entries)] for entries in dumps]
    sizes = {len(one) for one in orders if one and one[0] > 0}
    gaps = any(second - first > 1 for one in orders for first, second in itertools.pairwise(one))
    return (
        gaps or len(sizes) > 1 or min(sizes, default=SMALLEST) < SMALLEST or any(map(_has_a_batch_without_end, dumps))
    )


def _has_a_batch_without_end(entries: Sequence[Mapping[str, Any]]) -> bool:
    numbers = ("pg_id", "is_p2p", "collective_seq_id", "p2p_seq_id")
    calls = [(tuple(str(entry.get(name)) for name in numbers), entry) for entry in entries]
    ended = {call for call, entry in calls if _is_end(entry)}
    counts = Counter(call for call, _ in calls if call not in ended)
    return any(count > 1 for count in counts.values())


def _configured(dump: Mapping[str, Any]) -> dict[str, Group]:
    """Return the groups whose members are listed in the rank's dump, by name."""
    config = dump.get("pg_config")
    found = {}
    for name, one in (config if isinstance(config, dict) else {}).items():
        ranks = one.get("ranks") if isinstance(one, dict) else one
        try:
            numbers = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
            order = tuple(map(int, numbers or ()))
            members = _members(order)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError):
            continue
        if order:
            words = one.get("desc") if isinstance(one, dict) else ""
            found[str(name)] = Group(str(name), words if isinstance(words, str) else "", members, order)
    return found


@functools.lru_cache(maxsize=4096)  # all ranks of a group list the same members
def _members(order: tuple[int, ...]) -> frozenset[int]:
    if not all(0 <= rank < MOST_RANKS for rank in order):
        raise ValueError("such ranks do not exist")
    return frozenset(order)


def _recording(
    rank: int,
    dump: Mapping[str, Any],
    entries: Sequence[Mapping[str, Any]],
    config: Mapping[str, Group],
    group_of: GroupOf,
) -> Recording:
    """Return the recording of a rank.

    A dump has thousands of calls, so Recording.call() creates a Call object only when the search needs it.
    """
    groups: dict[tuple[str, str], Group] = {}
    last: dict[Group, int] = {}
    ids: dict[str, Group] = {}
    found: dict[tuple[Group, bool, int, int | None], Batch] = {}
    with_messages: set[Group] = set()
    for place, entry in enumerate(entries):
        key = _group_name(entry)
        group = groups.get(key)
        cut = group is None and _kind(entry) == COALESCED and _order(0, entries[0]) > 0
        if group is None:
            known = group_of(rank, key[0])
            group = groups[key] = known if known.description or not key[1] else replace(known, description=key[1])
            ids[str(entry.get("pg_id"))] = group
        p2p = _is_message(entry)
        collective = _number(entry.get("collective_seq_id", entry.get("seq_id")))
        message = _number(entry.get("p2p_seq_id", entry.get("seq_id")))
        if message:
            with_messages.add(group)
        # A message has the number of the collective before it.
        if collective is not None and (not p2p or collective > 0):
            last[group] = max(collective, last.get(group, collective))
        number = CUT if cut else message if p2p else collective
        if number is not None:  # torch 2.4 does not number batches as messages
            found.setdefault((group, p2p, number, collective if p2p else None), []).append((place, entry))
    batches: dict[Operation, Batch] = {}
    messages: dict[tuple[Group, int, int], list[Batch]] = {}
    places: dict[Group, set[tuple[int, int]]] = {}
    for (group, p2p, number, _), batch in found.items():
        if not p2p:
            batches[group, number] = batch
            continue
        for own, (src, dst), part in _messages(batch):
            messages.setdefault((group, src, dst), []).append(part)
            places.setdefault(group, set()).add((own, src if own == dst else dst))
    complete = not entries or (not _order(0, entries[0]) and _order(len(entries) - 1, entries[-1]) < len(entries))
    for (group, src, dst), sent in messages.items():
        # If the recorder has overwritten the first calls, count from the oldest pending message. Assume that the same
        # message is the oldest pending one of the peer.
        first = 0 if complete else -sum(_state(batch) == DONE for batch in sent)
        batches |= {(group, Message(src, dst, number)): batch for number, batch in enumerate(sent, first)}
    backends = frozenset(str(entry.get("profiling_name", "")).partition(":")[0] for entry in entries)
    used = {group.name for group in groups.values()}
    unused = {group for name, group in config.items() if name not in used}
    for group, number in _last_by_status(dump, ids, unused).items():
        # pg_status also counts messages, which gloo does not record.
        if group not in with_messages and backends != {"gloo"}:
            last[group] = max(number, last.get(group, number))
    return Recording(
        rank,
        last,
        frozenset({*groups.values(), *unused}),
        _pending(batches),
        timed=any(entry.get("state") == STARTED or entry.get("time_discovered_started_ns") for entry in entries),
        untimed=any(entry.get("state") == DONE and not entry.get("time_discovered_started_ns") for entry in entries),
        complete=complete,
        backends=backends,
        places=places,
        written_ns=_integer(dump.get(WRITTEN_NS)),
        kept=len(entries),
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
    return [operation for _, operation in sorted(found.values(), key=lambda one: one[0])[:MOST_PENDING]]


def _group_name(entry: Mapping[str, Any]) -> tuple[str, str]:
    words = entry.get("process_group", entry.get("pg_name", entry.get("pg_id")))
    if isinstance(words, list | tuple):
        return str(words[0]) if words else "", str(words[1]) if len(words) > 1 else ""
    return str(words), ""


def _number(value: Any) -> int | None:
    """Return a number, which may be given as text, or None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _order(place: int, entry: Mapping[str, Any]) -> int:
    number = entry.get("record_id")
    return number if isinstance(number, int) else place


def _state(batch: Batch) -> str:
    """Return the state of a call. gloo's recorder never changes the state, but marks finished calls as retired."""
    entry = batch[0][1] if len(batch) == 1 else _end(batch)
    state = entry.get("state")
    if state == DONE or entry.get("time_discovered_completed_ns"):
        return DONE
    if entry.get("retired") and (state is None or str(entry.get("profiling_name", "")).startswith("gloo:")):
        return DONE
    return STARTED if state == STARTED or entry.get("time_discovered_started_ns") else SCHEDULED


def _kind(entry: Mapping[str, Any]) -> str:
    """Return 'all_reduce' for 'nccl:all_reduce'."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2] or "a collective"


def _is_end(entry: Mapping[str, Any]) -> bool:
    return _kind(entry).endswith(COALESCED)


def _end(batch: Batch) -> Mapping[str, Any]:
    return next((entry for _, entry in batch if _is_end(entry)), batch[-1][1])


def _call(batch: Batch) -> Call:
    """Return the call that these entries describe: a single entry, or all entries of a batch."""
    parts = [entry for _, entry in batch if not _is_end(entry)] or [batch[-1][1]]
    end, state = _end(batch), _state(batch)
    given_up = end.get("retired") is True and state != DONE
    return Call(
        kinds=tuple(_kind(part).partition(" ")[0] for part in parts),
        state=state,
        failed_ns=_integer(end.get("time_created_ns")) + _integer(end.get("timeout_ms")) * 1_000_000 if given_up else 0,
        order=min(_order(place, entry) for place, entry in batch),
        created_ns=min(_integer(part.get("time_created_ns")) for part in parts),
        input_sizes=tuple(_plain(part.get("input_sizes")) for part in parts),
        output_sizes=tuple(_plain(part.get("output_sizes")) for part in parts),
        input_dtypes=tuple(_plain(part.get("input_dtypes")) for part in parts),
        output_dtypes=tuple(_plain(part.get("output_dtypes")) for part in parts),
    )


def _plain(value: Any) -> Any:
    """Return nested lists as tuples, which can be compared and counted."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    return value if isinstance(value, str | int | None) else repr(value)


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


PAIR = re.compile(r"(?:send|recv) (\d{1,6})(->|<-)(\d{1,6})")


def _messages(batch: Batch) -> Iterator[tuple[int, tuple[int, int], Batch]]:
    """Yield (own rank in the group, (src, dst), entries) for each send and receive of a batch.

    The device executes a batch as a whole, so all its messages have the same position and state.
    """
    ends = [(batch[0][0], {**entry, "record_id": _order(*batch[0])}) for _, entry in batch if _is_end(entry)]
    for place, entry in batch:
        if found := PAIR.fullmatch(_kind(entry)):
            left, right = int(found[1]), int(found[3])
            yield left, (left, right) if found[2] == "->" else (right, left), [*ends, (place, entry)]


def _last_by_status(dump: Mapping[str, Any], ids: Mapping[str, Group], unused: Iterable[Group]) -> dict[Group, int]:
    """Return the number of each group's newest collective, according to pg_status.

    pg_status also counts calls that the recorder has overwritten. Its keys are pg_ids, which number the rank's groups
    in the order of their creation. If a group has an entry, the entry shows its pg_id. The other pg_ids are assigned to
    the other groups in the order of their names, which are numbers, too.

    unused: the groups without an entry.
    """
    status = dump.get("pg_status")
    if not isinstance(status, dict):
        return {}
    values = {str(key): one.get("last_enqueued_collective") for key, one in status.items() if isinstance(one, dict)}
    by_name = {group.name: group for group in (*ids.values(), *unused)}
    if not ids.keys() <= values.keys() and values.keys() <= by_name.keys():  # the keys are group names
        return {by_name[key]: last for key, one in values.items() if (last := _number(one)) and last > 0}
    rest = sorted(values.keys() - ids.keys(), key=lambda key: (len(key), key))
    groups = sorted(unused, key=lambda group: (len(group.name), group.name))
    if len(rest) != len(groups) or not all(group.name.isdigit() for group in groups):
        rest = []
    found = {**ids, **dict(zip(rest, groups, strict=False))}
    return {found[key]: last for key, one in values.items() if key in found and (last := _number(one)) and last > 0}


def read_attempt(run: Path, job_id: str, restart: object) -> dict[int, Mapping[str, Any]]:
    """Return the dumps of an attempt by rank, from the files flight/JOB.STEP.RESTART.rank_N in the run folder."""
    found: dict[int, Path] = {}
    for path in sorted((run / FLIGHT).glob("*.rank_*")):
        attempt, _, rank = path.name.rpartition(".rank_")
        job, _, rest = attempt.partition(".")
        mine = ("_" in job_id or job == scratch.folder_name(job_id)) and (
            restart is None or rest.rpartition(".")[2] in ("", str(restart))
        )
        if mine and rank.isdigit() and len(rank) < 7:
            found[int(rank)] = path
    return _read(found, dump_reader.ReadLimits(len(found)))


def read_folder(folder: Path, *, unreadable: bool = False) -> dict[int, Mapping[str, Any]]:
    """Return the dumps in a folder and below it, by rank. The number at the end of a file's name is the rank.

    Files with different prefixes are from several nodes. If their ranks overlap, they are from several attempts, and
    the newest files count. If some dumps are readable, an unreadable file counts as an unreadable dump of its rank.

    unreadable: whether to return unreadable files with 'rank' in their names if no dump can be read.
    """
    sets: dict[tuple[Path, str], dict[int, Path]] = {}
    for path in sorted(path for depth in DEPTHS for path in folder.glob(depth)):
        match = NAMED_RANK.fullmatch(path.name) or NAME.fullmatch(path.name)
        if match and path.is_file():
            sets.setdefault((path.parent, match["prefix"]), {}).setdefault(int(match["rank"]), path)
    limits = dump_reader.ReadLimits(len({rank for files in sets.values() for rank in files}))
    found: dict[int, Mapping[str, Any]] = {}
    broken: dict[int, Mapping[str, Any]] = {}
    for files in sorted(sets.values(), key=lambda files: _written(files.values()), reverse=True):
        if found.keys() & files.keys():
            continue
        dumps = _read(files, limits)
        if has_a_dump(dumps):
            found |= dumps
        elif all(NAMED_RANK.fullmatch(path.name) for path in files.values()):
            broken = broken or dumps
    if found or not unreadable:
        return found
    return {rank: dump for rank, dump in broken.items() if not dump[UNREADABLE].endswith(dump_reader.NO_DUMP)}


def has_a_dump(dumps: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether at least one of the dumps can be read."""
    return any(UNREADABLE not in dump for dump in dumps.values())


def _written(paths: Iterable[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


_newest: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}  # the dumps read last; --replay needs them again


def _read(paths: Mapping[int, Path], limits: dump_reader.ReadLimits) -> dict[int, Mapping[str, Any]]:
    """Return the content of each dump. For a file that cannot be read, return a dict with the reason.

    Small files are read first, so that a large file does not use up the time for them.
    """
    states: dict[int, os.stat_result] = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError):
            states[rank] = path.stat()
    unchanged = tuple((rank, str(paths[rank]), one.st_mtime_ns, one.st_size) for rank, one in states.items())
    if unchanged in _newest:
        return _newest[unchanged]
    found: dict[int, Mapping[str, Any]] = {}
    for rank in sorted(paths, key=lambda rank: states[rank].st_size if rank in states else 0):
        written = {WRITTEN_NS: states[rank].st_mtime_ns} if rank in states else {}
        try:
            found[rank] = {**written, **dump_reader.read(paths[rank], limits)}
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            found[rank] = {**written, UNREADABLE: f"{paths[rank].name}: {reason}"}
    _newest.clear()
    _newest[unchanged] = dict(sorted(found.items()))
    return _newest[unchanged]
