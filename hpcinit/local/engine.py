"""A job without Slurm: a background process runs the batch script, enforces its time limit and records its end.

    python -m hpcinit.local.engine RUN_FOLDER TIME_MIN

This is not a scheduler: a job starts at once, and no resources are reserved.
"""

from __future__ import annotations

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
from hpcinit.local import environment_variables, orphans
from hpcinit.records import run_folder
from hpcinit.records.spec import load

STATE = "local.json"  # in the run folder: the job's state, which squeue would report on Slurm
GO = b"go\n"  # on the engine's stdin: the job is recorded, run it
ENDING = (signal.SIGTERM, signal.SIGINT)
KILL_WAIT_S = 5  # between SIGTERM and SIGKILL; Slurm's KillWait is 30


def start(path: Path, time_min: float, env: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Start the job of a complete run folder in the background. Return its id (the process id) and the command."""
    command = [sys.executable, *orphans.ENGINE, str(path), str(time_min)]
    # The engine starts with these signals blocked and unblocks them after it installed its handlers: none is lost.
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
    except Exception as error:  # without GO the engine runs nothing
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
    env |= environment_variables.batch(os.getpid(), spec.name, spec.nodes, spec.ranks_per_node, spec.workdir)
    env[run_folder.ENV_ENGINE] = str(os.getpid())
    state: dict[str, object] = {"state": "RUNNING", "pid": os.getpid(), "started": time.time()}
    orphans.adopt_orphans()  # no process of the job may outlive it, even if a step was killed
    try:
        script = ["bash", str(path / run_folder.SCRIPT)]
        die_with_this = partial(processes.die_with_parent, os.getpid())
        job = Supervisor().start(0, script, env, folder=spec.workdir, in_child=die_with_this)
    except OSError as error:
        print(f"hpcinit: error: cannot start the batch script in {spec.workdir}: {error}", flush=True)
        return _ended(path, state, "FAILED", 1)
    end = _watch(job, stop_signals, time.monotonic() + 60 * time_min)
    orphans.kill_descendants()
    code = job.ended() or 0
    status = code if code >= 0 else 128 - code
    return _ended(path, state, end or ("COMPLETED" if status == 0 else "FAILED"), status)


def _ended(path: Path, state: Mapping[str, object], outcome: str, status: int) -> int:
    """Record the end of the job; overwrite the file if the disk is too full for an atomic replacement."""
    state = {**state, "state": outcome, "exit_status": status, "ended": time.time()}
    try:
        write_state(path, state)
    except OSError:
        (path / STATE).write_text(json.dumps(state) + "\n")
    return status


def _watch(job: Child, stop_signals: Sequence[int], deadline: float) -> str | None:
    """Wait for the job. Stop it on a signal or at its time limit, and return which of them; else None."""
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
    """Send SIGTERM to the batch script and its steps, then SIGKILL to the remaining processes, as slurmd does.

    The script exits at once, but its step needs time to stop the ranks: wait for the whole process group. The script is
    not reaped before, so that its group id is not reused.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        job.signal(number)
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline and orphans.group_runs(job.pid):
            time.sleep(0.02)


def read_state(path: Path) -> dict[str, Any]:
    """Return the last state of the run in `path`; NODE_FAIL if its engine was killed before it recorded the end."""
    state = _read(path)
    if state.get("state") == "RUNNING" and _has_ended(state):
        state = _read(path)  # the engine may have ended after the first read
        if state.get("state") == "RUNNING":
            return {**state, "state": "NODE_FAIL", "exit_status": 128 + signal.SIGKILL}
    return state


def elsewhere(path: Path) -> str:
    """Return the host of the run's engine if it may run there, invisible to this host or container; else ''."""
    state = _read(path)
    return state["engine"]["host"] if state.get("state") == "RUNNING" and _has_ended(state) is None else ""


def cancel(path: Path) -> None:
    """Signal the engine of the run in `path` to stop its job. Its id may be another process's on another host."""
    state = _read(path)
    if _has_ended(state) is False:
        os.kill(int(state["pid"]), signal.SIGTERM)


def _has_ended(state: Mapping[str, Any]) -> bool | None:
    """Return whether the engine has ended, or None if that is not visible from this host or container."""
    recorded = state.get("engine")
    return processes.Process(**recorded).has_ended() if recorded else not is_alive(state)


def is_alive(state: Mapping[str, Any]) -> bool:
    """Whether the process with the recorded id is still the engine. Ids are reused, so compare the start time."""
    try:
        process = psutil.Process(int(state["pid"]))
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < float(state["started"]) + 2
    except (psutil.NoSuchProcess, KeyError):
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((path / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return document


def write_state(path: Path, state: Mapping[str, object]) -> None:
    safe_files.write_atomically(path / STATE, json.dumps(state) + "\n")


# Checks of the request against this machine

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
