"""All combinations of a sweep are checked before the first job, and each has its own description."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.cli.main import main
from hpcinit.submit import folder
from tests.conftest import Run
from tests.submitting import scripts_of

NO_SLURM = {"PATH": f"{Path(sys.executable).parent}:/nowhere"}
# A stand-in for sbatch that accepts two jobs and refuses the third, as a limit on submitted jobs does.
REFUSES_THE_THIRD = """#!/bin/sh
case "$*" in *--test-only*) exit 0 ;; esac
echo x >> calls
if [ "$(wc -l < calls)" -gt 2 ]; then echo 'sbatch: error: Batch job submission failed: {why}' >&2; exit 1; fi
wc -l < calls
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_each_combination_becomes_a_job(hpcinit: Run, tmp_path: Path) -> None:
    """One line per combination shows its values, job id and folder. With wait=true the failed ones are reported."""
    words = ["-m", "seed=0,3", "wait=true", "--", "sh", "-c", "exit $(grep -c '^seed: 3' $HPCINIT_RUN/config.yaml)"]
    done = hpcinit("submit", *words)
    assert (done.returncode, done.stderr) == (1, "")
    lines = [line for line in done.stdout.splitlines() if "->" in line]
    for number, line in enumerate(lines):
        path = tmp_path / f"runs/sh-000{number + 1}"
        assert re.fullmatch(rf"seed={number * 3} -> job \d+ on local, {path}", line)
    assert len(lines) == 2
    assert done.stdout.index("== seed=0, sh-0001 ==") < done.stdout.index("COMPLETED")
    assert done.stdout.index("== seed=3, sh-0002 ==") < done.stdout.index("FAILED")
    assert sorted(path.name for path in tmp_path.rglob("[!.]*") if path.parent.name in {"runs", tmp_path.name}) == [
        "runs", "sh-0001", "sh-0002",
    ]  # fmt: skip


def test_swept_arguments_come_before_those_of_the_command_line(hpcinit: Run, tmp_path: Path) -> None:
    """Swept job.args precede the arguments after --, which replace a job's own program completely."""
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    words = ["-m", "+lr=1,2", "job.args=[--lr,'${lr}']", "wait=true", "--", "train.py", "more"]
    assert hpcinit("submit", *words).returncode == 0
    for number in (1, 2):
        assert f"['--lr', '{number}', 'more']" in (tmp_path / f"runs/train-000{number}/logs/rank-0.log").read_text()
    assert hpcinit("submit", "job=train_gpt", "wait=true", "--", "train.py", "x").returncode == 0
    assert "['x']" in (tmp_path / "runs/train_gpt-0001/logs/rank-0.log").read_text()


def test_dry_run_prints_the_scripts_that_would_be_written(hpcinit: Run, tmp_path: Path) -> None:
    """The scripts of a dry run are byte for byte those of the submissions, and it leaves no files."""
    words = ["submit", "-m", "seed=1,2", "name=a,b"]
    dry = hpcinit(*words, "dry_run=true", "--", "true")
    assert dry.stderr == "# seed=1 name=a\n# seed=1 name=b\n# seed=2 name=a\n# seed=2 name=b\n"
    assert list(tmp_path.iterdir()) == []
    assert hpcinit(*words, "wait=true", "--", "true").returncode == 0
    names = ["a-0001", "b-0001", "a-0002", "b-0002"]
    scripts = "".join((tmp_path / "runs" / name / "job.sh").read_text() for name in names)
    assert scripts_of(dry.stdout) == scripts.replace(" wait=true -- true\n", " -- true\n")  # in the header: the command


@pytest.mark.parametrize(
    ("words", "status", "messages"),
    [
        (["nodes=1,0,-1"], 2, ["with nodes=0: nodes is 0", "with nodes=-1: nodes is -1"]),
        (["nodes=1,abc"], 2, ["hpcinit: error: nodes=abc: expected a whole number"]),
        (["cluster=local,mini", "nodes=1,5"], 2, ["with cluster=mini nodes=5: nodes=5, but partition 'main'"]),
        (["nodes=1,2", "cluster=mini"], 1, ["sbatch is not on PATH"]),
        (["nodes=1,2", "runs_dir=/proc/x"], 1, ["with nodes=1: cannot write the run folder /proc/x/smoke-0001"]),
        (["nodes=1,2", "--", "nope.py"], 2, ["the program (job.script) is 'nope.py', expected a file"]),
    ],
)
def test_a_refused_sweep_submits_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    messages: list[str],
) -> None:
    """One invalid combination refuses the sweep: one line per problem, no job, no folder."""
    monkeypatch.setenv("PATH", NO_SLURM["PATH"])
    assert main(["submit", "-m", *words]) == status
    out, err = capfd.readouterr()
    smoke = err.startswith("no program after --, so this submits the smoke test")  # the checks have passed
    assert smoke == (status == 1)
    assert (out, err.count("\n")) == ("", (len(messages) if status == 2 else 1) + smoke)
    assert all(message in err for message in messages) and err.count("hpcinit: error: ") == err.count("\n") - smoke
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("why", "left"),
    [
        ("Job violates accounting policy", "runs_dir=c; runs_dir=d"),
        ("Socket timed out on send/recv operation", "runs_dir=d"),
    ],
)
def test_a_sweep_that_sbatch_refuses_halfway(tmp_path: Path, hpcinit: Run, why: str, left: str) -> None:
    """If sbatch refuses the third job, the first two are shown, and the third and the remaining ones are named."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(REFUSES_THE_THIRD.format(why=why))
    (tmp_path / "bin/sbatch").chmod(0o755)
    done = hpcinit(
        "submit",
        "-m",
        "cluster=mini",
        "cluster.submit_patience_s=1",
        "runs_dir=a,b,c,d",
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
    )
    assert done.returncode == 1
    assert [line.split(" on ")[0] for line in done.stdout.splitlines()] == [
        "runs_dir=a -> job 1",
        "runs_dir=b -> job 2",
    ]
    assert "hpcinit: error: with runs_dir=c: " in done.stderr and why in done.stderr
    assert done.stderr.endswith(f"\nnot submitted: {left}\n") and "nothing was submitted" not in done.stderr


@pytest.mark.slurm  # a mount needs root
def test_read_only_runs_dir(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A sweep on a read-only file system ends with one message."""
    (tmp_path / "ro").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", tmp_path / "ro"], check=True)
    try:
        assert main(["submit", "-m", "nodes=1,2", "runs_dir=ro/runs", "--", "true"]) == 1
    finally:
        subprocess.run(["umount", tmp_path / "ro"], check=True)
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "with nodes=1: cannot write the run folder" in err
    assert "the file system is read-only; choose another runs_dir=...; none of the 2 combinations was submitted" in err


def test_next_path_counts_up(tmp_path: Path) -> None:
    """Each call returns the next folder without creating it. claim() starts at the first one nevertheless."""
    shown = [folder.next_path(tmp_path, name).name for name in ("x", "x", "y", "x")]
    assert shown == ["x-0001", "x-0002", "y-0001", "x-0003"] and list(tmp_path.iterdir()) == []
    assert folder.claim(tmp_path, "x").name == "x-0001"
