"""Detects which launcher started the ranks, and reads the world from its variables.

It also reports variables of other launchers that contradict this world.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from hpcinit.base.errors import WorldError
from hpcinit.engine import from_environment
from hpcinit.world import ENV_WORLD, World, ports
from hpcinit.world.launchers import slurm_step
from hpcinit.world.launchers.mpi import check_horovod, horovod, mpich, openmpi
from hpcinit.world.launchers.slurm_step import UNKNOWN, Process, slurm_step_of_this_process
from hpcinit.world.launchers.torch_variables import torch_variables, torchrun

# Variables of other launchers in the environment that contradict the chosen one.


def find_contradictions(
    env: Mapping[str, str], world: World, chosen: Mapping[str, str], others: Iterable[tuple[str, Mapping[str, str]]]
) -> tuple[str, ...]:
    """Return one sentence for each other launcher whose variables contradict the world.

    It lists each value that differs, and the value that hpcinit uses.

    chosen: the variables of the launcher in use, as in {"rank": "RANK"}.
    others: the variables of each other launcher.
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
    return f"ignored variables of {owner}: {'; '.join(found)}. hpcinit uses the values of {world.launcher}"


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
    """Return how MASTER_ADDR and MASTER_PORT contradict the world, or [] if the launcher or hpcinit has set them."""
    if world.world_size == 1 or "RANK" in chosen.values() or env.get(ENV_WORLD) == world.job:
        return []
    found = []
    if env.get("MASTER_ADDR", world.master_addr) != world.master_addr:
        found.append(f"MASTER_ADDR is {_shown(env['MASTER_ADDR'])}, rank 0's host is {world.master_addr}")
    own = [str(port) for port in world.master_ports]
    if env.get("MASTER_PORT", own[0]) not in own:
        found.append(f"MASTER_PORT is {_shown(env['MASTER_PORT'])}, the port is {own[0]}")
    return found


def _shown(text: str) -> str:
    return text or "''"


# Names the launcher that started this process. This is not the config group `launch=`, which determines how hpcinit
# starts the ranks of a job.
ENV_STARTED_BY = "HPCINIT_STARTED_BY"


class Launcher(Protocol):
    """The interface of a launcher. slurm_step implements it as a module, the others as objects.

    NAME: its name in messages and in HPCINIT_STARTED_BY.
    VARIABLES: the environment variable that contains each value, such as the rank or the world size.
    present: returns whether the launcher started this process.
    read: returns the world, read only from the launcher's variables, or raises WorldError.
    """

    NAME: str
    VARIABLES: Mapping[str, str]

    def present(self, env: Mapping[str, str]) -> bool: ...
    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World: ...


class Single:
    """The only rank of its world: a process that no launcher started."""

    NAME = "single"
    VARIABLES: Mapping[str, str] = {}

    def present(self, env: Mapping[str, str]) -> bool:
        return True

    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World:
        job = f"pid{os.getpid()}"
        return World(self.NAME, 0, 1, 0, 1, 0, ("127.0.0.1",), "127.0.0.1", ports.candidate_ports(job), job)


single = Single()


# In the order of detection. Inside a Slurm step, torchrun is detected before Slurm, because the step's tasks are its
# agents. Inside an allocation, mpirun is also detected before Slurm. The last entry is always present.
LAUNCHERS: tuple[Launcher, ...] = (torchrun, horovod, openmpi, mpich, slurm_step, torch_variables, single)


def read(env: Mapping[str, str], started_by: str | None = None, process: Process | None = None) -> World:
    """Return the world that this process's launcher describes, with warnings about contradicting variables.

    Raise WorldError if the launcher's variables are missing or contradict each other, or if it is unclear which
    launcher to use.

    env: the environment. If it is os.environ, the parents of this process are checked too.
    started_by: the name of the launcher, one of LAUNCHERS. None: detect it. Users can set HPCINIT_STARTED_BY instead.
    process: how Slurm started this process. Only tests pass it.
    """
    if process is None:
        process = slurm_step_of_this_process() if env is os.environ else UNKNOWN
    named = started_by or env.get(ENV_STARTED_BY)
    chosen = _named(named) if named else _present(env, process)
    world = ports.fixed(env, chosen.read(env, process))
    if not named:
        _refuse_two_launchers(env, world, chosen)
        _refuse_ranks_of_nobody(env, world, chosen, process)
        _refuse_ranks_without_job(env, chosen)
    check_horovod(world)
    # torchrun and torch_variables share their variables, and single has none. Under hpcinit's agent, Slurm's variables
    # describe the agent.
    not_others = (chosen, torchrun, slurm_step if torchrun.by_our_agent(env) else chosen)
    others = [(m.NAME, m.VARIABLES) for m in LAUNCHERS if m not in not_others]
    others.append(("PMIx", {"rank": "PMIX_RANK"}))
    return replace(world, warnings=find_contradictions(env, world, chosen.VARIABLES, others))


