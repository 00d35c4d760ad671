"""A job without Slurm: a background process runs the batch script, enforces its time limit and records its end.

    python -m hpcinit.engine.local_job RUN_FOLDER TIME_MIN

This is not a scheduler: a job starts at once, and no resources are reserved.

No process of a job outlives the job. The background process adopts descendants whose parent died, and kills them at the
end. As on Slurm, runs that the program itself submitted with cluster=local are separate jobs, so they keep running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hpcinit.base import processes, safe_files, signals
from hpcinit.base.errors import NOTHING_SUBMITTED, SpecError, SubmitError
from hpcinit.base.supervisor import Child, Supervisor
from hpcinit.engine.local_step import batch_variables
from hpcinit.records import run_folder
from hpcinit.records.spec import load

STATE = "local.json"  # file in the run folder with the state that squeue would report on Slurm
GO = b"go\n"  # on the engine's stdin, means that the job is recorded and may run
ENDING = (signal.SIGTERM, signal.SIGINT)
MODULE = ["-m", "hpcinit.engine.local_job"]  # the part after Python in this process's command line
KILL_WAIT_S = 5  # between SIGTERM and SIGKILL; Slurm's KillWait is 30


def start(path: Path, time_min: float, env: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Start the job of a run folder in the background. Return its id, which is the process id, and the command.

    path: the run folder, which must be complete.
    """
    command = [sys.executable, *MODULE, str(path), str(time_min)]
    # The engine starts with these signals blocked. It unblocks them after it has installed handlers, so none is lost.
    before = signals.block(ENDING)
    try:
        with (path / run_folder.JOB_LOG).open("ab") as log:
            process = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
    except OSError as error:
        raise SubmitError(f"cannot start the local engine: {error}", NOTHING_SUBMITTED) from None
    finally:
        signals.set_blocked(before)
    assert process.stdin is not None  # PIPE
    # The state is on disk before the job runs, so that a reader always finds one.
    try:
        engine = processes.identity(process.pid)
        write_state(path, {"state": "RUNNING", "pid": process.pid, "started": time.time(), "engine": engine})
        process.stdin.write(GO)
        process.stdin.close()
    except Exception as error:  # without GO, the engine runs nothing
        process.kill()
        process.wait()
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise SubmitError(f"cannot start the job of {path}: {why}", NOTHING_SUBMITTED) from error
    return str(process.pid), command


def main(argv: Sequence[str]) -> int:
    stop_signals = signals.collected(ENDING)
    signals.unblock(ENDING)
    if sys.stdin.buffer.read() != GO:
        return 1  # the submitting process was killed before it recorded the job
    path, time_min = Path(argv[0]), float(argv[1])
    try:
        spec = load(path / run_folder.SPEC)
        for place in (path, path / run_folder.SCRIPT):
            if problem := safe_files.path_ownership_problems(place, "submit again"):
                raise SpecError(problem)
    except (SpecError, OSError) as error:
        print(f"hpcinit: error: {error}", flush=True)
        return _ended(path, {"pid": os.getpid(), "started": time.time()}, "FAILED", 2)
    env = dict(os.environ)
    env |= batch_variables(os.getpid(), spec.name, spec.nodes, spec.ranks_per_node, spec.workdir)
    env[run_folder.ENV_ENGINE] = str(os.getpid())
    state: dict[str, object] = {"state": "RUNNING", "pid": os.getpid(), "started": time.time()}
    processes.adopt_orphans()  # no process of the job may outlive it, even if a step was killed
    try:
        script = ["bash", str(path / run_folder.SCRIPT)]
        die_with_this = partial(processes.die_with_parent, os.getpid())
        job = Supervisor().start(0, script, env, folder=spec.workdir, in_child=die_with_this)
    except OSError as error:
        print(f"hpcinit: error: cannot start the batch script in {spec.workdir}: {error}", flush=True)
        return _ended(path, state, "FAILED", 1)
    end = _watch(job, stop_signals, time.monotonic() + 60 * time_min)
    kill_descendants()
    code = job.ended() or 0
    status = code if code >= 0 else 128 - code
    return _ended(path, state, end or ("COMPLETED" if status == 0 else "FAILED"), status)


