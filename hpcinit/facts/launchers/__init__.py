"""What started the ranks. Each module answers the same questions about one launcher:

    NAME                  what messages call it
    present(env) -> bool  did it start this process
    read(env) -> World    everything, from its variables alone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hpcinit.facts.errors import WorldError
from hpcinit.facts.launchers import mpi, single, slurm, torchrun
from hpcinit.facts.world import World



class Launcher(Protocol):
    """The questions that each module answers."""

    NAME: str

    def present(self, env: Mapping[str, str]) -> bool: ...
    def read(self, env: Mapping[str, str]) -> World: ...


# In this order: torchrun inside a Slurm step is torchrun's world (the step's tasks are its agents), and
# mpirun inside an allocation is MPI's. `srun` is what is left. A stale RANK alone does not look like
# torchrun, which always sets TORCHELASTIC_RUN_ID.
LAUNCHERS: tuple[Launcher, ...] = (torchrun, mpi, slurm, single)


def read(env: Mapping[str, str], launcher: str | None = None) -> World:
    """The world as the launcher that started this process describes it.

    env: usually os.environ. launcher: a name from LAUNCHERS, to choose by hand.
    Raises WorldError if the chosen launcher's variables are absent or contradict each other.
    """
    if launcher is not None:
        for module in LAUNCHERS:
            if launcher == module.NAME:
                return module.read(env)
        names = ", ".join(module.NAME for module in LAUNCHERS)
        raise WorldError(f"launcher {launcher!r} is not known, expected one of: {names}")
    chosen = next(module for module in LAUNCHERS if module.present(env))
    return chosen.read(env)
