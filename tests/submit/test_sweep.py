"""A sweep on Slurm is one job array, with a run folder for each task."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from hpcinit.cli.main import main
from hpcinit.config import combinations, hydra_compose, hydra_setup
from hpcinit.submit import array, sweep
from tests import json_documents, waiting
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, scripts_of, submit

until = partial(waiting.until, timeout_s=200)

SMALL = ("ranks_per_node=1", "cluster.gpu_flag=null")
TASK = 'echo "$HPCINIT_RUN $LR $(grep ^seed: $HPCINIT_RUN/config.yaml)"; exit $(grep -c "^seed: 3" $HPCINIT_RUN/config.yaml)'


def requests(*words: str) -> list:  # type: ignore[type-arg]
    hydra_setup.register()
    return combinations.requests(words, hydra_compose._composer("hpcinit"), lambda request: None)


def fake_sbatch(tmp_path: Path, script: str) -> dict[str, str]:
    """Create an sbatch that runs `script`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n[ $1 != --test-only ] || exit 0\n{script}\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def cancelled(hpcinit: Run, slurm: MiniSlurm) -> list[int]:
    tasks = json_documents.parse(hpcinit("status", "sleep-0001", "--json", env=slurm.env).stdout, "status")
    return [task["task"] for task in tasks if task["state"] not in ("PENDING", "RUNNING", "COMPLETING")]


