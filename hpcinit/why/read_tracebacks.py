"""Reads errors from log lines: tracebacks of Python and rich, exception groups, and messages without a traceback.

If several ranks write to the same log, their tracebacks are interleaved. Therefore, the lines of each process are read
separately. If an exception was raised while another one was handled, only the last exception counts. An error counts as
handled if its process continued training afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcinit.base.failure_kinds import HANG
from hpcinit.records import causes
from hpcinit.why.evidence import NO_RANK
from hpcinit.why.log_lines import Line, named

HEADER = "Traceback (most recent call last)"
CUT = "the log ends inside this traceback"
MOST_DETAILS = 8  # further lines of one message
# An error counts as handled if its rank prints HANDLED_AFTER lines about training afterwards. If another rank handled
# the same error, HANDLED_BY_ALL_AFTER such lines of any ranks are enough.
HANDLED_AFTER = 2
HANDLED_BY_ALL_AFTER = 10
_MARGIN = re.compile(r"^\s*(?:\+-[+-]*|[|+])(?: (?=\S)|(?= ))")  # of an exception group
_BOX = re.compile(r"^│ ?(.*?)\s*│?$")  # of rich
_BOX_FRAME = re.compile(r"^\s*(\S+):(\d+) in (.+)$")
# The line of an exception. Lines of other programs may be inside a traceback: 'Epoch: 3', 'wandb: ...', 'n1: ...'
_ERROR = re.compile(
    r"^(?:(?:\w+\.)+(?:_*[A-Z]\w*|error|timeout|gaierror|herror)|_*[A-Z]\w*[a-z0-9][A-Z]\w*"
    r"|(?:_*[A-Z]\w*)?Exception|_*[A-Z]\w*(?:Error|Exit|Interrupt|Warning|Group))(?::|$)"
)
# A program that catches an exception, and C++ below 'terminate called after throwing', print the message alone.
_ALONE = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)|^\s+what\(\):\s+(\[enforce fail .*)")
# Log frameworks: 'ERROR | rank=5 | app | Uncaught HfHubHTTPError: 429 ...'; the driver: 'NVRM: Xid ...'
_LOGGED = re.compile(
    r"\b(?:[Uu]ncaught|[Uu]nhandled)(?: exception)?:? ((?:\w+\.)*[A-Z]\w*: \S.*)"
    r"|(?:\b(?:ERROR|CRITICAL|FATAL)\b|^[EF]\d{4} ).*?\b((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)"
    r"|(NVRM: Xid .*|(?:Memory access fault|HW Exception) by GPU.*)"
)
_RETRIED = re.compile(r"(?i)\bretrying\b|\battempt (\d+) ?(?:of|/) ?(?!\1\b)\d+")  # not the last attempt
_FAILS = re.compile(r"(?i)\b(?:error|exception|fail\w*|crash\w*|critical|fatal)\b")
_CHAIN = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct cause"
    r"|-- Process (?P<rank>\d{1,6}) terminated with the following error)"  # torch.multiprocessing.spawn
)
_WRAPPER = re.compile(
    r"^(?:[\w.]*ProcessRaisedException|(?:Base)?ExceptionGroup)\b"
    r"|^[\w.]+: (?:Caught \w+ in |The following operation failed in the TorchScript interpreter)"
)
_OF_RANK = re.compile(r"last\): \(RANK (\d{1,6})\)$")  # inside a message of torch.distributed.checkpoint
_IN_TABLE = re.compile(r"^\s*rank\s*: (\d{1,6}) \(local_rank")  # torchrun's table, which may have tracebacks
MOST_NOISE = 20  # lines of other programs inside a traceback
_IGNORED = re.compile(r"^Exception ignored in|^Error in atexit\._run_exitfuncs|^--- Logging error ---")
_DETAIL = re.compile(
    r"^(?:\t|  +(?!File \")\S|[\w.\[\]]+$|nccl[A-Z]\w+:|Last error:"
    # gloo; Ascend's HCCL; Ray
    r"| Original exception|\[ERROR\] |E[A-Z0-9]\d{4}: |Memory on the node)"
)
# Megatron-LM: 'AssertionError: Rank 11: found NaN in ...'; gloo: 'RuntimeError: Rank 3 successfully reached ...'
_NAMED = re.compile(r"^[\w.]+: Rank (\d{1,6})(?:[:,]| successfully) ")
_ON_NODE = re.compile(r"\bnode \((?:ID: \w+, )?IP: ([\w.:-]+?)[,)]")  # of Ray
_HOST = re.compile(r"([A-Za-z][\w.-]*)(?::| *\|) ")  # as a prefix of each line
_OF_KERNEL = re.compile(r"^NVRM|by GPU")
_KERNEL = re.compile(r"(\S+) kernel: ")
_NCCL_WARNING = re.compile(r"^(?:(?P<host>[^\s:]{1,80}):\d+:\d+ \[\d+\])?.*NCCL WARN (?P<text>.*)")
_MISSING = re.compile(r"(\d{1,6}): (\[.*)")  # of Horovod's stall inspector
_USAGE_ERROR = re.compile(r"^(\S+): error: (.*)")  # of argparse, below 'usage: train.py [-h] ...'
TRAINS = re.compile(
    r"(?i)^ba\d+$|\b(?:(?<!job )(?<![*] )step|iter(?:ation)?s?|epoch|batch)\b\W{0,3}\d|\bloss\b\W{0,3}\d|\d+/\d+ ?\["
    r"|\btraining finished\b"
)
_NO_PROGRESS = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|saved|saving)\b")
_HANDLER = "trainer/connectors/signal_connector.py"  # in tracebacks of Lightning's SIGTERM handler


@dataclass(frozen=True)
class Error:
    """An error in a log.

    rank: the rank that printed it, or the rank that the message names.
    text: the message, which may have several lines.
    traceback: the traceback with its frames.
    number: the number of its line in the log.
    handled: whether the process continued training after the error.
    alone: whether the message has no traceback, because the program caught the exception.
    host: the host in the prefix of the line, or '' if unknown.
    raised_from: the message of the exception that is its direct cause.
    in_thread: whether the error ended only a thread of its process.
    """

    rank: int
    text: str
    traceback: str
    number: int
    handled: bool = False
    alone: bool = False
    host: str = ""
    raised_from: str = ""
    in_thread: bool = False

    @property
    def whole(self) -> str:
        """Return the message together with that of its direct cause, which may show the kind of failure."""
        return f"{self.text}\n{self.raised_from}".rstrip()


def read(lines: Sequence[Line]) -> list[Error]:
    """Return the errors in the log, in the order of their lines."""
    streams: dict[str, list[tuple[int, Line]]] = {}
    for number, line in enumerate(lines):
        streams.setdefault(line.stream, []).append((number, line))
    found = _handled_together([one for own in streams.values() for one in _of_process(own, len(lines))], lines)
    warnings = [match for line in lines if (match := _NCCL_WARNING.search(line.text)) and _is_cause(match["text"])]
    if warnings:
        # First the events of the process's own network card.
        warnings.sort(key=lambda match: "async event" not in match["text"])
        reasons = "; ".join(dict.fromkeys(match["text"] for match in warnings[:MOST_DETAILS]))
        found = [_with_reason(error, reasons) for error in found]
        if all(causes.is_secondary_text(error.text, error.traceback) for error in found):
            found.append(Error(NO_RANK, f"NCCL WARN {reasons}", "", len(lines), host=warnings[0]["host"] or ""))
    return sorted(found, key=lambda one: one.number)


def _handled_together(found: Sequence[Error], lines: Sequence[Line]) -> list[Error]:
    """Mark an error as handled if another rank handled the same error, and training continued for many steps.

    For example, all ranks run out of memory while they search for a batch size, but only rank 0 prints steps.
    """
    same = {_without_numbers(one.text) for one in found if one.handled and one.rank != NO_RANK}
    trains = [number for number, line in enumerate(lines) if TRAINS.search(line.text)] if found else []
    if len(trains) < HANDLED_BY_ALL_AFTER:
        return [*found]
    until = trains[-HANDLED_BY_ALL_AFTER]
    # If the ranks train after a warning that a collective waits for some of them, the collective did finish.
    found = [one for one in found if one.number > until or one.traceback or causes.kind(one.text)[0] != HANG]
    return [
        replace(one, handled=one.handled or (one.number < until and _without_numbers(one.text) in same))
        for one in found
    ]


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "", text)


def is_exception(text: str) -> bool:
    """Return whether this is the line with the message of an exception of Python."""
    return bool(_ERROR.match(text))


def trains(text: str) -> bool:
    """Return whether the line reports the progress of the training, and no error and no save."""
    return bool(TRAINS.search(text)) and not _NO_PROGRESS.search(text)


def is_ignored(text: str) -> bool:
    """Return whether this line announces a traceback that Python prints without ending the process."""
    return bool(_IGNORED.match(text))


def is_chain(text: str) -> bool:
    """Return whether this line joins two tracebacks, or announces the traceback below it."""
    return bool(_CHAIN.match(text) or _IGNORED.match(text) or text.startswith("Exception in thread"))


def _is_cause(warning: str) -> bool:
    return causes.message(f"NCCL WARN {warning}") is not None and not causes.is_secondary_text(warning)


def _with_reason(error: Error, warning: str) -> Error:
    """Return the error. If NCCL raised it, add the warning in which NCCL printed the reason."""
    is_reason = re.search("(?i)nccl", error.text) and "Last error" not in error.text
    if not is_reason or causes.is_secondary_text(error.text):
        return error
    return replace(error, text=f"{error.text}\nLast error: {warning}")


def _of_process(lines: Sequence[tuple[int, Line]], size: int) -> list[Error]:
    """Return the errors of one process.

    lines: the lines of the process, each with its number in the log.
    size: the number of lines in the log.
    """
    trains = [number for number, line in lines if TRAINS.search(line.text)]
    # Lines without a rank may be from several processes, so require one more line.
    enough = HANDLED_AFTER + (lines[0][1].rank == NO_RANK)
    last = max((number for number, line in lines if line.text), default=-1)
    host = _HOST.fullmatch(lines[0][1].stream)
    return [
        replace(
            one,
            host=one.host or next((match[1] for match in (_ON_NODE.search(one.text), host) if match), ""),
            handled=sum(1 for number in trains if number > one.number) >= enough
            or (last > one.number and _is_of_text(one.traceback)),
        )
        for one in _errors(lines, size)
        if _HANDLER not in one.traceback
    ]


def _is_of_text(traceback: str) -> bool:
    """Return whether all frames are in code that the program compiled from a string, such as a model's output."""
    files = re.findall(r'File "([^"]*)"', traceback)
    return bool(files) and all(re.fullmatch(r"<(?!string|stdin|frozen).*>", file) for file in files)


