"""Render batch scripts with submitit, without its pickles. Only this file imports submitit.

What differs from submitit's own scripts, and why, is in docs/decisions/0004-submitit-as-renderer.md (submitit 1.5.4).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# submitit always writes --signal=USR2@90, which kills every program that does not handle USR2. Without a requested
# signal, the line is rendered with this value and then dropped.
_DROPPED = "=hpcinit-drops-this-line"
# submitit's headings, and a variable that only programs started by submitit read.
_HEADINGS = ("\n\n# Parameters\n", "\n# setup\n", "\n# command\nexport SUBMITIT_EXECUTOR=slurm\n")


def render(folder: Path, command: str, parameters: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Return the batch script with the comment `header`.

    parameters: submitit's, with further sbatch options under additional_parameters.
    """
    extra = {"signal": "hpcinit-drops-this-line", **parameters["additional_parameters"]}
    given = {**parameters, "wckey": None, "additional_parameters": extra, "use_srun": False}
    text = _renderer()(command=command, folder=folder, **given)
    for line in _HEADINGS:
        text = text.replace(line, "\n", 1)
    first, _, rest = "\n".join(line for line in text.split("\n") if not line.endswith(_DROPPED)).partition("\n")
    return "\n".join([first, *header, rest])


@cache
def _renderer() -> Callable[..., str]:
    """Return submitit's function that renders, without executors and helpers, whose import opens 100 more files.

    `import submitit` imports all of them, so its package is an empty one meanwhile. A later import gets the real one.
    """
    if "submitit" in sys.modules:
        return _imported()
    spec = importlib.util.find_spec("submitit")
    assert spec is not None  # it is installed with hpcinit
    package = types.ModuleType("submitit")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["submitit"] = package
    try:
        return _imported()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "submitit"]:
            del sys.modules[name]


def _imported() -> Callable[..., str]:
    function: Callable[..., str] = importlib.import_module("submitit.slurm.slurm")._make_sbatch_string
    return function
