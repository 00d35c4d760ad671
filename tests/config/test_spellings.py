"""Unambiguous options of Slurm, torchrun and PBS are accepted on the command line."""

from __future__ import annotations

import pytest

from hpcinit.base.errors import ConfigError
from hpcinit.config import hydra_compose, spellings
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

FLAGS = hydra_compose.flags()


@pytest.mark.parametrize(
    ("line", "translated"),
    [
        ("time=24:00:00", "time_min=1440"),
        ("time=90", "time_min=90"),
        ("time=90:30", "time_min=91"),
        ("time=1-12", "time_min=2160"),
        ("time=1-12:30", "time_min=2190"),
        ("time=1-12:30:01", "time_min=2191"),
        ("walltime=2:00:00", "time_min=120"),
        ("-t 1:00:00", "time_min=60"),
        ("-m time=1:00:00,2:00:00", "-m time_min=60,120"),
        ("mem=32G", "mem_gb=32"),
        ("--mem=512M", "mem_gb=0.5"),
        ("mem=1TB", "mem_gb=1024"),
        ("mem=0", "mem_gb=0"),
        ("--nodes=8", "nodes=8"),
        ("--nodes 8 name=x", "nodes=8 name=x"),
        ("-N 8", "nodes=8"),
        ("-N8", "nodes=8"),
        ("nnodes=2 nproc_per_node=4", "nodes=2 ranks_per_node=4"),
        ("ntasks_per_node=4", "ranks_per_node=4"),
        ("--ntasks-per-node=4 --cpus-per-task 2", "ranks_per_node=4 cpus_per_rank=2"),
        ("--gpus 4 --partition high -A me -J x", "gpus=4 partition=high account=me name=x"),
        ("-G 2", "gpus=2"),
        ("--job-name=x --qos long", "name=x qos=long"),
        ("reservation=x", "++cluster.sbatch.reservation=x"),
        ("--constraint=a&b --nodelist n1", "++cluster.sbatch.constraint='a&b' ++cluster.sbatch.nodelist=n1"),
        ("exclude=n[1-2],n4", "++cluster.sbatch.exclude='n[1-2],n4'"),
        (
            "-C a100 -w n1 -x n2",
            "++cluster.sbatch.constraint=a100 ++cluster.sbatch.nodelist=n1 ++cluster.sbatch.exclude=n2",
        ),
        ("-c 2", "cpus_per_rank=2"),
        ("-c2 -d afterok:7", "cpus_per_rank=2 dependency=afterok:7"),
        ("-c job", "-c job"),
        ("--wait --dry-run name=x", "wait=true dry_run=true name=x"),
        ("--hint=nomultithread", "++cluster.sbatch.hint=nomultithread"),
        ("venv=/v conda=e python=p", "cluster.venv=/v cluster.conda=e cluster.python=p"),
        ("modules=[a] setup=[b] exclusive=true", "cluster.modules=[a] cluster.setup=[b] cluster.exclusive=true"),
        ("image=x.sif cpus=4 env.A_B=1.10", "container.image=x.sif cpus_per_rank=4 ++job.env.A_B=1.10"),
        ("env={A:1.10}", "++job.env={A:1.10}"),
        ("container=x.sif container.image=y.sif", "container.image=x.sif container.image=y.sif"),
        # These stay: hpcinit's own keys and Hydra's flags, and options that mean something else or nothing.
        ("nodes=8 +time=3 a.time=3 ~nodes", "nodes=8 +time=3 a.time=3 ~nodes"),
        ("-m --cfg job -p high --config-name x", "-m --cfg job -p high --config-name x"),
        ("--lr 3 -p high", "--lr 3 -p high"),
        ("--nodes", "--nodes"),
        ("--nodes name=x", "--nodes name=x"),
    ],
)
def test_translations(line: str, translated: str) -> None:
    """Each option becomes the key with the same meaning, or stays unchanged."""
    assert " ".join(spellings.translate(line.split(), FLAGS)) == translated


def test_all_problems_in_one_pass() -> None:
    """Values without a clear meaning are reported together."""
    with pytest.raises(ConfigError) as caught:
        spellings.translate(["mem=32", "--time", "soon", "-n", "4"], FLAGS)
    assert caught.value.problems == (
        "mem=32: expected a size with a unit, as in 32G",
        "--time soon: expected a time as in 24:00:00, 1-12:00:00 or 90 (minutes)",
        "-n 4: set the number of ranks with nodes=2 ranks_per_node=8",
    )


@pytest.mark.slurm
def test_slurm_gets_what_the_options_say(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """The real job has the nodes, tasks, GPUs, memory, time limit and nodelist of sbatch's own options."""
    options = ["-N2", "--ntasks-per-node=2", "--time=0:05:30", "mem=500M", "--gpus", "8", "nodelist=n[2-3]"]
    words = [*options, "wait=true", "--", "sh", "-c", "scontrol show job $SLURM_JOB_ID"]
    done = submit(hpcinit, idle_slurm, *words)
    shown = (folder_of(done) / "logs/rank-0.log").read_text()
    assert "NumNodes=2 " in shown and "NodeList=n[2-3]\n" in shown and "TimeLimit=00:06:00" in shown, shown
    assert "MinMemoryNode=500M" in shown and "gpu:4" in shown and (folder_of(done) / "logs/rank-3.log").exists()