def _errors(lines: Sequence[tuple[int, Line]], size: int) -> list[Error]:
    found: list[Error] = []
    opened: list[str] = []  # the lines of a traceback whose message follows
    details, ignored, chained, named, before, indent, noise = 0, False, False, NO_RANK, "", 0, 0
    direct, inner, thread = False, "", False
    listed, usage = NO_RANK, ""
    for number, line in lines:
        text = _plain(line.text)
        listed = _number(_IN_TABLE.match(text), listed)
        if opened:
            text = text[indent:] if not text[:indent].strip() else text
            noise += bool(text.strip()) and not text.startswith(" ")
            opened = [*opened, text] if noise <= MOST_NOISE else []
            if _ERROR.match(text):
                if chained and not ignored:
                    inner = found.pop().whole
                if not ignored:
                    raised_from = inner if direct else ""
                    error = Error(_rank(line, text, named), text, "\n".join(opened), number)
                    error = replace(error, raised_from=raised_from, in_thread=thread)
                    found.append(error)
                    details = MOST_DETAILS
                opened, ignored, chained, named, direct = [], False, False, NO_RANK, False
        elif HEADER in text:
            opened, noise, indent = [text], 0, len(text) - len(text.lstrip())
            thread = before.startswith("Exception in thread")
            reported = listed if text.lstrip().startswith("traceback :") else _reported(before)
            inner_of = _OF_RANK.search(text)
            reported = _number(inner_of, reported)
            named = reported if named == NO_RANK else named
            chained = bool(found) and (chained or bool(inner_of) or bool(_WRAPPER.match(found[-1].text)))
        elif details and (_DETAIL.match(text) or before.rstrip().endswith(":")):
            found[-1] = replace(found[-1], text=f"{found[-1].text}\n{text}")
            details -= 1
        elif chain := _CHAIN.match(text):
            chained, named, direct = bool(found), int(chain["rank"] or NO_RANK), "direct" in text and bool(found)
        elif alone := _without_traceback(line, text, number, before, usage):
            # Sort messages of the kernel, which have no rank, after the errors of ranks.
            found.append(replace(alone, number=number + size) if _OF_KERNEL.search(alone.text) else alone)
            details = MOST_DETAILS
        elif text.strip():
            details, ignored = 0, bool(_IGNORED.match(text))
        before, usage = text, text if text.startswith("usage: ") else usage
    if opened and not ignored and lines[-1][0] >= size - 2:
        found.append(Error(named if named != NO_RANK else lines[-1][1].rank, CUT, "\n".join(opened), lines[-1][0]))
    return found


