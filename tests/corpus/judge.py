"""Read the cases of the corpus, and judge an answer: right, half, unknown or wrong. README.md defines the four results."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.corpus.generate import generate

HERE = Path(__file__).parent
FOLDERS = {"cases": HERE / "cases", "apart": HERE / "held_apart"}
RIGHT, HALF, UNKNOWN, WRONG = "right", "half", "unknown", "wrong"

# Each kind of failure, and how an answer without JSON expresses it.
KINDS = {
    "program": r"\b[A-Z]\w*(Error|Exception|Group|Empty|NotFound)\b|exited with (exit )?(code|status)|bug",
    "hang": r"hang|hung|did not (call|join|reach)|waits? for|timed? ?out|stuck",
    "mismatch": r"mismatch|different (collective|size|call)",
    "early-end": r"status 0|early|returned",
    "start-up": r"start-up|rendezvous|did not connect|clients joined|store",
    "cuda-memory": r"(?i)out of memory|GPU memory|ALLOC_FAILED|calloc",
    "host-memory": r"(?i)oom.?kill|host memory|out of memory",
    "shared-memory": r"(?i)shared memory|/dev/shm",
    "disk": r"(?i)disk|quota|no space",
    "import": r"ModuleNotFoundError|ImportError|not installed",
    "no-gpu": r"(?i)device ordinal|duplicate gpu|no gpu|same gpu",
    "gpu": r"(?i)ECC|Xid|GPU|device",
    "network": r"(?i)network|connect|link",
    "node": r"(?i)node fail|node was lost|credential",
    "port": r"(?i)address already in use|EADDRINUSE|port",
    "file": r"(?i)no such file|permission denied|FileNotFound",
    "not-a-number": r"(?i)\bnan\b|diverged|infinite",
    "signal": r"(?i)signal|SIG[A-Z]+|killed",
    "time-limit": r"(?i)time limit",
    "preempted": r"(?i)preempt",
    "requeued": r"(?i)requeue",
    "cancelled": r"(?i)cancel",
    "script": r"(?i)script|srun",
    "none": r"(?i)nothing (has )?failed|no (failure|error)|finished",
    "unknown": r"(?i)unknown|not known|no cause",
}
VAGUE = ("unknown", "signal")  # a kind that names no cause; with the right rank it is half of the answer
HEDGE = re.compile(
    r"(?i)unknown|perhaps|probabl|\bmay\b|might|possib|likely|seems|not certain|uncertain|cannot|does not show|no failure is"
)
FIRST = re.compile(r"^(?:probably )?ranks? (\d+(?:(?:, | and |-)\d+)*)\b(?! (?:wait|other))")
CERTAINTIES = ("certain", "unknown acceptable")
REQUIRED = ("cause", "kind", "ranks", "hosts", "certainty", "because", "source", "shape", "ask")
OPTIONAL = ("accept", "also_true", "never", "say", "generate")


class Case(NamedTuple):
    """A case: its folder, whether it is one of the cases apart, and its truth."""

    folder: Path
    apart: bool
    truth: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    def build(self, place: Path) -> Path:
        """Copy and generate the files of the case below `place`. Return the path that the command gets."""
        shutil.copytree(self.folder, place, ignore=shutil.ignore_patterns("truth.yaml"))
        generate(place, self.truth.get("generate", {}))
        return place if self.truth["ask"] == "." else place / self.truth["ask"]


class Answer(NamedTuple):
    """What a command answered. fields: the JSON object of `why --json`, or None for another command."""

    text: str
    fields: Mapping[str, Any] | None = None
    failed: str = ""  # why there is no answer: an exit status, a timeout


class Result(NamedTuple):
    """The judgment of one answer, and why."""

    value: str
    certain: bool
    why: str


def cases(*, apart: bool = True) -> list[Case]:
    """Return all cases, in the order of their names."""
    found = []
    for name, folder in FOLDERS.items():
        if name == "apart" and not apart:
            continue
        for path in sorted(folder.glob("*/truth.yaml")):
            found.append(Case(path.parent, name == "apart", yaml.safe_load(path.read_text())))
    return found


def problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is invalid in a truth.yaml."""
    found = [f"{key} is missing" for key in REQUIRED if key not in truth]
    found += [f"{key} is no key" for key in truth if key not in (*REQUIRED, *OPTIONAL)]
    if found:
        return found
    found += [f"{kind} is no kind" for kind in (truth["kind"], *truth.get("accept", ())) if kind not in KINDS]
    found += [f"{key} is empty" for key in ("cause", "because", "source", "shape") if not truth[key]]
    if truth["certainty"] not in CERTAINTIES:
        found.append(f"certainty: {truth['certainty']}")
    for key in ("ranks", "also_true"):
        found += [f"{key}: {rank} is no rank" for rank in truth.get(key, ()) if not isinstance(rank, int)]
    for key in ("never", "say"):
        for pattern in truth.get(key, ()):
            try:
                re.compile(pattern)
            except re.error as error:
                found.append(f"{key}: {pattern}: {error}")
    return found


