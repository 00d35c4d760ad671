"""Groups the failed tasks of a sweep by the cause of their failure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base import json_output
from hpcinit.base.text import counted, ranges
from hpcinit.observe import find_runs
from hpcinit.observe.find_runs import Task
from hpcinit.why.evidence import Verdict


@dataclass(frozen=True)
class Group:
    """Failed tasks that have the same cause.

    verdict: the verdict on the first of them.
    """

    tasks: tuple[Task, ...]
    verdict: Verdict

    @property
    def numbers(self) -> list[int]:
        return [task.number for task in self.tasks]


def grouped(tasks: Sequence[Task], explain: Callable[[Task], Verdict]) -> list[Group]:
    """Group the failed tasks by the kind of failure and by the error, largest group first.

    Errors that differ only in numbers count as equal.
    """
    found: dict[tuple[str, str], tuple[list[Task], Verdict]] = {}
    for task in tasks:
        if (task.state.over and task.state.status) or task.state.purged:
            verdict = explain(task)
            key = verdict.kind, re.sub(r"\d+", "N", verdict.error)
            found.setdefault(key, ([], verdict))[0].append(task)
    groups = [Group(tuple(its), verdict) for its, verdict in found.values()]
    return sorted(groups, key=lambda group: -len(group.tasks))


def lines(path: Path, tasks: Sequence[Task], groups: Sequence[Group]) -> list[str]:
    """Return the groups as text for a terminal."""
    failed = sum(len(group.tasks) for group in groups)
    text = [f"{failed or 'none'} of {counted(len(tasks), 'task')} failed ({find_runs.count_states(tasks)})"]
    for group in groups:
        plural = "s" * (len(group.tasks) > 1)
        text.append(f"task{plural} {ranges(group.numbers)}: {group.verdict.headline}")
        text += [f"  what to do: {group.verdict.do}"] * bool(group.verdict.do)
        text.append(f"  more:  hpcinit why {shlex.quote(f'{path}/{group.numbers[0]}')}")
    return text


def document(path: Path, tasks: Sequence[Task], groups: Sequence[Group]) -> str:
    """Return the groups as JSON."""
    causes = [
        {
            "kind": group.verdict.kind,
            "verdict": group.verdict.headline,
            "advice": group.verdict.do,
            "tasks": group.numbers,
        }
        for group in groups
    ]
    return json_output.line("why sweep", {"run": str(path), "tasks": len(tasks), "causes": causes})
