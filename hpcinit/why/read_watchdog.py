"""Reads what torch's NCCL watchdog prints on each rank, and finds the rank for which the others are waiting.

ProcessGroupNCCL.cpp prints '[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812,
OpType=ALLREDUCE, NumelIn=1024, ...)', '... last enqueued NCCL work: 812, last completed NCCL work: 811', and "watchdog
got stuck for 600 seconds". '[Rank 0]' is the rank in the group, as in the prefix
'[PG ID 0 PG GUID 0(default_pg) Rank 0]'.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hpcinit.base import failure_kinds
from hpcinit.records import causes
from hpcinit.why.evidence import NO_RANK, Evidence, Position, Verdict, Watched, named
from hpcinit.why.log_lines import Line
from hpcinit.why.ranking import Finding, Grade
from hpcinit.why.read_tracebacks import Error

_WHO = (
    r"\[(?:PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))? ?(?:\((?P<group>[^)]*)\))? )?"
    r"Rank (?P<rank>\d{1,6})\]"
)
_TIMEOUT = re.compile(
    rf"{_WHO}.*(?P<text>Watchdog caught collective operation timeout"
    r"(?:: WorkNCCL\(SeqNum=(?P<number>\d{1,18}), OpType=(?P<call>\w+)"
    r"(?:, NumelIn=(?P<sent>\d+), NumelOut=(?P<received>\d+))?)?.*)"
)
_WORK = re.compile(
    rf"{_WHO}.*[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{{1,18}}), last completed (?:NCCL )?work: -?\d"
)
_STUCK = re.compile(rf"{_WHO}.*(?:watchdog got stuck for|Heartbeat monitor timed out)")
_ENDED = re.compile(rf"{_WHO}.*watchdog thread terminated with exception: (?P<text>(?!.*Watchdog caught).*)")
MESSAGES = ("SEND", "RECV")
ONE_WAY = ("BROADCAST", "REDUCE", "GATHER", "SCATTER")  # the source may finish before the others make the call
UNEVEN = ("ALLTOALL", "SEND", "RECV", "GATHER", "SCATTER", "COALESCED")  # sizes of these may differ between ranks
FEW = 4  # if more than 1/4 of the ranks are missing, assume that the log lacks messages
ADVICE = (
    "its own log and stack show what it did instead of this call; dumps of torch's flight recorder prove it "
    "(TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1), and hpcinit why reads them"
)
BLOCKED = "a CUDA or NCCL call does not return there: look for Xid errors in dmesg on its node; read its stack"


def read(lines: Sequence[Line]) -> tuple[list[Watched], list[Error]]:
    """Return the messages of the watchdogs, and the errors with which they ended ranks."""
    watched: list[Watched] = []
    errors: list[Error] = []
    for number, line in enumerate(lines):
        if "Rank" not in line.text:
            continue
        if found := _TIMEOUT.search(line.text):
            watched.append(Watched(_rank(line, found), _group(found), _position(found)))
            text = f"RuntimeError: [Rank {found['rank']}] {found['text']}"
            errors.append(Error(_rank(line, found), text, "", number))
        elif found := _WORK.search(line.text):
            watched.append(Watched(_rank(line, found), _group(found), enqueued=int(found["enqueued"])))
        elif found := _STUCK.search(line.text):
            watched.append(Watched(_rank(line, found), _group(found), stuck=True))
        elif found := _ENDED.search(line.text):
            errors.append(Error(_rank(line, found), f"RuntimeError: {found['text']}", "", number))
    return watched, errors


def _position(found: re.Match[str]) -> Position | None:
    if not found["number"]:
        return None
    sizes = () if found["call"].startswith(UNEVEN) else (found["sent"], found["received"])
    return int(found["number"]), found["call"], sizes


def _group(found: re.Match[str]) -> str | None:
    """Return the group's description, '' for the group of all ranks, or None if the message does not show it."""
    name = found["group"] or found["guid"] or found["id"]
    return "" if name in ("0", "default_pg") else name


