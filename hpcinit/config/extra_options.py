"""cluster.sbatch and cluster.srun: options that hpcinit has no key for, and those that it keeps to itself."""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.config import slurm_options
from hpcinit.config.schema import Config
from hpcinit.facts import quoting

# sbatch and srun options that hpcinit sets itself, and the key that sets them.
OWNED = {
    "nodes": "nodes",
    "ntasks": "ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "cpus_per_rank",
    "time": "time_min",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "mem": "mem_gb",
    "comment": "comment",
    "job-name": "name",
    "chdir": "job.workdir",
    "gpus-per-node": "cluster.gpus_per_node",
    "gres": "cluster.gpu_flag",
    "exclusive": "cluster.exclusive",
    "signal": "stop.signal",
    "kill-on-bad-exit": "launch.kill_on_bad_exit",
    "wait": "launch.wait_s",
    "cpu-bind": "launch.cpu_bind",
    "gpu-bind": "launch.gpu_bind",
    "container-image": "container.image",
    "container-mounts": "container.mounts",
    "output": "runs_dir",
    "error": "runs_dir",
}
# What no key sets in the same words, and why it cannot be an option beside.
ENVIRONMENT = (
    "the job needs its whole environment; job.env and cluster.env set a variable, `env -u NAME hpcinit` drops one"
)
ANSWERS = "it makes Slurm print text in the place of a job"
REASONS = {
    "open-mode": "hpcinit sets it itself: a job that is requeued goes on in its logs",
    "unbuffered": "hpcinit sets it itself",
    "parsable": "hpcinit sets it itself",
    "dependency": "use after, after_ok or singleton instead",
    "array": "a sweep is one: several values of a key and --multirun, with sweep.at_once for a cap",
    "export": ENVIRONMENT,
    "export-file": ENVIRONMENT,
    "wrap": "hpcinit writes the script; what is to run stands after --",
    "test-only": "test_only=true asks Slurm so before each submission, dry_run=true prints the script",
    "clusters": "hpcinit looks for a job on this cluster only; submit where the other one's login nodes are",
    **dict.fromkeys(("help", "usage", "version"), ANSWERS),
}
OF_SBATCH = {"wait": "wait=true follows a job to its end"}  # srun's is another


# Words of sbatch, torchrun and other schedulers that people bring along, and what is meant by them here.
GPUS = "one GPU is for each rank: ranks_per_node=4; what a node has is the cluster's gpus_per_node"
ELSEWHERE = {
    **dict.fromkeys(("gpus", "gpus-per-task", "gres", "num-gpus"), GPUS),
    **dict.fromkeys(("ntasks", "nproc-per-node", "tasks-per-node"), "ranks are nodes=2 x ranks_per_node=8"),
    **dict.fromkeys(("nnodes", "num-nodes"), "that is nodes=2"),
    **dict.fromkeys(("time", "walltime"), "that is time_min=60, in minutes"),
    "queue": "that is partition=NAME",
    "project": "that is account=NAME",
}
# sbatch's, most often asked for, that no key has.
OWN_OF_SBATCH = {
    "constraint",
    "reservation",
    "exclude",
    "nodelist",
    "mail-type",
    "mail-user",
    "licenses",
    "begin",
    "nice",
}


def meant(name: str, value: str) -> str:
    """What one means with sbatch's or torchrun's word, which is no key; '' for any other. name: as in mail-type."""
    if name in OWN_OF_SBATCH:
        return f"sbatch's own is +cluster.sbatch.{name}={value or '...'}"
    return ELSEWHERE.get(name, "")


def instead(option: str, table: str = "sbatch") -> str:
    """What to do where `option` cannot be in cluster.sbatch or cluster.srun; '' if it can. table: sbatch or srun."""
    if table == "sbatch" and option in OF_SBATCH:
        return OF_SBATCH[option]
    return f"use {OWNED[option]} instead" if option in OWNED else REASONS.get(option, "")


def problems(config: Config) -> Iterator[str]:
    """One message for each option that hpcinit sets itself, or that is none."""
    if config.cluster.engine == "local" and config.cluster.srun:
        yield f"cluster.srun is {config.cluster.srun}, but cluster {config.cluster.name} has no srun (engine: local)"
    for table, options in (("sbatch", config.cluster.sbatch), ("srun", config.cluster.srun)):
        key = f"cluster.{table}"
        for option, value in options.items():
            full = slurm_options.meant(str(option), table)
            if said := instead(full, table):
                yield f"{key}.{option}: {f'{table} takes it for --{full}; ' * (full != option)}{said}"
            elif not quoting.OPTION_NAME.fullmatch(str(option)):
                yield f"{key} has {option!r}, expected the long name of an option without its dashes, as in mail-type"
            elif isinstance(value, (list, dict)):
                yield f"{key}.{option} is {value!r}, expected one value"
