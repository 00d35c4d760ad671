"""Ranks started by torchrun (`python -m torch.distributed.run`), or by programs built on it, such as accelerate.

Variables: https://docs.pytorch.org/docs/stable/elastic/run.html. With launch=torchrun the agents are tasks of a Slurm
step, one per node, and set HPCINIT_AGENT: the step's variables then name the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.base.errors import WorldError
from hpcinit.records import elastic_restarts
from hpcinit.world import World, number, ports
from hpcinit.world.launchers import slurm_step
from hpcinit.world.parent_step import UNKNOWN, Process

NAME = "torchrun"
VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
}
DO = "torchrun sets it for every worker; start the ranks with torchrun"
ENV_AGENT = "HPCINIT_AGENT"  # set for ranks that hpcinit.elastic has started: World.job of the agents


def present(env: Mapping[str, str]) -> bool:
    """Return whether torchrun started this process. A stale RANK is not enough: it always sets TORCHELASTIC_RUN_ID."""
    return "TORCHELASTIC_RUN_ID" in env


def by_our_agent(env: Mapping[str, str]) -> bool:
    """Return True for a rank of hpcinit.elastic, False for a rank of a torchrun that such a rank has started."""
    return present(env) and env.get(ENV_AGENT) == env["TORCHELASTIC_RUN_ID"]


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Return the world from torchrun's own variables. It does not name the hosts, but counts them."""
    if by_our_agent(env):
        return _of_our_agents(env, process)
    address = env.get("MASTER_ADDR")
    if not address:
        raise WorldError(f"MASTER_ADDR is not set, expected rank 0's host: {DO}")
    return World(
        launcher=NAME,
        rank=number(env, "RANK", DO),
        world_size=number(env, "WORLD_SIZE", DO),
        local_rank=number(env, "LOCAL_RANK", DO),
        local_world_size=number(env, "LOCAL_WORLD_SIZE", DO),
        node_rank=number(env, "GROUP_RANK", DO),
        hosts=(),
        master_addr=address,
        master_ports=(number(env, "MASTER_PORT", DO),),
        job=_job(env, address),
        node_count=number(env, "GROUP_WORLD_SIZE", DO) if "GROUP_WORLD_SIZE" in env else 0,
    )


def _of_our_agents(env: Mapping[str, str], process: Process) -> World:
    """Return the world of a rank. The agents' step names rank 0's host; each restart round has its own ports."""
    agents = slurm_step.read(env, process)
    job = elastic_restarts.round_folder(agents.job, number(env, "TORCHELASTIC_RESTART_COUNT", DO))
    return World(
        launcher=NAME,
        rank=number(env, "RANK", DO),
        world_size=number(env, "WORLD_SIZE", DO),
        local_rank=number(env, "LOCAL_RANK", DO),
        local_world_size=number(env, "LOCAL_WORLD_SIZE", DO),
        node_rank=agents.node_rank,
        hosts=agents.hosts,
        master_addr=agents.master_addr,
        master_ports=ports.candidate_ports(job),
        job=job,
        master_known=agents.master_known,
    )


def _job(env: Mapping[str, str], address: str) -> str:
    """Return 'RUN.RESTART'. Without --rdzv-id every run is called 'none'; then use the address and port of its store.

    The agents agree on both and pass them to all workers. Two torchruns on a node have different ports.
    """
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run in {"", "none"}:
        run = f"none-{address}-{env.get('MASTER_PORT', '')}"
    return f"{run}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
