"""`hpcinit export`: a plain script that runs without hpcinit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.waiting import until

# Uses only env://, and fails if hpcinit has anything to do with its process.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
assert "hpcinit" not in sys.modules and "HPCINIT_RUN" not in os.environ
dist.init_process_group("gloo", init_method="env://")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, sum {total.item():g}, {sys.argv[1:]}, {os.environ['MINE']}", flush=True)
assert os.environ["LOCAL_RANK"] == os.environ["SLURM_LOCALID"]
assert os.environ["GROUP_RANK"] == os.environ["SLURM_NODEID"] and os.environ["LOCAL_WORLD_SIZE"] == "2"
dist.destroy_process_group()
"""
REQUEST = ("nodes=2", "ranks_per_node=2", "launch=fork", "chain=2", "name=plain", "+job.env.MINE=a value")
TRAIN = ("--", "train.py", "--name", "two parts")


@pytest.mark.slurm
def test_plain_sbatch_runs_the_exported_script(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The script of a run, submitted with plain sbatch, trains on all ranks; that of the same request is equal."""
    (tmp_path / "train.py").write_text(PROGRAM)
    queued = folder_of(submit(hpcinit, idle_slurm, *REQUEST, "+cluster.sbatch.begin=now+1hour", *TRAIN))
    of_run = hpcinit("export", "plain-0001", env=idle_slurm.env)
    assert of_run.returncode == 0, of_run.stderr
    assert "# This script omits these settings, because they need hpcinit: chain=2, launch=fork\n" in of_run.stdout
    idle_slurm.cancel_all()
    shutil.rmtree(queued)
    script = tmp_path / "job.sbatch"
    script.write_text(of_run.stdout.replace("#SBATCH --begin=now+1hour\n", ""))
    of_request = hpcinit("export", "cluster=mini", *REQUEST, *TRAIN, env=idle_slurm.env).stdout
    assert of_request == script.read_text()
    # The checkout, and with it the Python, may have any path.
    assert "hpcinit" not in _commands(of_request).replace(sys.executable, "python")
    job = idle_slurm.run("sbatch", "--parsable", str(script)).strip()
    output = tmp_path / f"plain-{job}.out"
    until(lambda: output.exists() and "4 ranks, sum 6, ['--name', 'two parts'], a value" in output.read_text())
    until(lambda: "JobState=COMPLETED" in idle_slurm.run("scontrol", "show", "job", job))


def _commands(script: str) -> str:
    return "\n".join(line for line in script.splitlines() if not line.startswith("#"))


def test_scripts_of_public_clusters_are_valid_bash(hpcinit: Run, tmp_path: Path) -> None:
    """A container runs in each rank, and a host template is part of rank 0's address."""
    request = ["cluster=juwels_booster", "nodes=2", "account=x", "check_paths=false", "cluster.host_template=-ib0"]
    done = hpcinit(
        "export", *request, "cluster.container.runtime=apptainer", "container.image=/x.sif", "--", "-m", "pkg.train"
    )
    assert done.returncode == 0, done.stderr
    assert 'export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)-ib0"\n' in done.stdout
    assert (
        f"  apptainer exec --nv --pwd={tmp_path} --bind={tmp_path}:{tmp_path} /x.sif python -u -m pkg.train\n"
        in done.stdout
    )
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    document = json.loads(hpcinit("export", "--json", *request, "--", "true").stdout)
    assert document["script"].startswith("#!/bin/bash\n# true: true\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster=local", "--", "true"], "cluster local has no Slurm (engine: local), so a batch script cannot run"),
        (["train-0001", "nodes=2"], "train-0001 nodes=2: expected one RUN, or the request of a new job"),
        (["nope-0001"], "no run 'nope-0001'"),
        (["cluster=mini", "node=2", "--", "true"], "node=2: no such key 'node'; did you mean 'nodes'?"),
    ],
)
def test_wrong_requests(hpcinit: Run, arguments: list[str], message: str) -> None:
    done = hpcinit("export", *arguments)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
