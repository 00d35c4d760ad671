"""What a killed save leaves is removed when its job has ended for certain, and never while it may be alive."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.train.checkpoint import checkpoint_folder as of_steps
from hpcinit.train.checkpoint import export_weights
from hpcinit.train.checkpoint import owner as owners
from tests.minislurm import MiniSlurm
from tests.runtime.test_checkpoint import left_in, two_ranks, whole
from tests.waiting import until

# Writes half of a step, or removes what can be removed; the arguments are what to do, the folder and the job.
PROGRAM = """
import os, sys, time
from pathlib import Path
from hpcinit.train.checkpoint import checkpoint_folder as of_steps, owner as owners
do, folder, job = sys.argv[1], Path(sys.argv[2]), sys.argv[3].format(**os.environ)
if do == "write":
    of_steps.write(of_steps.begin(folder, 1, owners.of_this_process(job)).path / "dcp/file", bytes(4096))
    print("half of it is written", flush=True)
    time.sleep(600)
of_steps.sweep(folder, owners.of_this_process(job))
assert of_steps.wait_for_removals(100)
"""
OF_STEP = "{SLURM_JOB_ID}.{SLURM_STEP_ID}.0"  # World.job


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """An unfinished step, whose job was killed with SIGKILL while it wrote."""
    command = [sys.executable, "-c", PROGRAM, "write", str(tmp_path / "checkpoints"), ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "half of it is written\n"
        process.kill()
    return next((tmp_path / "checkpoints").glob(".step-*.tmp"))


def change(step: Path, **fields: object) -> None:
    path = step / of_steps.OWNER
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def swept(unfinished: Path, step: int = 2) -> bool:
    """Return whether the unfinished step is gone after this process has saved another one."""
    whole(unfinished.parent, step)
    return unfinished.name not in left_in(unfinished.parent)


def test_after_kill_9(killed: Path) -> None:
    """The next save removes the unfinished step of a process that was killed."""
    assert swept(killed)


def test_a_pid_that_another_process_has_now(killed: Path) -> None:
    """The killed process has ended, although its process id is in use again."""
    with subprocess.Popen(["sleep", "600"]) as process:
        change(killed, pid=process.pid)
        removed = swept(killed)
        process.kill()
    assert removed


def test_after_a_reboot(killed: Path) -> None:
    """A process of an earlier boot of this host has ended, although its process id and start time exist."""
    me = owners.of_this_process("")
    change(killed, pid=me.pid, started=me.started, boot="an earlier one")
    assert swept(killed)


UNKNOWN = {
    "another node": {"host": "n999"},
    "another pid namespace": {"namespace": "pid:[1]"},
    "written by an older hpcinit": {"boot": "", "namespace": "", "started": ""},
    "a job of another cluster": {"host": "n999", "job": "1.0.0", "cluster": "other"},
}


@pytest.mark.parametrize("case", list(UNKNOWN))
def test_a_process_that_may_be_alive(killed: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without proof that the job has ended, its unfinished step stays, however old, and one line names it."""
    change(killed, **UNKNOWN[case])
    for path in (killed / of_steps.OWNER, killed):
        os.utime(path, (1, 1))
    assert not swept(killed)
    of_steps.sweep(killed.parent, owners.of_this_process(""))
    assert not swept(killed, step=3)
    line = f"may still write into this unfinished folder. If that job has ended: rm -r {shlex.quote(str(killed))}\n"
    assert capsys.readouterr().err.count(line) == 1


def test_a_step_that_this_host_is_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another process of this host is alive: its unfinished step stays, without a message."""
    mine = owners.of_this_process("")
    step = of_steps.begin(tmp_path, 1, dataclasses.replace(mine, token="other")).path
    assert not swept(step)
    assert "unfinished" not in capsys.readouterr().err


def test_attempts_of_one_job(tmp_path: Path) -> None:
    """A restarted job removes what its earlier attempts left, but not what another step of the same attempt writes."""
    elsewhere = dataclasses.replace(owners.of_this_process(""), host="n999", token="other")
    mine = dataclasses.replace(elsewhere, job="42.1e2.1", token="mine")
    cases = {"42.0.0": True, "42.7.0": True, "42.1e1.1": True, "42.0.1": None, "42.2.1": None, "42.0.2": None}
    for job, ended in cases.items():
        assert owners.has_ended(dataclasses.replace(elsewhere, job=job), mine) is ended, job


def test_a_load_removes_it(killed: Path) -> None:
    """A run that loads and never saves removes the unfinished step of a killed process, too."""
    code = """
        found["loaded"] = checkpoint.load(Program(run, plain, ddp).wrapped, Path(os.environ["FOLDER"]), layout=Layout())
        found["left"] = checkpoint_folder.wait_for_removals(60) and names(Path(os.environ["FOLDER"]))
    """
    (zero, output), _ = two_ranks(code, killed.parents[1], FOLDER=str(killed.parent))
    assert zero == {"loaded": None, "left": []}, output
    assert not killed.exists()


EXPORT = """
import sys, time
from pathlib import Path
from hpcinit.train.checkpoint import export_weights
print(export_weights.begin(Path(sys.argv[1]), ""), flush=True)
time.sleep(600)
"""


def test_an_unfinished_export(tmp_path: Path) -> None:
    """The next export removes what a killed one left, at once, and keeps the folder of one that is alive, however old."""
    folder = tmp_path / "out [1]"
    command = [sys.executable, "-c", EXPORT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as alive:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout and alive.stdout
            gone, kept = Path(killed.stdout.readline().rstrip("\n")), Path(alive.stdout.readline().rstrip("\n"))
            assert gone.is_dir() and kept.is_dir()
            killed.kill()
        for path in (kept / of_steps.OWNER, kept):
            os.utime(path, (1, 1))
        mine = export_weights.begin(folder, "")
        assert of_steps.wait_for_removals(100)
        assert {*tmp_path.iterdir()} == {kept, mine}
        alive.kill()


def test_an_id_that_slurm_gave_again(tmp_path: Path) -> None:
    """A job with the id of an older run is another job: it takes the folder over, and removes nothing of that run."""
    old = dataclasses.replace(
        owners.of_this_process("5.0.2"), host="n999", cluster="c", run="/runs/x-0001", token="old"
    )
    mine = dataclasses.replace(old, job="5.0.0", run="/runs/y-0001", token="mine")
    assert owners.claim(tmp_path, old) is None
    assert owners.claim(tmp_path, mine) == old
    again = dataclasses.replace(mine, job="5.0.9", token="again")
    assert again.is_restart_of(mine) and not again.is_restart_of(old)


@pytest.mark.slurm
@pytest.mark.timeout(400)
def test_a_job_on_another_node(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The unfinished step of a job on another node stays while Slurm shows the job running or requeued, and is removed
    when it has ended."""
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / "checkpoints"

    def run(node: str, do: str) -> list[str]:
        return ["srun", f"-w{node}", "-n1", sys.executable, str(tmp_path / "program.py"), do, str(folder), OF_STEP]

    def left() -> int:
        idle_slurm.run(*run("n2", "sweep"))
        return len(list(folder.glob(".step-*.tmp")))

    with subprocess.Popen(run("n1", "write"), stdout=subprocess.PIPE, text=True, env=idle_slurm.env) as writer:
        assert writer.stdout
        first, before = writer.stdout.readline(), left()
        job = idle_slurm.run("squeue", "--noheader", "--format=%i", "--nodelist=n1").strip()
        idle_slurm.run("scancel", "--signal=KILL", job)
    assert (first, before) == ("half of it is written\n", 1)
    until(lambda: left() == 0)
