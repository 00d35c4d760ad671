"""Renders the srun command of the batch script: srun, its options, and what each task runs.

- launch=srun: one task per rank runs `python -m hpcinit.run SPEC`
- launch=fork: one task per node runs the fork server, `python -m hpcinit.fork SPEC`
- launch=torchrun: one task per node runs the elastic agent, `python -m hpcinit.elastic SPEC`

With cluster=local, `python -m hpcinit.engine.local_step` replaces srun and accepts the same options.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import quoting
from hpcinit.base.quoting import option_flags
from hpcinit.checks import environment
from hpcinit.config import hetjob
from hpcinit.config.job_spec import gpu_bind, warm_spares
from hpcinit.config.resources import cpus_per_rank, mem_gb, ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.records import run_folder
from hpcinit.records.starts import STARTS
from hpcinit.submit import container
from hpcinit.submit.run_path import RunPath

STEP_LIMIT_S = 300  # how long srun tries to create a step; slow prologs need some of it
NODES = "hpcinit_nodes"  # with warm spare nodes, the batch script's variable with the number of nodes
WIDTH = 100  # characters in a line of the command
# In a heterogeneous job, srun's %t is not the rank. In a step of several components, Slurm 22.05 replaces it by 3 for
# rank 2. In each step, Slurm 26.05 replaces it by 4294967295 for rank 0. So each rank opens its own log in the folder
# $0. If it cannot, it prints to the job's log.
OWN_LOG = 'log=$0/rank-$SLURM_PROCID.log; true >> "$log" && exec >> "$log" 2>&1; exec "$@"'


def step_lines(config: Config, run: RunPath, workdir: Path) -> list[str]:
    """Return the shell lines that start the ranks: one srun, or one per world of a heterogeneous job."""
    if not config.hetjob:
        return [srun_step_line(config, run, workdir)]
    return (_worlds if config.worlds == hetjob.EACH else _one_world)(config, run, workdir)


def _one_world(config: Config, run: RunPath, workdir: Path) -> list[str]:
    """Return the lines that start the ranks of all components in one step.

    In srun's messages, the tasks of each component are numbered from 0. So the lines first print the nodes and the
    first rank of each component, for records/job_log.py.
    """
    lines, first = [], 0
    for at, part in enumerate(hetjob.parts(config)):
        lines.append(f'echo "hpcinit: component {at}, ranks from {first}: $SLURM_JOB_NODELIST_HET_GROUP_{at}"')
        first += part.ranks
    steps = [
        srun_step_line(each, run, workdir, _own(at, each), _own_log(run)).removeprefix("srun ")
        for at, each in enumerate(hetjob.components(config))
    ]
    return [*lines, "srun " + " \\\n  : ".join(steps)]


def _worlds(config: Config, run: RunPath, workdir: Path) -> list[str]:
    """Return the lines that start one step per component and wait for all of them. The job fails if any step fails."""
    steps = []
    for at, each in enumerate(hetjob.components(config)):
        world = run.component(at)
        log = f" \\\n    >> {quoting.shell(world.in_shell(run_folder.JOB_LOG))} 2>&1" if at else ""
        step = srun_step_line(each, world, workdir, _own(at, each), _own_log(world))
        steps += [f"{step}{log} &", "hpcinit_worlds+=($!)"]
    return [
        *steps,
        "# Wait for all worlds. The job fails if one of them does.",
        "hpcinit_status=0",
        'for world in "${hpcinit_worlds[@]}"; do wait "$world" || hpcinit_status=$?; done',
        'hpcinit_after "$hpcinit_status"',
    ]


def _own(number: int, config: Config) -> dict[str, Any]:
    """Return srun's options for one component. Without --mem, srun would use the --mem of the first component."""
    return {"het-group": number, "mem": memory_option(config), "output": None}


def _own_log(run: RunPath) -> list[str]:
    """Return a command prefix that redirects the command's output to the rank's log."""
    return ["sh", "-c", OWN_LOG, run.in_shell(run_folder.LOGS)]


