"""Reads a pickle of plain values that another user may have written. Calls no function, and limits time and memory.

Python's unpickler cannot be interrupted, and 300 bytes can make it hash tuples for years. It also keeps every value, so
a dump of 200 MB takes 2 GB of memory. The Reader in this module supports only the opcodes of plain values, and executes
each of them in constant time. It creates only the last items of a long list of dicts. It skips the other items with a
regular expression, because a Python loop over all opcodes of 200 MB takes 10 s.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

STEP = 1 << 18  # bytes between two calls of `check`
MOST_OF_ITEM = 1 << 20  # bytes of an item that is skipped as a whole
MOST_DEPTH = 1000  # of open lists, dicts and tuples
MOST_KEY = 1 << 31  # largest number that may be a key; many larger numbers can have the same hash


class Incomplete(ValueError):
    """The data ends too early."""


class Forgotten(ValueError):
    """A value is part of an item that the reader skipped."""


EARLY = "it ends too early"
MALFORMED = "it is not a pickle of plain values"
FORGOTTEN = object()  # replaces a value that was in a skipped item

_FLOAT = struct.Struct(">d")
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()}
_LONG = b"|".join(rb"\x8a%c.{%d}" % (size, size) for size in range(10))
_FIXED = rb"[N\x88\x89\])(eat\x85-\x87]|[Kqh].|[jJr].{4}|M..|[G\x95].{8}|" + _LONG
# A sequence of opcodes with their arguments. It may contain dicts without texts, such as frames of a stack, but no
# other dicts and no texts. The numbers limit the memory for a match.
_RUN = re.compile(rb"(?:%s|\}(?:q.|r.{4})\((?:%s){0,100}u){0,10000}" % (_FIXED, _FIXED), re.DOTALL)
_REFERENCES = re.compile(rb"(?:q.|r.{4}|(\x94))?\((?:h.|j.{4}){0,1000}e", re.DOTALL)  # the items of a list
_DICT = re.compile(rb"\}(?:q.|r.{4}|(\x94))?\(", re.DOTALL)


class _Place(NamedTuple):
    """Where an item starts in the data, and how many values were memoized before it."""

    start: int
    memoized: int


class Reader:
    """Reads one pickle by executing its opcodes."""

    def __init__(
        self,
        data: bytes,
        key: str,
        most: int,
        take: Callable[[Any], Any],
        check: Callable[[], None],
        *,
        unneeded: str = "",
        skip: bool = True,
    ) -> None:
        """Prepare to read the dict in `data` and the last `most` items of its list `key`.

        take: called with each complete item. It returns what to keep of the item.
        check: called regularly. It raises ValueError to stop reading.
        skip: whether to skip the other items of the list. A later item that refers to a value in a skipped one gets
            FORGOTTEN instead of the value.
        unneeded: a key that no caller needs. Its value may become FORGOTTEN, too.
        """
        self.data, self.key, self.take, self.check = data, key, take, check
        self.unneeded, self.skip = unneeded, skip
        self.memo: dict[int, Any] = {}
        self.memoized = 0  # the number that MEMOIZE gives to the next value
        self.texts: dict[str, str] = {}
        self.items: list[Any] = []  # the list self.key of the dict, which stays empty
        self.last: deque[Any] = deque(maxlen=most)  # an item, or its _Place
        self.count = 0

    def read(self) -> tuple[dict[Any, Any], list[Any], int]:
        """Return the dict with an empty list, the last items of the list, and how many items were before them.

        Raise ValueError if the pickle is not such a dict, and Incomplete if it is cut off.
        """
        document = self._run(0)
        if not isinstance(document, dict):
            raise ValueError("it is no dictionary")
        before = self.count - len(self.last)
        self.items = []  # a hostile item may refer to the list, but cannot change the result
        items = []
        for number, one in enumerate(self.last):
            if number % 256 == 0:
                self.check()
            items.append(self._run_item(one) if isinstance(one, _Place) else one)
        return document, items, before

    def _run_item(self, place: _Place) -> Any:
        self.memoized = place.memoized
        return self.take(self._run(place.start, one_item=True))

    def _add(self, items: list[Any]) -> None:
        self.count += len(items)
        self.last.extend(items)

    def _run(self, at: int, *, one_item: bool = False) -> Any:  # noqa: PLR0912, PLR0915  # a case for each opcode
        """Execute the opcodes from `at` to the end of the pickle or of one item. Return the value."""
        data, memo = self.data, self.memo
        stack: list[Any] = []
        outer: list[list[Any]] = []  # the stacks below the open marks
        items_depth = 0 if one_item else -1  # number of marks around each item
        begun = _Place(at, self.memoized)
        try:
            while True:
                stop = at + STEP
                while at < stop:
                    code = data[at]
                    at += 1
                    if code == 0x68:  # BINGET
                        stack.append(memo.get(data[at], FORGOTTEN))
                        at += 1
                    elif code == 0x6A:  # LONG_BINGET
                        stack.append(memo.get(int.from_bytes(data[at : at + 4], "little"), FORGOTTEN))
                        at += 4
                    elif code == 0x71:  # BINPUT
                        memo[data[at]] = stack[-1]
                        at += 1
                    elif code == 0x72:  # LONG_BINPUT
                        memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
                        at += 4
                    elif code == 0x94:  # MEMOIZE
                        memo[self.memoized] = stack[-1]
                        self.memoized += 1
                    elif code == 0x28:  # MARK
                        outer.append(stack)
                        if len(outer) > MOST_DEPTH:
                            raise ValueError(f"its values are nested more than {MOST_DEPTH} levels deep")
                        if items_depth < 0 and stack and stack[-1] is self.items:
                            items_depth = len(outer)
                        stack = []
                    elif code == 0x4B:  # BININT1
                        stack.append(data[at])
                        at += 1
                    elif code == 0x5D:  # EMPTY_LIST
                        key = stack[-1] if stack else None
                        if key == self.key and len(outer) < 2 and not one_item:
                            stack.append(self.items)
                        elif key == self.unneeded and (list_of := _REFERENCES.match(data, at)):
                            self.memoized += list_of[1] is not None
                            at = list_of.end()
                            stack.append(FORGOTTEN)
                        else:
                            stack.append([])
                    elif code == 0x61:  # APPEND
                        value = stack.pop()
                        if stack[-1] is self.items:
                            self._add([self.take(value)])
                        else:
                            stack[-1].append(value)
                    elif code == 0x65:  # APPENDS
                        values, stack = stack, outer.pop()
                        if stack[-1] is self.items:
                            self._add([self.take(value) for value in values])
                            items_depth = -1
                        else:
                            stack[-1].extend(values)
                    elif code == 0x75:  # SETITEMS
                        values, stack = stack, outer.pop()
                        _set(stack[-1], values)
                        if len(outer) == items_depth and len(stack) == 1:
                            if one_item:
                                return stack.pop()
                            item = stack.pop()
                            self._add([begun if self.skip else self.take(item)])
                    elif code == 0x7D:  # EMPTY_DICT
                        if len(outer) == items_depth and not stack and not one_item:
                            begun = _Place(at - 1, self.memoized)
                            if self.skip and (end := self._end_of_item(at - 1)):
                                self._add([begun])
                                at = end
                                continue
                            self.memoized = begun.memoized
                        stack.append({})
                    elif code in _CONSTANTS:
                        stack.append(_CONSTANTS[code])
                    elif code == 0x4D:  # BININT2
                        stack.append(int.from_bytes(data[at : at + 2], "little"))
                        at += 2
                    elif code == 0x4A:  # BININT
                        stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
                        at += 4
                    elif code == 0x8A:  # LONG1
                        size = data[at]
                        stack.append(int.from_bytes(data[at + 1 : at + 1 + size], "little", signed=True))
                        at += 1 + size
                    elif code in (0x58, 0x8C):  # BINUNICODE, SHORT_BINUNICODE
                        text, at = self._text(code, at)
                        stack.append(text)
                    elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                        size = code - 0x84
                        stack[-size:] = [tuple(stack[-size:])]
                    elif code == 0x74:  # TUPLE
                        values, stack = stack, outer.pop()
                        stack.append(tuple(values))
                    elif code == 0x73:  # SETITEM
                        value, key = stack.pop(), stack.pop()
                        _set(stack[-1], [key, value])
                    elif code == 0x47:  # BINFLOAT
                        (number,) = _FLOAT.unpack_from(data, at)
                        stack.append(number)
                        at += 8
                    elif code == 0x95:  # FRAME
                        at += 8
                    elif code == 0x80:  # PROTO
                        at += 1
                    elif code == 0x2E:  # STOP
                        return stack.pop()
                    else:
                        raise ValueError(_refusal(data, at, stack))
                self.check()
        except (IndexError, struct.error):
            raise (Incomplete(EARLY) if at >= len(data) else ValueError(MALFORMED)) from None
        except (TypeError, AttributeError):
            raise ValueError(MALFORMED) from None

    def _end_of_item(self, at: int) -> int:
        """Return where the dict at `at` ends, or 0 for a large or broken dict.

        Memoize only its strings, because later items refer to them.
        """
        data, depth, most = self.data, 0, min(at + MOST_OF_ITEM, len(self.data) - 1)
        while at < most:
            code = data[at]
            if code == 0x7D:  # EMPTY_DICT
                opened = _DICT.match(data, at)
                if not opened:
                    return 0
                self.memoized += opened[1] is not None
                at, depth = opened.end(), depth + 1
            elif code == 0x75:  # SETITEMS
                at, depth = at + 1, depth - 1
                if not depth:
                    return at
            elif code in (0x58, 0x8C):  # BINUNICODE, SHORT_BINUNICODE
                text, at = self._text(code, at + 1)
                code = data[at] if at < most else 0
                if code == 0x71:  # BINPUT
                    self.memo[data[at + 1]] = text
                elif code == 0x72:  # LONG_BINPUT
                    self.memo[int.from_bytes(data[at + 1 : at + 5], "little")] = text
                elif code == 0x94:  # MEMOIZE
                    self.memo[self.memoized] = text
            elif code == 0x94:
                at, self.memoized = at + 1, self.memoized + 1
            else:
                run = _RUN.match(data, at)
                if not run or run.end() == at:
                    return 0
                at = run.end()
        return 0

    def _text(self, code: int, at: int) -> tuple[str, int]:
        """Return the string whose length is at `at`, and where it ends. Raise Incomplete if the data ends before it."""
        start = at + (4 if code == 0x58 else 1)
        end = start + int.from_bytes(self.data[at:start], "little")
        if end > len(self.data):
            raise Incomplete(EARLY)
        text = self.data[start:end].decode(errors="replace")
        return self.texts.setdefault(text, text), end


def _set(target: Any, values: list[Any]) -> None:
    """Add keys and values to a dict. Raise ValueError if a key is neither a string nor a number.

    Other keys are refused, because hashing a nested tuple can take years.
    """
    keys = values[::2]
    kinds = set(map(type, keys))
    if not isinstance(target, dict) or kinds - {str, int}:
        raise ValueError("a key is neither a string nor a number")
    if int in kinds and any(abs(key) > MOST_KEY for key in keys if isinstance(key, int)):
        raise ValueError(f"a key is a number above {MOST_KEY}")
    target.update(zip(keys, values[1::2], strict=False))


def _refusal(data: bytes, at: int, stack: list[Any]) -> str:
    """Return why the opcode before `at` is refused."""
    code, names = data[at - 1 : at], []
    if code in (b"c", b"i"):  # GLOBAL, INST
        names = [line[:100].decode(errors="replace") for line in data[at : at + 300].split(b"\n")[:2]]
    elif code == b"\x93":  # STACK_GLOBAL
        names = [one[:100] for one in stack[-2:] if isinstance(one, str)]
    if names:
        return f"it refers to {'.'.join(names)}, and a flight recorder's dump contains only plain values"
    return f"it contains an opcode that torch's dumps do not have: {code!r}"
