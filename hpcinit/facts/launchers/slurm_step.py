"""Is this process really a task of the step that its environment describes?

A batch script has SLURM_PROCID=0 and looks like rank 0 of all its tasks, and a job that was submitted from inside
a step inherits the step's variables. Measured on Slurm 22.05.8 and 24.11.5 (tests/data/slurm, tests/data/worlds):

    what a batch script shows                           sees through
    no SLURM_STEP_ID                                    sbatch and salloc from a login node
    SLURM_STEP_ID 4294967290                            salloc's interactive shell
    no SLURM_UMASK: srun sets it for every task, and    every batch script, nested ones too
    slurmstepd takes it out of a batch script's
    step hosts that are not the job's, or not this      jobs that were nested with another shape
    node; another number of tasks here than the step's
    another slurmstepd above this process               all of them, where /proc can be read
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.facts.errors import WorldError
from hpcinit.facts.process import Process
from hpcinit.slurm import nodelist

# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT
NO_RANKS = {
    "4294967290": "an interactive shell of salloc",
    "4294967291": "a batch script",
    "4294967292": "a login to the node",
    "interactive": "an interactive shell of salloc",
    "batch": "a batch script",
    "extern": "a login to the node",
}


def doubt(env: Mapping[str, str], process: Process) -> str:
    """Why this process is no task of a step, as a clause for a message; '' if it is one.

    Raises WorldError where the environment fits a task as well as a leak, and the process cannot be seen.
    """
    step = env.get("SLURM_STEP_ID")
    if step is None:
        return "SLURM_STEP_ID is not set"
    if step in NO_RANKS:
        return f"SLURM_STEP_ID is {step}: {NO_RANKS[step]}"
    # slurmstepd sets SLURM_TASK_PID. hpcinit's local engine does not, and may itself run inside a step.
    if process.step and "SLURM_TASK_PID" in env:
        return _doubt_from_process(env, process)
    reason = _doubt_from_umask(env) or _doubt_from_hosts(env) or _doubt_from_counts(env)
    if not reason:
        _refuse_two_sizes(env)
    return reason


def job_ids(env: Mapping[str, str]) -> set[str]:
    """Of the job; of a heterogeneous one, of all its components, each of which is a job to slurmstepd."""
    names = ("SLURM_JOB_ID", "SLURM_JOBID")
    return {env[k] for k in env if k in names or k.startswith(("SLURM_JOB_ID_HET_GROUP_", "SLURM_JOB_ID_PACK_GROUP_"))}


def _doubt_from_process(env: Mapping[str, str], process: Process) -> str:
    job, _, step = process.step.partition(".")
    if job in job_ids(env) and step == env["SLURM_STEP_ID"]:
        return ""
    claimed = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    what = f", {NO_RANKS[step]}," if step in NO_RANKS else ""
    return f"SLURM_STEP_ID is inherited: Slurm started this process in step {process.step}{what} not in {claimed}"


def _doubt_from_umask(env: Mapping[str, str]) -> str:
    first = all(env.get(f"SLURM_{name}") == "0" for name in ("PROCID", "LOCALID", "NODEID", "GTIDS"))
    if first and "SLURM_TASK_PID" in env and "SLURM_UMASK" not in env:
        return (
            "SLURM_STEP_ID is inherited from the step that submitted this job: SLURM_UMASK, which srun sets for every "
            "task, is not set"
        )
    return ""


def _doubt_from_hosts(env: Mapping[str, str]) -> str:
    step, job, node = env.get("SLURM_STEP_NODELIST"), env.get("SLURM_JOB_NODELIST"), env.get("SLURMD_NODENAME")
    if not step:
        return ""
    hosts = set(nodelist.expand(step))
    if job and not hosts <= set(nodelist.expand(job)):
        return f"SLURM_STEP_ID is inherited from another job: SLURM_STEP_NODELIST is {step}, SLURM_JOB_NODELIST {job}"
    if node and node not in hosts:
        return f"SLURM_STEP_ID is inherited from another step: SLURM_STEP_NODELIST is {step}, SLURMD_NODENAME {node}"
    return ""


def _doubt_from_counts(env: Mapping[str, str]) -> str:
    step, per_node, gtids = (env.get(f"SLURM_{k}") for k in ("STEP_NODELIST", "STEP_TASKS_PER_NODE", "GTIDS"))
    if not (step and per_node and gtids):
        return ""
    # Both lists are in the nodelist's order, which need not be that of SLURM_NODEID.
    counts = dict(zip(nodelist.expand(step), nodelist.expand_counts(per_node), strict=False))
    count, here = counts.get(env.get("SLURMD_NODENAME", "")), len(gtids.split(","))
    if count is None or count == here:
        return ""
    return (
        f"SLURM_STEP_ID is inherited from another step: that has {count} tasks on {env['SLURMD_NODENAME']} "
        f"(SLURM_STEP_TASKS_PER_NODE {per_node}), and SLURM_GTIDS is {gtids}"
    )


def _refuse_two_sizes(env: Mapping[str, str]) -> None:
    step, job = env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_NTASKS")
    if step and job and step != job:
        raise WorldError(
            f"SLURM_STEP_NUM_TASKS is {step} and SLURM_NTASKS is {job}, expected the same number: either the step's "
            "variables are inherited from the job that submitted this one (then start the ranks with srun), or srun "
            "was told to --preserve-env (then leave that out)"
        )
