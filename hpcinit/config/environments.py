"""The Python of the ranks, the environment that it belongs to, and whether that one can be packed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hpcinit.config.schema import Config
from hpcinit.facts.user_paths import expanded

KEY = "launch.env_to_local"


def python(config: Config) -> str:
    """The interpreter of the ranks: of the image, as the cluster says, of its environment, or the one that submits."""
    cluster = config.cluster
    if config.container.image:
        return config.container.python
    if cluster.python:
        return cluster.python
    if cluster.venv:
        return f"{cluster.venv}/bin/python"
    return "python" if cluster.conda else sys.executable


def packed(config: Config) -> Path:
    """The interpreter of the environment that launch.env_to_local packs; of a conda environment, which is on PATH."""
    cluster = config.cluster
    if cluster.conda and not cluster.python:
        return expanded(cluster.conda) / "bin/python"
    return expanded(python(config)).absolute()


def prefix(interpreter: Path) -> Path | None:
    """The folder of the virtual or conda environment of `interpreter`; None of one that belongs to none.

    As Python itself looks for it: pyvenv.cfg beside or above the name that it was called by, links not followed.
    """
    place = interpreter.parent.parent
    return place if (place / "pyvenv.cfg").is_file() or (place / "conda-meta").is_dir() else None


def problems(config: Config) -> Iterator[str]:
    """A message for each reason why the environment cannot be taken to the nodes' own disks."""
    if not config.launch.env_to_local:
        return
    cluster = config.cluster
    if cluster.engine == "local":
        yield (
            f"{KEY} is true, but cluster {cluster.name} starts the ranks on this machine, where the environment is "
            f"already: {KEY}=false"
        )
    elif config.container.image:
        yield (
            f"{KEY} is true, but the ranks run in container.image {config.container.image!r}, which is one file "
            f"already: {KEY}=false"
        )
    elif cluster.conda and not cluster.python and "/" not in cluster.conda:
        yield (
            f"{KEY} is true and cluster.conda is {cluster.conda!r}, expected the folder of the environment, as "
            "`conda env list` shows it"
        )
    elif not cluster.python or "/" in cluster.python:
        yield from _not_here(config)
    else:
        yield (
            f"{KEY} is true and cluster.python is {cluster.python!r}, expected the path of the Python of a virtual or "
            "conda environment, as in /home/me/venv/bin/python"
        )


def _not_here(config: Config) -> Iterator[str]:
    interpreter = packed(config)
    if not interpreter.exists():
        yield (
            f"{KEY} is true, but {interpreter} is not on this machine, where its environment would be packed: submit "
            f"where it is, or {KEY}=false"
        )
    elif prefix(interpreter) is None:
        yield (
            f"{KEY} packs a virtual or a conda environment, and {interpreter} belongs to none (no pyvenv.cfg, no "
            f"conda-meta in {interpreter.parent.parent}): cluster.venv=FOLDER, or {KEY}=false"
        )
    elif shutil.which("sbatch") and not shutil.which("sbcast"):  # a dry run on a laptop has neither
        yield (
            f"{KEY} needs Slurm's sbcast, and sbcast is not on PATH, where sbatch is: load the module that brings it, "
            f"or {KEY}=false"
        )
