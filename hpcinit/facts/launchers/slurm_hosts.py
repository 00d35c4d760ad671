"""The hosts of a Slurm step in the order of SLURM_NODEID, and the one of rank 0.

Slurm sorts SLURM_STEP_NODELIST. SLURM_NODEID counts along it, but in a heterogeneous step, where it counts along
the components; rank 0 is on its first host, but under --distribution=arbitrary. In 22.05.8 and 24.11.5:

    srun --het-group=0,1 of n4 and n[1-2]     list n[1-2,4]   SLURM_NODEID n4 n1 n2   rank 0 n4
    srun -m arbitrary, hosts n3 n1 n3 n2      list n[1-3]     SLURM_NODEID n1 n2 n3   rank 0 n3
    srun -w n3 : -w n1,n2 in a plain job      list n[1-3]     SLURM_NODEID n3 n1 n2   rank 0 n3, told nowhere
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts.errors import NodelistError, WorldError
from hpcinit.slurm import nodelist


@dataclass(frozen=True)
class Placement:
    """hosts: by SLURM_NODEID. master: rank 0's host. known: whether that is certain, and with it the order."""

    hosts: tuple[str, ...]
    master: str
    known: bool = True


def place(env: Mapping[str, str], node_rank: int, ranks_here: Sequence[int], do: str) -> Placement:
    """From the step's nodelist, its components and the host file. Raises WorldError, which says `do`."""
    listed = nodelist.expand(_step_list(env, do))
    hosts = by_component(env, listed)
    own = env.get("SLURMD_NODENAME", "")
    if not node_rank < len(hosts):
        raise WorldError(f"SLURM_NODEID is {node_rank}, but the step has {len(hosts)} hosts ({','.join(hosts)}): {do}")
    if env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        master = _of_hostfile(env, hosts, own, ranks_here)
        return Placement(hosts, master) if master else _without_order(hosts, own or hosts[node_rank], ranks_here)
    if own and own in hosts and hosts[node_rank] != own:
        return _without_order(_moved(hosts, own, node_rank), own, ranks_here)
    if (0 in ranks_here) != (node_rank == 0):
        return _without_order(hosts, own or hosts[node_rank], ranks_here)
    return Placement(hosts, hosts[0])


def by_component(env: Mapping[str, str], listed: Sequence[str]) -> tuple[str, ...]:
    """The hosts in the order of the heterogeneous job's components, where there are such."""
    ordered = [host for group in components(env) for host in group if host in set(listed)]
    return tuple(ordered if len(ordered) == len(listed) else listed)


def components(env: Mapping[str, str]) -> list[list[str]]:
    """The hosts of each component; none for a plain job. PACK is the name from before Slurm 20.02."""
    for kind in ("HET", "PACK"):
        # Variables of another job can be inherited: the first component's id is the job's own.
        if env.get(f"SLURM_JOB_ID_{kind}_GROUP_0") != env.get("SLURM_JOB_ID") or "SLURM_JOB_ID" not in env:
            continue
        size = env.get(f"SLURM_{kind}_SIZE", "0")
        lists = [env.get(f"SLURM_JOB_NODELIST_{kind}_GROUP_{i}") for i in range(int(size) if size.isdigit() else 0)]
        if lists and all(lists):
            return [nodelist.expand(text) for text in lists if text]
    return []


def _step_list(env: Mapping[str, str], do: str) -> str:
    # SLURM_JOB_NODELIST stays the job's list in a step on a part of the allocation; the step's own is
    # SLURM_STEP_NODELIST (Slurm, env.c: env_array_for_step).
    text = env.get("SLURM_STEP_NODELIST")
    if not text:
        raise WorldError(f"SLURM_STEP_NODELIST is not set, expected the step's host names: {do}")
    return text


def _of_hostfile(env: Mapping[str, str], hosts: Sequence[str], own: str, ranks_here: Sequence[int]) -> str:
    """The first host of SLURM_HOSTFILE, if the file is there and is the one that placed this step; else ''."""
    try:
        lines = Path(env["SLURM_HOSTFILE"]).read_text(encoding="utf-8").splitlines()
        names = [name for line in lines for word in line.partition("#")[0].split() for name in _repeated(word)]
    except (KeyError, OSError, UnicodeDecodeError, NodelistError):
        return ""
    if set(names) != set(hosts) or max(ranks_here) >= len(names):
        return ""  # srun -w HOSTS beats the file, and the file may have changed since
    return names[0] if all(names[rank] == own for rank in ranks_here) else ""


def _repeated(word: str) -> list[str]:
    """'n[1-2]' is n1 n2, and 'n1*3' is n1 n1 n1."""
    names, _, times = word.partition("*")
    return nodelist.expand(names) * (int(times) if times.isdigit() and len(times) < 6 else 1)


def _without_order(hosts: tuple[str, ...], own: str, ranks_here: Sequence[int]) -> Placement:
    """What this rank can tell without knowing the order: whether rank 0 is here, and with two hosts, where else."""
    others = [host for host in hosts if host != own]
    master = own if 0 in ranks_here else (others or hosts)[0]
    return Placement(hosts, master, known=len(hosts) <= 2)


def _moved(hosts: tuple[str, ...], own: str, to: int) -> tuple[str, ...]:
    """This rank's host where SLURM_NODEID puts it, so that at least its own place is right."""
    swapped = list(hosts)
    at = swapped.index(own)
    swapped[at], swapped[to] = swapped[to], swapped[at]
    return tuple(swapped)
