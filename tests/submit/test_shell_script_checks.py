"""A shell script that starts ranks itself is refused before the queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.checks.started_program import first_directive, launchers
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, submit

BATCH = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --time=60\nmodule load cuda\nsrun python train.py --lr 3\n"


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("srun python train.py", "srun"),
        ("  torchrun --nproc-per-node=2 train.py", "torchrun"),
        ("exec ~/env/bin/torchrun train.py", "torchrun"),
        ('"$VENV/bin/torchrun" train.py', "torchrun"),
        ("OMP_NUM_THREADS=4 mpirun -np 4 ./solver", "mpirun"),
        ("cd x && accelerate launch train.py", "accelerate launch"),
        ("if true; then deepspeed train.py; fi", "deepspeed"),
        ("time mpiexec -n 4 ./solver", "mpiexec"),
        ("python3 -u -m torch.distributed.run train.py", "python -m torch.distributed.run"),
        ("torchrun \\\n  --nnodes=2 \\\n  train.py", "torchrun"),
        ("# torchrun train.py", None),
        ("echo torchrun train.py", None),
        ("accelerate config", None),
        ("python train.py --launcher torchrun", None),
        ("python torchrun_helper.py", None),
        ("which srun", None),
        ("export LAUNCHER=torchrun", None),
        ("srunning=1", None),
    ],
)
def test_lines_that_start_ranks(line: str, launcher: str | None) -> None:
    """Only a launcher at the start of a command counts, with its continuation lines."""
    found = [one.launcher for one in launchers(f"#!/bin/sh\nset -e\n{line}\n")]
    assert found == ([launcher] if launcher else [])


def test_directives_are_those_that_sbatch_reads() -> None:
    """An #SBATCH line after the first command, for example in a here-document, has no effect."""
    found = first_directive(BATCH)
    assert found is not None and (found.number, found.text) == (2, "#SBATCH --nodes=4")
    assert first_directive("#!/bin/sh\ncat > job.sh << EOF\n#SBATCH --nodes=4\nEOF\n") is None


@pytest.mark.parametrize(
    ("text", "program", "messages"),
    [
        (
            "torchrun --nproc-per-node=2 train.py --lr 3\n", ["./wrap.sh"],
            [
                "'./wrap.sh' starts ranks itself, with torchrun in line 2: 'torchrun --nproc-per-node=2 train.py --lr 3'",
                "2 nodes x 2, and each copy would start a separate training run", "as in: -- train.py --lr 3",
                "job.check_script=false",
            ],
        ),
        ("srun python train.py\n", ["bash", "wrap.sh"], ["'wrap.sh' starts ranks itself, with srun", "would wait forever"]),
        ("", ["bash", "-c", "module load x; mpirun ./solver"], ["the text after bash -c starts ranks itself, with mpirun"]),
        (BATCH.partition("\n")[2], ["./wrap.sh"], ["'./wrap.sh' is a batch script: line 2 is '#SBATCH --nodes=4'", "-- train.py --lr 3"]),
    ],
    ids=["torchrun", "srun", "bash -c", "batch script"],
)  # fmt: skip
def test_refused(hpcinit: Run, tmp_path: Path, text: str, program: list[str], messages: list[str]) -> None:
    """The message names the line, the reason and the program to submit, also in a dry run. No folder remains."""
    (tmp_path / "wrap.sh").write_text(f"#!/bin/bash\n{text}")
    (tmp_path / "wrap.sh").chmod(0o755)
    for more in ([], ["dry_run=true"]):
        done = hpcinit("submit", "nodes=2", "ranks_per_node=2", *more, "--", *program)
        assert (done.returncode, done.stdout) == (2, "")
        assert all(message in done.stderr for message in messages), done.stderr
        assert done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["nodes=1", "ranks_per_node=1"], "torchrun train.py\n"),
        (["nodes=2", "ranks_per_node=1"], "torchrun --nnodes=2 train.py\n"),
        (["nodes=2", "ranks_per_node=2"], "srun --overlap hostname\n"),
        (["nodes=2", "ranks_per_node=2", "job.check_script=false"], "torchrun train.py\n"),
        (["nodes=2", "ranks_per_node=2"], "python train.py\n"),
    ],
)
def test_accepted(hpcinit: Run, tmp_path: Path, overrides: list[str], text: str) -> None:
    """A launcher for one rank in all, one that knows all nodes, and a script that the user allows are accepted."""
    (tmp_path / "wrap.sh").write_text(f"#!/bin/bash\n{text}")
    (tmp_path / "wrap.sh").chmod(0o755)
    done = hpcinit("submit", *overrides, "dry_run=true", "--", "./wrap.sh")
    assert done.returncode == 0, done.stderr


@pytest.mark.slurm
def test_on_the_real_slurm(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A batch script is refused before the queue, and a wrapper without a launcher runs once per rank."""
    (tmp_path / "old.sbatch").write_text(BATCH)
    (tmp_path / "wrap.sh").write_text('#!/bin/bash\necho "rank $RANK of $WORLD_SIZE"\n')
    for name in ("old.sbatch", "wrap.sh"):
        (tmp_path / name).chmod(0o755)
    refused = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "--", "./old.sbatch")
    assert refused.returncode == 2 and "'./old.sbatch' is a batch script" in refused.stderr
    assert not (tmp_path / "runs").exists()
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", "wait=true", "--", "./wrap.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [printed(folder_of(done), rank) for rank in (0, 1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert json.loads((folder_of(done) / "spec.json").read_text())["program"]["target"] == "./wrap.sh"
