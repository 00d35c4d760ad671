"""Slurm's nodelist, read and written without Slurm.

    n[1-3,7],gpu[08-10]     -> n1 n2 n3 n7 gpu08 gpu09 gpu10
    r[1-2]n[01-02]          -> r1n01 r1n02 r2n01 r2n02
    n[1-2]-ib               -> n1-ib n2-ib    (scontrol can do this since Slurm 23.11)

What valid text means is what `scontrol show hostnames` says, in its order, duplicates kept; the tests hold
its recorded answers. On malformed text scontrol is no guide: it exits with 0 and repairs in silence. We
refuse, because a repaired name is a host that nobody has:

    text             scontrol 22.05      here
    n[               n]                  error
    n[1-]            n1                  error
    n[ 1-2]          n01, n02            error
    n1,,n2           n1, n2              error
    (null)           (null)              error
    None assigned    None, assigned      error
    n[3-1]           nothing, exit 0     error

The rules come from `src/common/hostlist.c` (_hostlist_create_bracketed, _parse_single_range) of Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from hpcinit.facts.errors import NodelistError

# slurm.h: MAX_SLURM_NODES 65536 is the largest cluster, and one range of scontrol ends there too (MAX_RANGE).
# Four of those leave room for lists that were joined, and keep the longest answer at some tens of MB.
MAX_HOSTS = 4 * 65_536
MAX_NAME = 255  # RFC 1035: a name has at most 255 octets, so nobody needs a longer one
MAX_DIGITS = 19  # 19 nines still fit the unsigned 64 bits in which Slurm reads the ends of a range

# Letters of a host name. No quote, no shell character, and no '-' in front: names end up on command lines.
_LITERAL = r"[A-Za-z0-9._-]*"
_ELEMENT = re.compile(rf"(?!-){_LITERAL}(?:\[[^][]*\]{_LITERAL})*")
_PARTS = re.compile(r"\[([^]]*)\]")
_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")
_NUMBERED = re.compile(rf"(.*?)([0-9]{{1,{MAX_DIGITS}}})", re.DOTALL)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,8})\))?")


class _Range(NamedTuple):
    low: int
    high: int
    width: int  # digits of the low end: 098-102 is 098 099 100 101 102, and 1-010 is 1 ... 10


class _Name(NamedTuple):
    """`r[1-2]n[01-02]-ib`: literals "r", "n", "-ib" around the brackets, one literal more than brackets."""

    literals: list[str]
    brackets: list[list[_Range]]


def expand(text: str) -> list[str]:
    """All hosts of a nodelist, in Slurm's order, duplicates kept.

    Raises NodelistError for text that Slurm would not have written, and for more than MAX_HOSTS hosts (told
    from the ranges, before any name is made).
    """
    hosts: list[str] = []
    for literals, brackets in list(_parse(text)):
        if not brackets:
            hosts.append(literals[0])
            continue
        # Slurm's order: the last bracket runs fastest, then the first, the second, ... (_push_range_list).
        numbers = [[n for span in ranges for n in _names("", span, "")] for ranges in brackets[:-1]]
        for picked in product(*reversed(numbers)):
            inner = zip(literals[:-2], reversed(picked), strict=True)
            prefix = "".join(literal + number for literal, number in inner) + literals[-2]
            for span in brackets[-1]:
                hosts += _names(prefix, span, literals[-1])
    return hosts


def first(text: str) -> str:
    """The first host of a nodelist, the same as `expand(text)[0]`, without making the others.

    Raises NodelistError exactly where `expand` does: the whole text is read, so the time grows with the
    length of the text (microseconds for what Slurm writes) and not with the number of hosts.
    """
    literals, brackets = list(_parse(text))[0]
    numbers = [f"{ranges[0].low:0{ranges[0].width}d}" for ranges in brackets]
    return "".join(literal + number for literal, number in zip(literals, [*numbers, ""], strict=True))


def compress(hosts: Sequence[str]) -> str:
    """The short form that `scontrol show hostlist` prints: n1 n2 n3 n7 -> `n[1-3,7]`.

    `expand` gives the same hosts back in the same order, since only neighbours fold. Names are taken as they
    are; no hosts give "". Raises nothing.
    """
    groups: list[tuple[str, list[tuple[str, str]]]] = []  # ("n", [("1", "3"), ("7", "7")])
    for host in hosts:
        found = _NUMBERED.fullmatch(host)
        prefix, digits = found.groups() if found else (host, "")
        if not digits or not groups or groups[-1][0] != prefix or not groups[-1][1][0][0]:
            groups.append((prefix, [(digits, digits)]))
            continue
        low, high = groups[-1][1][-1]
        if digits == f"{int(high) + 1:0{len(low)}d}":
            groups[-1][1][-1] = (low, digits)
        else:
            groups[-1][1].append((digits, digits))
    return ",".join(prefix + _bracket(spans) for prefix, spans in groups)


def expand_counts(text: str) -> list[int]:
    """One number per node from SLURM_TASKS_PER_NODE or SLURM_JOB_CPUS_PER_NODE: `4(x2),3` -> [4, 4, 3].

    Raises NodelistError. The grammar is that of `_uint16_array_to_str` in Slurm's `src/common/env.c`.
    """
    counts: list[int] = []
    column = 0
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if not found:
            raise _fault(f"bad count '{_printable(item)}', expected N or N(xREPEAT),", text, column, _COUNTS)
        count, repeat = int(found[1]), int(found[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise _fault(f"more than {MAX_HOSTS:,} nodes (4 x Slurm's largest cluster)", text, column, _COUNTS)
        counts += [count] * repeat
        column += len(item) + 1
    return counts


_COUNTS = "tasks-per-node list"


def _names(prefix: str, span: _Range, suffix: str) -> Iterator[str]:
    """Every host of one range. Formatting with a width is slow; in 098-102 the zeros change once."""
    low, high, width = span
    while low <= high:
        digits = len(str(low))
        last = min(high, 10**digits - 1)
        head = prefix + "0" * (width - digits)
        yield from [f"{head}{number}{suffix}" for number in range(low, last + 1)]
        low = last + 1


def _bracket(spans: list[tuple[str, str]]) -> str:
    ranges = ",".join(low if low == high else f"{low}-{high}" for low, high in spans)
    return ranges if len(spans) == 1 and spans[0][0] == spans[0][1] else f"[{ranges}]"


def _parse(text: str) -> Iterator[_Name]:
    """Each comma-separated name; raises at the first character that does not fit."""
    start, total = 0, 0
    while True:
        found = _ELEMENT.match(text, start)
        end = found.end() if found else start
        if end == start or (end < len(text) and text[end] != ","):
            raise _misfit(text, start, end)
        name = _parse_name(text, start, end)
        total += prod(sum(high - low + 1 for low, high, _ in ranges) for ranges in name.brackets)
        if total > MAX_HOSTS:
            raise _fault(f"more than {MAX_HOSTS:,} hosts (4 x Slurm's largest cluster)", text, start)
        yield name
        if end == len(text):
            return
        start = end + 1


def _parse_name(text: str, start: int, end: int) -> _Name:
    # "r[1-2]n[01-02]" splits into "r" "1-2" "n" "01-02" ""
    parts = _PARTS.split(text[start:end])
    brackets = []
    column = start
    for literal, inside in zip(parts[0::2], parts[1::2]):  # noqa: B905 - the last literal has no bracket
        column += len(literal) + 1
        brackets.append(_parse_ranges(inside, text, column))
        column += len(inside) + 1
    digits = (max(max(width, len(str(high))) for _, high, width in ranges) for ranges in brackets)
    if sum(map(len, parts[0::2])) + sum(digits) > MAX_NAME:
        raise _fault(f"a name longer than {MAX_NAME} characters", text, start)
    return _Name(parts[0::2], brackets)


def _parse_ranges(inside: str, text: str, column: int) -> list[_Range]:
    ranges = []
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if not found:
            long = re.fullmatch(r"[0-9]+(-[0-9]+)?", item)
            what = f"more than {MAX_DIGITS} digits in the" if long else "bad"
            raise _fault(f"{what} range '{_printable(item)}'", text, column)
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high:
            raise _fault(f"backward range '{item}'", text, column)
        ranges.append(_Range(low, high, len(found[1])))
        column += len(item) + 1
    return ranges


def _misfit(text: str, start: int, at: int) -> NodelistError:
    """Says why no name, or no longer name than text[start:at], can be read at `start`."""
    if text in {"(null)", "None assigned"}:
        return _fault("no host (Slurm has not assigned nodes yet)", text, 0)
    if not text:
        return NodelistError("the nodelist is empty, expected names such as 'n[1-3],m7'")
    if at == len(text) or (at == start and text[at] == ","):
        return _fault("no name beside the comma", text, max(at - 1, 0) if at == len(text) else at)
    if text[at] == "]":
        return _fault("']' without '['", text, at)
    if text[at] == "[":
        inner = re.compile(r"[][]").search(text, at + 1)
        return _fault("'[' inside '['", text, inner.start()) if inner else _fault("'[' without ']'", text, at)
    return _fault(f"unexpected character {ascii(text[at])}", text, at)


def _printable(text: str, most: int = 40) -> str:
    """One line that cannot move the cursor, so that the caret under it stays right."""
    return re.sub(r"[^ -~]", "?", text[:most]) + ("..." if len(text) > most else "")


def _fault(what: str, text: str, at: int, noun: str = "nodelist") -> NodelistError:
    skipped = max(0, at - 40)
    shown = ("..." if skipped else "") + _printable(text[skipped:], 80)
    caret = " " * (at - skipped + (3 if skipped else 0)) + "^"
    return NodelistError(f"{what} at column {at + 1} of the {noun} '{shown}'\n  {shown}\n  {caret}")
