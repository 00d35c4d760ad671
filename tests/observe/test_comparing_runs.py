"""`hpcinit status` compares runs: arguments, dates, results, sorting, values that are not finite, deleted folders."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.engine import LOCAL
from hpcinit.observe import overview, requests, status
from hpcinit.observe.requests import Submission
from hpcinit.observe.state import State
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.observe.test_state import SMALL, counting_queries, statuses
from tests.submitting import folder_of, submit
from tests.waiting import until

PROGRAM = """
import json, os, sys, time
loss = float(sys.argv[sys.argv.index("--lr") + 1]) * 10
run = os.environ["HPCINIT_RUN"]
json.dump({"step": 9, "total": 9, "values": {"loss": loss}, "time": time.time()}, open(run + "/progress.json", "w"))
json.dump({"value": loss + 1}, open(run + "/result.json", "w"))
"""


def test_status_shows_what_differs_between_runs(hpcinit: Run, tmp_path: Path) -> None:
    """Runs of one program show what the user typed that differs; a single run shows all that the user typed."""
    (tmp_path / "train.py").write_text(PROGRAM)
    for lr, seed in (("0.3", 1), ("0.1", 1), ("0.2", 2)):
        done = hpcinit("submit", "wait=true", f"seed={seed}", "--", "train.py", "--data", "/x", "--lr", lr)
        assert done.returncode == 0, done.stderr
    first, _, third = hpcinit("status").stdout.splitlines()
    assert first.endswith("  seed=1 --lr 0.3") and third.endswith("  seed=2 --lr 0.2"), (first, third)
    assert "  loss 3  result 4  " in first and "  submitted " in first and "--data" not in first
    assert hpcinit("status", "train-0001").stdout.rstrip().endswith("  seed=1 -- train.py --data /x --lr 0.3")
    documents = [json.loads(line) for line in hpcinit("status", "--json", "--sort", "loss").stdout.splitlines()]
    assert [Path(one["run"]).name for one in documents] == ["train-0002", "train-0003", "train-0001"]
    best = documents[0]
    assert (best["result"], best["arguments"]) == (2.0, ["--data", "/x", "--lr", "0.1"])
    assert best["progress"]["values"] == {"loss": 1.0} and best["submitted"] > 1e9
    shown = hpcinit("status", "--sort", "result", "--reverse", "--top", "2").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["train-0001", "train-0003"]
    assert shown[0].endswith("  seed=1 --lr 0.3"), shown
    refused = hpcinit("status", "--sort", "los")
    assert refused.returncode == 2
    assert "--sort is 'los', but no run has a value with this name, expected one of: loss, step" in refused.stderr
    same = hpcinit("status", "train-0001", "train-0002").stdout.splitlines()
    assert [line.endswith(f"  --lr {lr}") for line, lr in zip(same, ("0.3", "0.1"), strict=True)] == [True, True], same
    [document] = [json.loads(line) for line in hpcinit("status", "--json", "train-0001").stdout.splitlines()]
    assert document["arguments"] == ["--data", "/x", "--lr", "0.3"]
    assert document["typed"] == ["wait=true", "seed=1"]
    [first, *_] = csv.DictReader(hpcinit("status", "--csv").stdout.splitlines())
    assert (first["run"], first["loss"], first["result"]) == ("train-0001", "3.0", "4.0"), first
    assert (first["typed"], first["arguments"]) == ("wait=true seed=1", "--data /x --lr 0.3")


@pytest.mark.slurm
def test_the_best_run_of_a_sweep(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """`status SWEEP --sort loss --top 1` shows the best task of a sweep with its combination."""
    (tmp_path / "train.py").write_text(PROGRAM)
    options = (*SMALL, "name=many", "wait=true")
    done = submit(hpcinit, idle_slurm, "-m", "+lr=0.3,0.1,0.2", "job.args=[--lr,'${lr}']", "job=program",
                  "job.script=train.py", *options)  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = hpcinit("status", "many-0001", "--sort", "loss", "--top", "1", env=idle_slurm.env).stdout.splitlines()
    assert len(shown) == 1 and shown[0].startswith("many-0001/1 ") and "lr=0.1" in shown[0], shown
    assert "loss 1  result 2" in shown[0]
    (tmp_path / "runs/many-0001/1/spec.json").unlink()  # submission.json of each task has its arguments
    [best] = statuses(hpcinit, idle_slurm, "many-0001", "--sort=loss", "--top=1")
    assert best["arguments"] == ["--lr", "0.1"]
    assert (best["task"], best["progress"]["values"]["loss"], best["result"]) == (1, 1.0, 2.0)
    assert best["parameters"] == {"lr": "0.1"} and best["typed"][-1] == "+lr=0.1"
    rows = list(csv.DictReader(hpcinit("status", "many-0001", "--csv", env=idle_slurm.env).stdout.splitlines()))
    assert [(row["run"], row["lr"], row["loss"]) for row in rows] == [
        ("many-0001/0", "0.3", "3.0"),
        ("many-0001/1", "0.1", "1.0"),
        ("many-0001/2", "0.2", "2.0"),
    ]
    refused = hpcinit("status", "--csv", "--json")
    assert refused.returncode == 2 and "--csv and --json cannot be combined" in refused.stderr


@pytest.mark.slurm
def test_a_resubmitted_task_takes_the_place_of_its_original(
    idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path
) -> None:
    """A sweep shows a resubmitted task as it ran last; a second resubmission of the sweep has nothing to do.

    `cancel SWEEP` does not touch the new run, and a task whose new run waits is not submitted a third time.
    """
    fails = "import os, sys; sys.exit(3 if os.path.exists('bad') and sys.argv[1] == '2' else 0)"
    (tmp_path / "train.py").write_text(fails)
    (tmp_path / "bad").touch()
    env = idle_slurm.env
    done = submit(hpcinit, idle_slurm, "-m", "+k=1,2,3", *SMALL, "wait=true", "--", "train.py", "${k}")
    assert done.returncode == 3, done.stderr
    (tmp_path / "bad").unlink()
    held = hpcinit("resubmit", "train-0001/1", "wait=false", "+cluster.sbatch.begin=now+1hour", env=env)
    assert held.returncode == 0, held.stderr
    refused = hpcinit("resubmit", "train-0001/1", env=env)
    assert refused.returncode == 2 and "1 was submitted again as train-0002, which is still PENDING" in refused.stderr
    assert "has failed, so there is nothing to submit" in hpcinit("resubmit", "train-0001", env=env).stderr
    assert "train-0001: has already ended" in hpcinit("cancel", "train-0001", env=env).stdout
    [task] = statuses(hpcinit, idle_slurm, "train-0001")[1:2]
    assert (task["state"], task["resubmitted"], task["parameters"]) == ("PENDING", "train-0002", {"k": "2"})
    assert hpcinit("cancel", "train-0002", env=env).returncode == 0
    done = hpcinit("resubmit", "train-0001", "wait=true", env=env)  # the newest run of task 1 was canceled
    assert done.returncode == 0, done.stderr
    lines = hpcinit("status", "train-0001", env=env).stdout.splitlines()
    assert lines[0].endswith("3 tasks: 3 COMPLETED"), lines
    assert "COMPLETED     k=2  submitted again as train-0003" in lines[2], lines
    shutil.rmtree(tmp_path / "runs/train-0003")
    assert statuses(hpcinit, idle_slurm, "train-0001")[1]["state"] == "CANCELLED"


@pytest.mark.slurm
def test_a_running_run_whose_folder_was_deleted(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """`status` shows jobs in the queue whose run folder does not exist, with the command that cancels them."""
    program = ("sh", "-c", "echo up; sleep 600")
    kept = folder_of(submit(hpcinit, idle_slurm, *SMALL, "name=kept", "--", *program))
    gone = folder_of(submit(hpcinit, idle_slurm, *SMALL, "name=gone", "--", *program))
    job = str(json.loads((gone / "submission.json").read_text())["job_id"])
    logs = [folder / "logs/rank-0.log" for folder in (kept, gone)]
    until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    shutil.rmtree(gone)
    env, queries = counting_queries(tmp_path)
    shown = hpcinit("status", env={**idle_slurm.env, **env}).stdout.splitlines()
    assert queries.read_text().split() == ["squeue"]
    [line] = [line for line in shown if line.startswith(gone.name)]
    assert "RUNNING" in line and f"its run folder was deleted; cancel it: scancel {job}" in line
    assert len(shown) == 2 and "deleted" not in next(line for line in shown if line.startswith(kept.name))
    for name in (gone.name, str(gone), job):
        named = hpcinit("status", name, env=idle_slurm.env)
        assert f"its run folder was deleted; cancel it: scancel {job}" in named.stdout, (name, named.stderr)
    both = hpcinit("status", kept.name, gone.name, env=idle_slurm.env).stdout.splitlines()
    assert [line.split()[0] for line in both] == [kept.name, gone.name] and "deleted" in both[1]
    assert "no run 'nope-0001'" in hpcinit("status", "nope-0001", gone.name, env=idle_slurm.env).stderr
    shutil.rmtree(kept)
    found = statuses(hpcinit, idle_slurm)
    assert {(Path(one["run"]).name, one["folder_deleted"]) for one in found} == {(gone.name, True), (kept.name, True)}
    elsewhere = hpcinit("status", "--runs-dir", str(tmp_path / "other"), env=idle_slurm.env)
    assert elsewhere.returncode == 2 and "no runs in" in elsewhere.stderr
    idle_slurm.run("scancel", job)
    idle_slurm.cancel_all()


def test_a_loss_that_becomes_nan(hpcinit: Run, tmp_path: Path) -> None:
    """A loss that became NaN in `run.progress` is shown by status, watch and why, with the first NaN step."""
    (tmp_path / "train.py").write_text("""
