"""Render the srun command of the batch script: srun, its options, and the command of each task.

- launch=srun: a task per rank, `python -m hpcinit.run SPEC`
- launch=fork: a task per node, the fork server `python -m hpcinit.fork SPEC`
- launch=torchrun: a task per node, the elastic agent `python -m hpcinit.elastic SPEC`

With cluster=local, `python -m hpcinit.local.step` replaces srun and takes the same options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import quoting
from hpcinit.base.quoting import option_flags
from hpcinit.config import environment_checks
from hpcinit.config.job_spec import gpu_bind
from hpcinit.config.resources import cpus_per_rank, ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.records import run_folder
from hpcinit.submit import script
from hpcinit.submit.run_path import RunPath

ENTRIES = {"srun": "hpcinit.run", "fork": "hpcinit.fork", "torchrun": "hpcinit.elastic"}
WIDTH = 100  # of a line of the command, in characters


def srun_step_line(config: Config, run: RunPath, workdir: Path) -> str:
    """Return the command that starts the ranks, in several lines: the options of srun, then what each task runs."""
    python = environment_checks.python(config)
    here = sys.executable if config.container.image else python
    launcher = ["srun"] if config.cluster.engine == "slurm" else [here, "-m", "hpcinit.local.step"]
    flags = {**options(config, run), **script.container_options(config, run, workdir), **config.cluster.srun}
    program = [python, "-u", "-m", ENTRIES[config.launch.kind], run.in_shell(run_folder.SPEC)]
    before = [*launcher, *option_flags(flags)]
    return " \\\n    ".join([*_wrapped(before), *_wrapped([*script.container_prefix(config, run, workdir), *program])])


def _wrapped(arguments: Sequence[str]) -> list[str]:
    """Return the quoted arguments in lines of at most WIDTH characters. No argument is divided."""
    lines = [""]
    for argument in map(quoting.shell, arguments):
        if lines[-1] and len(lines[-1]) + len(argument) >= WIDTH:
            lines.append("")
        lines[-1] += f" {argument}" if lines[-1] else argument
    return lines


def options(config: Config, run: RunPath) -> dict[str, Any]:
    """Return srun's options. With one task per node, the task gets the resources of all its ranks and binds them."""
    ranks, cores, launch = ranks_per_node(config), cpus_per_rank(config), config.launch
    alone = launch.kind == "srun"
    return {
        "nodes": config.nodes,
        "ntasks": config.nodes * (ranks if alone else 1),
        "ntasks-per-node": ranks if alone else 1,
        # Repeated here because srun of Slurm 22.05 to 23.02 does not inherit it from sbatch.
        "cpus-per-task": cores if alone or cores is None else cores * ranks,
        # With SLURM_EXPORT_ENV=NONE (sbatch --export=NONE, some sites' profiles) the ranks would get no environment.
        "export": "ALL",
        # A site's MpiDefault may need a library that the nodes lack. cluster.srun.mpi selects another type.
        "mpi": None if config.comm.backend == "mpi" else "none",
        "kill-on-bad-exit": int(launch.kill_on_bad_exit),
        "wait": launch.wait_s,
        "cpu-bind": launch.cpu_bind if alone else launch.cpu_bind and "none",
        "gpu-bind": gpu_bind(config) if alone else None,
        "unbuffered": True,
        "open-mode": "append",  # a requeued job must not overwrite the output of the first attempt.
        # With one task per node, its output goes to the job's log, and it opens the logs of its ranks.
        "output": quoting.joined("", [run.pattern_in_shell(run_folder.LOGS), "/rank-%t.log"]) if alone else None,
    }
