"""Ranks started by torchrun (`python -m torch.distributed.run`), and by what is built on it, such as accelerate.

Variables: https://docs.pytorch.org/docs/stable/elastic/run.html. With launch=torchrun the agents are tasks of a Slurm
step, one per node, and say so (HPCINIT_AGENT): the step's variables then name the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.base.errors import WorldError
from hpcinit.records import elastic_restarts
from hpcinit.world import World, network, number
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
ENV_AGENT = "HPCINIT_AGENT"  # of a rank that hpcinit.elastic has started: World.job of the agents


def present(env: Mapping[str, str]) -> bool:
    """A stale RANK alone does not look like torchrun, which always sets TORCHELASTIC_RUN_ID."""
    return "TORCHELASTIC_RUN_ID" in env


def by_our_agent(env: Mapping[str, str]) -> bool:
    """True for a rank that hpcinit.elastic started; False for one of a torchrun that such a rank has started."""
    return present(env) and env.get(ENV_AGENT) == env["TORCHELASTIC_RUN_ID"]


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Every value from torchrun's own variables. It does not name the hosts, but counts them."""
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
    """The agents' world is the step's, and it says where rank 0 is; each start of the ranks has ports of its own."""
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
        master_ports=network.candidate_ports(job),
        job=job,
        master_known=agents.master_known,
    )


def _job(env: Mapping[str, str], address: str) -> str:
    """'RUN.RESTART'; without --rdzv-id, where every run is called 'none', with the address and port of its store.

    The agents agree on both, and give them to all workers; two torchruns on a node have different ports.
    """
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run in {"", "none"}:
        run = f"none-{address}-{env.get('MASTER_PORT', '')}"
    return f"{run}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
