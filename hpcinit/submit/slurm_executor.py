"""Render batch scripts with submitit's SlurmExecutor, without its pickles. Only this file imports submitit.

What is overridden, and why (submitit 1.5.4), is in docs/decisions/0004-submitit-as-renderer.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string


class ScriptExecutor(SlurmExecutor):
    """Renders one batch script that runs a shell command instead of a pickle."""

    @classmethod
    def affinity(cls) -> int:
        """Return a positive score, because rendering needs no Slurm. submitit's own method looks for srun."""
        return 2

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = _make_sbatch_string(command=command, folder=self.folder, use_srun=False, **self.parameters)
        for line in _HEADINGS:
            text = text.replace(line, "\n", 1)
        return "\n".join(line for line in text.split("\n") if not line.endswith(_DROPPED))


# submitit always writes --signal=USR2@90, which kills every program that does not handle USR2. Without a requested
# signal, the line is rendered with this value and then dropped.
_DROPPED = "=hpcinit-drops-this-line"
# submitit's headings, and a variable that only programs started by submitit read.
_HEADINGS = ("\n\n# Parameters\n", "\n# setup\n", "\n# command\nexport SUBMITIT_EXECUTOR=slurm\n")


def render(folder: Path, command: str, parameters: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Return the batch script with the comment `header`.

    parameters: submitit's, with further sbatch options under additional_parameters.
    """
    executor = ScriptExecutor(folder)
    extra = {"signal": "hpcinit-drops-this-line", **parameters["additional_parameters"]}
    executor.parameters.update({**parameters, "wckey": None, "additional_parameters": extra})
    first, _, rest = executor._make_submission_file_text(command, uid="").partition("\n")
    return "\n".join([first, *header, rest])
