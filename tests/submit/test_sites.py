"""The script for each public cluster in conf/cluster/: bash and sbatch can read it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.submit import script
from tests import sites
from tests.minislurm import MiniSlurm

FOLDER, WORKDIR = Path("/shared/me/runs/x-0001"), Path("/shared/me/project")
REQUEST = ["job=train_gpt", "time_min=30", "parallel=hsdp", "cluster.python=/shared/me/venv/bin/python"]
REQUEST += ["check_paths=false"]  # they are paths of the site
# The names of the images, at sites where containers are usual.
IMAGES = {
    "dgx_superpod_h100": ["container.image='nvcr.io#nvidia/pytorch:25.01-py3'", "cluster.python=null"],
    "aws_p5_efa": ["container.image=/fsx/images/pytorch.sqsh", "cluster.python=null"],
}


def render(name: str) -> str:
    config = compose([*sites.asked(name), *REQUEST, *IMAGES.get(name, [])])
    assert all_checks.problems(config) == []
    return script.render(config, FOLDER, WORKDIR)


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the user's name, which is part of a site's folders."""
    monkeypatch.setenv("USER", "me")


@pytest.mark.parametrize("name", sites.NAMES)
def test_script_is_valid_bash(name: str) -> None:
    """bash parses the script of a training run on two nodes of each site."""
    subprocess.run(["bash", "-n"], input=render(name), text=True, check=True)


@pytest.mark.slurm
@pytest.mark.parametrize("name", sites.NAMES)
def test_sbatch_reads_every_option(slurm: MiniSlurm, tmp_path: Path, name: str) -> None:
    """A real sbatch accepts each #SBATCH line. Only the controller does not have the site's partitions."""
    path = tmp_path / "script.sh"
    path.write_text(render(name))
    done = subprocess.run(["sbatch", "--test-only", path], env=slurm.env, capture_output=True, text=True, check=False)
    # A request that sbatch itself refuses ("unrecognized option", "Invalid --hint") does not reach the controller.
    assert "allocation failure: " in done.stderr or "to start at " in done.stderr, done.stderr
