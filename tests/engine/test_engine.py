"""cluster=local: jobs without Slurm."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from hpcinit.base import processes
from hpcinit.engine import local_job, local_step
from hpcinit.records import run_folder
from hpcinit.records.spec import Program, Spec
from tests import waiting
from tests.conftest import Run
from tests.submitting import folder_of, printed
from tests.waiting import until

wait_for = partial(waiting.until, timeout_s=90, pause_s=0.05)


def processes_with(word: str) -> list[psutil.Process]:
    """Return the running processes that have `word` as an argument; their arguments are in info["cmdline"].

    `process.cmdline()` would read them again, and raise if the process has ended meanwhile.
    """
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if word in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def number() -> Iterator[str]:
    """A sleep time that no other test uses; processes that still use it after the test are killed."""
    number = str(random.randint(100_000, 999_999))
    yield number
    for process in processes_with(number):
        process.kill()


def start(hpcinit: Run, script: str, *overrides: str) -> Path:
    """Submit `sh -c script` and return its run folder."""
    done = hpcinit("submit", *overrides, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.partition("run folder: ")[2].strip())


def edit_program(folder: Path, script: str) -> None:
    """Change the program of the run to `sh -c script`, for the next start."""
    spec = json.loads((folder / "spec.json").read_text())
    spec["program"]["args"] = ["-c", script]
    (folder / "spec.json").write_text(json.dumps(spec))


def test_ranks_on_virtual_nodes(hpcinit: Run) -> None:
    """Four ranks on two virtual nodes have torch's environment variables and a log each."""
    folder = start(hpcinit, 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR"', "nodes=2", "ranks_per_node=2")  # fmt: skip
    wait_for(lambda: local_job.read_state(folder)["state"] == "COMPLETED")
    logs = [printed(folder, rank).strip() for rank in range(4)]
    assert logs == [f"{rank}/4 {rank % 2}/2 {rank // 2} 127.0.0.1" for rank in range(4)]


def test_returns_at_once_and_status_follows(hpcinit: Run) -> None:
    """Submission returns while the job runs; status shows RUNNING, then COMPLETED with the exit status."""
    folder = start(hpcinit, "sleep 2")
    assert "RUNNING" in hpcinit("status", folder.name).stdout
    wait_for(lambda: "COMPLETED  exit status 0" in hpcinit("status", folder.name).stdout)
    document = json.loads(hpcinit("status", "--json").stdout)
    assert (document["state"], document["exit_status"], document["engine"]) == ("COMPLETED", 0, "local")


def test_cancel_ends_every_process(hpcinit: Run, number: str) -> None:
    """After cancel the state is CANCELLED, and no process of the job is left, including child processes of ranks."""
    folder = start(hpcinit, f"sleep {number} & sleep {number}", "nodes=2")
    wait_for(lambda: len(processes_with(number)) == 4)
    assert hpcinit("cancel", folder.name).returncode == 0
    wait_for(lambda: local_job.read_state(folder)["state"] == "CANCELLED")
    wait_for(lambda: not processes_with(number))
    assert "has already ended" in hpcinit("cancel", folder.name).stdout


def test_one_failing_rank_ends_the_others(hpcinit: Run, number: str) -> None:
    """A failing rank ends the job with its exit status, not with the 143 of the ranks that are terminated for it."""
    folder = start(hpcinit, f'[ "$RANK" = 1 ] && exit 7; sleep {number}', "nodes=2")
    wait_for(lambda: local_job.read_state(folder)["state"] == "FAILED", timeout_s=10)
    assert "127.0.0.2: task 1: Exited with exit code 7" in hpcinit("logs", "--job", folder.name).stdout
    assert not processes_with(number)
    assert "FAILED" in hpcinit("status", folder.name).stdout and local_job.read_state(folder)["exit_status"] == 7


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_wait_returns_the_exit_status(hpcinit: Run, script: str, status: int) -> None:
    """With wait=true, the exit status is that of the rank, or 128 + signal."""
    done = hpcinit("submit", "wait=true", "--", "sh", "-c", script)
    assert done.returncode == status and f"exit status {status}" in done.stdout


def test_time_limit(hpcinit: Run, number: str, tmp_path: Path) -> None:
    """A job that reaches its time limit is stopped with the state TIMEOUT."""
    folder = start(hpcinit, "true")
    wait_for(lambda: local_job.read_state(folder)["state"] == "COMPLETED")
    edit_program(folder, f"sleep {number}")
    local_job.start(folder, 2 / 60, os.environ)  # minutes, as in the config: 2 s
    # On a slow machine the job may end before its program is seen.
    wait_for(lambda: processes_with(number) or local_job.read_state(folder)["state"] == "TIMEOUT")
    wait_for(lambda: local_job.read_state(folder)["state"] == "TIMEOUT")
    wait_for(lambda: not processes_with(number))


@pytest.mark.parametrize("victim", ["hpcinit.engine.local_job", "hpcinit.engine.local_step"])
def test_nothing_is_orphaned_by_kill_9(hpcinit: Run, number: str, victim: str) -> None:
    """kill -9 of the engine or of the step leaves no rank running, and the state shows the failure."""
    folder = start(hpcinit, f"sleep {number}", "nodes=2")
    wait_for(lambda: len(processes_with(number)) == 2)
    for process in processes_with(victim):
        if str(folder) in " ".join(process.info["cmdline"]):
            with suppress(psutil.NoSuchProcess):  # the end of the first one ends the others
                process.kill()
    wait_for(lambda: not processes_with(number))
    wait_for(lambda: local_job.read_state(folder)["state"] in {"NODE_FAIL", "FAILED"})


@pytest.mark.parametrize("end", ["COMPLETED", "CANCELLED"])
def test_a_run_that_a_run_submitted_outlives_it(hpcinit: Run, end: str) -> None:
    """A local run whose program submits another one ends or is canceled without ending it, as on Slurm."""
    inner = f"'{sys.executable}' -m hpcinit submit cluster=local name=inner -- sh -c 'touch started; until [ -e stop ]; do sleep 0.2; done'"
    outer = f"{inner}; sleep 1000 & until [ -e go ]; do sleep 0.2; done"
    folder = folder_of(hpcinit("submit", "cluster=local", "name=outer", "--", "sh", "-c", outer))
    until(lambda: Path("started").exists())
    if end == "CANCELLED":
        hpcinit("cancel", folder.name)
    Path("go").touch()
    until(lambda: end in hpcinit("status", folder.name).stdout)
    assert "RUNNING" in hpcinit("status", "inner-0001").stdout
    Path("stop").touch()
    until(lambda: "COMPLETED" in hpcinit("status", "inner-0001").stdout)


def test_a_reused_process_id_is_not_the_engine(tmp_path: Path) -> None:
    """If another process has the recorded process id, the engine is dead, and cancel does not signal that process."""
    recorded = {**processes.identity(), "started": "1"}  # clock ticks since the boot
    local_job.write_state(tmp_path, {"state": "RUNNING", "pid": os.getpid(), "engine": recorded})
    assert local_job.read_state(tmp_path)["state"] == "NODE_FAIL"
    local_job.cancel(tmp_path)  # must not signal this process


def test_signals_reach_the_ranks(hpcinit: Run) -> None:
    """A SIGUSR1 sent to the step reaches every rank, as with srun."""
    script = 'trap "echo got it; exit 0" USR1; echo ready; while :; do sleep 0.1; done'
    folder = start(hpcinit, script, "nodes=2")
    logs = [folder / f"logs/rank-{rank}.log" for rank in (0, 1)]
    wait_for(lambda: all(log.exists() and "ready\n" in log.read_text() for log in logs))
    for process in processes_with("hpcinit.engine.local_step"):
        if str(folder) in " ".join(process.info["cmdline"]):
            process.send_signal(signal.SIGUSR1)
    wait_for(lambda: local_job.read_state(folder)["state"] == "COMPLETED")
    assert all("got it\n" in log.read_text() for log in logs)


def test_a_signal_at_once_is_not_lost(hpcinit: Run, tmp_path: Path, number: str) -> None:
    """SIGTERM during the start of the engine cancels the job."""
    folder = start(hpcinit, "true")
    wait_for(lambda: local_job.read_state(folder)["state"] == "COMPLETED")
    edit_program(folder, f"sleep {number}")
    pid, _ = local_job.start(folder, 1, os.environ)
    os.kill(int(pid), signal.SIGTERM)
    wait_for(lambda: local_job.read_state(folder)["state"] != "RUNNING")
    assert local_job.read_state(folder)["state"] == "CANCELLED" and not processes_with(number)


def test_an_engine_without_a_submitter_runs_nothing(hpcinit: Run, tmp_path: Path) -> None:
    """If the submitter died before it recorded the state, the engine runs nothing."""
    folder = start(hpcinit, "echo ran")
    wait_for(lambda: local_job.read_state(folder)["state"] == "COMPLETED")
    command = [sys.executable, "-m", "hpcinit.engine.local_job", str(folder), "1"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 1
    assert printed(folder, 0) == "ran\n"


def test_a_batch_script_that_cannot_start_is_a_failure(hpcinit: Run, tmp_path: Path) -> None:
    """If the working folder does not exist, the job fails with a message in its log."""
    folder = start(hpcinit, "true")
    wait_for(lambda: local_job.read_state(folder)["state"] == "COMPLETED")
    spec = json.loads((folder / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps({**spec, "workdir": "/nowhere"}))
    local_job.start(folder, 1, os.environ)
    wait_for(lambda: local_job.read_state(folder)["state"] == "FAILED")
    assert "cannot start the batch script in /nowhere" in (folder / "logs/job.log").read_text()


def test_manual_start(hpcinit: Run, number: str) -> None:
    """`bash job.sh` starts all ranks again, and status shows whether it runs, ended or was killed."""
    # Both ranks must print before one of them ends the other.
    overrides = ["nodes=2", "wait=true", "launch.kill_on_bad_exit=false"]
    done = hpcinit("submit", *overrides, "--", "sh", "-c", "echo $RANK/$WORLD_SIZE; exit 3")
    folder = folder_of(done)
    assert subprocess.run(["bash", folder / "job.sh"], stderr=subprocess.DEVNULL, check=False).returncode == 3
    assert [printed(folder, r) for r in (0, 1)] == ["0/2\n" * 2, "1/2\n" * 2]
    assert "FAILED     started manually  exit status 3" in hpcinit("status").stdout
    edit_program(folder, f"sleep {number}")
    script = subprocess.Popen(["bash", folder / "job.sh"])
    wait_for(lambda: len(processes_with(number)) == 2)
    assert f"{script.pid}  RUNNING    started manually" in hpcinit("status", str(script.pid)).stdout
    refused = hpcinit("cancel", folder.name)
    assert refused.returncode == 2 and "stop it in its terminal with Ctrl-C" in refused.stderr
    script.kill()
    script.wait()
    wait_for(lambda: not processes_with(number))
    assert "NODE_FAIL  started manually" in hpcinit("status").stdout


def test_paths_with_blanks_can_be_pasted(hpcinit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell accepts the printed command to run a job again, even with a space in the path."""
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    done = hpcinit("submit", "wait=true", "--", "sh", "-c", "echo ran")
    command = done.stdout.partition("run it again manually:  ")[2]
    assert command == f"bash '{tmp_path}/a b/runs/sh-0001/job.sh'\n"
    subprocess.run(command, shell=True, check=True)
    assert printed(Path("runs/sh-0001"), 0) == "ran\n" * 2


def test_the_end_is_recorded_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk has no space for a second file, the engine overwrites the first one."""
    local_job.write_state(tmp_path, {"state": "RUNNING", "pid": os.getpid(), "engine": processes.identity()})
    (tmp_path / f"local.json.{os.getpid()}.tmp").mkdir()  # a fake for a disk without space for a new file
    assert local_job._ended(tmp_path, {}, "COMPLETED", 0) == 0
    assert local_job.read_state(tmp_path)["state"] == "COMPLETED"


def test_options_of_srun_without_effect_are_ignored() -> None:
    """The local step ignores srun's options that it does not need, and passes the program's own options on."""
    step = local_step.parse(["--ntasks=1", "--ntasks-per-node=1", "--nice=5", "--unbuffered", "true", "--nice=6"])
    assert (step.ntasks, step.command) == (1, ["true", "--nice=6"])


WATCHED = """
import os, sys
from pathlib import Path
from hpcinit.engine import {module}
kill = os.killpg
def watched(group, number):
    try:
        state = Path(f"/proc/{{group}}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        state = "reaped"
    print("signal", number, state, file=sys.stderr, flush=True)
    kill(group, number)
os.killpg = watched
sys.exit({module}.main(sys.argv[1:]))
"""


def test_the_step_signals_no_group_whose_rank_was_reaped() -> None:
    """The step signals no reaped rank: another process may have its id."""
    options = ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "sh", "-c"]
    rank = 'test "$SLURM_PROCID" = 0 && exit 0; sleep 0.5; exit 3'
    code = [sys.executable, "-c", WATCHED.format(module="local_step")]
    done = subprocess.run([*code, *options, rank], capture_output=True, text=True, timeout=60, check=False)
    signals = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("signal ")]
    assert done.returncode == 3 and signals and all(state != "reaped" for _, state in signals), done.stderr


def test_the_engine_signals_no_group_whose_script_was_reaped(tmp_path: Path) -> None:
    """The engine does not reap the batch script before its last signal to the process group."""
    spec = Spec("x", "local", 1, 1, Program("command", "true"), str(tmp_path), "nonce")
    (tmp_path / run_folder.SPEC).write_text(spec.to_json())
    (tmp_path / run_folder.SCRIPT).write_text("touch up; exec sleep 300\n")
    command = [sys.executable, "-c", WATCHED.format(module="local_job"), str(tmp_path), "5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write("go\n")
        process.stdin.close()
        wait_for((tmp_path / "up").exists)
        process.terminate()
        output = process.stderr.read()
    signals = [line.split()[1:] for line in output.splitlines() if line.startswith("signal ")]
    assert signals and all(state != "reaped" for _, state in signals), output


def test_values_of_yaml_files_reach_the_program(hpcinit: Run, tmp_path: Path) -> None:
    """A program gets values of a cluster file and a job file as typed, also those that YAML reads as another value."""
    shown = "printf '%s\\n' A=$A B=$B C=$C \"$@\""
    files = {
        "cluster": "defaults: [local]\nenv: {A: 010, B: no}\n",
        "job": f"name: x\ncommand: sh\nenv: {{C: '1.10'}}\nargs: [-c, {json.dumps(shown)}, sh, 8, 0.50, true, '010']\n",
    }
    for group, text in files.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    done = hpcinit("submit", "cluster=mine", "job=mine", "wait=true")
    assert done.returncode == 0, done.stderr
    assert "A=010\nB=no\nC=1.10\n8\n0.50\ntrue\n010\n" in done.stdout
