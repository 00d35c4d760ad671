"""Renders the batch script of a job array.

Each task runs the same script, which computes the path of the task's run folder (run_path.TaskPath).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.base.quoting import shell
from hpcinit.base.text import ranges
from hpcinit.config.schema import Config
from hpcinit.submit import script
from hpcinit.submit.run_path import TaskPath

SMALLEST = 1001  # Slurm's default MaxArraySize: the highest index is one less


def block(max_array_size: int | None) -> int:
    """Return how many tasks one array may have: a power of ten, or 1 if the site allows no arrays.

    A sweep with more tasks is divided into arrays of this size, which are called blocks. Indices in an array are
    smaller than MaxArraySize. If that is 1001, a block has 1000 tasks.

    A task's number is the number of its block, followed by its index in the array. Task 2017, for example, has index 17
    in block 2, and Slurm writes the path of its folder as '2%3a'.
    """
    most = SMALLEST if max_array_size is None else max_array_size
    size = 1
    while size * 10 <= most:
        size *= 10
    return size


def shape(config: Config, folder: Path, workdir: Path) -> object:
    """Return a value that is equal for two configs if their tasks can share an array.

    It consists of the script without the values of environment variables, and the names of these variables.
    """
    env = {**config.cluster.env, **config.job.env}
    return script.render_at(config, TaskPath(folder, own_env=frozenset(env)), workdir), tuple(env)


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
    run = TaskPath(folder, base=base, digits=len(str(size)) - 1, own_env=frozenset(differing(configs)))
    programs = list(dict.fromkeys(map(script.program_of, configs)))
    program = programs[0] if len(programs) == 1 else f"{programs[0]} (task {numbers[0]}; see spec.json of each task)"
    return script.render_at(config, run, workdir, program=program, origin=origin, tasks=configs)


def differing(configs: Sequence[Config]) -> set[str]:
    """Return the names of the environment variables whose values differ between tasks."""
    first, *others = [{**config.cluster.env, **config.job.env} for config in configs]
    return {name for name, value in first.items() if any(other[name] != value for other in others)}


def env_file(config: Config, names: set[str]) -> str:
    """Return the text of the file that sets the variables `names` for one task. The task's script reads this file."""
    env = {**config.cluster.env, **config.job.env}
    return "".join(f"export {name}={shell(value)}\n" for name, value in env.items() if name in names)


def _indices(numbers: Sequence[int], base: int) -> str:
    return ranges(number - base for number in numbers)
