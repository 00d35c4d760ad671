"""The scripts in sbatch/ do what their headers describe, without hpcinit's submitter, on a real Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.minislurm import MiniSlurm
from tests.skip_or_fail import installed, skip_or_fail

FOLDER = Path(__file__).parent.parent / "sbatch"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
BARE = ("ddp.sbatch", "torchrun.sbatch", "deepspeed.sbatch")  # the scripts without a container
AWKWARD = ["a blank", "*", "$HOME", "it's", 'a "quote"', "", "--lr=3e-4"]

# Variables that the submitting shell may have, from another job or from a tutorial.
STALE = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "elsewhere",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "stale",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMPI_COMM_WORLD_RANK": "3",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_DISTRIBUTION": "cyclic",
}

# A user's plain torch script, without hpcinit.
REPORT = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
os.write(1, (json.dumps({"host": os.uname().nodename, "rank": dist.get_rank(), "size": dist.get_world_size(),
    "local_rank": int(os.environ["LOCAL_RANK"]), "master": os.environ["MASTER_ADDR"],
    "port": int(os.environ["MASTER_PORT"]), "total": total.item(), "argv": sys.argv[1:],
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\\n").encode())
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Job:
    state: str
    exit_code: str
    log: str

    def reports(self) -> list[dict]:
        """Return what the ranks printed as JSON, in the order of ranks, without srun's label."""
        lines = (line.partition(": ")[2] for line in self.log.splitlines())
        return sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda r: r["rank"])


