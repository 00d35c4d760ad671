"""`hpcinit logs` of several ranks, a sweep and a chain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.observe.test_state import SMALL
from tests.submitting import submit


@pytest.mark.slurm
def test_ranks_tasks_and_links(idle_slurm: MiniSlurm, hpcinit: Run) -> None:
    """Each line starts with its rank, and in a sweep with its task; the jobs of a chain follow each other."""
    env = idle_slurm.env
    program = ("sh", "-c", "echo rank $SLURM_PROCID of $(grep ^seed: $HPCINIT_RUN/config.yaml)")
    submit(hpcinit, idle_slurm, *SMALL, "ranks_per_node=4", "wait=true", "name=four", "--", *program)
    lines = [
        line
        for line in hpcinit("logs", "--rank", "0,2-3", "four-0001", env=env).stdout.splitlines()
        if ": rank " in line
    ]
    assert [line.partition(" of")[0] for line in lines] == ["0: rank 0", "2: rank 2", "3: rank 3"]
    assert hpcinit("logs", "--rank", "2", "four-0001", env=env).stdout.splitlines()[-1].startswith("rank 2 of")
    done = hpcinit("logs", "--rank", "3-5", "four-0001", env=env)
    assert done.returncode == 2 and "has no log of the ranks 4-5; ranks with a log: 0-3" in done.stderr
    submit(hpcinit, idle_slurm, "-m", "seed=7,8", *SMALL, "name=many", "--", *program)
    followed = hpcinit("logs", "--all", "--follow", "many-0001", env=env).stdout
    assert "0/0: rank 0 of seed: 7\n" in followed and "1/0: rank 0 of seed: 8\n" in followed
    chain = ("sh", "-c", "echo link $SLURM_JOB_ID; exit 143")
    submit(hpcinit, idle_slurm, *SMALL, "chain=2", "name=long", "--", *chain)
    followed = hpcinit("logs", "-f", "long-0001", env=env).stdout
    links = [line.split()[1] for line in followed.splitlines() if line.startswith("link ")]
    assert len(links) == 2 and int(links[1]) == int(links[0]) + 1


@pytest.mark.parametrize("word", ["x", "1-", "-1", "1,,2", ""])
def test_an_invalid_rank(tmp_path: Path, hpcinit: Run, word: str) -> None:
    """An invalid --rank is refused with examples of valid values."""
    (tmp_path / "runs/x-0001").mkdir(parents=True)
    (tmp_path / "runs/x-0001/job.sh").write_text("")
    done = hpcinit("logs", f"--rank={word}", "x-0001")
    assert done.returncode == 2 and f"--rank is {word!r}, expected one or more ranks: 3, or 0,4-7" in done.stderr
