"""The options of sbatch and srun: which the keys set, which cluster.sbatch and cluster.srun may have, and their names.

The lists are those of Slurm 22.05.8: `sbatch --a`, `sbatch --b` and so on print the options that begin so.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.base import quoting
from hpcinit.config import keys
from hpcinit.config.schema import Config

# Options whose value means the same in our key; --time=1:00:00 and --mem=4G do not.
SAME_VALUE = keys.options("sbatch")
# Options of sbatch and srun that hpcinit sets itself, and the key that sets them.
OWNED = {**SAME_VALUE, **keys.options("owns")}
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
WAIT_OF_SBATCH = {"wait": "wait=true follows a job to its end"}  # srun's is another


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

BOTH = """
account acctg-freq bb bbf begin chdir cluster cluster-constraint clusters comment constraint container context
contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
error exclude exclusive export extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task
gres gres-flags help hint hold input job-name licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nice no-kill nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket ntasks-per-tres open-mode output overcommit oversubscribe partition power prefer priority profile
propagate qos quiet reboot reservation signal sockets-per-node spread-job switches tasks-per-node test-only thread-spec
threads-per-core time time-min tmp uid usage use-min-nodes verbose version wait wckey
"""
OF_SBATCH = """
array batch export-file get-user-env ignore-pbs kill-on-invalid-dep no-requeue parsable requeue wait-all-nodes wrap
"""
OF_SRUN = """
accel-bind bcast bcast-exclude compress cpu-bind cpu_bind debugger-test disable-status epilog exact het-group immediate
interactive jobid kill-on-bad-exit label mpi msg-timeout multi-prog no-allocate overlap pack-group preserve-env prolog
pty quit-on-interrupt relative resv-ports send-libs slurmd-debug task-epilog task-prolog threads unbuffered whole x11
"""
OF_PYXIS = "container-image container-mounts"  # of the plugin's options, those that hpcinit sets
KNOWN = {
    "sbatch": frozenset(f"{BOTH} {OF_SBATCH} {OF_PYXIS}".split()),
    "srun": frozenset(f"{BOTH} {OF_SRUN} {OF_PYXIS}".split()),
}
SAME = {"cluster": "clusters", "tasks-per-node": "ntasks-per-node", "cpu_bind": "cpu-bind"}  # as slurm_opt.c has them


def full_name(name: str, command: str) -> str:
    """Return the option that `command`, sbatch or srun, takes --`name` for; `name` where it is none, or ambiguous."""
    known = KNOWN[command]
    found = [name] if name in known else [option for option in known if option.startswith(name)]
    return SAME.get(found[0], found[0]) if len(found) == 1 else name


def meant(name: str, value: str) -> str:
    """What one means with sbatch's or torchrun's word, which is no key; '' for any other. name: as in mail-type."""
    if name in OWN_OF_SBATCH:
        return f"sbatch's own is +cluster.sbatch.{name}={value or '...'}"
    return ELSEWHERE.get(name, "")


def instead(option: str, table: str = "sbatch") -> str:
    """What to do where `option` cannot be in cluster.sbatch or cluster.srun; '' if it can. table: sbatch or srun."""
    if table == "sbatch" and option in WAIT_OF_SBATCH:
        return WAIT_OF_SBATCH[option]
    return f"use {OWNED[option]} instead" if option in OWNED else REASONS.get(option, "")


def problems(config: Config) -> Iterator[str]:
    """One message for each option that hpcinit sets itself, or that is none."""
    if config.cluster.engine == "local" and config.cluster.srun:
        yield f"cluster.srun is {config.cluster.srun}, but cluster {config.cluster.name} has no srun (engine: local)"
    for table, options in (("sbatch", config.cluster.sbatch), ("srun", config.cluster.srun)):
        key = f"cluster.{table}"
        for option, value in options.items():
            full = full_name(str(option), table)
            if said := instead(full, table):
                yield f"{key}.{option}: {f'{table} takes it for --{full}; ' * (full != option)}{said}"
            elif not quoting.OPTION_NAME.fullmatch(str(option)):
                yield f"{key} has {option!r}, expected the long name of an option without its dashes, as in mail-type"
            elif isinstance(value, (list, dict)):
                yield f"{key}.{option} is {value!r}, expected one value"
