"""A full disk at the end of a job, on the real Slurm: the next job of a chain runs, and a restart happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import outcomes
from tests.chaos.conftest import ALL
from tests.chaos.outcomes import Outcome
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submit.test_chain import jobs, states
from tests.submit.test_restart import ATTEMPTS, finish, state
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos(short=True), pytest.mark.timeout(400)]
SHAPE = ["ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]

# Its switches and what it reports are in the working folder, which has room. Rank 0 alone writes.
PROGRAM = """
import os, pathlib, time
import hpcinit
def report(word):
    if int(os.environ["RANK"]) == 0:
        with open("reported", "a") as file:
            file.write(f"{os.environ['SLURM_JOB_ID']} {word}\\n")
with hpcinit.session() as run:
    report("up")
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
    while not pathlib.Path("finish").exists():
        if stop := run.should_stop():
            report(f"stopped: {stop.reason}")
            break
        report("step")
        time.sleep(0.2)
while not pathlib.Path("leave").exists():
    time.sleep(0.1)
"""


class Disk:
    """A small file system. It holds the run folders of a cluster and nothing else."""

    def __init__(self, place: Path) -> None:
        self.place, self._filler = place, place / "filler"

    def fill(self) -> None:
        """Write until not one more byte fits."""
        with self._filler.open("ab", buffering=0) as filler:
            for size in (1 << 16, 4096, 1):
                while True:
                    try:
                        filler.write(bytes(size))
                    except OSError:
                        break

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Disk, MiniSlurm]]:
    """The disk is mounted before the nodes are made, so that all of them see it."""
    require_slurm()
    place = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "hpcinit", place], check=True)
    try:
        with MiniSlurm(nodes=2, gpus=0, name=f"pytest-{os.getpid()}-chain") as slurm:
            yield Disk(place), slurm
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def disk(cluster: tuple[Disk, MiniSlurm]) -> Iterator[Disk]:
    disk, slurm = cluster
    yield disk
    disk.free()
    slurm.cancel_all()


@pytest.fixture
def small(cluster: tuple[Disk, MiniSlurm], disk: Disk) -> MiniSlurm:
    return cluster[1]


def reported(job: str, word: str) -> bool:
    path = Path("reported")
    return path.exists() and f"{job} {word}" in path.read_text()


@pytest.mark.parametrize(
    ("full", "launch", "kind"),
    [
        # A command's exit status is its own: from a disk that is full before its first step nothing can be told.
        ("before the first step", "srun", "script"),
        ("before the stop", "srun", "script"),
        ("before the stop", "srun", "command"),
        ("before the stop", "fork", "script"),
        ("until the next job", "srun", "script"),
    ],
)
def test_a_chain_goes_on_from_a_full_disk(
    hpcinit: Run, disk: Disk, small: MiniSlurm, full: str, launch: str, kind: str
) -> None:
    """Rank 0 cannot record that the training stopped before its end. The next job of the chain runs all the same."""
    Path("stop.py").write_text(PROGRAM)
    program = ["stop.py"] if kind == "script" else [sys.executable, "stop.py"]
    words = [f"runs_dir={disk.place}", "chain=2", "nodes=2", "time_min=1", "stop.signal=USR1", f"launch={launch}"]
    folder = folder_of(submit(hpcinit, small, *words, *SHAPE, "--", *program))
    first, second = jobs(folder)
    small.run("scontrol", "update", f"jobid={second}", "TimeLimit=10")  # a busy machine may need its minute to start
    until(lambda: reported(first, "up"))
    if full == "before the first step":
        disk.fill()
    Path("go").touch()
    until(lambda: reported(first, "step"))
    disk.fill()
    small.run("scancel", "--signal=USR1", first)
    since = time.monotonic()
    until(lambda: reported(first, "stopped: time limit"))
    if full != "until the next job":
        disk.free()  # another job has removed its files: exit.json of the batch script can be written
    Path("leave").touch()
    until(lambda: states(small, [first])[0] in ("COMPLETED", "FAILED"))
    until(lambda: states(small, [second])[0] in ("RUNNING", "COMPLETED", "FAILED"))
    disk.free()
    until(lambda: reported(second, "up") or states(small, [second])[0] != "RUNNING", 60)
    assert reported(second, "up"), (folder / "logs/job.log").read_text()
    shown = hpcinit("status", "--json", str(folder), env=small.env).stdout
    assert json.loads(shown)["link"] == "job 2 of a chain of 2", shown
    if full == "before the stop":
        told = f"hpcinit: warning: job {first} of this chain stopped, the reason was not recorded; was the disk full?"
        assert told in (folder / "logs/job.log").read_text()
    Path("finish").touch()
    until(lambda: states(small, [second])[0] == "COMPLETED", 60)
    assert not (folder / "stopped.txt").exists(), "the second job came to its end"
    if os.environ.get(ALL) == "1" and full == "before the stop" and kind == "script":
        why = hpcinit("why", folder.name, f"--runs-dir={disk.place}", env=small.env).stdout.partition("\n")[0]
        ends = f"job 1 {states(small, [first])[0]}, job 2 {states(small, [second])[0]}"
        fault = "the disk is full at the end of a chain's job"
        outcomes.keep(Outcome(fault, launch, why, time.monotonic() - since, None, ends))


def test_a_restart_happens_on_a_full_disk(hpcinit: Run, disk: Disk, small: MiniSlurm) -> None:
    """Neither the record of the restart nor that of the job's end can be written; the job restarts, and its budget
    still ends it."""
    waits = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)\n"
    counts = ATTEMPTS.replace("sys.exit(", "open('attempts', 'a').write('x')\nsys.exit(")
    Path("attempts.py").write_text(waits + counts.replace("print(", "0 and print("))  # stdout is on the full disk
    words = [f"runs_dir={disk.place}", "restart.max_restarts=2", "restart.without_progress=null", "nodes=1", *SHAPE]
    done = submit(hpcinit, small, *words, "--", "attempts.py", "76", "76", "76", "0")
    job = job_id_of(done)
    until(lambda: state(small, job) == "RUNNING")
    until((folder_of(done) / "exit.json").exists)
    disk.fill()
    Path("go").touch()
    assert finish(small, job, 120) == "FAILED"
    assert Path("attempts").read_text() == "xxx", "the first attempt and two restarts"


def test_a_training_that_stops_on_a_full_disk_is_requeued(hpcinit: Run, disk: Disk, small: MiniSlurm) -> None:
    """With restart.on=[time_limit] a stop whose reason could not be recorded counts as the time limit."""
    Path("stop.py").write_text(PROGRAM)
    asked = ["restart.max_restarts=1", "restart.on=[time_limit]", "time_min=1", "stop.signal=USR1"]
    done = submit(hpcinit, small, f"runs_dir={disk.place}", *asked, "nodes=2", *SHAPE, "--", "stop.py")
    job = job_id_of(done)
    Path("go").touch()
    until(lambda: reported(job, "step"))
    disk.fill()
    small.run("scancel", "--signal=USR1", job)
    until(lambda: reported(job, "stopped: time limit"))
    small.run("scontrol", "update", f"jobid={job}", "TimeLimit=10")  # as above, for the next attempt
    Path("leave").touch()
    until(lambda: state(small, job) in ("PENDING", "COMPLETED", "FAILED"))
    disk.free()
    Path("finish").touch()
    assert finish(small, job, 120) == "COMPLETED"
    assert Path("reported").read_text().count(" up") == 2, "the first attempt and one restart"
