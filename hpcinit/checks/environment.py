"""Checks the ranks' environment: container, cluster.setup, run folder, and the limits of the local machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hpcinit.base import quoting, safe_files
from hpcinit.base.text import counted, expanded
from hpcinit.checks import python_environment
from hpcinit.config import keys
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config

LEAST_MB = 16  # a run folder is about 20 kB at submission; logs and error records are added
IMAGES = (".sif", ".sqsh", ".simg", ".img")
INSTEAD = {"image": "container.image", "mounts": "container.mounts", "bind": "container.mounts", "pwd": "job.workdir"}
BASH_S = 10  # parsing a script takes milliseconds
# extglob, because the user's lines may turn it on with shopt and use patterns such as !(x). `bash -n` runs no shopt.
COMMAND = ("bash", "-O", "extglob", "-n")
MOST_LOCAL_NODES = 254  # node i is 127.0.0.i


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each contradiction between settings, for each missing path, and for an unusable runs_dir."""
    yield from _consistent(config)
    # On a laptop, a dry run cannot see the cluster's file systems.
    if config.check_paths and shutil.which(config.engine.script_command):
        yield from python_environment.problems(config, os.environ)
        yield from _image(config)
    yield from _runs_dir(expanded(config.runs_dir).absolute())


def _image(config: Config) -> Iterator[str]:
    """Yield a message if an image given as a path does not exist.

    Images in a registry (docker://, oras://, #) cannot be checked.
    """
    image = config.container.image
    if not image or "://" in image or "#" in image:
        return
    if (image.startswith(("/", "./", "../")) or image.endswith(IMAGES)) and not Path(image).exists():
        hint = python_environment.elsewhere(Path(image))
        yield f"container.image is {image!r}, expected a file that exists, or a registry's URL{hint}"


def _runs_dir(place: Path) -> Iterator[str]:
    """Yield a message if `place` cannot be used as runs_dir.

    `place` must be a folder, or hpcinit must be able to create it. Its disk must have LEAST_MB free. No other user may
    be able to replace run folders in it. This check creates nothing. hpcinit reports missing permissions and an
    exceeded quota later, when it creates the run folder.
    """
    there = next((path for path in (place, *place.parents) if path.exists()), place)
    if not there.is_dir():
        yield f"runs_dir is {str(place)!r}, but {there} is not a folder: choose another runs_dir=..."
        return
    if there == place and (problem := safe_files.runs_dir_ownership_problems(place)):
        yield f"runs_dir: {problem}"
    if not os.access(there, os.W_OK | os.X_OK):
        return  # submit reports the missing permission with the system's reason, such as a read-only file system
    disk = shutil.disk_usage(there)
    free = disk.free // 2**20
    if disk.total and free < LEAST_MB:  # /proc has no size, and creating the run folder there fails with an error
        yield (
            f"runs_dir is {str(place)!r} with {free} MB free, expected {LEAST_MB} MB or more: free some space or "
            "choose another runs_dir=..."
        )


def _consistent(config: Config) -> Iterator[str]:
    """Yield a message for each contradiction, such as a virtual environment together with a conda environment."""
    cluster, image = config.cluster, config.container.image
    if cluster.venv and cluster.conda:
        yield (
            f"cluster.venv is {cluster.venv!r} and cluster.conda is {cluster.conda!r}, expected only one: set "
            "cluster.venv=null or cluster.conda=null"
        )
    if image and cluster.container.runtime is None:
        names = ", ".join(name for name in keys.choices("cluster.container.runtime") if name)
        yield (
            f"container.image is {image!r}, but cluster {cluster.name} has no container runtime: set "
            f"cluster.container.runtime to one of: {names}"
        )
    if image and cluster.container.runtime == "pyxis" and not config.engine.uses_slurm:
        yield (
            f"cluster.container.runtime is pyxis, a plugin of srun, and cluster {cluster.name} has no srun: "
            "set cluster.container.runtime=apptainer"
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
    """Return the Python that the ranks use.

    With a container image, it is container.python. Otherwise it is the first of these that is set: cluster.python, the
    virtual environment's Python, the conda environment's Python. If none is set, it is the Python of this process.
    """
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


def setup_syntax(config: Config) -> Iterator[str]:
    """Yield a message if bash finds syntax errors in cluster.setup.

    The message shows the errors and the numbered lines of cluster.setup. Yield nothing if bash is missing or does not
    exit.
    """
    if not config.cluster.setup:
        return
    setup = "\n".join(config.cluster.setup)
    try:
        # The user's environment is not passed on: bash would print a line about a missing locale.
        done = subprocess.run(
            COMMAND,
            input=f"{setup}\n".encode(errors="replace"),
            capture_output=True,
            timeout=BASH_S,
            check=False,
            env={"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    # An unfinished here-document is only a warning, but it swallows the lines of the script that follow.
    if output := done.stderr.decode(errors="replace").strip():
        shown = [f"  {line}" for line in output.splitlines()]
        numbered = [f"  {number}: {line}" for number, line in enumerate(setup.split("\n"), 1)]
        lines = "\n".join(["expected complete commands:", *shown, "cluster.setup has these lines:", *numbered])
        yield f"bash cannot parse cluster.setup, {lines}"


def local_machine(config: Config) -> Iterator[str]:
    """Yield a message for each limit of this machine that a request for cluster=local exceeds."""
    if config.engine.other_machines:
        return
    import psutil  # noqa: PLC0415 - for this engine only

    nodes, mem_gb_per_rank = config.nodes, config.cluster.mem_gb_per_rank
    world_size = nodes * ranks_per_node(config)
    if nodes > MOST_LOCAL_NODES:
        yield f"nodes={nodes}, but cluster=local has at most {MOST_LOCAL_NODES} (addresses 127.0.0.1 to 127.0.0.254)"
    # Compare with the total memory: other programs may use less memory when the ranks start than they use now.
    total_gb = psutil.virtual_memory().total / 1e9
    if world_size * mem_gb_per_rank > total_gb:
        yield (
            f"{counted(world_size, 'rank')} x {mem_gb_per_rank:g} GB (cluster.mem_gb_per_rank) = "
            f"{world_size * mem_gb_per_rank:g} GB, but this machine has {total_gb:.1f} GB: at most "
            f"{counted(int(total_gb / mem_gb_per_rank), 'rank')} fit"
        )
