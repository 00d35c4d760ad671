"""An environment and a container that do not fit together give an error with the key to change."""

from __future__ import annotations

import pytest

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose

APPTAINER = "cluster.container.runtime=apptainer"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.venv=/v", "cluster.conda=c"], "cluster.venv is '/v' and cluster.conda is 'c', expected only one"),
        (
            ["container.image=x.sif"],
            "but cluster local has no container runtime: set cluster.container.runtime to one of",
        ),
        (
            ["container.image=x", "cluster.container.runtime=pyxis"],
            "is pyxis, a plugin of srun, and cluster local has no srun",
        ),
        (["cluster.container.runtime=docker"], "expected one of: pyxis, apptainer, singularity, null"),
        (["container.mounts=[/data]"], "container.mounts has '/data', expected SRC:DST or SRC:DST:ro"),
        (["cluster.container.mounts=['data:/x']"], "cluster.container.mounts has 'data:/x', expected SRC:DST"),
        (["container.mounts=['/a,b:/c']"], "two absolute paths and no comma"),
        (["+container.options.image=y"], "container.options.image: use container.image instead"),
        (["+cluster.container.options.bind=y"], "cluster.container.options.bind: use container.mounts instead"),
        (["+container.options.A_b=y"], "container.options has 'A_b', expected the long name of an option"),
        (["+container.options.env=[1]"], "container.options.env is [1], expected one value"),
        (["container.image=''"], "container.image is '', expected a value, or null"),
        (["cluster=mini", "+cluster.srun.container-image=x"], "cluster.srun.container-image: use container.image"),
    ],
)
def test_contradictions(words: list[str], message: str) -> None:
    """Each message names the key, its value and what is expected."""
    found = all_checks.problems(compose(words))
    assert [text for text in found if message in text], found


def test_a_consistent_environment() -> None:
    """An image with a runtime and mounts of two and three parts is accepted."""
    mounts = "container.mounts=['/a:/a','/b:/c:ro']"
    assert all_checks.problems(compose(["container.image=docker://x", APPTAINER, mounts])) == []
