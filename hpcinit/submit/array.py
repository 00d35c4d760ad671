"""The script of a job array: that of a run, in which the run folder is the task's (run_path.TaskPath)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.base.quoting import shell
from hpcinit.base.text import ranges
from hpcinit.config.schema import Config
from hpcinit.submit import script
from hpcinit.submit.run_path import TaskPath

SMALLEST = 1001  # Slurm's default MaxArraySize: the highest index is one less


def block(max_array_size: int | None) -> int:
    """How many tasks an array may have: a power of ten, so that a file name can be made of block and index.

    Indices are smaller than MaxArraySize. With 1001, task 2017 has index 17 in the array of block 2, and its folder is
    '2%3a' to Slurm. 1 where the site allows no arrays.
    """
    most = SMALLEST if max_array_size is None else max_array_size
    size = 1
    while size * 10 <= most:
        size *= 10
    return size


def shape(config: Config, folder: Path, workdir: Path) -> object:
    """Return what tasks in one array have in common: the script except for the values of environment variables."""
    env = {**config.cluster.env, **config.job.env}
    return script.render_at(config, TaskPath(folder, own_env=frozenset(env)), workdir), tuple(env)


def render(configs: Sequence[Config], numbers: Sequence[int], folder: Path, workdir: Path, size: int) -> str:
    """The script of the tasks `numbers`, all of one block of `size`, whose shape is the same. configs: theirs."""
    first, base = configs[0], numbers[0] // size * size
    cap = f"%{first.sweep.at_once}" if first.sweep.at_once else ""
    options = {**first.cluster.sbatch, "array": _indices(numbers, base) + cap}
    config = replace(first, cluster=replace(first.cluster, sbatch=options))
    run = TaskPath(folder, base=base, digits=len(str(size)) - 1, own_env=frozenset(differing(configs)))
    return script.render_at(config, run, workdir)


def differing(configs: Sequence[Config]) -> set[str]:
    """Environment variables that have other values in other tasks."""
    first, *others = [{**config.cluster.env, **config.job.env} for config in configs]
    return {name for name, value in first.items() if any(other[name] != value for other in others)}


def env_file(config: Config, names: set[str]) -> str:
    """The file that a task's script reads its own variables from."""
    env = {**config.cluster.env, **config.job.env}
    return "".join(f"export {name}={shell(value)}\n" for name, value in env.items() if name in names)


def _indices(numbers: Sequence[int], base: int) -> str:
    return ranges(number - base for number in numbers)