def _rank(line: Line, found: re.Match[str]) -> int:
    if line.rank != NO_RANK:
        return line.rank
    return NO_RANK if _group(found) else int(found["rank"])


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield the ranks for which the others are waiting, according to the call in which each rank timed out.

    The calls are compared by their numbers and types.
    """
    known = [one for one in evidence.watched if one.rank != NO_RANK]
    if not evidence.watched:
        return
    every = {one.rank: one.position for one in reversed(known) if one.position}
    at = _without_sources(every)
    behind = {one.rank for one in known if one.enqueued is not None} - every.keys()
    stuck = {one.rank for one in known if one.stuck} - at.keys()
    of_rank = {one.rank: one.group for one in reversed(known) if one.group is not None}
    groups = {of_rank.get(rank) for rank in at}
    of_two = at and all(call.startswith(MESSAGES) for _, call, _ in at.values())
    if of_two or len(groups - {None}) > 1:  # a missing rank may wait in another group or for a third rank
        yield _unclear(at)
    elif len(set(at.values())) > 1:
        yield _different(at, evidence, same_group=None not in groups)
    elif stuck:
        others = f", and {named(at)} {_wait(at)} in {_call(at)}" if at else ""
        head = (
            f"{named(stuck)} {_do(stuck)} not make progress: torch's watchdog is blocked there in a CUDA or NCCL call"
        )
        yield _finding(head + others, sorted(stuck), BLOCKED, evidence)
    elif late := {rank for rank in behind if at and _enqueued(rank, known) < min(each[0] for each in at.values())}:
        head = f"{named(late)} did not call {_call(at)}, in which {named(at)} {_wait(at)}"
        yield _finding(head, sorted(late), ADVICE, evidence)
    elif missing := _missing(every, evidence) if groups <= {"", None} else ():
        it = "them" if len(missing) > 1 else "it"  # inferred, because the log may lack lines
        head = f"{named(missing)} did not report a timeout of {_call(at)}: {named(at)} waited for {it}"
        yield replace(_finding(head, missing, ADVICE, evidence), inferred=True)
    else:
        yield _unclear(at)


def _unclear(at: Mapping[int, Position]) -> Finding:
    head = f"a collective timed out on {named(at)}: {_call(at)}" if at else "a collective timed out"
    head += "; it is unknown which rank, device or link was late"
    return Finding(Grade.HUNG, Verdict(head, failure_kinds.HANG, ADVICE.replace("its own", "each rank's")))


def _without_sources(at: Mapping[int, Position]) -> dict[int, Position]:
    """Remove the ranks that wait in a later call than the majority, if the majority's call is one-way.

    In a one-way collective, such as a broadcast, the source can finish before the other ranks.
    """
    (usual, _), *_ = Counter(at.values()).most_common() or [((0, "", ()), 0)]
    one_way = usual[1].startswith(ONE_WAY) and usual[1] != "REDUCE_SCATTER"
    return {rank: position for rank, position in at.items() if not one_way or position[0] <= usual[0]}


def _finding(
    head: str, ranks: Sequence[int], advice: str, evidence: Evidence, kind: str = failure_kinds.HANG
) -> Finding:
    host = evidence.hosts.get(ranks[0], "") if ranks else ""
    rank = ranks[0] if ranks else None
    verdict = Verdict(head, kind, advice, rank, host, evidence=evidence.last_output(ranks[:2]))
    return Finding(Grade.STATED, verdict, tuple(ranks))


def _different(at: Mapping[int, Position], evidence: Evidence, *, same_group: bool) -> Finding:
    """Return the finding on ranks that wait in a different call than the majority.

    same_group: whether all calls certainly belong to one group. If not, a call with another number proves nothing.
    """
    (usual, most), *_ = Counter(at.values()).most_common()
    odd = sorted(rank for rank, position in at.items() if position != usual)
    shown = [rank for rank in odd if at[rank] == at[odd[0]]]
    many = sorted(at.keys() - set(odd))
    mine, theirs = _described(at[shown[0]], usual), _described(usual, at[shown[0]])
    head = f"{named(shown)} {_wait(shown)} in {mine}, and {named(many)} in {theirs}"
    close = most <= 2 * (len(at) - most)
    head += f": the call of {named(shown)} is wrong" if close else ""
    is_majority = 2 * most > max(len(at), evidence.size)
    if not is_majority or not (same_group or len({number for number, _, _ in at.values()}) == 1):
        head = f"the ranks wait in different collectives, and it is unknown whose call is wrong: {head}"
        odd = []
    return replace(_finding(head, odd, causes.DIFFERENT_CALLS, evidence, failure_kinds.MISMATCH), inferred=close)


def _described(position: Position, other: Position) -> str:
    number, call, sizes = position
    return f"{call} number {number}" + (f" of {sizes[0]} elements" if sizes and position[:2] == other[:2] else "")


def _call(at: Mapping[int, Position]) -> str:
    return next((f"{call} number {number}" for number, call, _ in at.values()), "a collective")


def _missing(at: Mapping[int, object], evidence: Evidence) -> tuple[int, ...]:
    """Return the ranks that did not time out, or () if they are too many.

    If the world size is unknown, the highest rank that timed out counts as the last rank.
    """
    size = evidence.size or max(at, default=-1) + 1
    missing = tuple(sorted(set(range(size)) - at.keys()))
    few = len(missing) == 1 or FEW * len(missing) <= size
    return missing if few and 2 * len(missing) < size else ()


def _enqueued(rank: int, known: Sequence[Watched]) -> int:
    return max(one.enqueued for one in known if one.rank == rank and one.enqueued is not None)


def _wait(ranks: Sequence[int] | set[int] | Mapping[int, object]) -> str:
    return "wait" if len(ranks) > 1 else "waits"


def _do(ranks: set[int]) -> str:
    return "do" if len(ranks) > 1 else "does"
