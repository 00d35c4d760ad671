"""Starts the ranks in a container, with srun's options (pyxis) or with a command in front of Python (apptainer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base.quoting import joined, option_flags
from hpcinit.config.schema import Config
from hpcinit.submit.job_setup import setup_names
from hpcinit.submit.run_path import RunPath

PYXIS = "pyxis"


def container_options(config: Config, run: RunPath, workdir: Path) -> dict[str, Any]:
    """Return the srun options that start a container with pyxis. Without an image or with another runtime, return {}.

    --container-env lists the variables of the job that override those of the image
    (https://github.com/NVIDIA/pyxis/wiki/Usage).
    """
    if not config.container.image or config.cluster.container.runtime != PYXIS:
        return {}
    known = {
        "image": config.container.image,
        "mounts": joined(",", _mounts(config, run, workdir)),
        "env": ",".join(setup_names(config)) or None,
        **_options(config),
    }
    return {f"container-{name}" if not name.startswith("no-") else name: value for name, value in known.items()}


def container_prefix(config: Config, run: RunPath, workdir: Path) -> list[str]:
    """Return the apptainer command that runs a rank's Python in a container.

    Without an image or with pyxis, return []. Singularity has the same options as apptainer:
    https://apptainer.org/docs/user/latest/cli/apptainer_exec.html.
    """
    runtime = config.cluster.container.runtime
    if not config.container.image or runtime in (PYXIS, None):
        return []
    options = {
        "nv": bool(config.cluster.gpus_per_node) and "rocm" not in _options(config),
        "pwd": str(workdir),
        "bind": joined(",", _mounts(config, run, workdir)),
        **_options(config),
    }
    return [runtime, "exec", *option_flags(options), config.container.image]


def _options(config: Config) -> Mapping[str, Any]:
    return {**config.cluster.container.options, **config.container.options}


def _mounts(config: Config, run: RunPath, workdir: Path) -> Sequence[str]:
    """Return the paths to mount in the container.

    The first ones are the working folder and the run folder, at the same paths as outside. The next ones are the mounts
    in the site's and the user's config.
    """
    own = [joined(":", [place, place]) for place in dict.fromkeys((str(workdir), run.in_shell()))]
    return [*own, *config.cluster.container.mounts, *config.container.mounts]
