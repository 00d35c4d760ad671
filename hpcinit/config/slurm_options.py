"""The long options of sbatch and srun, and which of them a name means: getopt_long takes any unambiguous beginning.

The lists are those of Slurm 22.05.8: `sbatch --a`, `sbatch --b` and so on print the options that begin so.
"""

from __future__ import annotations

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


def meant(name: str, command: str) -> str:
    """Return the option that `command`, sbatch or srun, takes --`name` for; `name` where it is none, or ambiguous."""
    known = KNOWN[command]
    found = [name] if name in known else [option for option in known if option.startswith(name)]
    return SAME.get(found[0], found[0]) if len(found) == 1 else name
