"""Whether the places that a job needs are there: Python, environment, image, and room for the run folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpcinit.config.schema import Config
from hpcinit.facts import ownership
from hpcinit.facts.user_paths import expanded

LEAST_MB = 16  # a run folder begins with some 20 kB; logs and error records come to it
IMAGES = (".sif", ".sqsh", ".simg", ".img")


def problems(config: Config) -> Iterator[str]:
    """One message for each place that is not there, and for a runs_dir that cannot take a run folder."""
    # A dry run on a laptop sees nothing of the cluster's file systems.
    if config.check_paths and (config.cluster.engine == "local" or shutil.which("sbatch")):
        yield from _environment(config)
        yield from _image(config)
    yield from _runs_dir(expanded(config.runs_dir).absolute())


def _environment(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.venv and not config.container.image:
        python = expanded(cluster.venv) / "bin/python"
        if not os.access(python, os.X_OK):
            yield f"cluster.venv is {cluster.venv!r}, expected a virtual environment: no {python}{_elsewhere(python)}"
    if cluster.python and "/" in cluster.python and not config.container.image:
        path = Path(cluster.python)
        if not (path.is_file() and os.access(path, os.X_OK)):
            yield f"cluster.python is {cluster.python!r}, which is no program that you may run{_elsewhere(path)}"


def _image(config: Config) -> Iterator[str]:
    """A file, or a sandbox's folder. docker://, oras:// and nvcr.io#nvidia/pytorch:24.05 are a registry's to know."""
    image = config.container.image
    if not image or "://" in image or "#" in image:
        return
    if (image.startswith(("/", "./", "../")) or image.endswith(IMAGES)) and not Path(image).exists():
        yield f"container.image is {image!r}, expected a file that exists, or a registry's URL{_elsewhere(Path(image))}"


def _elsewhere(path: Path) -> str:
    return f"; if {path} is on the compute nodes only: check_paths=false"


def _runs_dir(place: Path) -> Iterator[str]:
    """Looked at before anything is made; what only writing shows (a quota) is told when the folder is written."""
    there = next((path for path in (place, *place.parents) if path.exists()), place)
    if not there.is_dir():
        yield f"runs_dir is {str(place)!r}, but {there} is not a folder: choose another runs_dir=..."
        return
    if there == place and (said := ownership.of_runs_dir(place)):
        yield f"runs_dir: {said}"
    if not os.access(there, os.W_OK | os.X_OK):
        return  # said by submit, with the system's own reason: read-only, or not yours
    disk = shutil.disk_usage(there)
    free = disk.free // 2**20
    if disk.total and free < LEAST_MB:  # /proc has no size: writing there has its own message
        yield (
            f"runs_dir is {str(place)!r}, with {free} MB free, expected {LEAST_MB} MB or more: free some space or "
            "choose another runs_dir=..."
        )
