"""Worlds of launchers that do not say where rank 0 is: the MPI launchers and Horovod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcinit.base.errors import WorldError
from hpcinit.slurm import nodelist
from hpcinit.world import World, network, number


class Rank0Address(NamedTuple):
    """What such a launcher tells of itself.

    job: names this start. own: this node's name. guess: an address that it mentions, which may be rank 0's. lost: what
    to do where there is none; {size} and {here} are filled in. node_rank: the variable that holds it; without one the
    nodes are filled in order. node_count: 0 where it does not tell.
    """

    launcher: str
    job: str
    own: str
    guess: str
    lost: str
    node_rank: str = ""
    node_count: int = 0


def world_of(env: Mapping[str, str], names: Mapping[str, str], do: str, told: Rank0Address) -> World:
    """Every value from the variables `names`, by what they hold.

    Raises WorldError, which says `do`, if a value is absent; and one if nothing tells where to meet.
    """
    rank, size, local_rank, here = (
        number(env, names[name], do) for name in ("rank", "world_size", "local_rank", "local_world_size")
    )
    address, known = _place(env, told, one_node=here == size, rank=rank)
    if not address:
        raise WorldError(told.lost.format(size=size, here=here))
    return World(
        launcher=told.launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=here,
        node_rank=number(env, told.node_rank, do) if told.node_rank else rank // max(here, 1),
        hosts=(),
        master_addr=address,
        master_ports=(number(env, "MASTER_PORT", do),) if env.get("MASTER_PORT") else network.candidate_ports(told.job),
        job=told.job,
        master_known=known,
        node_count=told.node_count,
    )


def _place(env: Mapping[str, str], told: Rank0Address, *, one_node: bool, rank: int) -> tuple[str, bool]:
    """MASTER_ADDR if it was given; this machine if it is the only one; else a guess, which rank 0 must correct."""
    job_list = env.get("SLURM_JOB_NODELIST")
    guess = (told.own if rank == 0 else "") or (nodelist.first(job_list) if job_list else "") or told.guess
    given = env.get("MASTER_ADDR")
    # hpcinit.run exports the guess too; seen again, it is still one.
    if given and (given != guess or one_node):
        return given, True
    return ("127.0.0.1", True) if one_node else (guess, False)
