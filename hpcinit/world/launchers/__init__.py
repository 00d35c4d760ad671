"""What started the ranks. Each module answers the same questions about one launcher:

NAME                           what messages call it, and HPCINIT_LAUNCHER
VARIABLES                      which variable holds the rank, the size, ...
present(env) -> bool           did it start this process
read(env, process) -> World    everything, from its variables alone
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from hpcinit.base.errors import WorldError
from hpcinit.world import ENV_WORLD, World
from hpcinit.world import parent_step as processes
from hpcinit.world.launchers import horovod, mpich, openmpi, single, slurm_step, torch_env, torchrun
from hpcinit.world.parent_step import UNKNOWN, Process

# What other launchers left in the environment that contradicts the chosen one.


def find_contradictions(
    env: Mapping[str, str], world: World, chosen: Mapping[str, str], others: Iterable[tuple[str, Mapping[str, str]]]
) -> tuple[str, ...]:
    """One sentence per foreign launcher, with every value that differs beside the one in use.

    chosen, others: the names of the variables by what they hold ({"rank": "RANK"}); others with whom they belong to.
    """
    sentences = [
        _sentence(owner, found, world)
        for owner, variables in others
        if (found := _differing(env, world, chosen, variables))
    ]
    if rank0_address := _rendezvous(env, world, chosen):
        sentences.append(_sentence("torch", rank0_address, world))
    return tuple(dict.fromkeys(sentences))


def _sentence(owner: str, found: list[str], world: World) -> str:
    return f"left aside from {owner}: {'; '.join(found)}. In use is what {world.launcher} says"


def _differing(
    env: Mapping[str, str], world: World, chosen: Mapping[str, str], variables: Mapping[str, str]
) -> list[str]:
    found = []
    for field, name in variables.items():
        text, value = env.get(name), getattr(world, field)
        if text is None or name in chosen.values() or text.strip() == str(value):
            continue
        source = chosen.get(field, "")
        own = f"{source} is {_shown(env[source])}" if source in env else f"{field} is {value}"
        found.append(f"{name} is {_shown(text)}, {own}")
    return found


def _rendezvous(env: Mapping[str, str], world: World, chosen: Mapping[str, str]) -> list[str]:
    """MASTER_ADDR and MASTER_PORT, unless they are of no use, are the launcher's own or hpcinit's."""
    if world.world_size == 1 or "RANK" in chosen.values() or env.get(ENV_WORLD) == world.job:
        return []
    found = []
    if env.get("MASTER_ADDR", world.master_addr) != world.master_addr:
        found.append(f"MASTER_ADDR is {_shown(env['MASTER_ADDR'])}, rank 0's host is {world.master_addr}")
    ports = [str(port) for port in world.master_ports]
    if env.get("MASTER_PORT", ports[0]) not in ports:
        found.append(f"MASTER_PORT is {_shown(env['MASTER_PORT'])}, the port is {ports[0]}")
    return found


def _shown(text: str) -> str:
    return text or "''"


ENV_LAUNCHER = "HPCINIT_LAUNCHER"


class Launcher(Protocol):
    """The questions that each module answers."""

    NAME: str
    VARIABLES: dict[str, str]

    def present(self, env: Mapping[str, str]) -> bool: ...
    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World: ...


# In this order: torchrun inside a Slurm step is torchrun's world (the step's tasks are its agents), and mpirun
# inside an allocation is MPI's. `srun` is what is left. The last is never absent, and the one before it never
# present: it is there to be named.
LAUNCHERS: tuple[Launcher, ...] = (torchrun, horovod, openmpi, mpich, slurm_step, torch_env, single)


def read(env: Mapping[str, str], launcher: str | None = None, process: Process | None = None) -> World:
    """The world as the launcher that started this process describes it, and warnings of what contradicts it.

    env: usually os.environ; then this process's parents are looked at too. launcher: a name from LAUNCHERS, to
    choose by hand; HPCINIT_LAUNCHER does the same from outside. process: for tests.

    Raises WorldError if the chosen launcher's variables are absent or contradict each other, or if it cannot be
    told which launcher is right.
    """
    if process is None:
        process = processes.slurm_step_of_this_process() if env is os.environ else UNKNOWN
    by_hand = launcher or env.get(ENV_LAUNCHER)
    chosen = _named(by_hand) if by_hand else _present(env, process)
    world = chosen.read(env, process)
    if not by_hand:
        _refuse_two_launchers(env, world, chosen)
        _refuse_ranks_of_nobody(env, world, chosen, process)
    horovod.check(world)
    # torchrun and torch_env share their variables, and single has none. Slurm's are of the agent above a rank of ours.
    left_out = (chosen, torchrun, slurm_step if torchrun.by_our_agent(env) else chosen)
    others = [(m.NAME, m.VARIABLES) for m in LAUNCHERS if m not in left_out]
    others.append(("PMIx", {"rank": "PMIX_RANK"}))
    return replace(world, warnings=find_contradictions(env, world, chosen.VARIABLES, others))


def _named(name: str) -> Launcher:
    for module in LAUNCHERS:
        if name == module.NAME:
            return module
    names = ", ".join(module.NAME for module in LAUNCHERS)
    raise WorldError(f"launcher {name!r} is not known, expected one of: {names} (from launcher= or {ENV_LAUNCHER})")


def _present(env: Mapping[str, str], process: Process) -> Launcher:
    if slurm_step.present(env) and slurm_step.starts_this_very_process(env, process):
        return slurm_step  # the others were inherited, however fresh they look
    return next(module for module in LAUNCHERS if module.present(env))


def _refuse_two_launchers(env: Mapping[str, str], world: World, chosen: Launcher) -> None:
    """MPI's launchers and Horovod's do not nest in a known order."""
    if chosen not in (horovod, openmpi, mpich):
        return
    for other in (openmpi, mpich):
        names = other.VARIABLES["rank"], other.VARIABLES["world_size"]
        said = tuple(env.get(name) for name in names)
        # Under MpiDefault=pmi2 srun gives PMI_RANK to mpirun's daemons, which is not Hydra's and no reason to refuse.
        present = other is not chosen and other.present(env) and None not in said
        if not present or said == (str(world.rank), str(world.world_size)):
            continue
        theirs = [text or "''" for text in said]
        raise WorldError(
            f"{chosen.NAME} started rank {world.rank} of {world.world_size}, and {other.NAME} rank {theirs[0]} of "
            f"{theirs[1]} ({', '.join(names)}): it cannot be told which of them is inside the other; say "
            f"{ENV_LAUNCHER}={chosen.NAME} or {ENV_LAUNCHER}={other.NAME}"
        )


def _refuse_ranks_of_nobody(env: Mapping[str, str], world: World, chosen: Launcher, process: Process) -> None:
    """Ranks that torch's variables speak of although nothing is to be seen that started them."""
    if world.world_size > 1 or chosen not in (single, slurm_step) or not torch_env.many(env):
        return
    if ENV_WORLD in env or slurm_step.starts_this_very_process(env, process):
        return  # inherited from a rank of hpcinit's, or from before srun
    raise WorldError(
        f"RANK is {env['RANK']} and WORLD_SIZE is {env['WORLD_SIZE']}, but nothing is to be seen that started "
        f"so many ranks ({chosen.NAME} says 1): if they are left over, unset them or say {ENV_LAUNCHER}={chosen.NAME}; "
        f"if a launcher of yours has set them, say {ENV_LAUNCHER}=env"
    )