def display_name(world: World, env: Mapping[str, str]) -> str:
    """Return the launcher's name to show to the user. With cluster=local, it is 'local' instead of 'slurm'."""
    return from_environment(env).name if world.launcher == slurm_step.NAME else world.launcher


def _named(name: str) -> Launcher:
    for module in LAUNCHERS:
        if name == module.NAME:
            return module
    names = ", ".join(module.NAME for module in LAUNCHERS)
    raise WorldError(f"launcher {name!r} is unknown, expected one of: {names} (from started_by= or {ENV_STARTED_BY})")


def _present(env: Mapping[str, str], process: Process) -> Launcher:
    if slurm_step.present(env) and slurm_step.starts_this_very_process(env, process):
        return slurm_step  # variables of other launchers were inherited
    return next(module for module in LAUNCHERS if module.present(env))


def _refuse_two_launchers(env: Mapping[str, str], world: World, chosen: Launcher) -> None:
    """Raise WorldError if two of Open MPI, MPICH and Horovod give this process different ranks or sizes.

    It is then unclear which of the two launchers started the other.
    """
    if chosen not in (horovod, openmpi, mpich):
        return
    for other in (openmpi, mpich):
        names = other.VARIABLES["rank"], other.VARIABLES["world_size"]
        values = tuple(env.get(name) for name in names)
        # With MpiDefault=pmi2, srun sets PMI_RANK for mpirun's daemons. Only a PMI_RANK from Hydra is a contradiction.
        present = other is not chosen and other.present(env) and None not in values
        if not present or values == (str(world.rank), str(world.world_size)):
            continue
        theirs = [text or "''" for text in values]
        raise WorldError(
            f"this process is rank {world.rank} of {world.world_size} according to {chosen.NAME}, but rank "
            f"{theirs[0]} of {theirs[1]} according to {other.NAME} ({', '.join(names)}). Choose the launcher that "
            f"started the ranks: set {ENV_STARTED_BY}={chosen.NAME} or {ENV_STARTED_BY}={other.NAME}"
        )


def _refuse_ranks_of_nobody(env: Mapping[str, str], world: World, chosen: Launcher, process: Process) -> None:
    """Raise WorldError if torch's variables describe several ranks, but the detected launcher started only one."""
    if world.world_size > 1 or chosen not in (single, slurm_step) or not torch_variables.many(env):
        return
    if ENV_WORLD in env or slurm_step.starts_this_very_process(env, process):
        return  # torch's variables were inherited from a rank of hpcinit, or set before srun
    if chosen is single:
        raise WorldError(
            f"RANK is {env['RANK']} and WORLD_SIZE is {env['WORLD_SIZE']}, but LOCAL_RANK is not set. Set it to "
            "this rank's index among the ranks that share the node's devices (0 if the rank sees only its own device)"
        )
    raise WorldError(
        f"RANK is {env['RANK']} and WORLD_SIZE is {env['WORLD_SIZE']}, but {chosen.NAME} started only 1 rank. If your "
        f"own launcher set RANK and WORLD_SIZE, set {ENV_STARTED_BY}=env. Otherwise, unset both, or set "
        f"{ENV_STARTED_BY}={chosen.NAME} to ignore them"
    )


def _refuse_ranks_without_job(env: Mapping[str, str], chosen: Launcher) -> None:
    """Raise WorldError if srun's variables show that this is one of several ranks, but there is no SLURM_JOB_ID.

    Containers and wrappers that filter the environment can remove the variables of the job. Without this check, each
    rank would train alone, and the job would succeed.
    """
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    tasks = env.get("SLURM_NTASKS", "")
    if chosen is not single or ENV_WORLD in env or not all(map(env.get, names)):
        return
    if tasks.isdigit() and int(tasks) > 1:
        values = ", ".join(f"{name} is {env[name]}" for name in names)
        raise WorldError(
            f"{values}, but SLURM_JOB_ID is not set, so hpcinit cannot find the nodes. Start the ranks with srun and "
            "keep its variables. Or set RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
            f"MASTER_ADDR=HOST MASTER_PORT=PORT. For a single process, set {ENV_STARTED_BY}=single"
        )