def _without_traceback(line: Line, text: str, number: int, before: str, usage: str) -> Error | None:
    """Return the error that a line outside of tracebacks reports, or None if it reports no error.

    before: the line above.
    usage: the last line in which argparse printed the program's usage, or ''.
    """
    if before.strip().endswith("Missing ranks:") and (missing := _MISSING.match(text)):
        return Error(NO_RANK, f"RuntimeError: Missing ranks: {missing[1]} in {missing[2]}", "", number)
    if usage and (wrong := _USAGE_ERROR.match(text)) and usage.startswith(f"usage: {wrong[1]}"):
        return Error(line.rank, f"{wrong[1]}: {wrong[2]}", "", number)
    if (alone := _ALONE.match(text) or _LOGGED.search(text)) and not _RETRIED.search(text):
        message = next(filter(None, alone.groups()))
        rank = named(text)
        rank = _rank(line, message, NO_RANK) if rank == NO_RANK else rank
        kernel = _KERNEL.search(text)
        host = kernel[1] if kernel else ""
        return Error(rank, message, "", number, alone=alone.re is _ALONE, host=host)
    return None


def _number(found: re.Match[str] | None, otherwise: int) -> int:
    return int(found[1]) if found else otherwise


def _reported(before: str) -> int:
    """Return the rank in the line above a traceback, or NO_RANK if that line does not introduce the traceback."""
    return named(before) if _FAILS.search(before) else NO_RANK


def _plain(text: str) -> str:
    """Return a line without the margin of an exception group, or the box that rich draws around a traceback."""
    if box := _BOX.match(text):
        frame = _BOX_FRAME.match(box[1])
        return f'  File "{frame[1]}", line {frame[2]}, in {frame[3]}' if frame else f"    {box[1]}"
    return _MARGIN.sub("", text, count=1)


def _rank(line: Line, message: str, named: int) -> int:
    if found := _NAMED.match(message):
        return int(found[1])
    return line.rank if named == NO_RANK else named
