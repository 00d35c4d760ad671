"""The options of sbatch and srun: which keys set them, and which are allowed in cluster.sbatch and cluster.srun.

The lists are those of Slurm 22.05.8: `sbatch --a`, `sbatch --b` and so on print the options with that first letter.
"""

from __future__ import annotations

from hpcinit.config import keys

# Options that take the key's value unchanged; --time and --mem have other units than time_min and mem_gb.
SAME_VALUE = keys.options("sbatch")
# Options of sbatch and srun that hpcinit sets, with the key that determines the value.
OWNED = {**SAME_VALUE, **keys.options("owns")}
# Options that hpcinit does not allow in cluster.sbatch and cluster.srun, with the reason and what to use instead.
ENVIRONMENT = (
    "the job needs its whole environment; set a variable with job.env or cluster.env, drop one with "
    "`env -u NAME hpcinit`"
)
ANSWERS = "with it, Slurm prints text instead of starting a job"
TEST_ONLY = "did you mean validate=...? validate=true does this before each submission; dry_run=true prints the script"
REASONS = {
    "open-mode": "hpcinit sets it itself, so that a requeued job appends to its logs",
    "unbuffered": "hpcinit sets it itself",
    "parsable": "hpcinit sets it itself",
    "array": "hpcinit submits sweeps as arrays: give a key several values and --multirun; sweep.at_once is the limit",
    "export": ENVIRONMENT,
    "export-file": ENVIRONMENT,
    "wrap": "hpcinit writes the script; the program goes after --",
    "test-only": TEST_ONLY,
    **dict.fromkeys(("help", "usage", "version"), ANSWERS),
}
WAIT_OF_SBATCH = {"wait": "use wait=true, which waits for the job's end"}  # srun's --wait has another meaning


# Options of sbatch, torchrun and other schedulers that users try, with hpcinit's equivalent.
GPUS = "use gpus_per_node=4 or gpus=8"
ELSEWHERE = {
    **dict.fromkeys(("gpus-per-task", "gres", "num-gpus"), GPUS),
    **dict.fromkeys(
        ("ntasks", "nproc-per-node", "tasks-per-node"), "set the number of ranks with nodes=2 ranks_per_node=8"
    ),
    **dict.fromkeys(("nnodes", "num-nodes"), "use nodes=2"),
    **dict.fromkeys(("time", "walltime"), "use time_min=60, in minutes"),
    "queue": "use partition=NAME",
    "project": "use account=NAME",
    **dict.fromkeys(("after", "afterany"), "did you mean dependency=afterany:JOB?"),
    **dict.fromkeys(("after-ok", "afterok"), "did you mean dependency=afterok:JOB?"),
    "test-only": TEST_ONLY,
    "requeue": "use restart.max_restarts=3, which requeues the job up to 3 times after the failures in restart.on",
    "singleton": "did you mean dependency=singleton?",
}
# Common options of sbatch that no key sets.
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
    "hint",
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
OF_PYXIS = "container-image container-mounts"  # the options of the plugin that hpcinit sets
KNOWN = {
    "sbatch": frozenset(f"{BOTH} {OF_SBATCH} {OF_PYXIS}".split()),
    "srun": frozenset(f"{BOTH} {OF_SRUN} {OF_PYXIS}".split()),
}
SAME = {"cluster": "clusters", "tasks-per-node": "ntasks-per-node", "cpu_bind": "cpu-bind"}  # synonyms in slurm_opt.c


def full_name(name: str, command: str) -> str:
    """Return the option that `command` (sbatch or srun) takes an abbreviation for; `name` if unknown or ambiguous."""
    known = KNOWN[command]
    found = [name] if name in known else [option for option in known if option.startswith(name)]
    return SAME.get(found[0], found[0]) if len(found) == 1 else name


def meant(name: str, value: str) -> str:
    """Return hpcinit's equivalent of an option of sbatch or torchrun that is not a key, or ''."""
    if name in OWN_OF_SBATCH:
        return f"set sbatch's option with +cluster.sbatch.{name}={value or '...'}"
    return ELSEWHERE.get(name, "")


def instead(option: str, table: str = "sbatch") -> str:
    """Return what to use instead of `option` in cluster.sbatch or cluster.srun; '' if it is allowed there.

    table: sbatch or srun.
    """
    if table == "sbatch" and option in WAIT_OF_SBATCH:
        return WAIT_OF_SBATCH[option]
    return f"use {OWNED[option]} instead" if option in OWNED else REASONS.get(option, "")
