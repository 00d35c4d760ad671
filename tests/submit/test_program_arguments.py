"""The program's arguments after --: ${key} is replaced, and a sweep that sweeps nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import printed, submit


def test_references_are_replaced(hpcinit: Run) -> None:
    """Only ${key} of a key on the command line is replaced. Every other ${...} is the shell's."""
    words = ["+lr=1e-3", "+model.width=8", "nodes=2", "wait=true", "name=x"]
    shell = 'echo "$@" ${HOME} ${nothing:-none}'
    program = ["sh", "-c", shell, "-", "--lr=${lr}", "${model.width}x${nodes}", r"\${lr}", "${runs_dir}", "${lrs}"]
    done = hpcinit("submit", *words, "--", *program, env={"HOME": "/home/me"})
    assert done.returncode == 0 and "has no effect" not in done.stderr, done.stderr
    assert printed(Path("runs/x-0001"), 1) == "--lr=1e-3 8x2 ${lr} ${runs_dir} ${lrs} /home/me none\n"


def test_a_reference_to_a_list_is_refused(hpcinit: Run) -> None:
    """An argument is a single value."""
    done = hpcinit("submit", "+lr=[1,2]", "--", "echo", "${lr}")
    assert done.returncode == 2 and "${lr} after -- is [1, 2], expected a single value" in done.stderr


@pytest.mark.slurm
def test_a_sweep_over_an_argument(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Each task of a sweep gets its own value and number, and there is no warning."""
    (tmp_path / "toy.sh").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "toy.sh").chmod(0o755)
    words = ["-m", "+lr=1,2,3", "ranks_per_node=1", "cluster.gpu_flag=null", "name=x", "wait=true"]
    done = submit(hpcinit, idle_slurm, *words, "--", "./toy.sh", "${lr}", "task-${hydra:job.num}")
    assert done.returncode == 0 and "has no effect" not in done.stderr, done.stderr
    assert [printed(Path(f"runs/x-0001/{task}"), 0) for task in range(3)] == ["1 task-0\n", "2 task-1\n", "3 task-2\n"]


@pytest.mark.parametrize(
    ("words", "program", "message"),
    [
        (
            ["+lr=1,2,3"], ["./toy.sh", "fixed"],
            "+lr=1 and +lr=2 of this sweep would submit the same job twice, because the program does not get lr: pass it to the program, as in: "
            "-- ./toy.sh fixed '${lr}', or add again=true to submit both",
        ),
        (["+lr=1,2"], ["./toy.sh", "--lr", "1e-3", "x"], "as in: -- ./toy.sh --lr '${lr}' x, or add"),
        (["+lr=1,2"], ["./toy.sh", "--lr=1e-3"], "as in: -- ./toy.sh '--lr=${lr}', or add"),
        (
            ["seed=1,1"], ["./toy.sh"],
            "combination 0 and combination 1 of this sweep would submit the same job twice: give each value once",
        ),
        (["seed=1,2,1"], ["./toy.sh"], "seed=1 and seed=1 of this sweep would submit the same job twice"),
        (
            [], ["./toy.sh", "--lr", "1e-1,1e-2"],
            "-m requests a sweep, but --lr 1e-1,1e-2 after -- is not swept. To sweep it: hpcinit submit -m +lr=1e-1,1e-2 -- "
            "./toy.sh --lr '${lr}'. To pass the list unchanged, remove -m",
        ),
        ([], ["./toy.sh", "--seed=1,2"], "hpcinit submit -m seed=1,2 -- ./toy.sh '--seed=${seed}'"),
    ],
)  # fmt: skip
def test_a_sweep_that_sweeps_nothing(
    hpcinit: Run, tmp_path: Path, words: list[str], program: list[str], message: str
) -> None:
    """Identical combinations and a list after -- are refused with the correct command, and nothing is submitted."""
    (tmp_path / "toy.sh").write_text("#!/bin/sh\n")
    (tmp_path / "toy.sh").chmod(0o755)
    done = hpcinit("submit", "-m", *words, "--", *program)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()


def test_what_is_allowed(hpcinit: Run) -> None:
    """again=true submits identical combinations, and a list is only a warning if another key is swept."""
    assert hpcinit("submit", "-m", "+lr=1,2", "again=true", "dry_run=true", "--", "true").returncode == 0
    done = hpcinit("submit", "-m", "seed=1,2", "dry_run=true", "--", "true", "--gpus", "0,1")
    assert done.returncode == 0 and "--gpus 0,1 after -- is not swept: every task gets the whole list" in done.stderr
    assert hpcinit("submit", "dry_run=true", "--", "true", "--gpus", "0,1").stderr == ""