def start(slurm: MiniSlurm, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Run `sbatch ARGUMENTS` in `folder` and return the job's id."""
    given = {"PYTHON": sys.executable, "TMPDIR": str(folder), **STALE, **(env or {})}
    done = subprocess.run(
        ["sbatch", "--parsable", "--time=5", "--output=job.log", *words], cwd=folder,
        env=os.environ | given | slurm.env, timeout=60, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def finish(slurm: MiniSlurm, folder: Path, job: str, timeout_s: float = 120) -> Job:
    deadline = time.monotonic() + timeout_s
    while True:
        words = slurm.run("scontrol", "--oneliner", "show", "job", job).split()
        shown = dict(word.partition("=")[::2] for word in words)
        log = (folder / "job.log").read_text() if (folder / "job.log").exists() else ""
        if shown["JobState"] not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}:
            return Job(shown["JobState"], shown["ExitCode"], log)
        if time.monotonic() > deadline:
            slurm.run("scancel", job)
            pytest.fail(f"job {job} is {shown['JobState']} after {timeout_s:g} s:\n{log}")
        time.sleep(0.1)


def run(slurm: MiniSlurm, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> Job:
    return finish(slurm, folder, start(slurm, folder, *words, env=env))


def locally(script: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *words], env={"PATH": os.environ["PATH"], **(env or {})}, timeout=30,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def require(script: str) -> None:
    """Skip the test of deepspeed.sbatch without DeepSpeed, because the script refuses to start."""
    if script == "deepspeed.sbatch" and not importlib.util.find_spec("deepspeed"):
        skip_or_fail("DeepSpeed is not installed: pip install 'hpcinit[deepspeed]'")


# --- as text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck(script: Path) -> None:
    """shellcheck accepts all scripts."""
    done = subprocess.run(
        [installed("shellcheck"), str(script)], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_directives_come_before_the_first_command(script: Path) -> None:
    """Slurm reads every #SBATCH line. It stops at the first command."""
    lines = script.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines[first] == "set -euo pipefail"
    assert sum(line.startswith("#SBATCH") for line in lines[:first]) == 6
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_common_parts_are_identical() -> None:
    """Each script is independent, but counts ranks and cleans the environment like the others."""
    texts = [script.read_text() for script in SCRIPTS]
    assert len({text[text.index("gpus=") : text.index('"${!OMPI_@}"')] for text in texts}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to run, expected: "),
        (["train.py"], "not in a batch job: SLURM_CPUS_ON_NODE is not set, expected: "),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_not_submitted(script: Path, words: list[str], message: str) -> None:
    """Without a program, or with bash instead of sbatch, the script exits with 2 and shows how to submit."""
    done = locally(script, *words)
    assert done.returncode == 2
    image = "IMAGE=train.sif " * (script.name == "container.sbatch")
    assert done.stderr == f"{message}{image}sbatch --nodes=8 {script.name} train.py ...\n"


# --- on the cluster


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("script", "option", "gpus"),
    [
        ("ddp.sbatch", "--gpus-per-node=2", "0,1"),  # a rank per GPU
        pytest.param(
            "torchrun.sbatch", "--ntasks-per-node=2", "0,1,2,3,4,5,6,7", marks=pytest.mark.more
        ),  # whole nodes, so all of their GPUs
        ("deepspeed.sbatch", "--gpus-per-node=2", "0,1"),
    ],
)
def test_ranks_form_a_group(slurm: MiniSlurm, tmp_path: Path, script: str, option: str, gpus: str) -> None:
    """A plain torch script gets 4 ranks on 2 nodes, its arguments, and all GPUs of the job in each rank.

    It runs from a copy of the script, because users copy it.
    """
    require(script)
    (tmp_path / "my train.py").write_text(REPORT)
    shutil.copy(FOLDER / script, tmp_path / "my.sbatch")
    job = run(slurm, tmp_path, "--nodes=2", option, "my.sbatch", "my train.py", *AWKWARD)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.log
    reports = job.reports()
    assert [(r["rank"], r["size"], r["local_rank"]) for r in reports] == [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]
    hosts = [r["host"] for r in reports]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    for report in reports:
        assert report["argv"] == AWKWARD
        assert report["total"] == 6
        assert report["gpus"] == gpus
        assert report["master"] == hosts[0]
        assert 20_000 <= report["port"] < 32_768, "outside of the ports of outgoing connections"


@pytest.mark.slurm
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_no_such_script(slurm: MiniSlurm, tmp_path: Path, script: Path) -> None:
    """A missing script is reported once in the log, not by each rank."""
    job = run(slurm, tmp_path, "--nodes=2", str(script), "nosuch.py", "--lr=1", env={"IMAGE": "my.sif"})
    assert (job.state, job.exit_code) == ("FAILED", "2:0")
    expected = f"no script nosuch.py in {tmp_path} on n1, expected one on a disk that all nodes share\n"
    assert job.log == expected


@pytest.mark.slurm
@pytest.mark.parametrize("script", BARE)
def test_an_unsuitable_python(slurm: MiniSlurm, tmp_path: Path, script: str) -> None:
    """A python that is missing or lacks a module is reported once, with what it lacks."""
    (tmp_path / "train.py").touch()
    empty = tmp_path / "empty"
    venv.create(empty)
    for python in ("nopython", f"{empty}/bin/python"):
        job = run(slurm, tmp_path, str(FOLDER / script), "train.py", env={"PYTHON": python})
        first, last = job.log.splitlines()
        assert (job.state, job.exit_code) == ("FAILED", "2:0")
        assert last.startswith(f"{python} on n1 is not found or lacks ") and "PYTHON=.../bin/python sbatch" in last
        lacks = last.partition("lacks ")[2].partition(",")[0]
        assert "command not found" in first if python == "nopython" else first.split(", ") == lacks.split(" or ")
        (tmp_path / "job.log").unlink()


@pytest.mark.slurm
@pytest.mark.parametrize("script", BARE)
def test_a_failing_rank_ends_the_job(slurm: MiniSlurm, tmp_path: Path, script: str) -> None:
    """If one rank exits with 7 while the others sleep for ten minutes, the job fails at once."""
    require(script)
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nos.environ['RANK'] == '1' and sys.exit(7)\ntime.sleep(600)"
    )
    job = run(slurm, tmp_path, "--nodes=2", "--ntasks-per-node=2", str(FOLDER / script), "train.py")
    assert job.state == "FAILED"
    assert job.exit_code != "0:0"
    assert "Exited with exit code" in job.log


@pytest.mark.slurm
def test_a_signal_to_the_batch_script_reaches_every_rank(slurm: MiniSlurm, tmp_path: Path) -> None:
    """`sbatch --signal=B:USR1@60` reaches the ranks, because exec makes srun the batch shell's process."""
    (tmp_path / "train.py").write_text("""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print("warned", os.environ["RANK"])))
pathlib.Path("ready-" + os.environ["RANK"]).touch()
time.sleep(600)
""")
    number = start(slurm, tmp_path, "--nodes=2", "--ntasks-per-node=2", str(FOLDER / "ddp.sbatch"), "train.py")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    job = finish(slurm, tmp_path, number)
    assert job.state == "COMPLETED", job.log
    assert sorted(line for line in job.log.splitlines() if "warned" in line) == [f"{r}: warned {r}" for r in range(4)]


@pytest.mark.more
@pytest.mark.slurm
def test_deepspeed_trains(slurm: MiniSlurm, tmp_path: Path) -> None:
    """deepspeed.initialize trains on 4 ranks without mpi4py, with the extensions of earlier jobs; a lock that a killed
    build left among them is reported.

    On a CPU DeepSpeed first compiles an operator for shared memory for most of a minute, so the script disables that.
    """
    require("deepspeed.sbatch")
    (tmp_path / "train.py").write_text("""
import json, os
import torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
optimizer = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
losses = []
for _ in range(3):
    loss = (engine(torch.ones(1, 4)) - 10).square().sum()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
caches = [os.environ.get("TORCH_EXTENSIONS_DIR"), os.environ["TRITON_CACHE_DIR"]]
os.write(1, (json.dumps({"rank": engine.global_rank, "size": engine.world_size, "losses": losses, "caches": caches,
    "weight": engine.module.weight.tolist()}) + "\\n").encode())
deepspeed.comm.destroy_process_group()
""")
    words = ["--nodes=2", "--ntasks-per-node=2", str(FOLDER / "deepspeed.sbatch"), "train.py"]
    lock = tmp_path / "cache/torch_extensions/py3_cpu/fused_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for each in (lock, lock.parent):
        os.utime(each, (0, 0))
    number = start(
        slurm, tmp_path, *words, env={"TRITON_CACHE_DIR": "/mine", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    )
    job = finish(slurm, tmp_path, number)
    assert job.state == "COMPLETED", job.log
    reports = job.reports()
    assert [(report["rank"], report["size"]) for report in reports] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert f"remove it: rm {lock}" in job.log and lock.exists()
    for report in reports:
        assert report["losses"][-1] < report["losses"][0]
        assert report["weight"] == reports[0]["weight"]
        assert report["caches"] == [None, "/mine"]


# --- containers


def stand_in(folder: Path, name: str, text: str) -> dict[str, str]:
    """Create a program with this name, and return the PATH on which it is found first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.more
@pytest.mark.slurm
def test_apptainer_is_called_for_every_rank(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Each rank is one `apptainer exec`, and the ranks form a group.

    A stand-in records its arguments and runs the command without an image, because no container runtime works here.
    """
    note = f'printf "%s\\n" "$@" > "{tmp_path}/called-$SLURM_PROCID"; while [[ "$1" != my.sif ]]; do shift; done'
    env = stand_in(tmp_path / "bin", "apptainer", f'{note}; shift; exec "$@"')
    (tmp_path / "train.py").write_text(REPORT)
    words = ["--nodes=2", "--gpus-per-node=2", str(FOLDER / "container.sbatch"), "train.py", *AWKWARD]
    job = run(slurm, tmp_path, *words, env=env | {"IMAGE": "my.sif", "MOUNTS": "/data:/d"})
    assert job.state == "COMPLETED", job.log
    assert [report["total"] for report in job.reports()] == [6, 6, 6, 6]
    assert all(report["argv"] == AWKWARD for report in job.reports())
    expected = ["exec", "--bind", f"{tmp_path}:{tmp_path},/data:/d", "--pwd", str(tmp_path), "--nv", "my.sif"]
    for rank in range(4):
        called = (tmp_path / f"called-{rank}").read_text().split("\n")
        assert called[:8] == [*expected, sys.executable]


ALLOCATION = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8", "IMAGE": "org/image:1"}
INSIDE = "/image/train.py"  # not searched outside of the image


def test_pyxis_is_used_if_srun_has_it(tmp_path: Path) -> None:
    """If `srun --help` lists --container-image, the image is an option of srun.

    A stand-in for srun prints its arguments, because Pyxis needs Enroot and user namespaces.
    """
    say = 'if [[ "$*" == --help ]]; then echo "      --container-image=[USER@][REGISTRY#]IMAGE"; else printf "%s\\n" "$@"; fi'
    env = stand_in(tmp_path, "srun", say) | ALLOCATION
    done = locally(FOLDER / "container.sbatch", INSIDE, "a blank", env=env)
    assert done.returncode == 0, done.stderr
    called = done.stdout.splitlines()
    assert f"--container-image={ALLOCATION['IMAGE']}" in called
    assert f"--container-workdir={Path.cwd()}" in called
    assert called[-6:] == ["python", "-u", "-m", "hpcinit.run", INSIDE, "a blank"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"IMAGE": ""}, "IMAGE is not set, expected: IMAGE=train.sif sbatch"),
        ({"CONTAINER_RUNTIME": "docker"}, "container runtime: docker, expected one of pyxis"),
    ],
)
def test_an_impossible_container(env: dict[str, str], message: str) -> None:
    """Without an image, or with an unknown runtime, the job exits with 2 and lists the possible ones."""
    done = locally(FOLDER / "container.sbatch", INSIDE, env=ALLOCATION | env)
    assert done.returncode == 2
    assert done.stderr.startswith(message)


def test_no_container_runtime(tmp_path: Path) -> None:
    """Without Pyxis and Apptainer the job exits with 2 and lists what it looked for.

    A stand-in replaces srun, and PATH contains only grep.
    """
    stand_in(tmp_path, "srun", 'echo "  --nodes=N"')
    for name in ("bash", "grep"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    done = locally(FOLDER / "container.sbatch", INSIDE, env=ALLOCATION | {"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.startswith("container runtime: none found, expected one of pyxis")