def _numbers(text: str) -> set[int]:
    """Return the ranks of `3`, `1, 2 and 5` or `4-6`."""
    ranks: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        first, last = int(low), int(high or low)
        ranks |= set(range(first, min(last, first + 10_000) + 1))
    return ranks


def named(answer: Answer) -> set[int]:
    """Return the ranks that an answer blames: those of the JSON fields and of the start of the first line."""
    lines = answer.text.strip().splitlines()
    first = answer.fields.get("verdict", "") if answer.fields else (lines[0] if lines else "")
    match = FIRST.match(first)
    ranks = _numbers(match[1]) if match else set()
    if answer.fields:
        blamed = [answer.fields.get("rank"), *(culprit.get("rank") for culprit in answer.fields.get("culprits") or ())]
        ranks |= {rank for rank in blamed if isinstance(rank, int) and rank >= 0}
    return ranks


def kinds(answer: Answer) -> list[str]:
    """Return the kinds that an answer can mean: one for JSON, each whose pattern matches for text."""
    if answer.fields:
        return [str(answer.fields.get("kind", "unknown"))]
    return [kind for kind, pattern in KINDS.items() if re.search(pattern, answer.text)]


def judge(truth: Mapping[str, Any], answer: Answer) -> Result:  # noqa: PLR0911  # a return for each rule of README.md
    """Judge `answer` as README.md defines it."""
    if answer.failed:
        return Result(WRONG, False, answer.failed)
    lines = answer.text.strip().splitlines()
    certain = not HEDGE.search(answer.fields.get("verdict", "") if answer.fields else (lines[0] if lines else ""))
    for pattern in truth.get("never", ()):
        if re.search(pattern, answer.text):
            return Result(WRONG, certain, f"matches {pattern!r}")
    ranks, true = named(answer), set(truth["ranks"])
    kind = kinds(answer)
    innocent = ranks - true - set(truth.get("also_true", ()))
    if innocent:
        return Result(WRONG, certain, f"names rank {', '.join(map(str, sorted(innocent)[:5]))}")
    accepted = {truth["kind"], *truth.get("accept", ())}
    if not accepted & set(kind):
        vague = set(kind) <= set(VAGUE)  # also if there is no kind
        if vague and ranks & true:
            return Result(HALF, certain, "the rank without a cause")
        if vague:
            return Result(UNKNOWN, certain, f"kind {', '.join(kind) or 'none'}")
        return Result(WRONG, certain, f"kind {', '.join(kind[:3])}")
    if truth["kind"] not in kind and set(kind) <= {"unknown"}:
        # Unknown is accepted: as right if the truth is that nothing can be concluded, or that nothing failed.
        return Result(RIGHT if truth["kind"] in ("none", "unknown") else UNKNOWN, certain, "unknown")
    if true and not ranks:
        return Result(HALF, certain, "the cause without a rank")
    for pattern in truth.get("say", ()):
        if not re.search(pattern, answer.text):
            return Result(HALF, certain, f"does not print {pattern!r}")
    if truth["hosts"] and not true and not any(host in answer.text for host in truth["hosts"]):
        return Result(HALF, certain, "the cause without a host")
    return Result(RIGHT, certain, "")


def read_json(text: str) -> Mapping[str, Any] | None:
    """Return the JSON object that `why --json` printed, or None."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def share(results: Sequence[Result]) -> list[int]:
    """Return how many results are right, half, unknown, wrong, and wrong with certainty."""
    counts = [sum(result.value == value for result in results) for value in (RIGHT, HALF, UNKNOWN, WRONG)]
    return [*counts, sum(result.value == WRONG and result.certain for result in results)]
