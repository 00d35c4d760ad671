"""Checks how Slurm starts and restarts the job: the options of sbatch and srun, restart, chain, launch and ports."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcinit.base import quoting
from hpcinit.config.schema import Config
from hpcinit.config.spellings import instead
from hpcinit.records import run_folder
from hpcinit.records.starts import STARTS
from hpcinit.world import ports

# Bindings that hpcinit can apply itself where it starts a node's ranks. srun's other bindings depend on the topology.
CPU_BIND = r"none|mask_cpu:[0-9a-fA-Fx,]+|map_cpu:[0-9a-fA-Fx,]+|cores|threads"
GPU_BIND = r"none|single:1|per_task:\d+|map_gpu:[\d,]+"


def slurm_options(config: Config) -> Iterator[str]:
    """Yield a message for each invalid option of sbatch or srun, and for each option that hpcinit sets itself."""
    if config.cluster.srun and not config.engine.uses_slurm:
        yield f"cluster.srun is {config.cluster.srun}, but cluster {config.cluster.name} has no srun (engine: local)"
    if name := config.cluster.clusters:
        if not quoting.PLAIN_NAME.fullmatch(name) or name == "all":
            yield (
                f"cluster.clusters is {name!r}, expected the name of one cluster: all jobs of a run must be on one "
                "cluster"
            )
        if not config.engine.uses_slurm:
            yield f"cluster.clusters is {name!r}, but cluster {config.cluster.name} has no Slurm (engine: local)"
    for table, options in (("sbatch", config.cluster.sbatch), ("srun", config.cluster.srun)):
        key = f"cluster.{table}"
        for option, value in options.items():
            if advice := instead(str(option), table):
                yield f"{key}.{option}: {advice}"
            elif not quoting.OPTION_NAME.fullmatch(str(option)):
                yield f"{key} has {option!r}, expected the long name of an option without its dashes, as in mail-type"
            elif isinstance(value, (list, dict)):
                yield f"{key}.{option} is {value!r}, expected one value"


def restarts(config: Config) -> Iterator[str]:
    restart = config.restart
    if config.spare_nodes and not config.engine.other_machines:
        name = config.cluster.name
        yield f"spare_nodes is {config.spare_nodes}, but all nodes of cluster {name} are this machine"
    if unknown := [reason for reason in restart.on if reason not in run_folder.REASONS]:
        yield f"restart.on: unknown reason {', '.join(map(repr, unknown))}; choose from {', '.join(run_folder.REASONS)}"
    if restart.max_restarts is None:
        return
    for option in ("requeue", "no-requeue"):
        if option in config.cluster.sbatch:
            yield f"cluster.sbatch.{option} and restart.max_restarts={restart.max_restarts} are both set; remove one"
    if restart.max_restarts and not config.engine.has_queue:
        yield (
            f"restart.max_restarts is {restart.max_restarts}, but cluster {config.cluster.name} has no queue "
            "(engine: local) to requeue a job; choose a cluster with Slurm"
        )
    if run_folder.TIME_LIMIT in restart.on and restart.max_restarts and config.chain > 1:
        yield (
            f"restart.on contains time_limit and chain is {config.chain}: both continue the run after a time limit; "
            "remove one"
        )


def launch(config: Config) -> Iterator[str]:
    """Yield a message for each invalid value in `launch`, and for each key that launch.kind does not support."""
    chosen = config.launch
    start = STARTS.get(chosen.kind, STARTS["srun"])  # values.declared() reports an unknown kind
    for name in chosen.preload:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            yield f"launch.preload has {name!r}, expected the name of a module, as in transformers or my.models"
    if chosen.max_restarts > 0 and not start.restarts_ranks:
        yield (
            f"launch.max_restarts is {chosen.max_restarts}, but launch.kind is {chosen.kind}, expected torchrun: set "
            "launch=torchrun, or restart.max_restarts instead"
        )
    warm = config.restart.warm
    if warm and chosen.kind != "fork":
        yield (
            f"restart.warm is true, but launch.kind is {chosen.kind}, expected fork: set launch=fork, or remove "
            "restart.warm"
        )
    if warm and not chosen.kill_on_bad_exit:
        yield (
            "restart.warm is true, but launch.kill_on_bad_exit is false, expected true: otherwise the other ranks "
            "continue after one fails"
        )
    if warm and chosen.wait_s:
        yield (
            f"restart.warm is true, but launch.wait_s is {chosen.wait_s}, expected 0: otherwise srun could end ranks "
            "that wait for a restart"
        )
    text = None if config.comm.ports is None else str(config.comm.ports)
    if text is not None and (reason := ports.problem(text)):
        yield f"comm.ports {reason}"
    elif (start.restarts_ranks or warm) and text and "-" not in text:
        who = "with restart.warm, the fork servers" if warm else "with launch=torchrun, the agents"
        yield f"comm.ports is {text!r}, expected a range such as 20000-20100: {who} need ports too"
    if start.task_per_rank:
        return
    for key, value, known in (("cpu_bind", chosen.cpu_bind, CPU_BIND), ("gpu_bind", chosen.gpu_bind, GPU_BIND)):
        if value and not re.fullmatch(rf"(?:(?:quiet|verbose|q|v),)?(?:{known})", value):
            names = ", ".join(word.partition(":")[0] for word in known.split("|"))
            yield (
                f"launch.{key} is {value!r}, expected one of: {names}, null. With launch.kind={chosen.kind}, hpcinit "
                "binds the ranks itself; for srun's other values, set launch=srun"
            )
