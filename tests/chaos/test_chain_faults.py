"""A full disk at the end of a job, on the real Slurm: the next job of a chain and a restart still start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.slurm import queue
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

# The program reads and writes files in the working folder, whose disk is not full. Only rank 0 writes.
PROGRAM = """
import os, pathlib, time
import hpcinit
def report(event):
    if int(os.environ["RANK"]) == 0:
        with open("reported", "a") as file:
            file.write(f"{os.environ['SLURM_JOB_ID']} {event}\\n")
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
    """A small file system that contains only the run folders of a cluster."""

    def __init__(self, place: Path) -> None:
        self.place, self._filler = place, place / "filler"

    def fill(self) -> None:
        """Write until the file system is full."""
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
    """A small disk and a cluster. The disk is mounted first, so that all nodes can access it."""
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


def reported(job: str, event: str) -> bool:
    path = Path("reported")
    return path.exists() and f"{job} {event}" in path.read_text()


def elapsed_s(slurm: MiniSlurm, job: str) -> int:
    return queue.seconds(slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%M").strip()) or 0


def signal_near_the_end(slurm: MiniSlurm, job: str) -> None:
    """Send USR1 to a running job while its limit is 30 to 60 s away, as --signal does; then extend the limit.

    A short limit from the start could end the job before its first step on a busy machine.
    """
    until(lambda: elapsed_s(slurm, job) % 60 < 30)  # Slurm's limits are whole minutes
    slurm.run("scontrol", "update", f"jobid={job}", f"TimeLimit={elapsed_s(slurm, job) // 60 + 1}")
    slurm.run("scancel", "--signal=USR1", job)
    until(lambda: reported(job, "stopped: time limit"))
    slurm.run("scontrol", "update", f"jobid={job}", "TimeLimit=10")


@pytest.mark.parametrize(
    ("full", "launch", "kind"),
    [
        # Not tested with a command: its exit status is its own, so a disk that was full before its first step has no effect.
        ("before the first step", "srun", "script"),
        ("before the stop", "srun", "script"),
        ("before the stop", "srun", "command"),
        ("before the stop", "fork", "script"),
        ("until the next job", "srun", "script"),
    ],
)
def test_a_chain_continues_after_a_full_disk(
    hpcinit: Run, disk: Disk, small: MiniSlurm, full: str, launch: str, kind: str
) -> None:
    """The next job of the chain runs even if rank 0 could not record that the run stopped early."""
    Path("stop.py").write_text(PROGRAM)
    program = ["stop.py"] if kind == "script" else [sys.executable, "stop.py"]
    overrides = [f"runs_dir={disk.place}", "chain=2", "nodes=2", "stop.signal=USR1", f"launch={launch}"]
    folder = folder_of(submit(hpcinit, small, *overrides, *SHAPE, "--", *program))
    first, second = jobs(folder)
    until(lambda: reported(first, "up"))
    if full == "before the first step":
        disk.fill()
    Path("go").touch()
    until(lambda: reported(first, "step"))
    disk.fill()
    since = time.monotonic()
    signal_near_the_end(small, first)
    if full != "until the next job":
        disk.free()  # as if another job had removed its files: the batch script can write exit.json
    Path("leave").touch()
    until(lambda: states(small, [first])[0] in ("COMPLETED", "FAILED"))
    until(lambda: states(small, [second])[0] in ("RUNNING", "COMPLETED", "FAILED"))
    disk.free()
    until(lambda: reported(second, "up") or states(small, [second])[0] != "RUNNING", 60)
    assert reported(second, "up"), (folder / "logs/job.log").read_text()
    shown = hpcinit("status", "--json", str(folder), env=small.env).stdout
    assert json.loads(shown)["link"] == "job 2 of a chain of 2", shown
    if full == "before the stop":
        told = f"hpcinit: warning: job {first} of this chain stopped early and recorded no reason. Was the disk full?"
        assert told in (folder / "logs/job.log").read_text()
    Path("finish").touch()
    until(lambda: states(small, [second])[0] == "COMPLETED", 60)
    assert not (folder / "stopped.json").exists(), "the second job reached its end"
    if os.environ.get(ALL) == "1" and full == "before the stop" and kind == "script":
        why = hpcinit("why", folder.name, f"--runs-dir={disk.place}", env=small.env).stdout.partition("\n")[0]
        ends = f"job 1 {states(small, [first])[0]}, job 2 {states(small, [second])[0]}"
        fault = "the disk is full at the end of a chain's job"
        outcomes.keep(Outcome(fault, launch, why, time.monotonic() - since, None, ends))


def test_a_restart_happens_on_a_full_disk(hpcinit: Run, disk: Disk, small: MiniSlurm) -> None:
    """A job restarts without a writable record of the restart, and its restart budget still applies."""
    waits = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)\n"
    counts = ATTEMPTS.replace("sys.exit(", "open('attempts', 'a').write('x')\nsys.exit(")
    Path("attempts.py").write_text(waits + counts.replace("print(", "0 and print("))  # stdout is on the full disk
    overrides = [f"runs_dir={disk.place}", "restart.max_restarts=2", "restart.without_progress=null", "nodes=1", *SHAPE]
    done = submit(hpcinit, small, *overrides, "--", "attempts.py", "76", "76", "76", "0")
    job = job_id_of(done)
    until(lambda: state(small, job) == "RUNNING")
    until((folder_of(done) / "exit.json").exists)
    disk.fill()
    Path("go").touch()
    assert finish(small, job, 120) == "FAILED"
    assert Path("attempts").read_text() == "xxx", "the first attempt and two restarts"


def test_a_run_that_stops_on_a_full_disk_is_requeued(hpcinit: Run, disk: Disk, small: MiniSlurm) -> None:
    """With restart.on=[time_limit] a stop whose reason could not be recorded counts as the time limit."""
    Path("stop.py").write_text(PROGRAM)
    restart = ["restart.max_restarts=1", "restart.on=[time_limit]", "stop.signal=USR1"]
    done = submit(hpcinit, small, f"runs_dir={disk.place}", *restart, "nodes=2", *SHAPE, "--", "stop.py")
    job = job_id_of(done)
    Path("go").touch()
    until(lambda: reported(job, "step"))
    disk.fill()
    signal_near_the_end(small, job)
    Path("leave").touch()
    until(lambda: state(small, job) in ("PENDING", "COMPLETED", "FAILED"))
    disk.free()
    Path("finish").touch()
    assert finish(small, job, 120) == "COMPLETED"
    assert Path("reported").read_text().count(" up") == 2, "the first attempt and one restart"