def srun_step_line(
    config: Config, run: RunPath, workdir: Path, more: Mapping[str, Any] | None = None, before: Sequence[str] = ()
) -> str:
    """Return the srun command that starts the ranks, on several lines: srun's options, and then what each task runs.

    more: additional options of srun.
    before: a prefix for the command that each task runs.
    """
    python = environment.python(config)
    here = sys.executable if config.container.image else python
    launcher = config.engine.step_command(here)
    flags = {**options(config, run), **(more or {}), **container.container_options(config, run, workdir)}
    if str(config.cluster.srun.get("distribution")).startswith("arbitrary"):
        del flags["nodes"]  # Slurm 26.05 refuses --nodes with an arbitrary distribution
    program = [python, "-u", "-m", STARTS[config.launch.kind].module, run.in_shell(run_folder.SPEC)]
    task = [*before, *container.container_prefix(config, run, workdir), *program]
    words = [*launcher, *option_flags({**flags, **config.cluster.srun})]
    return " \\\n    ".join([*wrapped(map(quoting.shell, words)), *wrapped(map(quoting.shell, task))])


def wrapped(arguments: Iterable[str]) -> list[str]:
    """Join the arguments into lines of at most WIDTH characters. No argument is split."""
    lines = [""]
    for argument in arguments:
        if lines[-1] and len(lines[-1]) + len(argument) >= WIDTH:
            lines.append("")
        lines[-1] += f" {argument}" if lines[-1] else argument
    return lines


def options(config: Config, run: RunPath) -> dict[str, Any]:
    """Return the options for srun.

    If one task starts all ranks of a node, it gets all their CPUs and GPUs, and binds each rank itself.
    """
    ranks, cores, launch = ranks_per_node(config), cpus_per_rank(config), config.launch
    start = STARTS[launch.kind]
    alone = start.task_per_rank
    # With warm spare nodes, each node has one task, and a later step has as many nodes as the job has left.
    left = quoting.Raw(f'"${NODES}"') if warm_spares(config) else None
    return {
        "nodes": left or config.nodes,
        "ntasks": left or config.nodes * start.tasks_per_node(ranks),
        "ntasks-per-node": start.tasks_per_node(ranks),
        # Repeated here because srun of Slurm 22.05 to 23.02 does not inherit it from sbatch.
        "cpus-per-task": cores if alone or cores is None else cores * ranks,
        # With SLURM_EXPORT_ENV=NONE (sbatch --export=NONE, some sites' profiles) the ranks would get no environment.
        "export": "ALL",
        # A site's MpiDefault may need a library that the nodes lack. cluster.srun.mpi selects another type.
        "mpi": None if config.comm.backend == "mpi" else "none",
        "kill-on-bad-exit": int(launch.kill_on_bad_exit),
        "no-kill": bool(left),  # the other tasks continue without a node that is lost
        # If the job loses a node before this step, srun would wait forever. After the limit, hpcinit.after acts.
        "immediate": STEP_LIMIT_S if config.spare_nodes else None,
        "wait": launch.wait_s,
        "cpu-bind": launch.cpu_bind if alone else launch.cpu_bind and "none",
        "gpu-bind": gpu_bind(config) if alone else None,
        "unbuffered": True,
        "open-mode": "append",  # a requeued job must not overwrite the output of the first attempt.
        # With one task per node, its output goes to the job's log, and it opens the logs of its ranks.
        "output": quoting.joined("", [run.pattern_in_shell(run_folder.LOGS), "/rank-%t.log"]) if alone else None,
    }


def memory_option(config: Config) -> str | None:
    """Return the value for --mem, the memory per node, or None if the config does not set it."""
    return None if (memory := mem_gb(config)) is None else _mem(memory)


def _mem(gb: float) -> str:
    # Slurm's --mem=0 means all memory of the node. Fractions of a gigabyte must be written in megabytes.
    return f"{int(gb)}G" if gb == int(gb) and gb else f"{math.ceil(gb * 1024)}M" if gb else "0"