@pytest.mark.slurm
def test_one_array_runs_every_combination(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Each task has its own folder, config, variables and exit record. Status, logs and the array's id lead to them."""
    words = ("-m", "seed=1,2,3", "+job.env.LR='it is ${seed} $HOME'", "wait=true", *SMALL, "--", "sh", "-c", TASK)
    done = submit(hpcinit, idle_slurm, *words)
    run = tmp_path / "runs/sh-0001"
    assert done.returncode == 1, done.stderr
    [job] = json.loads((run / "submission.json").read_text())["sweep"]
    assert (
        job["tasks"] == "0-2"
        and f"3 tasks on mini as job {job['job_id']}, using up to 3 nodes at once\nrequest of each task: "
        in done.stdout
    )
    assert f"{job['job_id']}_1     1  seed=2" in done.stdout and f"{job['job_id']}_2 FAILED" in done.stdout
    for number in range(3):
        record = json.loads((run / f"{number}/exit.json").read_text())
        assert record["job"] == f"{job['job_id']}_{number}" and record["exit_status"] == int(number == 2)
        assert json.loads((run / f"{number}/submission.json").read_text())["job_id"] == record["job"]
        said = (run / f"{number}/logs/rank-0.log").read_text()
        assert f"{run}/{number} it is {number + 1} $HOME seed: {number + 1}\n" in said
    env = idle_slurm.env
    shown = hpcinit("status", "sh-0001", env=env).stdout
    assert "3 tasks: 2 COMPLETED, 1 FAILED" in shown and re.search(r"2 +\d+_2 +FAILED +seed=3 .*exit status 1", shown)
    assert hpcinit("status", f"{job['job_id']}_1", env=env).stdout.split()[1:3] == [f"{job['job_id']}_1", "COMPLETED"]
    assert "seed: 2" in hpcinit("logs", "sh-0001/1", env=env).stdout
    assert "is a sweep with the tasks 0-2" in hpcinit("logs", "sh-0001", env=env).stderr
    assert (
        "sh-0001" in hpcinit("status", env=env).stdout
        and len(hpcinit("status", "--json", env=env).stdout.splitlines()) == 3
    )


@pytest.mark.slurm
def test_a_sweep_as_json(idle_slurm: MiniSlurm, hpcinit: Run) -> None:
    """--json prints an object for each task with its run folder, and -q the array's id, on stdout only."""
    done = submit(hpcinit, idle_slurm, "-m", "seed=4,5", "--json", *SMALL, "--", "true")
    tasks = json_documents.parse(done.stdout, "submit")
    assert [(task["task"], task["combination"]) for task in tasks] == [(0, "seed=4"), (1, "seed=5")]
    for task in tasks:
        assert json.loads((Path(task["run"]) / "submission.json").read_text())["job_id"] == task["job_id"]
    quiet = submit(hpcinit, idle_slurm, "-q", "-m", "seed=6,7", *SMALL, "--", "true")
    assert re.fullmatch(r"\d+\n", quiet.stdout) and quiet.stderr == ""
    chain = submit(hpcinit, idle_slurm, "--json", "chain=2", *SMALL, "--", "true")
    assert len(json_documents.parse(chain.stdout, "submit")[0]["jobs"]) == 2


@pytest.mark.slurm
def test_blocks_of_a_larger_sweep(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Above MaxArraySize a second array follows, and a single remaining task is a plain job.

    Every task runs in its folder.
    """
    words = ("-m", "seed=range(0,21)", "cluster.max_array_size=11", "sweep.at_once=8", "wait=true", *SMALL)
    done = submit(hpcinit, idle_slurm, *words, "--", "sh", "-c", TASK.replace("exit", "echo"), timeout=280)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    run = tmp_path / "runs/sh-0001"
    jobs = json.loads((run / "submission.json").read_text())["sweep"]
    assert [(job["tasks"], job["script"]) for job in jobs] == [
        ("0-9", "job.sh"),
        ("10-19", "job-2.sh"),
        ("20", "20/job.sh"),
    ]
    assert "#SBATCH --array=0-9%8" in (run / "job-2.sh").read_text()
    for number in range(21):
        assert f"{run}/{number}  seed: {number}\n" in (run / f"{number}/logs/rank-0.log").read_text()
        assert (run / f"{number}/logs/job.log").exists() and (run / f"{number}/exit.json").exists()


@pytest.mark.slurm
def test_cancel_ends_all_of_it(idle_slurm: MiniSlurm, hpcinit: Run) -> None:
    """`hpcinit cancel` of a task cancels this task, of a sweep all its jobs. The estimate of each array was shown."""
    done = submit(hpcinit, idle_slurm, "-m", "seed=1,2,3", "nodes=1,2", *SMALL, "--", "sleep", "600")
    assert re.search(r"^tasks 0,2,4: Slurm expects to start the job .* on n\d$", done.stdout, re.M), (
        done.stdout + done.stderr
    )
    assert re.search(r"^tasks 1,3,5: Slurm expects to start the job .* on n\S+$", done.stdout, re.M)
    assert "is being canceled" in hpcinit("cancel", "sleep-0001/2", env=idle_slurm.env).stdout
    until(lambda: cancelled(hpcinit, idle_slurm) == [2])
    assert re.search(r"jobs \d+, \d+ are being canceled", hpcinit("cancel", "sleep-0001", env=idle_slurm.env).stdout)
    until(lambda: cancelled(hpcinit, idle_slurm) == [0, 1, 2, 3, 4, 5])
    assert "sleep-0001: has already ended: " in hpcinit("cancel", "sleep-0001", env=idle_slurm.env).stdout


def test_a_dry_run_prints_what_is_submitted(tmp_path: Path, hpcinit: Run) -> None:
    """The scripts of a dry run are byte for byte those of sbatch, in the same order, and it leaves no files."""
    env = fake_sbatch(tmp_path, 'for last; do :; done; cat "$last" >> seen; echo 7')
    words = [
        "submit",
        "-m",
        "cluster=mini",
        "seed=1,2",
        "nodes=1,2",
        "+job.env.A='${seed}'",
        "runs_dir='a $HOME runs'",
    ]
    words += ["name=x", "sweep.at_once=1"]
    dry = hpcinit(*words, "dry_run=true", "--", "true")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"], dry.stderr
    done = hpcinit(*words, "--", "true", env=env)
    assert done.returncode == 0, done.stderr
    assert scripts_of(dry.stdout) == (tmp_path / "seen").read_text() and dry.stdout.count("#SBATCH --array=") == 2
    assert "case $SLURM_ARRAY_TASK_ID in\n  0) export A=1 ;;\n  2) export A=2 ;;\nesac\n" in dry.stdout
    assert '# 2/spec.json, where it differs from 0/spec.json:\n# | -  "seed": 1,\n' in dry.stdout
    assert dry.stderr.startswith("# an array of 2 tasks, 0,2: seed=1 nodes=1 to seed=2 nodes=1\n")


@pytest.mark.parametrize("name", ["plain", "it's", "a b", 'a "x"', "$HOME", "100%t", "`true`"])
def test_a_task_finds_its_folder_below_any_name(tmp_path: Path, name: str) -> None:
    """bash computes the task's folder for any characters in the path."""
    made = requests("cluster=mini", "seed=1,2")
    folder = tmp_path / name
    text = array.render([request.config for request in made], [2017, 2018], folder, tmp_path, 1000)
    assert "#SBATCH --array=17-18\n" in text
    line = next(line for line in text.split("\n") if line.startswith("export HPCINIT_RUN="))
    done = subprocess.run(["bash", "-c", f"{line}\nprintf %s \"$HPCINIT_RUN\""], env={"SLURM_ARRAY_TASK_ID": "17", "HOME": "/"}, capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == f"{folder}/2017"
    shown = str(folder).replace("%", "%%").replace("'", "'\"'\"'")  # as shlex quotes it
    assert f"{shown}/2%3a/logs/job.log" in text


def test_what_goes_into_one_array() -> None:
    """Combinations with the same resources share an array, whatever variables they set."""

    def jobs(*words: str) -> list[list[int]]:
        return [job.numbers for job in sweep.sweep_jobs(requests("cluster=mini", *words), Path("/runs/x-0001"), [])]

    assert jobs("seed=range(0,5)") == [[0, 1, 2, 3, 4]]
    assert jobs("+job.env.A=1,2,3") == [[0, 1, 2]]
    assert jobs("nodes=1,2", "seed=1,2") == [[0, 1], [2, 3]]
    assert jobs("time_min=1,2,3") == [[0], [1], [2]]
    assert jobs("seed=range(0,3)", "cluster.max_array_size=1") == [[0], [1], [2]]
    assert [array.block(size) for size in (None, 1, 10, 11, 1001, 5000, 65536, 0)] == [
        1000,
        1,
        10,
        10,
        1000,
        1000,
        10000,
        1,
    ]


def test_a_refused_sweep_leaves_nothing(tmp_path: Path, hpcinit: Run) -> None:
    """If sbatch refuses the first array, its message is shown and no folder remains."""
    env = fake_sbatch(
        tmp_path, "echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1"
    )
    done = hpcinit("submit", "-m", "cluster=mini", "seed=1,2", "--", "true", env=env)
    assert done.returncode == 1 and "Job violates accounting/QOS policy" in done.stderr
    assert "nothing was submitted" in done.stderr and list((tmp_path / "runs").iterdir()) == []


def test_a_sweep_that_sbatch_refuses_halfway(tmp_path: Path, hpcinit: Run) -> None:
    """If sbatch refuses the second array, the first is reported, and the combinations of the second are named and
    removed.
    """
    env = fake_sbatch(tmp_path, "[ -e once ] && { echo 'sbatch: error: no more' >&2; exit 1; }; touch once; echo 7")
    done = hpcinit("submit", "-m", "cluster=mini", "seed=1,2", "nodes=1,2", "--", "true", env=env)
    assert done.returncode == 1 and "7_0     0  seed=1 nodes=1" in done.stdout
    assert "no more" in done.stderr and "not submitted: seed=1 nodes=2; seed=2 nodes=2" in done.stderr
    run = tmp_path / "runs/true-0001"
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["0", "2"]
    assert main(["cancel", str(run / "1")]) == 2


def test_a_task_cannot_be_written(tmp_path: Path, hpcinit: Run) -> None:
    """A place without permission leads to one message, before anything is submitted."""
    words = ["submit", "-m", "cluster=mini", "seed=1,2", "runs_dir=/proc/x", "--", "true"]
    done = hpcinit(*words, env=fake_sbatch(tmp_path, "touch submitted; echo 7"))
    assert done.returncode == 1 and "cannot write the run folder /proc/x/true-0001" in done.stderr
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize(
    ("shell", "kept"),
    [
        ("[ -e once ] || { touch once; echo 7; exit; }; echo hello", ["0", "1", "3", "4"]),
        ("echo hello", ["0", "3"]),
    ],
    ids=["the second array", "the first array"],
)
def test_a_sweep_of_which_an_array_may_exist(tmp_path: Path, hpcinit: Run, shell: str, kept: list[str]) -> None:
    """The folders of tasks that were or may have been submitted stay. Those of later arrays are removed."""
    env = fake_sbatch(tmp_path, shell)
    words = ["submit", "-m", "cluster=mini", "seed=1,2", "nodes=1,2,3", "cluster.submit_patience_s=1", "--", "true"]
    done = hpcinit(*words, env=env)
    assert done.returncode == 1 and "the job may exist anyway" in done.stderr
    run = tmp_path / "runs/true-0001"
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == kept


@pytest.mark.slurm
def test_failed_tasks_are_grouped_by_cause(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """`why SWEEP` prints each cause once, with the tasks that it ended, also if ranks, times and numbers differ."""
    program = "import sys\nn = int(sys.argv[1])\nif n < 3: raise ValueError(f'bad sample {n}')\nif n == 3: {}['lr']\n"
    (tmp_path / "train.py").write_text(program)
    words = ["-m", "+n=0,1,2,3,4", "nodes=1", "ranks_per_node=1", "cluster.gpus_per_node=0", "name=s", "wait=true"]
    done = submit(hpcinit, idle_slurm, *words, "--", "train.py", "${n}")
    folder = folder_of(done)
    found = hpcinit("why", str(folder), env=idle_slurm.env)
    assert found.returncode == 0, found.stderr
    shown = found.stdout
    assert shown.startswith("4 of 5 tasks failed (") and "\ntasks 0-2: rank 0 on n" in shown, shown
    assert shown.count("ValueError: bad sample") == 1 and "\ntask 3: rank 0 on n" in shown and "KeyError: 'lr'" in shown
    causes = json_documents.parse(hpcinit("why", str(folder), "--json", env=idle_slurm.env).stdout, "why sweep")[0][
        "causes"
    ]
    assert [cause["tasks"] for cause in causes] == [[0, 1, 2], [3]]
