"""Renders the batch script of a job array.

Each task runs the same script, which computes the path of the task's run folder (run_path.TaskPath).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.base.text import ranges
from hpcinit.config.schema import Config
from hpcinit.submit import script
from hpcinit.submit.run_path import TaskPath

SMALLEST = 1001  # Slurm's default MaxArraySize: the highest index is one less


def block(max_array_size: int | None) -> int:
    """Return how many tasks one array may have: a power of ten, or 1 if the site allows no arrays.

    A larger sweep is divided into blocks of this size, one array each. Indices in an array are smaller than
    MaxArraySize. If that is 1001, a block has 1000 tasks.

    Task 2017, for example, has index 17 in block 2. The script writes the name of its folder as '2%3a', which Slurm
    expands to 2017.
    """
    most = SMALLEST if max_array_size is None else max_array_size
    size = 1
    while size * 10 <= most:
        size *= 10
    return size


def shape(config: Config, folder: Path, workdir: Path) -> object:
    """Return the script without the values of environment variables, and the names of these variables.

    Two tasks can share an array if this function returns the same result for both.
    """
    env = _env(config)
    return script.render_at(config, TaskPath(folder, own_env={name: {} for name in env}), workdir), tuple(env)


def render(
    configs: Sequence[Config],
    numbers: Sequence[int],
    folder: Path,
    workdir: Path,
    size: int,
    origin: Sequence[str] = (),
) -> str:
    """Return the batch script of the array that runs the tasks `numbers`.

    All tasks must belong to the same block (see block()) and have the same shape().

    configs: the config of each task.
    size: the number of tasks in a block.
    origin: comments about the submission.
    """
    if any(config.hetjob for config in configs):
        raise RequestError(
            "a sweep cannot use hetjob, because Slurm has no arrays of heterogeneous jobs: submit each combination "
            "as a separate run"
        )
    first, base = configs[0], numbers[0] // size * size
    cap = f"%{first.sweep.at_once}" if first.sweep.at_once else ""
    options = {**first.cluster.sbatch, "array": _indices(numbers, base) + cap}
    config = replace(first, cluster=replace(first.cluster, sbatch=options))
    run = TaskPath(folder, base=base, digits=len(str(size)) - 1, own_env=_differing(configs, numbers, base))
    programs = list(dict.fromkeys(map(script.program_of, configs)))
    program = programs[0] if len(programs) == 1 else f"{programs[0]} (task {numbers[0]}; see spec.json of each task)"
    return script.render_at(config, run, workdir, program=program, origin=origin, tasks=configs)


def _differing(configs: Sequence[Config], numbers: Sequence[int], base: int) -> dict[str, dict[int, str]]:
    """Return the environment variables that differ between tasks, each with its value for every task's index."""
    envs = {number - base: _env(config) for number, config in zip(numbers, configs, strict=True)}
    names = [name for name in _env(configs[0]) if len({env[name] for env in envs.values()}) > 1]
    return {name: {index: env[name] for index, env in envs.items()} for name in names}


def _env(config: Config) -> dict[str, str]:
    return {**config.cluster.env, **config.job.env}


def _indices(numbers: Sequence[int], base: int) -> str:
    return ranges(number - base for number in numbers)
