"""Recorded environments of Slurm tasks, with the true values of each task (tests/data)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
# The first is recorded by tests.record_slurm_environments, the second by tests.world.record_worlds.
FOLDERS = ("slurm", "worlds")


@dataclass(frozen=True)
class Task:
    """One process: its environment and the true values. rank: None if srun did not start it."""

    shape: str
    version: str
    env: dict[str, str]
    host: str
    rank: int | None
    world_size: int
    local_rank: int
    local_world_size: int
    hosts: frozenset[str]
    host_of_rank_0: str

    def __str__(self) -> str:
        return f"{self.version}-{self.shape}-{self.rank}"


@dataclass(frozen=True)
class Shape:
    """One recorded launch: its command, and the host file if there was one."""

    name: str
    version: str
    tasks: tuple[Task, ...]
    hostfile: str

    def __str__(self) -> str:
        return f"{self.version}-{self.name}"


def shapes() -> list[Shape]:
    paths = [path for folder in FOLDERS for path in (DATA / folder).glob("*/*.json")]
    return [_shape(path) for path in sorted(paths)]


def _shape(path: Path) -> Shape:
    document = json.loads(path.read_text())
    launches: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for task in document["tasks"]:
        launches[task["launch"]].append(task)
    tasks = [task for launch in launches.values() for task in _tasks(path, launch)]
    lines = document["command"].partition("\nhosts: ")[2]
    return Shape(path.stem, path.parent.name, tuple(tasks), lines)


def _tasks(path: Path, launch: list[dict[str, Any]]) -> list[Task]:
    """Return the tasks of one launch. The local rank is the index among the ranks of the host."""
    found = []
    seen: Counter[str] = Counter()
    for task in sorted(launch, key=lambda task: task["rank"] or 0):
        hosts = frozenset(each["host"] for each in launch)
        first = next((each["host"] for each in launch if each["rank"] == 0), "")
        place = seen[task["host"]]
        found.append(
            Task(path.stem, path.parent.name, task["env"], task["host"], task["rank"], len(launch), place,
                 task["tasks_on_host"], hosts, first)
        )  # fmt: skip
        seen[task["host"]] += 1
    return found
