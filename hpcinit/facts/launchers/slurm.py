"""Ranks started by srun: one Slurm task per rank. Also what hpcinit's local engine sets.

What was right in every recorded launch (tests/data): SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, the length of
SLURM_GTIDS, SLURM_STEP_NUM_TASKS. What was not: SLURM_NTASKS (srun --preserve-env), SLURM_NTASKS_PER_NODE,
ntasks // nodes, the first host of any list (slurm_hosts.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.facts import ports
from hpcinit.facts.errors import WorldError
from hpcinit.facts.launchers import slurm_hosts, slurm_step
from hpcinit.facts.process import UNKNOWN, Process
from hpcinit.facts.world import World, number
from hpcinit.slurm import nodelist

NAME = "slurm"
VARIABLES = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
}
USE_SRUN = "sbatch and salloc alone set no rank, start the ranks with srun"


def present(env: Mapping[str, str]) -> bool:
    """True in a Slurm task, and in a batch script or salloc shell, where read() says what is missing."""
    return "SLURM_JOB_ID" in env or "SLURM_JOBID" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """The world of a Slurm step, or of a job with one task. Raises WorldError outside of one."""
    if not (env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        raise WorldError(
            f"SLURM_JOB_ID is not set, expected a job's number: Slurm sets it for every task, {USE_SRUN} (or leave out "
            "the launcher 'slurm')"
        )
    doubt = slurm_step.doubt(env, process)
    if doubt:
        return _without_step(env, doubt)
    rank = number(env, "SLURM_PROCID", USE_SRUN)
    local_rank = number(env, "SLURM_LOCALID", USE_SRUN)
    node_rank = number(env, "SLURM_NODEID", USE_SRUN)
    ranks_here = _ranks_here(env, rank, local_rank)
    placement = slurm_hosts.place(env, node_rank, ranks_here, USE_SRUN)
    job = identity(env)
    return World(
        launcher=NAME,
        rank=rank,
        # SLURM_NTASKS stays the job's under srun --preserve-env.
        world_size=number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", USE_SRUN),
        local_rank=local_rank,
        local_world_size=len(ranks_here),
        node_rank=node_rank,
        hosts=placement.hosts,
        master_addr=placement.master,
        master_ports=ports.candidates(job),
        job=job,
        master_known=placement.known,
    )


def identity(env: Mapping[str, str]) -> str:
    """'JOB.STEP.RESTART', or 'JOB+COMPONENT.STEP.RESTART' for a step without a heterogeneous job's first component.

    A requeued job keeps its id, so the restart count belongs to the name; each component counts its own steps.
    """
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID", "0")
    step = set(nodelist.expand(env["SLURM_STEP_NODELIST"])) if env.get("SLURM_STEP_NODELIST") else set()
    first = next((i for i, hosts in enumerate(slurm_hosts.components(env)) if step & set(hosts)), 0)
    component = f"+{first}" if first else ""
    return f"{job}{component}.{env.get('SLURM_STEP_ID', '0')}.{env.get('SLURM_RESTART_COUNT', '0')}"


def starts_this_very_process(env: Mapping[str, str], process: Process) -> bool:
    """True if slurmstepd made this process itself, so that nothing that sets ranks can stand between."""
    return process.pid != 0 and env.get("SLURM_TASK_PID") == str(process.pid) and not slurm_step.doubt(env, process)


def _ranks_here(env: Mapping[str, str], rank: int, local_rank: int) -> list[int]:
    """SLURM_GTIDS "4,5,6": the ranks on this node. Uneven nodes are ordinary: srun -N4 -n8 gives 5, 1, 1, 1."""
    text = env.get("SLURM_GTIDS", "")
    words = text.split(",")
    found = words[local_rank] if 0 <= local_rank < len(words) else "absent"
    if found != str(rank) or not all(word.isdigit() for word in words):
        raise WorldError(
            f"SLURM_GTIDS is {text!r}, so local rank {local_rank} should be rank {found}, but SLURM_PROCID is {rank}: "
            "these variables come from different steps; start the ranks with srun from the batch script"
        )
    return [int(word) for word in words]


def _without_step(env: Mapping[str, str], doubt: str) -> World:
    """A batch script or an salloc shell: fine for one rank, a hang for more, so refused."""
    tasks = _tasks_of_job(env)
    if tasks != "1 tasks":
        raise WorldError(
            f"{doubt}. The job has {tasks} and this process is none of them: as a rank it would wait for the others "
            f"for ever; {USE_SRUN} (or say HPCINIT_LAUNCHER=single, for one process on its own)"
        )
    job = f"{env.get('SLURM_JOB_ID') or env.get('SLURM_JOBID')}.batch.{env.get('SLURM_RESTART_COUNT', '0')}"
    host = env.get("SLURMD_NODENAME", "")
    return World(NAME, 0, 1, 0, 1, 0, (host,) if host else (), "127.0.0.1", ports.candidates(job), job)


def _tasks_of_job(env: Mapping[str, str]) -> str:
    """'8 tasks'; of all components; '2 nodes' where only nodes were asked for (SLURM_NTASKS is then not set)."""
    for kind in ("HET", "PACK"):
        counts = [env.get(f"SLURM_NTASKS_{kind}_GROUP_{i}", "1") for i in range(len(slurm_hosts.components(env)))]
        if counts and all(count.isdigit() for count in counts):
            return f"{sum(map(int, counts))} tasks"
    nodes, tasks = env.get("SLURM_JOB_NUM_NODES", "1"), env.get("SLURM_NTASKS", "1")
    return f"{nodes} nodes" if tasks == "1" != nodes else f"{tasks} tasks"
