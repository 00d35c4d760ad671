"""Finds steps and losses in a rank's log, for programs that do not call `run.progress()`.

The formats are a table of patterns. Real lines of each framework are in tests/drill/test_progress_lines.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcinit.base.errors import RequestError

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
# step 12, step=12, "step": 12, iter 12:, iteration 12/ 60, global_step 12, "num_updates": "12"; but not update: 1.25
_STEP = re.compile(
    r"(?i)(?<![a-z])(?:global[_ ]?|train[_ ]?)?(?:step|iter(?:ation)?|update)s?"
    r"['\"]?\s*[:=#\[]?\s*['\"]?(\d+)\b(?!\.\d)"
)
# Used only for lines in which _STEP finds nothing, because "batch=32" may also be the size of the batch.
_OTHER_STEP = re.compile(
    r"(?i)(?<![a-z])(?:it|batch(?:[_ ](?:idx|index))?|episode)['\"]?\s*[:=#\[]?\s*['\"]?(\d+)\b(?!\.\d)"
)
# loss 2.31, loss=2.31, 'loss': '2.31', lm loss: 2.31E+00, train_loss 2.31
_LOSS = re.compile(
    rf"(?i)(?<!val )(?<!val_)(?<!eval_)(?<!eval )loss(?:[_/.](?!scale)\w+)?['\"]?\s*[:=|]?\s*['\"\[]?({NUMBER})"
)
_RATE = re.compile(rf"(?i)(?<![a-z])(?:lr|learning[_ ]rate)['\"]?\s*[:=|]?\s*['\"\[]*({NUMBER})")
_EPOCH = re.compile(rf"(?i)(?<![a-z])epoch['\"]?[\s:=\[]*['\"]?({NUMBER})")
# Epoch 0:  50%|#####     | 32/64 [00:00<00:00, 120.10it/s, v_num=0, train_loss=2.30]   Lightning's bar, and tqdm's
_BAR = re.compile(r"(?:[Ee]poch\s+(\d+).*?)?\|\s*(\d+)/(\d+) \[[^\]]*\]?")
# Epoch: [0]  [ 10/64]  loss: 2.30; | epoch   1 |   20/ 64 batches | loss  2.30; [0/5][10/64] Loss_D: 2.30;
# Train: 0 [  10/64 ( 16%)]  Loss: 2.30
_IN_EPOCH = re.compile(r"(?:(?i:epoch|\btrain:)\W{0,4}(\d+)\D.*?|\[(\d+)/\d+\])\W*(\d+)\s*/\s*(\d+)")
# Trainer of Transformers: a dict without a step
_DICT = re.compile(r"^\{.*'epoch': .*\}$")
_SUMMARY = re.compile(r"'(?:eval_loss|train_runtime)'")


@dataclass(frozen=True)
class Point:
    """A training step that the program reported, in a line of its log or with `run.progress()`.

    step: the step's number. If the program prints only epochs, it is some increasing number.
    at: the position in the log, in bytes, at which the step's line ends.
    values: the printed numbers: 'loss', 'lr' and 'epoch'.
    time: when `run.progress()` was called, in seconds since 1970, or 0 for a line of the log.
    """

    step: int
    at: int
    values: Mapping[str, float] = field(default_factory=dict)
    time: float = 0.0

    @property
    def loss(self) -> float | None:
        """Return the loss of this step, or None if no loss was reported."""
        return self.values.get("loss")


def _values(line: str) -> dict[str, float]:
    found = {name: pattern.search(line) for name, pattern in (("loss", _LOSS), ("lr", _RATE), ("epoch", _EPOCH))}
    return {name: float(match[1]) for name, match in found.items() if match}


def _plain(line: str, at: int) -> Point | None:
    step, values = _STEP.search(line) or _OTHER_STEP.search(line), _values(line)
    return Point(int(step[1]), at, values) if step and "loss" in values else None


def _in_epoch_plain(line: str, at: int) -> Point | None:
    point = _plain(line, at)
    if not point or "epoch" not in point.values:
        return None
    return Point(round(point.values["epoch"] * LONGEST_EPOCH) + point.step, at, point.values)


def _epoch(line: str, at: int) -> Point | None:
    values = _values(line)
    if not {"loss", "epoch"} <= values.keys() or values["epoch"] != int(values["epoch"]):
        return None
    return Point(int(values["epoch"]), at, values)


def _bar(line: str, at: int) -> Point | None:
    found, values = _BAR.search(line), _values(line)
    if not found or "loss" not in values:
        return None
    epoch, done, total = int(found[1] or 0), int(found[2]), int(found[3])
    return Point(epoch * total + done, at, values | ({"epoch": float(epoch)} if found[1] else {}))


def _in_epoch(line: str, at: int) -> Point | None:
    found, values = _IN_EPOCH.search(line), _values(line)
    if not found or "loss" not in values:
        return None
    epoch, done, total = int(found[1] or found[2]), int(found[3]), int(found[4])
    return Point(epoch * max(1, total) + done, at, values | {"epoch": float(epoch)})


def _trainer(line: str, at: int) -> Point | None:
    values = _values(line)
    if not _DICT.match(line.strip()) or not {"loss", "epoch"} <= values.keys() or _SUMMARY.search(line):
        return None
    # Lines with equal epochs count as the same step: comparison.py only needs numbers that increase.
    return Point(round(values["epoch"] * 10000), at, values)


def _own(pattern: re.Pattern[str]) -> Callable[[str, int], Point | None]:
    def read(line: str, at: int) -> Point | None:
        found = pattern.search(line)
        if not found:
            return None
        named = {name: text for name, text in found.groupdict().items() if text is not None and name != "step"}
        return Point(int(found["step"]), at, _values(line) | {name: float(text) for name, text in named.items()})

    return read


Reader = Callable[[str, int], Point | None]
FORMATS: Mapping[str, Reader] = {
    "the Trainer of Transformers": _trainer,
    "a progress bar": _bar,
    "lines with a step and a loss": _plain,
    "lines with an epoch, a batch and a loss": _in_epoch,
    "lines with an epoch, a step in this epoch and a loss": _in_epoch_plain,
    "lines with an epoch and a loss": _epoch,
}


def reader_of(pattern: str) -> Reader:
    """Return a reader for drill.pattern.

    Raise RequestError if `pattern` is not a regular expression with a group called 'step'.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RequestError(f"drill.pattern={pattern!r} is not a regular expression: {error}") from None
    if "step" not in compiled.groupindex:
        raise RequestError(
            f"drill.pattern={pattern!r} has no group 'step', expected a pattern such as "
            "drill.pattern='it=(?P<step>\\d+) L=(?P<loss>\\S+)'"
        )
    return _own(compiled)


