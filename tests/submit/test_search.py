"""Hydra's Optuna sweeper waits for the results of runs on this machine and on Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hpcinit.base.errors import Failure
from hpcinit.config.request import Request
from hpcinit.config.schema import Config
from hpcinit.submit import search_command
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import submit
from tests.waiting import until

# Its minimum is 0 at x = 1; the trial with number $FAILS fails, and trial $SILENT has no result.
PROGRAM = """
import json, os, sys
x, number = float(sys.argv[1]), sys.argv[2]
if os.environ.get("FAILS") == number:
    sys.exit(3)
if os.environ.get("SILENT") != number:
    with open(os.environ["HPCINIT_RUN"] + "/result.json", "w") as file:
        json.dump({"value": (x - 1) ** 2}, file)
"""
OPTUNA = (
    "-m",
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_trials=6",
    "hydra.sweeper.n_jobs=3",
    "hydra.sweeper.sampler.seed=1",
)
TRIAL = ("+x=interval(-2.0,2.0)", "name=q", "job=program", f"job.command={sys.executable}", "ranks_per_node=1")
ARGS = 'job.args=[q.py,"${x}","${hydra:job.num}"]'


@pytest.fixture(autouse=True)
def _program(tmp_path: Path) -> None:
    (tmp_path / "q.py").write_text(PROGRAM)


def trials(tmp_path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in (tmp_path / "runs/q-search-0001/trials.jsonl").read_text().splitlines()]


def check_search(done: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    """Assert that the printed best of six trials is the one that Optuna recorded."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(tmp_path)
    assert [trial["trial"] for trial in found] == list(range(6))
    for trial in found:
        x = float(trial["combination"].removeprefix("+x="))
        assert trial["value"] == pytest.approx((x - 1) ** 2)
        assert yaml.safe_load((Path(trial["run"]) / "config.yaml").read_text())["x"] == pytest.approx(x)
    best = min(found, key=lambda trial: trial["value"])
    kept = yaml.safe_load((tmp_path / "runs/q-search-0001/optimization_results.yaml").read_text())
    assert kept["best_value"] == best["value"]
    assert done.stdout.splitlines()[-2:] == [
        f"best: {best['value']} with {best['combination']}",
        f"6 trials: {tmp_path}/runs/q-search-0001",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.py", "runs"]  # none of Hydra's own


def test_a_first_batch_that_is_refused_leaves_no_folder(hpcinit: Run, tmp_path: Path) -> None:
    """If sbatch refuses the first trials, neither their folder nor the search's folder remains."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no more' >&2; exit 1\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = hpcinit("submit", *OPTUNA, *TRIAL, ARGS, "cluster=mini", env=env)
    assert done.returncode == 1 and "no more" in done.stderr and "nothing was submitted" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_on_this_machine(hpcinit: Run, tmp_path: Path) -> None:
    """Two batches of three trials run one after the other.

    The command ends with the best one, and Hydra makes no folder.
    """
    check_search(hpcinit("submit", *OPTUNA, *TRIAL, ARGS), tmp_path)


def test_json_of_a_search(hpcinit: Run, tmp_path: Path) -> None:
    """--json prints an object for each trial, and one for the search."""
    one = ("hydra.sweeper.n_trials=1", "hydra.sweeper.n_jobs=1")
    done = hpcinit("submit", "--json", *OPTUNA, *one, *TRIAL, ARGS)
    trial, search = json_documents.parse(done.stdout, "submit", "search")
    assert trial["run"] == trials(tmp_path)[0]["run"] and search["trials"] == 1, done.stderr


@pytest.mark.slurm
def test_on_slurm(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Each batch is one job array. docs/sweeps.md shows such a search."""
    done = submit(hpcinit, idle_slurm, *OPTUNA, *TRIAL, ARGS, "cluster.gpu_flag=null", timeout=280)
    check_search(done, tmp_path)
    for batch, tasks in (("q-0001", "0-2"), ("q-0002", "3-5")):
        [job] = json.loads((tmp_path / f"runs/{batch}/submission.json").read_text())["sweep"]
        assert job["tasks"] == tasks


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"FAILS": "1"}, "failed with exit status 3. Read its logs:  hpcinit logs "),
        pytest.param(
            {"SILENT": "1"},
            "completed without a result: expected run.result(value) in the program, or ",
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_trial_without_a_result(hpcinit: Run, tmp_path: Path, env: dict[str, str], said: str) -> None:
    """It ends the search and is named, or it counts for max_failure_rate."""
    done = hpcinit("submit", *OPTUNA, *TRIAL, ARGS, env=env)
    assert done.returncode == 1 and "best:" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hpcinit: error: trial 1 (+x=") and said in last
    assert ["error" in trial for trial in trials(tmp_path)] == [False, True, False]
    (tmp_path / "runs").rename(tmp_path / "first")
    done = hpcinit("submit", *OPTUNA, "hydra.sweeper.max_failure_rate=0.4", *TRIAL, ARGS, env=env)
    assert done.returncode == 0, done.stderr
    assert ["error" in trial for trial in trials(tmp_path)] == [False, True, False, False, False, False]
    assert done.stdout.splitlines()[-2].startswith("best: ")


def test_a_batch_is_checked_as_a_whole(hpcinit: Run, tmp_path: Path) -> None:
    """One invalid trial refuses its batch before any job is submitted."""
    words = (*OPTUNA, "name=q", "hydra.sweeper.n_jobs=6", "cluster=local", "nodes=choice(1,0)")
    done = hpcinit("submit", *words, "--", "true")
    assert (done.returncode, done.stdout) == (2, "") and "nodes is 0, expected" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["q.py"]


def test_a_dry_run_shows_the_first_batch(hpcinit: Run, tmp_path: Path) -> None:
    """Later batches depend on its results, and a note explains it."""
    done = hpcinit("submit", *OPTUNA, *TRIAL, ARGS, "dry_run=true")
    assert done.returncode == 0 and done.stdout.count("#!/bin/bash") == 3, done.stderr
    assert done.stderr.endswith("# later batches depend on the results of this one\n")
    assert [path.name for path in tmp_path.iterdir()] == ["q.py"]


def test_several_objectives(hpcinit: Run, tmp_path: Path) -> None:
    """A result of several numbers has one for each objective."""
    code = 'echo "{\\"value\\": [$1, -$1]}" > $HPCINIT_RUN/result.json'
    few = (
        "hydra/sweeper/sampler=random",
        "hydra.sweeper.direction=[minimize,maximize]",
        "+x=range(1,4)",
        "name=q",
        "job=program",
        "job.command=sh",
    )
    done = hpcinit("submit", *OPTUNA, *few, f"job.args=[-c,'{code}',sh,\"${{x}}\"]", "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done.stderr
    assert "Pareto-optimal solutions" in done.stdout


def test_ctrl_c_in_a_batch(tmp_path: Path) -> None:
    """The search ends with 130 and reports that the run continues and how many trials are done."""
    line = [sys.executable, "-m", "hpcinit", "submit", *OPTUNA, "+x=interval(0.0,1.0)", "name=q", "--", "sleep", "60"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "runs/q-0001/exit.json").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    subprocess.run([sys.executable, "-m", "hpcinit", "cancel", "q-0001"], cwd=tmp_path, check=True, capture_output=True)
    assert process.returncode == 130 and "the job is still running" in out + err  # in err: before it waits
    assert err.splitlines()[-1] == "the search stopped after 0 trials"
    assert list((tmp_path / "runs/q-search-0001").iterdir()) == []


@pytest.mark.parametrize(
    ("exit_record", "result", "said"),
    [
        ({}, None, "trial 4 (+x=1) was terminated from outside: it has no exit record. Read its logs:  hpcinit logs "),
        ({"exit_status": 0}, '{"value": NaN}', "expected a number. Did the training diverge?"),
        ({"exit_status": 1}, '{"value": 1}', "trial 4 (+x=1) failed with exit status 1. Read its logs:  hpcinit logs "),
    ],
)
def test_a_run_without_a_result(tmp_path: Path, exit_record: dict[str, int], result: str | None, said: str) -> None:
    """The error explains why a run has no result. The result of a failed run does not count."""
    (tmp_path / "exit.json").write_text(json.dumps(exit_record))
    if result:
        (tmp_path / "result.json").write_text(result)
    came = search_command._outcome(Request(Config(), {}, "+x=1", (), 4), tmp_path, time.monotonic())
    assert isinstance(came, Failure) and said in str(came)


def test_a_search_of_no_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweeper without trials is an error.

    After Ctrl-C before the first batch, the message reports that nothing is running.
    """
    nothing = search_command.Trials(lambda requests, runs: 0)
    with pytest.raises(Failure, match="the sweeper requested no trials"):
        nothing.end(tmp_path)
    assert nothing.interrupted() == 130
    assert capsys.readouterr().err == "hpcinit: interrupted after 0 trials; no trial is running now\n"
