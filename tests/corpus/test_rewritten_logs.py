"""Logs of the corpus with other prefixes, colors, hosts and line ends: the answer must not depend on these."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hpcinit.why import diagnosis, foreign_job
from tests.corpus.judge import Case, cases

SHAPES = ("dumps", "hostile", "run folder", "large", "stacks", "binary", "empty", "file per rank")
LOGS = [
    case
    for case in cases(apart=False)
    if "generate" not in case.truth
    and not case.truth["shape"].startswith(SHAPES)
    and "py-spy" not in case.truth["shape"]
]


def _clock(text: str, form: str) -> str:
    """Return the lines with a time in front of each, a tenth of a second apart."""
    lines = text.splitlines(keepends=True)
    return "".join(
        form.format(number // 600, number // 10 % 60, number % 10) + line for number, line in enumerate(lines)
    )


def _colored(text: str) -> str:
    """Return the text with the colors of Python 3.13's tracebacks."""
    text = re.sub(r'File ("[^"]+"), line (\d+)', "File \x1b[35m\\1\x1b[0m, line \x1b[35m\\2\x1b[0m", text)
    return re.sub(r"\b([A-Z]\w*(?:Error|Exception)): (.*)", "\x1b[1;35m\\1\x1b[0m: \x1b[35m\\2\x1b[0m", text)


def _interleaved(text: str) -> str:
    """Return the text with neighboring lines of different ranks exchanged."""
    lines, chance = text.splitlines(keepends=True), random.Random(7)
    label = re.compile(r" *\d{1,6}: |\[rank\d{1,6}\]")
    for at in range(len(lines) - 1):
        one, other = label.match(lines[at]), label.match(lines[at + 1])
        if one and other and one[0] != other[0] and chance.random() < 0.4:
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
    return "".join(lines)


REWRITTEN: dict[str, Callable[[str], str]] = {
    "times of containers": lambda text: _clock(text, "2026-11-25T04:{:02}:{:02}.{}00Z "),
    "times of a log framework": lambda text: _clock(text, "[2026-11-25 04:{:02}:{:02},{}00] "),
    "colors": _colored,
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
    "a byte-order mark": lambda text: f"\ufeff{text}",
    "spaces": lambda text: "".join(f"    {line}" for line in text.replace("\n", "  \n").splitlines(keepends=True)),
    "long names of hosts": lambda text: re.sub(r"\bn(\d{1,2})\b", r"nid0000\1", text),
    "interleaved ranks": _interleaved,
}


def some_of(every: Iterable[str], *kept: str) -> list[object]:
    """Return parameters of which only those in `kept` are in `make test`."""
    return [pytest.param(one, marks=() if one in kept else pytest.mark.more) for one in every]


def _answer(path: Path) -> tuple[str, int | None, tuple[int, ...]]:
    found = foreign_job.find(str(path))
    assert found, path
    verdict = diagnosis.diagnose(found.logs.evidence)
    return verdict.kind, verdict.rank, verdict.ranks


def _rewritten(case: Case, place: Path, rewrite: Callable[[str], str]) -> Path:
    """Copy the case with other logs, and the same times of change."""
    asked = case.build(place)
    for path in (path for path in place.rglob("*") if path.is_file()):
        written = path.stat()
        path.write_bytes(rewrite(path.read_bytes().decode(errors="surrogateescape")).encode(errors="surrogateescape"))
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    return asked


@pytest.mark.parametrize("how", some_of(REWRITTEN, "times of containers", "colors", "interleaved ranks"))
def test_the_answer_does_not_depend_on(how: str, tmp_path: Path) -> None:
    """The kind and the ranks of each answer are those for the original log."""
    different = []
    for number, case in enumerate(LOGS):
        before = _answer(case.build(tmp_path / f"{number}"))
        after = _answer(_rewritten(case, tmp_path / f"{number}-new", REWRITTEN[how]))
        at_fault = {before[1], after[1]} <= {*case.truth["ranks"]}  # two ranks failed in lines that are exchanged
        if before != after and not (before[0] == after[0] and at_fault):
            different.append((case.name, before, after))
    assert not different


@pytest.mark.parametrize("prefix", some_of(["worker-0: ", "[pod/train-0/pytorch] ", "node-a  | "], "worker-0: "))
def test_a_prefix_of_all_lines(prefix: str, tmp_path: Path) -> None:
    """Most answers are the same, and no other rank is named: a log of few lines does not show that it is a prefix.

    `why` reads the rank of vLLM's workers only at the start of a line.
    """
    same, other = 0, []
    for number, case in enumerate(LOGS):
        before = _answer(case.build(tmp_path / f"{number}"))
        path = _rewritten(case, tmp_path / f"{number}-new", lambda text: re.sub(r"(?m)^", prefix, text.rstrip("\n")))
        after = _answer(path)
        same += before == after
        right = before[1] in case.truth["ranks"] and after[1] in case.truth["ranks"]  # for example, all ranks failed
        if after[1] not in (before[1], None) and not right and "vLLM" not in case.truth["shape"]:
            other.append((case.name, before, after))
    assert not other and same > 0.9 * len(LOGS)


@pytest.mark.parametrize("part", some_of(["the start", "the end"], "the end"))
def test_a_log_of_which_a_part_is_missing(part: str, tmp_path: Path) -> None:
    """A log that ends inside a traceback names no rank for it; no part makes `why` fail."""
    cut = itertools.count()
    for number, case in enumerate(LOGS):

        def rewrite(text: str) -> str:
            lines = text.splitlines(keepends=True)
            kept = random.Random(next(cut)).randint(len(lines) // 2, len(lines))
            return "".join(lines[-kept:] if part == "the start" else lines[:kept])

        path = _rewritten(case, tmp_path / f"{number}", rewrite)
        if found := foreign_job.find(str(path)):
            verdict = diagnosis.diagnose(found.logs.evidence)
            assert verdict.rank is None or "ends inside a traceback" not in verdict.headline