def _ended(path: Path, state: Mapping[str, object], outcome: str, status: int) -> int:
    """Record the end of the job. If the disk is too full to replace the file atomically, overwrite it."""
    state = {**state, "state": outcome, "exit_status": status, "ended": time.time()}
    try:
        write_state(path, state)
    except OSError:
        (path / STATE).write_text(json.dumps(state) + "\n")
    return status


def _watch(job: Child, stop_signals: Sequence[int], deadline: float) -> str | None:
    """Wait until the job ends, and stop it on a signal or at its time limit.

    Return 'CANCELLED' or 'TIMEOUT' if the job was stopped, otherwise None.
    """
    why = None
    while job.ended() is None:
        if stop_signals or time.monotonic() > deadline:
            why = "CANCELLED" if stop_signals else "TIMEOUT"
            print(f"hpcinit: job {os.getpid()} on 127.0.0.1 {why}", flush=True)
            _end(job)
            break
        time.sleep(0.05)
    job.reap()
    return why


def _end(job: Child) -> None:
    """Send SIGTERM to the batch script and its steps, then SIGKILL to the processes that remain, as slurmd does.

    Wait for the whole process group: the script exits at once, but its step needs time to stop the ranks. Do not reap
    the script before the group has ended, so that its group id can't be reused.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        job.signal(number)
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline and group_runs(job.pid):
            time.sleep(0.02)


def _reap() -> None:
    """Reap every child that has exited. Do not call this while another thread waits for a child."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _of_this_job() -> list[psutil.Process]:
    """Return the descendants of this process.

    Skip the background processes of other runs that the program submitted, and their descendants.
    """
    found, others = psutil.Process().children(recursive=True), set[psutil.Process]()
    for one in found:
        with contextlib.suppress(psutil.Error):  # it has ended
            if one.cmdline()[1:3] == MODULE:
                others.update([one, *one.children(recursive=True)])
    return [one for one in found if one not in others]


def kill_descendants() -> None:
    """Send SIGKILL to all descendants of this process, also adopted ones, until none is left.

    One pass is not enough, because a process may fork after the list was read.
    """
    for _ in range(100):
        _reap()
        left = _of_this_job()
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def group_runs(group: int) -> bool:
    """Return whether a descendant of this process is running in the process group `group`."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def read_state(path: Path) -> dict[str, Any]:
    """Return the last recorded state of the run in `path`.

    The state is NODE_FAIL if the job's background process was killed before it recorded the end.
    """
    state = safe_files.json_or_empty(path / STATE)
    if state.get("state") == "RUNNING" and _has_ended(state):
        state = safe_files.json_or_empty(path / STATE)  # the engine may have written the end after the first read
        if state.get("state") == "RUNNING":
            return {**state, "state": "NODE_FAIL", "exit_status": 128 + signal.SIGKILL}
    return state


def elsewhere(path: Path) -> str:
    """Return the job's host if the job may still be running there but is not visible from here. Otherwise return ''."""
    state = safe_files.json_or_empty(path / STATE)
    return state["engine"]["host"] if _has_ended(state) is None else ""


def cancel(path: Path) -> None:
    """Send a signal to the background process of the run in `path`, so that it stops its job.

    If that process has ended or isn't visible, send nothing, because its process id may now belong to another process.
    """
    state = safe_files.json_or_empty(path / STATE)
    if _has_ended(state) is False:
        os.kill(int(state["pid"]), signal.SIGTERM)


def _has_ended(state: Mapping[str, Any]) -> bool | None:
    """Return whether the job's background process has ended, or None if this host or container can't see it."""
    return state.get("state") != "RUNNING" or processes.Process(**state["engine"]).has_ended()


def is_alive(pid: int, started: float) -> bool:
    """Return whether a process is still running.

    pid: its process id, which the kernel may reuse.
    started: a time at which the process existed.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < started + 2
    except psutil.NoSuchProcess:
        return False


def write_state(path: Path, state: Mapping[str, object]) -> None:
    safe_files.write_atomically(path / STATE, json.dumps(state) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
