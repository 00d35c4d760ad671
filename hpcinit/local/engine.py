"""A job without Slurm: a process of its own that runs the batch script, keeps its time limit and records its end.

    python -m hpcinit.local.engine RUN_FOLDER TIME_MIN

Not a scheduler: a job starts at once, and nothing is shared out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hpcinit.base import process_limits, safe_files, signals
from hpcinit.base.errors import NOTHING_SUBMITTED, SpecError, SubmitError
from hpcinit.base.supervisor import Child, Supervisor
from hpcinit.local import environment_variables, processes
from hpcinit.records import run_folder
from hpcinit.records.spec import load

STATE = "local.json"  # in the run folder: what squeue would say
GO = b"go\n"  # on the engine's stdin: the job is on record, run it
ENDING = (signal.SIGTERM, signal.SIGINT)
KILL_WAIT_S = 5  # between SIGTERM and SIGKILL; Slurm's KillWait is 30


def start(path: Path, time_min: float, env: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    """Start the job of a filled run folder in the background; its id (the process's) and the command used."""
    command = [sys.executable, "-m", "hpcinit.local.engine", str(path), str(time_min)]
    # The engine starts with these signals blocked and takes them when its handlers stand: none is lost, none kills it.
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
    # Nothing is run before its state is on disk: a reader always finds one, and the engine's own comes after it.
    try:
        write_state(path, {"state": "RUNNING", "pid": process.pid, "started": time.time()})
        process.stdin.write(GO)
        process.stdin.close()
    except Exception as error:  # without GO the engine runs nothing
        process.kill()
        process.wait()
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise SubmitError(f"cannot start the job of {path}: {why}", NOTHING_SUBMITTED) from error
    return str(process.pid), command


def main(argv: Sequence[str]) -> int:
    asked = signals.collected(ENDING)
    signals.unblock(ENDING)
    if sys.stdin.buffer.read() != GO:
        return 1  # who submits was killed before it could say so: there is no job
    path, time_min = Path(argv[0]), float(argv[1])
    try:
        spec = load(path / run_folder.SPEC)
        for place in (path, path / run_folder.SCRIPT):
            if said := safe_files.path_ownership_problems(place, "submit again"):
                raise SpecError(said)
    except (SpecError, OSError) as error:
        print(f"hpcinit: error: {error}", flush=True)
        return _ended(path, {"pid": os.getpid(), "started": time.time()}, "FAILED", 2)
    env = dict(os.environ)
    env |= environment_variables.batch(os.getpid(), spec.name, spec.nodes, spec.ranks_per_node, spec.workdir)
    env[processes.ENV_ENGINE] = str(os.getpid())
    state: dict[str, object] = {"state": "RUNNING", "pid": os.getpid(), "started": time.time()}
    processes.adopt_orphans()  # of a step that was killed: nothing of the job may outlive it
    try:
        script = ["bash", str(path / run_folder.SCRIPT)]
        die_with_this = partial(process_limits.die_with_parent_process, os.getpid())
        job = Supervisor().start(0, script, env, folder=spec.workdir, in_child=die_with_this)
    except OSError as error:
        print(f"hpcinit: error: cannot start the batch script in {spec.workdir}: {error}", flush=True)
        return _ended(path, state, "FAILED", 1)
    end = _watch(job, asked, time.monotonic() + 60 * time_min)
    processes.kill_descendants()
    code = job.ended() or 0
    status = code if code >= 0 else 128 - code
    return _ended(path, state, end or ("COMPLETED" if status == 0 else "FAILED"), status)


def _ended(path: Path, state: Mapping[str, object], outcome: str, status: int) -> int:
    """Record the end, in place where the disk has no room for a second file."""
    state = {**state, "state": outcome, "exit_status": status, "ended": time.time()}
    try:
        write_state(path, state)
    except OSError:
        (path / STATE).write_text(json.dumps(state) + "\n")
    return status


def _watch(job: Child, asked: Sequence[int], deadline: float) -> str | None:
    """Wait for the job; end it when asked to or when its time is up. Returns why, if one of these."""
    why = None
    while job.ended() is None:
        if asked or time.monotonic() > deadline:
            why = "CANCELLED" if asked else "TIMEOUT"
            print(f"hpcinit: job {os.getpid()} on 127.0.0.1 {why}", flush=True)
            _end(job)
            break
        time.sleep(0.05)
    job.reap()
    return why


def _end(job: Child) -> None:
    """SIGTERM to the batch script and its steps, SIGKILL to what is left, as slurmd does it.

    The script is gone at once, its step needs a moment to end the ranks: wait for the whole group. The script is not
    reaped before, so that the number of the group stays its own.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        job.signal(number)
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline and processes.group_runs(job.pid):
            time.sleep(0.02)


def read_state(path: Path) -> dict[str, Any]:
    """The last state of the run in `path`; NODE_FAIL if its engine was killed before it could write one."""
    state = _read(path)
    if state.get("state") == "RUNNING" and not is_alive(state):
        state = _read(path)  # the engine writes its last state before it ends
        if state.get("state") == "RUNNING":
            return {**state, "state": "NODE_FAIL", "exit_status": 128 + signal.SIGKILL}
    return state


def cancel(path: Path) -> None:
    """Ask the engine of the run in `path` to end its job."""
    state = _read(path)
    if is_alive(state):
        os.kill(int(state["pid"]), signal.SIGTERM)


def is_alive(state: Mapping[str, Any]) -> bool:
    """Is the process with the recorded id still the engine? Ids are used again: compare the start time."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# Can this machine hold so many ranks?

MOST_NODES = 254  # node i is 127.0.0.i
MOST_RANKS_PER_CORE = 32


def problem(nodes: int, world_size: int, mem_gb_per_rank: float) -> Iterator[str]:
    """A message for each way in which the request is too large for this machine."""
    if nodes > MOST_NODES:
        yield f"nodes={nodes}, but cluster=local has at most {MOST_NODES}: the addresses 127.0.0.1 to 127.0.0.254"
    free_gb = psutil.virtual_memory().available / 1e9
    if world_size * mem_gb_per_rank > free_gb:
        yield (
            f"{world_size} ranks x {mem_gb_per_rank:g} GB (cluster.mem_gb_per_rank) = "
            f"{world_size * mem_gb_per_rank:g} GB, but this machine has {free_gb:.1f} GB free: at most "
            f"{int(free_gb / mem_gb_per_rank)} ranks fit"
        )
    cores = psutil.cpu_count() or 1
    if world_size > MOST_RANKS_PER_CORE * cores:
        yield (
            f"{world_size} ranks on {cores} cores: at most {MOST_RANKS_PER_CORE} ranks per core, "
            f"{MOST_RANKS_PER_CORE * cores} in all, come up in reasonable time"
        )