def points(data: bytes, start: int, reader: Reader) -> list[Point]:
    """Return the steps in the part of a log that starts at byte `start`.

    If several lines report the same step, the last one provides its values.
    """
    found: dict[int, Point] = {}
    for line, at in _lines(data, start):
        if point := reader(line, at):
            earlier = found.pop(point.step, point)
            found[point.step] = Point(point.step, earlier.at, point.values)
    return list(found.values())


def _lines(data: bytes, start: int) -> Iterator[tuple[str, int]]:
    """Yield each complete line, and the byte at which it ends. Progress bars end a line with a carriage return."""
    at = start
    for piece in re.split(rb"(?<=[\r\n])", data):
        at += len(piece)
        if piece.endswith((b"\r", b"\n")):
            yield piece.decode(errors="replace").strip("\r\n"), at


def best_reader(data: bytes) -> Reader | None:
    """Return the reader that finds the most steps with increasing numbers, or None if no known format matches."""

    def grown(reader: Reader) -> int:
        # Steps that start again in each epoch would make two different steps equal.
        steps = [point.step for line, at in _lines(data, 0) if (point := reader(line, at))]
        return len(set(steps)) if steps == sorted(steps) else 0

    counts = {reader: grown(reader) for reader in FORMATS.values()}
    best = max(counts, key=lambda reader: counts[reader])
    return best if counts[best] >= MOST_NEEDED else None


MOST_NEEDED = 3  # a format must find this many steps in a log
LONGEST_EPOCH = 10**7  # steps


def reported(documents: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the steps that `run.progress()` reported."""
    found = {one["step"]: Point(one["step"], 0, one["values"], one["time"]) for one in documents}
    return list(found.values())


def last_digit(texts: Sequence[float]) -> float:
    """Return the value of the last digit with which the numbers were printed, such as 0.0001 for 2.3104."""
    if not texts:
        return 0.0
    digits = max((len(f"{value!r}".partition(".")[2].split("e")[0]) for value in texts), default=0)
    return float(10.0**-digits)
