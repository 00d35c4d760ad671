"""Writes the path of the run folder into a batch script. sbatch and the shell read paths by different rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcinit.base import quoting
from hpcinit.base.quoting import Raw
from hpcinit.records import run_folder


@dataclass(frozen=True)
class RunPath:
    """The folder of one run, in the forms that a batch script needs."""

    path: Path

    job_id = Raw('"${SLURM_JOB_ID:-$$}"')
    guard = "in_a_job"  # the block that stops the script unless sbatch started it
    own_env: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # see TaskPath

    def component(self, number: int) -> RunPath:
        """Return the folder of a component of a heterogeneous job with worlds=each. Component 0 uses the run folder."""
        return RunPath(self.path / f"{run_folder.COMPONENT}{number}") if number else self

    def in_directive(self, name: str) -> str:
        """Return the path of the file `name` for an #SBATCH line, in which sbatch replaces patterns such as %j."""
        return quoting.pattern(str(self.path / name))

    def in_shell(self, name: str = "") -> str:
        """Return the path of the file `name` for a shell command.

        The caller must quote it, unless it is a quoting.Raw.
        """
        return str(self.path / name)

    def pattern_in_shell(self, name: str) -> str:
        """Return the path of the folder `name` for a shell command, with % escaped for srun's file name patterns.

        The caller must quote it, unless it is a quoting.Raw.
        """
        return quoting.pattern(self.in_shell(name))


@dataclass(frozen=True)
class TaskPath(RunPath):
    """The run folders of an array's tasks, in the forms that a batch script needs.

    path: the folder of the sweep.
    base: the number of the array's first task, which has index 0 in the array.
    digits: how many digits the highest index has.
    own_env: the environment variables that differ between the tasks. Each has one value per index.

    For example, with base 2000 and 3 digits, task 2017 has index 17 in the array. The script writes the name of its
    folder as '2%3a', which Slurm expands to 2017.
    """

    base: int = 0
    digits: int = 0

    job_id = Raw('"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"')  # in one task, SLURM_JOB_ID is the id of the array
    guard = "in_an_array"

    def in_directive(self, name: str) -> str:
        task = f"{self.base // 10**self.digits}%{self.digits}a" if self.base else "%a"
        return f"{quoting.pattern(str(self.path))}/{task}/{name}"

    def in_shell(self, name: str = "") -> str:
        return self._in_shell(str(self.path), name)

    def pattern_in_shell(self, name: str) -> str:
        return self._in_shell(quoting.pattern(str(self.path)), quoting.pattern(name))

    def _in_shell(self, sweep: str, name: str) -> Raw:
        task = f'"$(({self.base} + SLURM_ARRAY_TASK_ID))"' if self.base else '"$SLURM_ARRAY_TASK_ID"'
        return Raw(f"{quoting.shell(f'{sweep}/')}{task}{quoting.shell(f'/{name}') if name else ''}")
