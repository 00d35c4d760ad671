"""Variables of the submitting environment that do not reach the job."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.config.schema import Cluster, Config
from hpcinit.submit.job_environment import DEVICES, KEPT, DroppedVariables, clean_environment, job_environment
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of, printed


def test_another_jobs_variables_are_dropped_and_named() -> None:
    """Variables of another job and of rank launchers are dropped.

    Variables that locate Slurm or tune libraries stay.
    """
    foreign = {
        "SBATCH_PARTITION": "x",
        "SLURM_CPU_BIND": "x",
        "SLURM_EXACT": "1",
        "SRUN_DEBUG": "1",
        "_SLURM_SPANK_OPTION_pyxis_container_image": "x",
        "PMIX_RANK": "0",
        "PALS_RANKID": "0",
        "PRTE_LAUNCHED": "1",
        "MV2_COMM_WORLD_RANK": "0",
        "RANK": "7",
        "ROLE_WORLD_SIZE": "7",
        "OMPI_COMM_WORLD_RANK": "1",
        "HPCINIT_ENGINE": "1",
    }
    own = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "RANKING": "1", "SLURM_JWT": "t"}
    own |= {"NCCL_DEBUG": "INFO", "MV2_USE_RDMA_CM": "1", "I_MPI_FABRICS": "shm", "CUDA_VISIBLE_DEVICES": "2"}
    assert clean_environment({**foreign, **own}) == (own, sorted(foreign))


def test_gpu_numbers_are_not_passed_to_a_cluster() -> None:
    """The visible GPUs of this machine are dropped for a cluster and kept for cluster=local."""
    env = dict.fromkeys(DEVICES, "3")
    assert job_environment(env, Config()) == ({}, DroppedVariables(sorted(DEVICES), [], []))
    assert job_environment(env, Config(cluster=Cluster(engine="local"))) == (env, DroppedVariables([], [], []))


@pytest.mark.parametrize("page", ["sbatch", "srun"])
def test_every_input_variable_of_slurms_man_pages(page: str) -> None:
    """Each variable that sbatch(1) and srun(1) read instead of an option is dropped, except those that locate Slurm."""
    path = Path(f"/usr/share/man/man1/{page}.1.gz")
    if not path.exists():
        skip_or_fail(f"the manual page {path} is not installed")
    text = gzip.decompress(path.read_bytes()).decode()
    text = text[text.index('.SH "INPUT ENVIRONMENT VARIABLES"') : text.index('.SH "OUTPUT ENVIRONMENT VARIABLES"')]
    names = set(re.findall(r"(?:\\fB|\b)((?:SLURM|SBATCH|SRUN|SLURMD|PMI)_[A-Z_0-9]+)\b", text)) - KEPT
    assert len(names) > 50
    assert set(clean_environment(dict.fromkeys(names, "x"))[1]) == names


def test_dropped_variables_are_shown_as_keys() -> None:
    """An account that a profile sets for sbatch is dropped, and the message shows the equivalent key."""
    _, dropped = job_environment({"SBATCH_ACCOUNT": "proj", "SBATCH_DEBUG": "1"}, Config())
    assert str(dropped) == "SBATCH_ACCOUNT, SBATCH_DEBUG; if they are meant for this job, use account=proj"
    assert str(DroppedVariables()) == ""


HOSTILE = {
    "SBATCH_PARTITION": "high",
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_JOB_NAME": "not-this",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_OUTPUT": "/nowhere/x",
    "SBATCH_WAIT": "1",
    "SBATCH_EXCLUSIVE": "user",
    "SLURM_EXACT": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_NTASKS": "1",
    "SLURM_WAIT": "1",
    "SLURM_KILL_BAD_EXIT": "0",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_HOSTFILE": "/nowhere",
    "SRUN_CPUS_PER_TASK": "13",
    "OMPI_COMM_WORLD_RANK": "3",
    "RANK": "7",
    "WORLD_SIZE": "9",
}
REPORT = """
import json, os
keys = ["RANK", "WORLD_SIZE", "SLURM_JOB_PARTITION", "SLURM_JOB_NAME", "SLURM_CPUS_PER_TASK", "SLURM_JOB_NUM_NODES"]
print(json.dumps({key: os.environ.get(key) for key in keys} | {"cpu_bind": os.environ.get("SLURM_CPU_BIND_TYPE"),
    "array": os.environ.get("SLURM_ARRAY_JOB_ID"), "mine": os.environ.get("MINE")}))
"""


@pytest.mark.slurm
def test_a_job_from_within_a_job(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A job submitted by a rank of another allocation, with hostile variables in its shell, runs as requested."""
    (tmp_path / "report.py").write_text(REPORT)
    words = [
        "submit",
        "cluster=mini",
        "nodes=2",
        "ranks_per_node=2",
        "cpus_per_rank=2",
        "time_min=5",
        "--",
        "report.py",
    ]
    outer = ["salloc", "--quiet", "--nodes=1", "--ntasks=2", "--cpus-per-task=3", "--partition=high", "--gpus-per-node=2",
             "srun", "--ntasks=1", sys.executable, "-m", "hpcinit", *words]  # fmt: skip
    started = {**os.environ, **idle_slurm.env, "MINE": "stays"}
    inner = {f"{name}={value}" for name, value in HOSTILE.items()}
    outer[outer.index(sys.executable) : outer.index(sys.executable)] = ["env", *sorted(inner)]
    done = subprocess.run(outer, cwd=tmp_path, env=started, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("not passed on to the job: "))
    assert all(name in line for name in HOSTILE) and "CUDA_VISIBLE_DEVICES" in line and "partition=high" in line
    folder = folder_of(done)
    hpcinit("logs", "--follow", str(folder), env=idle_slurm.env)
    for rank in range(4):
        seen = json.loads(printed(folder, rank))
        assert seen["RANK"] == str(rank) and seen["WORLD_SIZE"] == "4" and seen["SLURM_CPUS_PER_TASK"] == "2"
        assert (seen["SLURM_JOB_PARTITION"], seen["SLURM_JOB_NAME"]) == ("main", "report")
        assert (seen["SLURM_JOB_NUM_NODES"], seen["array"], seen["mine"]) == ("2", None, "stays")
        assert "mask_cpu" not in (seen["cpu_bind"] or "")
