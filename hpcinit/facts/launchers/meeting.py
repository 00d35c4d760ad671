"""Where ranks meet whose launcher does not say where rank 0 is: the MPI launchers and Horovod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcinit.facts import nodelist, ports
from hpcinit.facts.errors import WorldError
from hpcinit.facts.world import number


class Meeting(NamedTuple):
    """What World calls master_addr, master_ports and master_known."""

    address: str
    ports: tuple[int, ...]
    known: bool


def meet(env: Mapping[str, str], job: str, *, one_node: bool, rank: int, own: str, guess: str, do: str) -> Meeting:
    """MASTER_ADDR if it was given; this machine if it is the only one; else a guess, which rank 0 must correct.

    own: this node's name. guess: an address that the launcher mentions. Raises WorldError, which says `do`, where
    there is nothing to guess from.
    """
    chosen = (number(env, "MASTER_PORT", do),) if env.get("MASTER_PORT") else ports.candidates(job)
    job_list = env.get("SLURM_JOB_NODELIST")
    guess = (own if rank == 0 else "") or (nodelist.first(job_list) if job_list else "") or guess
    given = env.get("MASTER_ADDR")
    # hpcinit.run exports the guess too; seen again, it is still one.
    if given and (given != guess or one_node):
        return Meeting(given, chosen, known=True)
    if one_node:
        return Meeting("127.0.0.1", chosen, known=True)
    if not guess:
        raise WorldError(do)
    return Meeting(guess, chosen, known=False)
