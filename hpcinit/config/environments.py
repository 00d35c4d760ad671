"""The Python of the ranks."""

from __future__ import annotations

import sys

from hpcinit.config.schema import Config


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