import hpcinit
with hpcinit.session() as run:
    for step in range(1, 41):
        run.progress(step, 40, loss=float("nan") if step >= 7 else 1 / step, norm=float("inf") if step == 3 else 1.0)
""")
    done = hpcinit("submit", "wait=true", "--", "train.py")
    assert done.returncode == 0, done.stderr
    note = "norm was not finite at step 3, loss is nan, first at step 7"
    assert note in hpcinit("status").stdout
    assert note in hpcinit("watch", "train-0001").stdout
    why = hpcinit("why", "train-0001").stdout
    assert why.startswith(f"nothing failed, but {note}  step 40/40") and "what to do: " in why, why
    assert json.loads(hpcinit("why", "--json", "train-0001").stdout)["kind"] == "not-a-number"
    text = hpcinit("status", "--json").stdout
    assert "NaN" not in text
    document = json.loads(text)
    assert document["not_finite"] == {"norm": 3, "loss": 7} and document["progress"]["values"]["loss"] is None


def test_runs_without_a_value_are_last(tmp_path: Path) -> None:
    """NaN and missing values are the last, in both orders."""
    losses = {"a": "NaN", "b": "2.0", "c": None, "d": "1.0"}
    runs = []
    for name, loss in losses.items():
        (tmp_path / name).mkdir()
        if loss:
            (tmp_path / name / "progress.json").write_text(f'{{"step": 1, "total": 2, "values": {{"loss": {loss}}}}}')
        runs.append(overview.Run(tmp_path / name, State("COMPLETED", "7", LOCAL)))
    assert [run.name for run in status.sort(runs, "loss", reverse=False)] == ["d", "b", "a", "c"]
    assert [run.name for run in status.sort(runs, "loss", reverse=True)] == ["b", "d", "a", "c"]
    with pytest.raises(RequestError, match="no run has a value with this name, expected one of: loss, step"):
        status.sort(runs, "accuracy", reverse=False)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([["--lr", "1"], ["--lr", "2"]], ["--lr 1", "--lr 2"]),
        ([["--lr=1"], ["--lr=2"]], ["--lr=1", "--lr=2"]),
        ([["--shift", "-1"], ["--shift", "-2"]], ["--shift -1", "--shift -2"]),
        ([["--fast", "--lr", "1"], ["--lr", "1"]], ["--fast", ""]),
        ([["a b"], ["c"]], ["'a b'", "c"]),
        ([["same"], ["same"]], ["", ""]),
        ([["--lr", "1"]], ["train.py --lr 1"]),
    ],
)
def test_arguments_that_differ(arguments: list[list[str]], shown: list[str]) -> None:
    """An option and its value stay together; arguments that all runs have are omitted."""
    submissions = [Submission(0.0, "train.py", tuple(one)) for one in arguments]
    assert requests.distinguish(submissions) == shown
