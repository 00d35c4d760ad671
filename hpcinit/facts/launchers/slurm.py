"""Ranks started by srun: one Slurm task per rank. Also what hpcinit's local engine sets.

What was right in 26 of 26 real launches of different shape (Slurm 22.05.8): SLURM_PROCID, SLURM_LOCALID,
SLURM_NTASKS inside a step, len(SLURM_GTIDS), SLURM_NODEID. What was not: the first host of
SLURM_JOB_NODELIST (20), ntasks // nodes (6), SLURM_NTASKS_PER_NODE.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcinit.facts import nodelist, ports
from hpcinit.facts.errors import WorldError
from hpcinit.facts.world import World, number

NAME = "slurm"
USE_SRUN = "sbatch and salloc alone set no rank, start the ranks with srun"


def present(env: Mapping[str, str]) -> bool:
    """True in a Slurm task, and in a batch script or salloc shell, where read() says what is missing."""
    return "SLURM_JOB_ID" in env or "SLURM_JOBID" in env


def read(env: Mapping[str, str]) -> World:
    """The world of a Slurm step. Raises WorldError outside of one."""
    if "SLURM_STEP_ID" not in env:
        return _without_step(env)
    hosts = _hosts(env)
    rank = number(env, "SLURM_PROCID", USE_SRUN)
    local_rank = number(env, "SLURM_LOCALID", USE_SRUN)
    # SLURM_GTIDS "4,5,6" = the global ranks on this node. Uneven nodes are ordinary: srun -N4 -n8 without
    # --ntasks-per-node places 5, 1, 1, 1.
    gtids = env.get("SLURM_GTIDS", "").split(",")
    if len(gtids) <= local_rank or gtids[local_rank] != str(rank):
        raise WorldError(
            f"SLURM_GTIDS is {env.get('SLURM_GTIDS')!r}, so local rank {local_rank} should be rank "
            f"{gtids[local_rank] if local_rank < len(gtids) else 'absent'}, but SLURM_PROCID is {rank}: "
            "these variables come from different steps; start the ranks with srun from the batch script"
        )
    job = identity(env)
    return World(
        launcher=NAME,
        rank=rank,
        world_size=number(env, "SLURM_NTASKS", USE_SRUN),
        local_rank=local_rank,
        local_world_size=len(gtids),
        node_rank=number(env, "SLURM_NODEID", USE_SRUN),
        hosts=hosts,
        master_addr=_master(env, hosts),
        master_ports=ports.candidates(job),
        job=job,
    )


def identity(env: Mapping[str, str]) -> str:
    """'JOB.STEP.RESTART'. A requeued job keeps its id, so the restart count belongs to the name."""
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID", "0")
    return f"{job}.{env.get('SLURM_STEP_ID', '0')}.{env.get('SLURM_RESTART_COUNT', '0')}"


def _hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    # SLURM_JOB_NODELIST stays the job's list in a step on a part of the allocation; the step's own is
    # SLURM_STEP_NODELIST (Slurm, env.c: env_array_for_step).
    for key in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if env.get(key):
            return tuple(nodelist.expand(env[key]))
    raise WorldError(f"SLURM_STEP_NODELIST is not set, expected the step's host names: {USE_SRUN}")


def _master(env: Mapping[str, str], hosts: tuple[str, ...]) -> str:
    """The host of rank 0, which is not always the first of the list."""
    if env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return _first_line(env)
    # A step over several components of a heterogeneous job has one merged list, which Slurm sorts; rank 0
    # is in component 0. A step on one component has the variables too, hence the second condition.
    for kind in ("HET", "PACK"):
        group = env.get(f"SLURM_JOB_NODELIST_{kind}_GROUP_0")
        if group and set(nodelist.expand(group)) < set(hosts):
            return nodelist.first(group)
    return hosts[0]


def _first_line(env: Mapping[str, str]) -> str:
    path = env.get("SLURM_HOSTFILE")
    try:
        lines = Path(path or "").read_text().split()
    except OSError as error:
        raise WorldError(
            f"SLURM_DISTRIBUTION is arbitrary, and SLURM_HOSTFILE {path!r}, whose first line is rank 0's "
            f"host, cannot be read: {error.strerror}; put it on a shared file system"
        ) from None
    if not lines:
        raise WorldError(f"SLURM_HOSTFILE {path!r} is empty, expected a host per rank")
    return nodelist.first(lines[0])


def _without_step(env: Mapping[str, str]) -> World:
    """A batch script or an salloc shell: fine for one rank, a hang for more, so refused."""
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks != "1":
        raise WorldError(
            f"SLURM_STEP_ID is not set although this job has {tasks} tasks: this process would be rank 0 of "
            f"{tasks} and wait for ever; {USE_SRUN}"
        )
    job = identity(env)
    host = env.get("SLURMD_NODENAME", "")
    return World(
        NAME, 0, 1, 0, 1, 0, (host,) if host else (), "127.0.0.1", ports.candidates(job), job
    )
