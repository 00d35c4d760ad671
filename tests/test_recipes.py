"""The programs of docs/recipes.md run on CPUs, and its commands are accepted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of
from tests.waiting import until

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "recipes.md").read_text()
LAUNCHING = (DOCS / "reference/launching.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE + LAUNCHING, re.DOTALL))
[CLUSTER_FILE] = re.findall(r"```yaml\n# conf/cluster/mycluster.yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^    ((?:rates=.*\n    )?(?:hpcinit|python) .*)$", PAGE, re.MULTILINE)
# One import per node: of torch, and of what the ranks import later.
FORK = "launch=fork launch.preload=[torch,torch._dynamo]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the programs and the cluster file of the page."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/mycluster.yaml").write_text(CLUSTER_FILE)
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
    """Each submission of the page renders a batch script with the page's cluster file."""
    (folder / "train.sif").touch()
    line = command.replace("cluster=mycluster", "cluster=mycluster check_paths=false").replace(
        "submit", "submit dry_run=true", 1
    )
    done = shell(line.split("  #")[0], folder)
    assert done.returncode == 0 and "#SBATCH --account=proj" in done.stdout, done.stderr
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


def stop_and_continue(
    hpcinit: Run, folder: Path, name: str, text: Callable[[int], str], settings: Sequence[str]
) -> tuple[int, subprocess.CompletedProcess[str]]:
    """Stop a run of two ranks with `cancel --save`. Start it again with 4 more steps.

    text: returns the program for a number of steps.
    Return the number of steps of the first run, and the second submission.
    """
    words = ["submit", "cluster=local", "ranks_per_node=2", *settings]
    (folder / name).write_text(text(100_000))
    first = folder_of(hpcinit(*words, "--", name))
    until((first / "progress.json").exists, 120)
    done = hpcinit("cancel", "--save", first.name)
    assert done.returncode == 0, done.stderr
    done = hpcinit("watch", first.name)
    assert done.returncode == 0, done.stdout + done.stderr
    stopped = last_progress(folder, first.name)["step"]
    (folder / name).write_text(text(stopped + 4))
    done = hpcinit(*words, "wait=true", "--", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_progress(folder, folder_of(done).name)["step"] == stopped + 4
    return stopped, done


def test_the_loop_saves_and_resumes(hpcinit: Run, tmp_path: Path) -> None:
    """loop.py saves when a user requests a stop. The next run continues at the next step, and removes old checkpoints."""
    program = PROGRAMS["loop.py"]
    assert "STEPS = 1000\n" in program
    stopped, done = stop_and_continue(
        hpcinit, tmp_path, "loop.py", lambda end: program.replace("STEPS = 1000", f"STEPS = {end}"), FORK.split()
    )
    assert f"start at step {stopped}\n" in done.stdout
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert f"step-{stopped:08}" in saved and len(saved) <= 2


def test_a_notebook(folder: Path) -> None:
    """The cell submits a program, and prints its state and its last values."""
    [cell] = re.findall(r"```python\n(from hpcinit import api\n.*?)```", PAGE, re.DOTALL)
    settings = 'cluster="local", ranks_per_node=2, '
    (folder / "cell.py").write_text(cell.replace('cluster="mycluster", nodes=2, ', settings))
    done = shell("python cell.py", folder)
    assert re.search(r"COMPLETED \{'loss': [\d.]+\}\n", done.stdout), done.stdout + done.stderr


def test_a_launcher_that_hpcinit_does_not_know(folder: Path) -> None:
    """Two ranks that another program starts with the page's lines are one world."""
    [script] = re.findall(r"^    (export RANK=.*\n)    (HPCINIT_STARTED_BY=env .*)\n", PAGE, re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        text = "".join(script).replace("29500", str(free.getsockname()[1]))
    rank = f"MY_RANK=$rank MY_LOCAL_RANK=$rank MY_SIZE=2 MY_HOST=127.0.0.1 bash -c {shlex.quote(text)}"
    # By pid: bash forgets a job's number if the job ended while it waited for another one.
    done = shell(f"{{ rank=0; {rank}; }} & first=$!; {{ rank=1; {rank}; }} & wait $! && wait $first", folder)
    assert done.returncode == 0, done.stderr
    assert "hpcinit: 2 ranks on 1 node (env), gloo on cpu, up in " in done.stdout + done.stderr
