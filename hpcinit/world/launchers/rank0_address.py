"""Worlds of launchers that do not name rank 0's host: the MPI launchers and Horovod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcinit.base.errors import WorldError
from hpcinit.slurm import nodelist
from hpcinit.world import World, number, ports


class Rank0Address(NamedTuple):
    """What such a launcher sets.

    job: the name of this start. own: this node's name. guess: an address that may be rank 0's. lost: the error if there
    is none; {size} and {here} are filled in. node_rank: the variable with the node's number; '' if nodes are filled in
    order. node_count: 0 if unknown.
    """

    launcher: str
    job: str
    own: str
    guess: str
    lost: str
    node_rank: str = ""
    node_count: int = 0


def world_of(env: Mapping[str, str], names: Mapping[str, str], advice: str, source: Rank0Address) -> World:
    """Return the world from the variables `names`, by what they contain.

    Raise WorldError, with `advice`, if a value is absent, or if there is no address for the rendezvous.
    """
    rank, size, local_rank, here = (
        number(env, names[name], advice) for name in ("rank", "world_size", "local_rank", "local_world_size")
    )
    address, known = _place(env, source, one_node=here == size, rank=rank)
    if not address:
        raise WorldError(source.lost.format(size=size, here=here))
    return World(
        launcher=source.launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=here,
        node_rank=number(env, source.node_rank, advice) if source.node_rank else rank // max(here, 1),
        hosts=(),
        master_addr=address,
        master_ports=(number(env, "MASTER_PORT", advice),)
        if env.get("MASTER_PORT")
        else ports.candidate_ports(source.job),
        job=source.job,
        master_known=known,
        node_count=source.node_count,
    )


def _place(env: Mapping[str, str], source: Rank0Address, *, one_node: bool, rank: int) -> tuple[str, bool]:
    """Return (address, is it certain): MASTER_ADDR, or this machine if it is the only one, or a guess."""
    job_list = env.get("SLURM_JOB_NODELIST")
    guess = (source.own if rank == 0 else "") or (nodelist.first(job_list) if job_list else "") or source.guess
    given = env.get("MASTER_ADDR")
    # hpcinit.run exports the guess too, so the same value again is still a guess.
    if given and (given != guess or one_node):
        return given, True
    return ("127.0.0.1", True) if one_node else (guess, False)
