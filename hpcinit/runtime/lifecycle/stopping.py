"""Implements `run.should_stop()`: all ranks agree, at the same step, to save and exit."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpcinit.base.console import say
from hpcinit.engine import from_environment
from hpcinit.records import run_folder
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.records.stop_reasons import SIGNAL_EARLY, Reason, Stop, Stopping
from hpcinit.runtime.lifecycle.signal_watch import Watch
from hpcinit.runtime.lifecycle.sigterm import FIRST_STEP_S, FirstStepWatch, end_if_stuck
from hpcinit.runtime.lifecycle.stop_record import StopRecord
from hpcinit.runtime.process_state import state
from hpcinit.slurm import queue, slurm_client
from hpcinit.world import World

SHARE = 0.005  # agreements may take at most this share of the training time
MOST_STEPS, MOST_S = 1000, 10.0  # the longest interval between two agreements
TIMED = 5  # the number of agreements and steps that are timed
LOOK_S = 2.0  # interval of checks for a user's request
ASK_EVERY_S = 600.0  # interval of queries for the remaining time; only rank 0 queries Slurm
ASK_PATIENTLY_S = 10.0  # timeout of a query in a thread; no rank waits for this query
MILLISECOND = timedelta(milliseconds=1)
ASK_S = 2.0
# Timeout of the query that checks whether the user requested a stop. No job continues the run after a user's stop, so
# the query waits longer for a busy server.
ASK_ORIGIN_S = 15.0
RANKS = 1 << 32
KILLED_BY_SIGTERM = "is killed by signal: Terminated"  # in torch's error for a killed worker, DataLoader.cpp


class Stopper:
    """Decides for one rank when to stop. Every rank calls ask() after each step, and only ask() uses collectives."""

    def __init__(
        self, world: World, asked: Stopping, timeout: timedelta, folder: Path | None, env: Mapping[str, str],
        early: FirstStepWatch | None = None,
    ) -> None:  # fmt: skip
        self._world, self._asked, self._folder, self._env = world, asked, folder, env
        self._early = early
        self._made = time.monotonic()
        self._had: timedelta | None = None
        self._ends: float | None = None  # end of the job, by time.monotonic()
        self._job = _job(env)
        self._file_seen = False
        self._set_left(left_of_job(env, time.time()))
        self._seen: Reason | None = None
        self._stop: Stop | None = None
        self._lock = threading.RLock()  # torch's handler of SIGCHLD can interrupt the main thread anywhere
        self._lost_workers: list[str] = []
        self._watch: Watch | None = None  # defined first, because a signal may arrive while the Watch is created
        self._closed = threading.Event()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world.world_size > 1 else None
        self._every, self._calls = asked.every_steps or 1, 0
        self._costs: list[float] = []
        self._steps: list[float] = []
        self._before, self._longest = time.monotonic(), 0.0
        self.longest_save = timedelta()
        self._stop_record: StopRecord | None = None
        if world.rank == 0 and folder is not None:
            self._stop_record = StopRecord(folder, env.get("SLURM_JOB_ID", ""))
        self._watch = self._listen()
        if world.rank == 0:
            threading.Thread(target=self._look, name="hpcinit-stop", daemon=True).start()

    def ask(self) -> Stop | None:
        """Return the Stop on which all ranks have agreed, or None. After an agreement, it is always the same Stop."""
        took = time.monotonic() - self._before
        while self._lost_workers:
            say(f"warning: a DataLoader worker died; this rank continues until the save: {self._lost_workers.pop(0)}")
        self._calls += 1
        self._longest = max(self._longest, took)
        if self._calls > 1 and len(self._steps) < TIMED:  # the time before the first call is not a whole step
            self._steps.append(took)
        if self._stop is None and self._calls % self._every == 0:
            self._agree()
        self._before = time.monotonic()
        return self._stop

    def left(self) -> timedelta | None:
        """Return how much time remains until the job's time limit, or None if unknown."""
        return None if self._ends is None else timedelta(seconds=self._ends - time.monotonic())

    def close(self) -> None:
        self._closed.set()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            state.loader_workers.on_death = None

    def _agree(self) -> None:
        reason = self._reason()
        began = time.monotonic()
        left = self.left() if self._world.rank == 0 else None
        found, left_ms = self._largest(
            0 if reason is None else reason * RANKS + RANKS - 1 - self._world.rank,
            -1 if left is None else max(0, int(left / MILLISECOND)),
        )
        if self._world.rank and left_ms >= 0:
            self._set_left(left_ms * MILLISECOND)
        if self._asked.every_steps is None and len(self._costs) < TIMED:
            self._costs.append(time.monotonic() - began)
            if len(self._costs) == TIMED:  # the fastest ones, because slow ones waited for other ranks
                mine = (min(self._costs), min(self._steps), -self._apart())
                cost, step, apart = (value / 1e6 for value in self._largest(*(int(1e6 * value) for value in mine)))
                self._every = every(cost, step, -apart)
        if found:
            reason, rank = Reason(found // RANKS), RANKS - 1 - found % RANKS
            (told,) = self._largest(self._who_told(reason) if self._world.rank == 0 else 0)
            self._stop = Stop(Reason(told), rank)
            if self._stop_record is not None:
                self._stop_record.stop(self._stop.reason)

    def _apart(self) -> float:
        """Return the longest permitted time between two agreements, in seconds.

        It is at most a quarter of the time that is reserved for the last checkpoint. A short job reserves little time.
        """
        margin = 4 * MOST_S if self._had is None else self._asked.margin(self._had, self.longest_save).total_seconds()
        return max(0.0, min(MOST_S, margin / 4))

    def _largest(self, *values: int) -> list[int]:
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group)
        return [int(value) for value in tensor]

    def _reason(self) -> Reason | None:
        with self._lock:
            if self._seen is not None:
                return self._seen
        if self._world.rank == 0 and self._ends_soon():  # rank 0 queries Slurm for all ranks
            self._ask_left(ASK_S)  # scontrol resume or update may have changed the end of the job
            return Reason.TIME_LIMIT if self._ends_soon() else None
        return None

    def _ends_soon(self) -> bool:
        left = self.left()
        return left is not None and self._had is not None and left < self._asked.margin(self._had, self.longest_save)

    def _set_left(self, left: timedelta | None) -> None:
        if left is not None:
            now = time.monotonic()
            self._ends, self._had = now + left.total_seconds(), left + timedelta(seconds=now - self._made)

    def _ask_left(self, timeout_s: float) -> None:
        """Query Slurm for the remaining time, because the limit may differ from the requested one, and may change.

        Without a reply, keep the last value.
        """
        if self._job:
            said = _output(["squeue", "--noheader", f"--jobs={self._job}", "--format=%L"], timeout_s)
            left_s = queue.seconds(said.partition("\n")[0].strip())  # a heterogeneous job has one line per component
            self._set_left(None if left_s is None else timedelta(seconds=left_s))

    def _who_told(self, reason: Reason) -> Reason:
        """Return why the job stops. Query Slurm for a preemption or a time limit, which the signal alone does not show.

        If Slurm shows no more precise reason, return `reason`.
        """
        if reason is Reason.USER and not self._file_seen:  # the other rank has used its own value of the remaining time
            self._ask_left(ASK_ORIGIN_S)
            return self._of_own_signal()
        if reason is not Reason.ENDED:
            return reason
        left = self.left()
        if left is not None and left <= timedelta():
            return Reason.TIME_LIMIT
        if self._job:
            said = _output(["scontrol", "--oneliner", "show", "job", self._job], ASK_S)
            words = dict(word.partition("=")[::2] for word in said.split())
            preempted = words.get("PreemptTime", "None")  # '2026-11-21T14:02:00'; a requeue does not clear it
            if preempted not in {"None", "N/A"} and preempted >= words.get("StartTime", ""):
                return Reason.PREEMPTED
        return reason

    def _listen(self) -> Watch | None:
        """Return a Watch, or None outside the main thread, where Python cannot set handlers."""
        if threading.current_thread() is not threading.main_thread():
            return None
        state.loader_workers.on_death = self._worker_died
        if self._early is not None:
            return self._early.hand_over(self._asked.numbers, self._noted)
        return Watch(self._asked.numbers, self._noted)

    def _worker_died(self, error: str) -> bool:
        """Return whether the rank can continue although a DataLoader worker died.

        A rank that is about to stop can continue, because it may save before it needs this worker. If SIGTERM ended the
        worker, Slurm has sent it to the rank too, so the rank will stop. This function runs in a signal handler, so
        ask() prints `error` later.
        """
        if self._seen is None and self._stop is None:
            if not error.rstrip(" .").endswith(KILLED_BY_SIGTERM):
                return False
            os.kill(os.getpid(), signal.SIGTERM)  # Slurm sent the worker's signal to the whole job step
        self._lost_workers.append(error)
        return True

    def _noted(self, number: int) -> None:
        reason = Reason.ENDED if number == signal.SIGTERM else self._of_own_signal()
        with self._lock:
            self._seen = max(reason, self._seen or reason)
        if number == signal.SIGTERM:
            threading.Thread(target=self._end_if_stuck, name="hpcinit-stuck", daemon=True).start()

    def _of_own_signal(self) -> Reason:
        """Return the reason for a signal that sbatch's --signal requested.

        The reason is TIME_LIMIT if the time limit is near or unknown, and USER otherwise.
        """
        left = self.left()
        near = left is None or self._had is None or left < max(SIGNAL_EARLY, 0.5 * self._had)
        return Reason.TIME_LIMIT if near else Reason.USER

    def _end_if_stuck(self) -> None:
        calls = self._calls
        longest = self._longest if calls > 1 else FIRST_STEP_S  # the first step may compile
        end_if_stuck(lambda: self._calls != calls or self._stop is not None or self._closed.is_set(), longest)

    def _look(self) -> None:
        """In a thread of rank 0, check the run folder for a user's stop request, and query Slurm for the time left."""
        ask_at = time.monotonic()
        while self._stop is None and not self._closed.is_set():
            # Not Path.exists(), which raises if a file server fails (ESTALE, EIO).
            if self._folder is not None and os.path.exists(self._folder / run_folder.STOP):  # noqa: PTH110
                with self._lock:
                    self._file_seen, self._seen = True, max(Reason.USER, self._seen or Reason.USER)
                with contextlib.suppress(OSError):
                    (self._folder / run_folder.STOP).unlink()
                return
            if time.monotonic() >= ask_at:
                self._ask_left(ASK_PATIENTLY_S)
                ask_at = time.monotonic() + ASK_EVERY_S
            time.sleep(LOOK_S)


def _job(env: Mapping[str, str]) -> str:
    """Return this job's id for squeue and scontrol, or '' without Slurm."""
    if not from_environment(env).uses_slurm:
        return ""
    if task := env.get("SLURM_ARRAY_TASK_ID"):  # SLURM_JOB_ID of one task can be the array's id, which means all tasks
        return f"{env.get('SLURM_ARRAY_JOB_ID')}_{task}"
    return env.get("SLURM_JOB_ID", "")


def _output(command: Sequence[str], timeout_s: float) -> str:
    try:
        return slurm_client.run(command, at_most=timedelta(seconds=timeout_s)).stdout
    except slurm_client.Unreachable:
        return ""


def every(cost_s: float, step_s: float, most_s: float = MOST_S) -> int:
    """Return after how many steps the ranks communicate again about whether to stop.

    The communication should take at most SHARE of the time. But the ranks communicate at least every MOST_STEPS steps
    or `most_s` seconds.

    cost_s: how long one such communication takes.
    step_s: how long a step takes.
    """
    if step_s <= 0:
        return 1
    wanted = cost_s / (SHARE * step_s)
    return max(1, min(math.ceil(wanted), int(most_s / step_s), MOST_STEPS))
