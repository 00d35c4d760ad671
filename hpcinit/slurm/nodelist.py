"""Parses and writes Slurm's nodelists without Slurm.

    n[1-3,7],gpu[08-10]     -> n1 n2 n3 n7 gpu08 gpu09 gpu10.
    r[1-2]n[01-02]          -> r1n01 r1n02 r2n01 r2n02.
    n[1-2]-ib               -> n1-ib n2-ib. (scontrol can do this since Slurm 23.11.)

For valid text, the hosts are those of `scontrol show hostnames`, in the same order and with duplicates. The tests
compare them with recorded output of scontrol. scontrol silently repairs malformed text and exits with 0. hpcinit
refuses such text, because the repaired text often names a host that does not exist:

    text             scontrol 22.05      hpcinit
    n[               n]                  error
    n[1-]            n1                  error
    n[ 1-2]          n01, n02            error
    n1,,n2           n1, n2              error
    (null)           (null)              error
    None assigned    None, assigned      error
    n[3-1]           nothing             error

The rules are those of Slurm's `src/common/hostlist.c` (_hostlist_create_bracketed, _parse_single_range).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, product
from math import prod
from operator import add
from typing import NamedTuple

from hpcinit.base.errors import NodelistError

# The largest cluster has 65536 nodes (slurm.h: MAX_SLURM_NODES), and so has the largest range of scontrol (MAX_RANGE).
# With four times as many, joined lists are possible, and the longest result has tens of MB.
MAX_HOSTS = 4 * 65_536
MAX_NAME = 255  # RFC 1035: a name has at most 255 octets
MAX_DIGITS = 19  # Slurm reads the ends of a range as unsigned 64-bit numbers, which can have 19 nines

# Characters of a host name: no quotes, no shell characters and no leading '-', because names appear on command lines.
_LITERAL = r"[A-Za-z0-9._-]*"
_ELEMENT = re.compile(rf"(?!-){_LITERAL}(?:\[[^][]*\]{_LITERAL})*")
_PARTS = re.compile(r"\[([^]]*)\]")
_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")
_MOST = f"{MAX_HOSTS:,} (4 x Slurm's largest cluster)"
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,8})\))?")
_COUNTS = "tasks-per-node list"

# ("098", 98, 102). Slurm pads to the digits of the low end: 098-102 is 098 ... 102, and 1-010 is 1 ... 10.
_Range = tuple[str, int, int]


class _Name(NamedTuple):
    """A name with brackets, such as `r[1-2]n[01-02]-ib`, which names several hosts.

    literals: the texts before, between and after the brackets, here "r", "n" and "-ib".
    brackets: the ranges in each pair of brackets.
    """

    literals: list[str]
    brackets: list[list[_Range]]

    def size(self) -> int:
        return prod(sum(high - low + 1 for _, low, high in ranges) for ranges in self.brackets)


def expand(text: str) -> list[str]:
    """Return all hosts of a nodelist, in Slurm's order and with duplicates.

    Raise NodelistError if the text is not a valid nodelist, or names more than MAX_HOSTS hosts.
    """
    hosts: list[str] = []
    for literals, brackets in _parse(text):
        if not brackets:
            hosts.append(literals[0])
            continue
        *outer, last = brackets
        tails = _names(literals[-2], last, literals[-1])
        if not outer:
            hosts += tails
            continue
        # Slurm's order: the last bracket varies fastest, then the first, the second, ... (_push_range_list).
        numbers = [_names("", ranges, "") for ranges in outer]
        for picked in product(*reversed(numbers)):
            head = "".join(map(add, literals[:-2], reversed(picked)))
            hosts += [head + tail for tail in tails]
    return hosts


def first(text: str) -> str:
    """Return the first host of a nodelist, without expanding the others.

    Raise NodelistError in the same cases as `expand`.
    """
    literals, brackets = _parse(text)[0]
    numbers = [ranges[0][0] for ranges in brackets]
    return "".join(map(add, literals, [*numbers, ""]))


def compress(hosts: Sequence[str]) -> str:
    """Return the hosts as a short nodelist, as `scontrol show hostlist` prints it: n1 n2 n3 n7 becomes `n[1-3,7]`.

    Only neighboring hosts are joined, so `expand` returns the same hosts in the same order. Names are not checked.
    Without hosts, return "".
    """
    pieces: list[str] = []
    for (prefix, numbered), group in groupby(map(_split, hosts), key=lambda split: (split[0], bool(split[1]))):
        numbers = [digits for _, digits in group]
        pieces += [prefix + _bracket(numbers)] if numbered else [prefix] * len(numbers)
    return ",".join(pieces)


def expand_counts(text: str) -> list[int]:
    """Return one number per node from SLURM_TASKS_PER_NODE or SLURM_JOB_CPUS_PER_NODE: `4(x2),3` becomes [4, 4, 3].

    Raise NodelistError at the first wrong number. The syntax is that of `_uint16_array_to_str` in Slurm's
    `src/common/env.c`.
    """
    counts: list[int] = []
    column = 0
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if not found:
            raise _fault(f"bad count '{_printable(item)}', expected N or N(xREPEAT),", text, column, _COUNTS)
        count, repeat = int(found[1]), int(found[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise _fault(f"more nodes than {_MOST}", text, column, _COUNTS)
        counts += [count] * repeat
        column += len(item) + 1
    return counts


def _names(prefix: str, ranges: list[_Range], suffix: str) -> list[str]:
    """Return every host that one pair of brackets names."""
    names: list[str] = []
    for digits, low, high in ranges:
        template = f"{prefix}%0{len(digits)}d{suffix}"
        names += [template % number for number in range(low, high + 1)]
    return names


def _split(host: str) -> tuple[str, str]:
    prefix = host.rstrip("0123456789")
    digits = host[len(prefix) :]
    return (prefix, digits) if len(digits) <= MAX_DIGITS else (host, "")


def _bracket(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    spans: list[list[str]] = []  # [["1", "3"], ["7", "7"]]
    for digits in numbers:
        if spans and digits == f"{int(spans[-1][1]) + 1:0{len(spans[-1][0])}d}":
            spans[-1][1] = digits
        else:
            spans.append([digits, digits])
    return "[" + ",".join(low if low == high else f"{low}-{high}" for low, high in spans) + "]"


def _parse(text: str) -> list[_Name]:
    """Return the comma-separated names, not expanded. Raise NodelistError at the first wrong character."""
    names, start, total = [], 0, 0
    while start <= len(text):
        found = _ELEMENT.match(text, start)
        end = found.end() if found else start
        if end == start or (end < len(text) and text[end] != ","):
            raise _misfit(text, start, end)
        element = text[start:end]
        name = _parse_name(element, text, start) if "[" in element else _Name([element], [])
        # A host is never longer than its element, so only long elements need the sum.
        if end - start > MAX_NAME < sum(map(len, name.literals)) + MAX_DIGITS * len(name.brackets):
            raise _fault(f"a name that can exceed {MAX_NAME} characters", text, start)
        total += name.size() if name.brackets else 1
        if total > MAX_HOSTS:
            raise _fault(f"more hosts than {_MOST}", text, start)
        names.append(name)
        start = end + 1
    return names


def _parse_name(element: str, text: str, column: int) -> _Name:
    # "r[1-2]n[01-02]" splits into "r" "1-2" "n" "01-02" ""
    parts = _PARTS.split(element)
    brackets = []
    for literal, inside in zip(parts[0::2], parts[1::2], strict=False):
        column += len(literal) + 1
        brackets.append(_parse_ranges(inside, text, column))
        column += len(inside) + 1
    return _Name(parts[0::2], brackets)


def _parse_ranges(inside: str, text: str, column: int) -> list[_Range]:
    ranges = []
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if not found:
            long = re.fullmatch(r"[0-9]+(-[0-9]+)?", item)
            what = f"more than {MAX_DIGITS} digits in the" if long else "bad"
            raise _fault(f"{what} range '{_printable(item)}'", text, column)
        first_digits, last_digits = found.groups()
        low = int(first_digits)
        high = int(last_digits) if last_digits else low
        if low > high:
            raise _fault(f"backward range '{item}'", text, column)
        ranges.append((first_digits, low, high))
        column += len(item) + 1
    return ranges


def _misfit(text: str, start: int, at: int) -> NodelistError:
    """Return an error that explains what is wrong at the position `at` of a nodelist.

    start: where the invalid name starts.
    """
    if text in {"(null)", "None assigned"}:
        return _fault("no host (Slurm has not assigned nodes yet)", text, 0)
    if not text:
        return NodelistError("the nodelist is empty, expected names such as 'n[1-3],m7'")
    if at == len(text) or (at == start and text[at] == ","):
        return _fault("no name next to the comma", text, max(at - 1, 0) if at == len(text) else at)
    if text[at] == "]":
        return _fault("']' without '['", text, at)
    if text[at] == "[":
        inner = re.compile(r"[][]").search(text, at + 1)
        return _fault("'[' inside '['", text, inner.start()) if inner else _fault("'[' without ']'", text, at)
    return _fault(f"unexpected character {text[at]!a}", text, at)


def _printable(text: str, most: int = 40) -> str:
    """Return the start of the text on one line of printable ASCII, so that the caret points at the right column."""
    return re.sub(r"[^ -~]", "?", text[:most]) + ("..." if len(text) > most else "")


def _fault(what: str, text: str, at: int, noun: str = "nodelist") -> NodelistError:
    skipped = max(0, at - 40)
    shown = ("..." if skipped else "") + _printable(text[skipped:], 80)
    caret = " " * (at - skipped + (3 if skipped else 0)) + "^"
    return NodelistError(f"{what} at column {at + 1} of the {noun} '{shown}'\n  {shown}\n  {caret}")
