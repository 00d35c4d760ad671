"""hpcinit: submit PyTorch jobs to Slurm and bring their process groups up.

    import hpcinit

    with hpcinit.session() as run:
        print(run.rank, run.world_size, run.device)

Cheap to import: torch comes in with the first use of a name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcinit.facts.errors import HpcinitError
    from hpcinit.facts.world import World
    from hpcinit.runtime.bringup import Runtime, init, session, shutdown

_PUBLIC = {
    "init": "hpcinit.runtime.bringup",
    "shutdown": "hpcinit.runtime.bringup",
    "session": "hpcinit.runtime.bringup",
    "Runtime": "hpcinit.runtime.bringup",
    "World": "hpcinit.facts.world",
    "HpcinitError": "hpcinit.facts.errors",
}

__all__ = ["HpcinitError", "Runtime", "World", "init", "session", "shutdown"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hpcinit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
