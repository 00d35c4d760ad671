"""submitit's SlurmExecutor as renderer, without its pickles. The only file that imports submitit.

What is overridden, and why (submitit 1.5.4): docs/decisions/0004-submitit-as-renderer.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string


class ScriptExecutor(SlurmExecutor):
    """Renders one batch script, which runs a shell command, not a pickle."""

    @classmethod
    def affinity(cls) -> int:
        """Rendering needs no Slurm on this machine; submitit's own answer asks for srun."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = _make_sbatch_string(command=command, folder=self.folder, use_srun=False, **self.parameters)
        return "\n".join(line for line in text.split("\n") if not line.endswith(_DROPPED))


# submitit always writes --signal=USR2@90, which kills every program that does not handle USR2; it is
# rendered with this value, which is then dropped, where no signal is asked for.
_DROPPED = "=hpcinit-drops-this-line"


def render(folder: Path, command: str, parameters: Mapping[str, Any]) -> str:
    """The batch script. parameters: submitit's, further sbatch options under additional_parameters."""
    executor = ScriptExecutor(folder)
    extra = {"signal": "hpcinit-drops-this-line", **parameters["additional_parameters"]}
    executor.parameters.update({**parameters, "wckey": None, "additional_parameters": extra})
    return executor._make_submission_file_text(command, uid="")
