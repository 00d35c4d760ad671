"""The programs of docs/recipes.md run on CPUs, and its commands are accepted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.skip_or_fail import skip_or_fail

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "recipes.md").read_text()
LAUNCHING = (DOCS / "reference/launching.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE + LAUNCHING, re.DOTALL))
COMMANDS = re.findall(r"^    ((?:rates=.*\n    )?(?:hpcinit|python) .*)$", PAGE, re.MULTILINE)
# One import per node: of torch, and of what the ranks import later.
FORK = "launch=fork launch.preload=[torch,torch._dynamo]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the programs of the page, and a cluster file without Slurm."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    for name in ("train.py", "loop.py"):
        (tmp_path / name).write_text("print()\n")
    return tmp_path


def shell(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        line, shell=True, executable="/bin/bash", cwd=folder, env=os.environ | {"PATH": path, "HOME": str(folder)} | env,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def last_progress(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"runs/{run}/progress.json").read_text())
    return found


@pytest.mark.parametrize("command", [each for each in COMMANDS if "hpcinit submit" in each])
def test_the_submissions_are_accepted(command: str, folder: Path) -> None:
    """Each submission of the page renders a batch script."""
    (folder / "train.sif").touch()
    line = command.replace("cluster=mycluster", "cluster=dgx_superpod_h100 check_paths=false").replace(
        "submit", "submit dry_run=true", 1
    )
    done = shell(line.split("  #")[0], folder)
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr
    if "rates" in command:
        assert "#SBATCH --array=0-99%10" in done.stdout, done.stdout


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "zero3"])
def test_one_program_with_ddp_fsdp_and_zero3(parallel: str, folder: Path) -> None:
    """The first program trains on two ranks with each of the three."""
    if parallel == "zero3" and not importlib.util.find_spec("deepspeed"):
        skip_or_fail("deepspeed is not installed: pip install deepspeed")
    line = f"hpcinit submit cluster=local nodes=1 ranks_per_node=2 wait=true {FORK} parallel={parallel} -- wrapped.py"
    done = shell(line, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_progress(folder, "wrapped-0001")["step"] == 20


def test_your_own_deepspeed_code(folder: Path) -> None:
    """deepspeed.initialize adopts the group of hpcinit.init(), and trains with ZeRO 3 on two ranks."""
    if not importlib.util.find_spec("deepspeed"):
        skip_or_fail("deepspeed is not installed: pip install deepspeed")
    done = shell(
        f"hpcinit submit cluster=local nodes=1 ranks_per_node=2 wait=true {FORK} comm.deepspeed=true -- own_zero3.py",
        folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_progress(folder, "own_zero3-0001")["step"] == 20


def test_a_hydra_application(folder: Path) -> None:
    """The program runs once with an override, and its own multirun runs one job for each value."""
    done = shell(f"hpcinit submit cluster=local ranks_per_node=1 wait=true {FORK} -- app.py +lr=1e-3", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_progress(folder, "app-0001")["values"]["loss"] == pytest.approx(2e-3)
    multirun = COMMANDS[[each.startswith("python app.py") for each in COMMANDS].index(True)]
    local = multirun.replace("cluster=mycluster", "cluster=local").replace("nodes=2", "ranks_per_node=1")
    done = shell(local, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = sorted(json.loads(path.read_text())["values"]["loss"] for path in folder.glob("runs/*/**/progress.json"))
    assert losses == pytest.approx([6e-4, 2e-3, 2e-3])


def test_weights_are_exported_and_evaluated(folder: Path) -> None:
    """evaluate.py loads the weights that run.export wrote, and reports a loss."""
    export = '    run.export(wrapped, "export/20")\n'
    (folder / "export_it.py").write_text(PROGRAMS["wrapped.py"] + export)
    for program in ("export_it.py", "evaluate.py 20"):
        done = shell(f"hpcinit submit cluster=local ranks_per_node=1 wait=true {FORK} -- {program}", folder)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "runs/evaluate-0001/result.json").read_text())["value"] > 0


def test_a_launcher_of_your_own(folder: Path) -> None:
    """The class of the page reads rank, size and hosts from its variables."""
    env = {"MY_RANK": "3", "MY_SIZE": "4", "MY_HOSTS": "n1,n2", "MY_JOB": "7"}
    read = "import os, my_launcher; print(my_launcher.MyLauncher().read(os.environ))"
    done = shell(f"python -c '{read}'", folder, PYTHONPATH=str(Path(__file__).parent.parent), **env)
    assert "rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, hosts=('n1', 'n2')" in done.stdout, (
        done.stderr
    )
