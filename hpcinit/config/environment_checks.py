"""Checks of the environment of the ranks: modules, Python or an image, and the run folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hpcinit.base import quoting, safe_files
from hpcinit.base.text import expanded
from hpcinit.config import keys, python_environment
from hpcinit.config.schema import Config

LEAST_MB = 16  # a run folder is about 20 kB at submission; logs and error records are added
IMAGES = (".sif", ".sqsh", ".simg", ".img")
INSTEAD = {"image": "container.image", "mounts": "container.mounts", "bind": "container.mounts", "pwd": "job.workdir"}


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each contradiction, each missing path and an unusable runs_dir."""
    yield from _consistent(config)
    # On a laptop, a dry run cannot see the cluster's file systems.
    if config.check_paths and (config.cluster.engine == "local" or shutil.which("sbatch")):
        yield from python_environment.problems(config, os.environ)
        yield from _image(config)
    yield from _runs_dir(expanded(config.runs_dir).absolute())


def _image(config: Config) -> Iterator[str]:
    """Check that an image given as a path exists. An image in a registry (docker://, oras://, #) cannot be checked."""
    image = config.container.image
    if not image or "://" in image or "#" in image:
        return
    if (image.startswith(("/", "./", "../")) or image.endswith(IMAGES)) and not Path(image).exists():
        yield f"container.image is {image!r}, expected a file that exists, or a registry's URL{_elsewhere(Path(image))}"


def _elsewhere(path: Path) -> str:
    return f"; if {path} exists only on the compute nodes: check_paths=false"


def _runs_dir(place: Path) -> Iterator[str]:
    """Check the folder before anything is created. A used-up quota shows only when the run folder is written."""
    there = next((path for path in (place, *place.parents) if path.exists()), place)
    if not there.is_dir():
        yield f"runs_dir is {str(place)!r}, but {there} is not a folder: choose another runs_dir=..."
        return
    if there == place and (problem := safe_files.runs_dir_ownership_problems(place)):
        yield f"runs_dir: {problem}"
    if not os.access(there, os.W_OK | os.X_OK):
        return  # submit reports it with the system's own reason, such as a read-only file system
    disk = shutil.disk_usage(there)
    free = disk.free // 2**20
    if disk.total and free < LEAST_MB:  # /proc has no size: writing there has its own message
        yield (
            f"runs_dir is {str(place)!r} with {free} MB free, expected {LEAST_MB} MB or more: free some space or "
            "choose another runs_dir=..."
        )


def _consistent(config: Config) -> Iterator[str]:
    """Check that the environment is either modules with Python or an image, and that its options are valid."""
    cluster, image = config.cluster, config.container.image
    if cluster.venv and cluster.conda:
        yield (
            f"cluster.venv is {cluster.venv!r} and cluster.conda is {cluster.conda!r}, expected one of them: "
            "cluster.venv=null or cluster.conda=null"
        )
    if image and cluster.container.runtime is None:
        names = ", ".join(name for name in keys.choices("cluster.container.runtime") if name)
        yield (
            f"container.image is {image!r}, but cluster {cluster.name} has no container runtime: set "
            f"cluster.container.runtime to one of: {names}"
        )
    if image and cluster.container.runtime == "pyxis" and cluster.engine == "local":
        yield (
            f"cluster.container.runtime is pyxis, a plugin of srun, and cluster {cluster.name} has no srun: "
            "cluster.container.runtime=apptainer"
        )
    yield from _mounts(config)
    yield from _options(config)


def _mounts(config: Config) -> Iterator[str]:
    for key, mounts in (
        ("cluster.container.mounts", config.cluster.container.mounts),
        ("container.mounts", config.container.mounts),
    ):
        for mount in mounts:
            parts = str(mount).split(":")
            if not 2 <= len(parts) <= 3 or not all(part.startswith("/") for part in parts[:2]) or "," in str(mount):
                yield f"{key} has {mount!r}, expected SRC:DST or SRC:DST:ro with two absolute paths and no comma"


def _options(config: Config) -> Iterator[str]:
    for key, options in (
        ("cluster.container.options", config.cluster.container.options),
        ("container.options", config.container.options),
    ):
        for name, value in options.items():
            if name in INSTEAD:
                yield f"{key}.{name}: use {INSTEAD[name]} instead"
            elif not quoting.OPTION_NAME.fullmatch(str(name)):
                yield f"{key} has {name!r}, expected the long name of an option without its dashes, as in rocm"
            elif isinstance(value, (list, dict)):
                yield f"{key}.{name} is {value!r}, expected one value"


def python(config: Config) -> str:
    """Return the interpreter of the ranks: the image's, cluster.python, the environment's, or the one that submits."""
    cluster = config.cluster
    if config.container.image:
        return config.container.python
    if cluster.python:
        return cluster.python
    if cluster.venv:
        return f"{cluster.venv}/bin/python"
    if cluster.conda:
        return f"{cluster.conda}/bin/python" if python_environment.is_folder(cluster.conda) else "python"
    return sys.executable
