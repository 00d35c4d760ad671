"""The script of a job array: that of a run, in which the run folder is the task's.

It is rendered as every other script, for a folder with a name that stands for the task's number. Where that name comes
out, Slurm's %a or the shell's variable is put.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.config.schema import Config
from hpcinit.facts import runfolder
from hpcinit.facts.quoting import shell
from hpcinit.facts.ranges import ranges
from hpcinit.submission import script, trusted

# The name that stands for a task; at random, so that no value of the user's contains it.
TASK = f"hpcinit-task-{secrets.token_hex(8)}"
SMALLEST = 1001  # Slurm's default MaxArraySize: the highest index is one less
# A task's SLURM_JOB_ID is a number of its own, and that of one task is the array's, all tasks to squeue and scontrol.
ARRAY_JOB_ID = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
IN_AN_ARRAY = (
    """[ -n "${SLURM_ARRAY_TASK_ID:-}" ] || { echo "$0 is for an array of jobs; """
    """start a task with: sbatch --array=NUMBER $(printf %q "$0")" >&2; exit 2; }"""
)


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


def shape(config: Config, folder: Path, workdir: Path) -> str:
    """What has to be the same of tasks in one array: the script but for the values of environment variables."""
    return script.render(_with_env(config, {*config.cluster.env, *config.job.env}), folder / TASK, workdir)


def render(configs: Sequence[Config], numbers: Sequence[int], folder: Path, workdir: Path, size: int) -> str:
    """The script of the tasks `numbers`, all of one block of `size`, whose shape is the same. configs: theirs."""
    config, base = configs[0], numbers[0] // size * size
    cap = f"%{config.sweep.at_once}" if config.sweep.at_once else ""
    config = _with_env(config, differing(configs))
    config.cluster = replace(config.cluster, sbatch={**config.cluster.sbatch, "array": _indices(numbers, base) + cap})
    text = script.render(config, folder / TASK, workdir)
    text = text.replace(script.IN_A_JOB, IN_AN_ARRAY).replace(script.JOB_ID, ARRAY_JOB_ID)
    number = f'"$(({base} + SLURM_ARRAY_TASK_ID))"' if base else '"$SLURM_ARRAY_TASK_ID"'
    pattern = f"{base // size}%{len(str(size)) - 1}a" if base else "%a"
    text = _sourced(text)
    return "\n".join(
        line.replace(TASK, pattern) if line.startswith("#SBATCH") else _in_shell(line, number)
        for line in text.split("\n")
    )


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


def _with_env(config: Config, names: set[str]) -> Config:
    """A copy of `config` in which the variables `names` have the task's name for a value."""

    def marked(env: dict[str, str]) -> dict[str, str]:
        return {name: TASK if name in names else value for name, value in env.items()}

    changed = replace(config, cluster=replace(config.cluster, env=marked(config.cluster.env)))
    changed.job = replace(config.job, env=marked(config.job.env))
    return changed


def _sourced(text: str) -> str:
    """The task's variables come from its file where the first of them is set."""
    lines = [trusted.source(f'"${runfolder.ENV_FOLDER}/{runfolder.ENV}"')]
    return re.sub(rf"^export \w+={TASK}\n", lambda _: f"{lines.pop()}\n" if lines else "", text, flags=re.MULTILINE)


def _in_shell(line: str, number: str) -> str:
    """`line` with the number in the name's place, outside of the quotes of a quoted word."""
    parts = line.split(TASK)
    text = parts[0]
    for part in parts[1:]:
        # shlex.quote writes a ' inside of '...' as '"'"': what matters is whether it is an odd one.
        quoted = text.replace("""'"'"'""", "").count("'") % 2
        text += (f"'{number}'" if quoted else number) + part
    return text
