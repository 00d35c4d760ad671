"""`hpcinit cancel` of a run whose submitter was killed between sbatch and its record, beside jobs that look alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_of, submit

pytestmark = pytest.mark.slurm
SMALL = ("nodes=1", "ranks_per_node=1", "gpus_per_node=0", "+cluster.sbatch.begin=now+1hour")


def queued(slurm: MiniSlurm) -> set[str]:
    return set(slurm.run("squeue", "--noheader", "--format=%A", "--states=PENDING").split())


def test_jobs_that_look_alike_stay(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A run of the same name in another runs_dir or inside the run, and another user's job with the same script and
    comment, stay."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    done = submit(hpcinit, idle_slurm, *SMALL, f"runs_dir={tmp_path}/link/runs", "name=a", "--", "true")
    killed, job = folder_of(done), job_of(folder_of(done))
    token = json.loads((killed / "submission.json").read_text())["token"]
    (killed / "submission.json").unlink()
    beside = job_of(folder_of(submit(hpcinit, idle_slurm, *SMALL, f"runs_dir={tmp_path}/b", "name=a", "--", "true")))
    inner = job_of(folder_of(submit(hpcinit, idle_slurm, *SMALL, f"runs_dir={killed}", "name=a", "--", "true")))
    alike = ("--uid=daemon", "--begin=now+1hour", f"--comment=hpcinit={token}", "--chdir=/")
    theirs = idle_slurm.run("sbatch", "--parsable", *alike, str(killed / "job.sh")).strip()
    assert queued(idle_slurm) == {job, beside, inner, theirs}
    found = hpcinit("cancel", str(tmp_path / "real/runs" / killed.name), env=idle_slurm.env)
    assert found.returncode == 0 and f"job {job} is being canceled; hpcinit was killed before" in found.stdout, found
    assert queued(idle_slurm) == {beside, inner, theirs}
    idle_slurm.cancel_all()


def test_a_sweep_without_a_record(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The arrays of a sweep are found by their scripts, also if only the last one was not recorded."""
    words = ("-m", *SMALL, "name=s", "time_min=5,6", "+x=1,2", "again=true")
    for kept in (False, True):
        done = submit(hpcinit, idle_slurm, *words, "--", "echo", "${x}")
        assert done.returncode == 0, done.stderr
        sweep = max((tmp_path / "runs").glob("s-*"))
        record = json.loads((sweep / "submission.json").read_text())
        jobs = {one["job_id"] for one in record["sweep"]}
        assert len(jobs) == 2 and queued(idle_slurm) == jobs
        lost = [json.loads((sweep / str(n) / "submission.json").read_text())["job_id"] for n in range(4)]
        for number in range(4):
            if not (kept and lost[number].startswith(f"{record['job_id']}_")):
                (sweep / str(number) / "submission.json").unlink()
        if not kept:
            (sweep / "submission.json").unlink()
        found = hpcinit("cancel", str(sweep), env=idle_slurm.env)
        assert found.returncode == 0 and "are being canceled" in found.stdout, (found.stdout, found.stderr)
        assert not queued(idle_slurm)
