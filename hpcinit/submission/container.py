"""The words that put a rank into a container: options of srun (pyxis), or a command before its own (apptainer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.config.schema import Config
from hpcinit.facts.options import flags
from hpcinit.facts.quoting import joined
from hpcinit.submission import setup
from hpcinit.submission.run_path import RunPath

PYXIS = "pyxis"


def of_srun(config: Config, run: RunPath, workdir: Path) -> dict[str, Any]:
    """Options that srun gets; none where no image is asked for, or another runtime runs it.

    https://github.com/NVIDIA/pyxis/wiki/Usage. --container-env: variables of the job that win over the image's own.
    """
    if not config.container.image or config.cluster.container.runtime != PYXIS:
        return {}
    known = {
        "image": config.container.image,
        "mounts": joined(",", _mounts(config, run, workdir)),
        "env": ",".join(setup.names(config)) or None,
        **_options(config),
    }
    return {f"container-{name}" if not name.startswith("no-") else name: value for name, value in known.items()}


def before_python(config: Config, run: RunPath, workdir: Path) -> list[str]:
    """The command that a rank's Python is an argument of, or none.

    https://apptainer.org/docs/user/latest/cli/apptainer_exec.html; Singularity has the same options.
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
    return [runtime, "exec", *flags(options), config.container.image]


def _options(config: Config) -> Mapping[str, Any]:
    return {**config.cluster.container.options, **config.container.options}


def _mounts(config: Config, run: RunPath, workdir: Path) -> Sequence[str]:
    """The working folder and the run folder where they are, and what site and user add."""
    own = [joined(":", [place, place]) for place in dict.fromkeys((str(workdir), run.in_shell()))]
    return [*own, *config.cluster.container.mounts, *config.container.mounts]
