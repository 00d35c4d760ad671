"""hpcinit: submit PyTorch jobs to Slurm and bring their process groups up.

    import hpcinit

    with hpcinit.session() as run:
        print(run.rank, run.world_size, run.device)

Cheap to import: torch comes in with the first use of a name that needs it.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

BEGAN = (time.time(), time.monotonic(), os.getpid())  # of this process: runtime/moments.py

if TYPE_CHECKING:
    from hpcinit.facts.errors import HpcinitError
    from hpcinit.facts.layout import Layout
    from hpcinit.facts.spec import Precision, Samples, Training
    from hpcinit.facts.world import World
    from hpcinit.runtime.bringup import init, session, shutdown
    from hpcinit.runtime.groups import side_group
    from hpcinit.runtime.runtime import Runtime

_PUBLIC = {
    "init": "hpcinit.runtime.bringup",
    "shutdown": "hpcinit.runtime.bringup",
    "session": "hpcinit.runtime.bringup",
    "side_group": "hpcinit.runtime.groups",
    "Runtime": "hpcinit.runtime.runtime",
    "Layout": "hpcinit.facts.layout",
    "Precision": "hpcinit.facts.spec",
    "Samples": "hpcinit.facts.spec",
    "Training": "hpcinit.facts.spec",
    "World": "hpcinit.facts.world",
    "HpcinitError": "hpcinit.facts.errors",
}

__all__ = [
    "HpcinitError",
    "Layout",
    "Precision",
    "Runtime",
    "Samples",
    "Training",
    "World",
    "init",
    "session",
    "shutdown",
    "side_group",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hpcinit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
