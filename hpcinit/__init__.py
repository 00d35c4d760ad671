"""hpcinit submits PyTorch jobs to Slurm and initializes their process groups.

    import hpcinit

    with hpcinit.session() as run:
        print(run.rank, run.world_size, run.device)

This import is fast: torch is imported only when you first use a name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcinit.base import BEGAN  # noqa: F401 - noted as early as possible

if TYPE_CHECKING:
    from hpcinit.base.errors import HpcinitError
    from hpcinit.records.layout import Layout
    from hpcinit.records.spec import Precision, Samples, Training
    from hpcinit.runtime.bringup import init, session, shutdown
    from hpcinit.runtime.runtime import Runtime
    from hpcinit.runtime.side_groups import side_group
    from hpcinit.submit.function_executor import FunctionExecutor as Executor
    from hpcinit.world import World

_PUBLIC = {
    "init": "hpcinit.runtime.bringup",
    "shutdown": "hpcinit.runtime.bringup",
    "session": "hpcinit.runtime.bringup",
    "side_group": "hpcinit.runtime.side_groups",
    "Executor": "hpcinit.submit.function_executor",
    "Runtime": "hpcinit.runtime.runtime",
    "Layout": "hpcinit.records.layout",
    "Precision": "hpcinit.records.spec",
    "Samples": "hpcinit.records.spec",
    "Training": "hpcinit.records.spec",
    "World": "hpcinit.world",
    "HpcinitError": "hpcinit.base.errors",
}

_OTHER_NAMES = {"Executor": "FunctionExecutor"}  # inside their modules

__all__ = [
    "Executor",
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
        return getattr(import_module(_PUBLIC[name]), _OTHER_NAMES.get(name, name))
    if name == "api":
        return import_module("hpcinit.api")
    raise AttributeError(f"module 'hpcinit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return only the public names, so that Tab completion offers no others."""
    return [*__all__, "api"]
