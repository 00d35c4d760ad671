"""The config key that sets an option of sbatch, for messages about a script that sbatch refused."""

from __future__ import annotations

from hpcinit.config.slurm_options import OWNED
from hpcinit.facts.errors import NOTHING_SUBMITTED, SubmitError
from hpcinit.slurm import sbatch_errors

# Keys that do not follow from the option's name, or of which there are two.
KEYS = {
    "gpus-per-node": "cluster.gpus_per_node and cluster.gpu_type",
    "gres": "cluster.gpus_per_node and cluster.gpu_type",
    "cpus-per-task": "cpus_per_rank or cluster.cpus_per_node",
    "dependency": "after, after_ok or singleton",
    "array": "the sweep",
    "exclude": "cluster.sbatch.exclude or by what `hpcinit nodes` shows",
}


def key_of(option: str) -> str:
    """Return the config key that sets `option` of sbatch."""
    return KEYS.get(option) or OWNED.get(option) or f"cluster.sbatch.{option}"


def refused(message: str, script: str, advice: str = "") -> SubmitError:
    """Return the error for a `script` that sbatch refused with `message`: its lines and keys, and what to do."""
    problem = f"{message}\n{sbatch_errors.explain(message, script, key_of)}{advice}".rstrip("\n")
    return SubmitError(problem, NOTHING_SUBMITTED, separator="; " if advice else "\n")
