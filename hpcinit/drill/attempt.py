"""One start of the program by the local engine: its processes, its progress and its saves."""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpcinit.base import safe_files
from hpcinit.drill import progress_lines
from hpcinit.drill.place import Place, changes, leftover
from hpcinit.drill.progress_lines import Point, Reader
from hpcinit.engine import local_job
from hpcinit.records import drill_records, error_records, run_folder

LOOK_S = 0.01
CLOCK_S = 0.002  # a file's time may be too early by this much, because the kernel's clock for files is coarse
TIME_MIN = 24 * 60.0  # the drill has its own limit
# Files that contain no training state: logs, tables and pictures.
NO_STATE = re.compile(r"(?i)\.(?:csv|tsv|log|out|err|jsonl|txt|md|html|ya?ml|png|jpe?g|gif|svg|pdf|wav|mp4)$|tfevents")
WITHOUT_OPTIMIZER = 0.6  # a file with only weights has at most this share of the size of a complete state
STEP = ["-m", "hpcinit.engine.local_step"]


@dataclass
class Save:
    """One save of the program.

    steps: how many steps were complete when the program saved.
    files: the files that it changed, with their sizes at the end of the save.
    """

    steps: int
    files: dict[str, int] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """Return the size of the largest file that may contain a training state."""
        return max((size for name, size in self.files.items() if not NO_STATE.search(name)), default=0)


@dataclass(frozen=True)
class Record:
    """The results of an attempt.

    steps: the optimizer steps that each rank recorded.
    points: the steps that the program reported.
    reporter: the rank that reported `points`.
    done: how many steps rank 0 completed.
    status: the exit status, or None if the drill killed the attempt.
    read: the files that the program read.
    outside: reports of files that the program created outside of its working folder.
    error: the error of the first rank that failed, or '' if none failed.
    begin_s: seconds from the start to the first step.
    """

    steps: Sequence[Sequence[drill_records.Step]]
    points: Sequence[Point]
    done: int
    status: int | None
    read: Sequence[str] = ()
    outside: Sequence[Mapping[str, object]] = ()
    error: str = ""
    begin_s: float = 0.0
    seconds: float = 0.0
    left_in_tmp: Mapping[str, int] = field(default_factory=dict)
    reporter: int = 0


class Attempt:
    """One start of the program. Call `kill()` at the end, even after an error."""

    def __init__(self, place: Place, run: Path, folder: Path, pid: int, log_from: Mapping[int, int]) -> None:
        self.place, self.run, self.folder, self.pid = place, run, folder, pid
        self._engine: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            # psutil also compares the start time, because another process may get the same id later.
            self._engine = psutil.Process(pid)
        self.began, self._at, self.first_step = time.monotonic(), time.time(), 0.0
        self.times: list[float] = []  # of rank 0's steps
        self.reader: Reader | None = None
        self.reporter = 0
        self._log_from, self._records_at, self._points_seen = log_from, 0, 0
        self._read: list[str] = []  # files read before the first step; the program may remove them later

    @classmethod
    def start(cls, place: Place, run: Path, env: Mapping[str, str], restart: int) -> Attempt:
        """Start the run's job again as if Slurm had requeued it. The folders stay as they are.

        restart: the number of the restart; 0 for a first attempt.
        """
        folder = place.next_attempt()
        more = environment(folder) | ({"SLURM_RESTART_COUNT": str(restart)} if restart else {})
        place.forget_reads()
        log_from = {rank: path.stat().st_size for rank, path in _logs(run).items()}
        pid, _ = local_job.start(run, TIME_MIN, {**env, **more})
        return cls(place, run, folder, int(pid), log_from)

    def running(self) -> bool:
        """Return whether the job is still running."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # if it is a child of this process
        try:
            engine = self._engine
            return engine is not None and engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def steps(self) -> int:
        """Return how many steps rank 0 has completed so far."""
        found, self._records_at = drill_records.read_lines(self.folder / "rank-0.jsonl", self._records_at)
        self.times += [one["time"] for one in found]
        done = len(self.times) or len(self.points())
        if done and not self.first_step:
            self.first_step, self._read = time.monotonic(), self._read_so_far()
        return done

    def _read_so_far(self) -> list[str]:
        return self.place.read_since() if self.place.reads_visible else []

    def log(self, rank: int = 0) -> bytes:
        """Return what a rank has printed in this attempt."""
        with contextlib.suppress(OSError), _log(self.run, rank).open("rb") as file:
            file.seek(self._log_from.get(rank, 0))
            return file.read()
        return b""

    def job_log(self) -> bytes:
        """Return what the batch script has printed in all attempts."""
        with contextlib.suppress(OSError):
            return (self.run / run_folder.JOB_LOG).read_bytes()
        return b""

    def points(self) -> list[Point]:
        """Return the steps that the program has reported in this attempt: with run.progress(), or in a rank's log."""
        if found := drill_records.read_lines(self.folder / drill_records.PROGRESS)[0]:
            return progress_lines.reported(found)
        for rank in sorted(_logs(self.run)):  # Megatron prints on the last rank
            text = self.log(rank)
            reader = self.reader or progress_lines.best_reader(text)
            if reader and (points := progress_lines.points(text, self._log_from.get(rank, 0), reader)):
                self.reporter = rank
                return points
        return []

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, in the order of the ranks."""
        found = []
        for one in self._tree():
            with contextlib.suppress(psutil.Error):
                if one.cmdline()[1:3] == STEP:
                    found = sorted(
                        one.children(), key=lambda child: int(child.environ().get("SLURM_PROCID", child.pid))
                    )
        return found

    def of_ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks and their child processes, such as the workers of data loaders."""
        found: list[psutil.Process] = []
        for one in self.ranks():
            with contextlib.suppress(psutil.Error):
                found += [one, *one.children(recursive=True)]
        return found

    def _tree(self) -> list[psutil.Process]:
        try:
            if self._engine is None or not self._engine.is_running():
                return []
            return [self._engine, *self._engine.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill every process of the job at once, like a node failure."""
        for _ in range(100):
            left = [one for one in self._tree() if one.is_running()]
            # Kill the engine last, because its children could not be found without it.
            for process in [*left[1:], *left[:1]]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=0.5)
            if not self.running():
                return

    def wait(self, until: Callable[[], bool], deadline: float, look_s: float = LOOK_S) -> bool:
        """Wait until `until()` returns True. Return False if the job ends or the deadline passes first."""
        while not until():
            if not self.running() or time.monotonic() > deadline:
                return until()
            time.sleep(look_s)
        return True

    def record(self, killed: bool) -> Record:
        """Return the results of this attempt. killed: whether the drill killed the attempt."""
        ranks = sorted(self.folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem[5:]))
        status = None if killed else int(local_job.read_state(self.run).get("exit_status", 1))
        errors = [one.record for one in error_records.read(self.run / run_folder.ERRORS) if one.record.time > self._at]
        first = min(errors, key=lambda one: one.time, default=None)
        points = self.points()
        if killed and len(points) > 1:
            points.pop()  # a later line with the same step may be missing: nanoGPT's after an evaluation
        return Record(
            steps=[drill_records.steps(self.folder, int(path.stem[5:])) for path in ranks],
            points=points,
            reporter=self.reporter,
            done=self.steps(),
            status=status,
            read=list(dict.fromkeys([*self._read, *self._read_so_far()])),
            outside=[
                one | {"bytes": file_size(Path(one["path"]))}
                for one in drill_records.read_lines(self.folder / drill_records.OUTSIDE)[0]
            ],
            error=f"rank {first.rank}: {first.error}" if first and status else "",
            begin_s=self.first_step - self.began if self.first_step else 0.0,
            seconds=time.monotonic() - self.began,
            left_in_tmp=leftover(self.folder),
        )


class SaveWatch:
    """Records which files the program changes, and after how many steps.

    from_step: how many steps were complete before this attempt.
    earlier: the saves of earlier attempts.
    """

    def __init__(self, attempt: Attempt, from_step: int = 0, earlier: Sequence[Save] = ()) -> None:
        self.attempt, self.from_step, self.earlier = attempt, from_step, list(earlier)
        self.last = attempt.place.written() if from_step else attempt.place.given
        self.by_steps: dict[int, Save] = {}

    def done(self) -> int:
        """Return how many steps the training run has completed."""
        return self.from_step + self.attempt.steps()

    def look(self) -> bool:
        """Record which files have changed since the last call. Return whether the job has ended."""
        now, steps = self.attempt.place.written(), self.attempt.steps()
        gone = {seen: name for name, seen in self.last.items() if name not in now}
        for name, seen in changes(self.last, now).items():
            if seen in gone and "/." in name:
                continue  # a file of an old checkpoint that run.save(keep=2) is removing
            for one in self.by_steps.values() if seen in gone else ():
                one.files.pop(gone[seen], None)  # a temporary file, which a thread may rename some steps later
            # The file's time is exact, but this call may be late.
            made = bisect.bisect(self.attempt.times, seen.changed_ns / 1e9 + CLOCK_S) if self.attempt.times else steps
            save = self.by_steps.setdefault(made, Save(made))
            save.files[name] = seen.size
            # A file that disappears during a save was a temporary file that was renamed.
            save.files = {name: size for name, size in save.files.items() if name in now}
        self.last = now
        return not self.attempt.running()

    def saves(self) -> list[Save]:
        """Return the saves so far. Omit files that change in more than half of the steps, such as a log of losses."""
        times: dict[str, int] = {}
        for save in self.by_steps.values():
            for name in save.files:
                times[name] = times.get(name, 0) + 1
        often = {name for name, count in times.items() if count > max(3, self.attempt.steps() / 2)}
        found = []
        for save in self.by_steps.values():
            kept = {name: size for name, size in save.files.items() if name not in often}
            if save.steps and kept:
                found.append(Save(self.from_step + save.steps, kept))
        return [*self.earlier, *sorted(found, key=lambda save: save.steps)]


def states(saves: Sequence[Save], largest: int) -> list[Save]:
    """Return the saves of a complete training state. Smaller saves, such as a table of losses, are omitted.

    largest: the size of the largest file of all saves.
    """
    return [save for save in saves if save.largest > WITHOUT_OPTIMIZER * largest]


def kinds(names: Iterable[str]) -> set[str]:
    """Return the names with each number replaced by '#'."""
    return {re.sub(r"\d+", "#", name) for name in names}


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if it is no file or can't be read."""
    with contextlib.suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that the drill adds for an attempt.

    folder: the folder for the reports of the attempt.
    """
    return {drill_records.ENV_DRILL: str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist. If a process id has been reused, skip the new process."""
    for one in processes:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            one.send_signal(number)


def handles(process: psutil.Process, number: signal.Signals) -> str:
    """Return how a process handles a signal: 'caught', 'ignored' or 'default'."""
    text = safe_files.read_or_empty(Path(f"/proc/{process.pid}/status"))
    masks = {
        name: int(value, 16)
        for name, _, value in (line.partition(":\t") for line in text.splitlines())
        if name in ("SigCgt", "SigIgn", "SigBlk")
    }
    bit = 1 << (number - 1)
    if masks.get("SigIgn", 0) & bit:
        return "ignored"
    return "caught" if (masks.get("SigCgt", 0) | masks.get("SigBlk", 0)) & bit else "default"


def _log(run: Path, rank: int) -> Path:
    return run / run_folder.RANK_LOG.format(rank=rank)


def _logs(run: Path) -> dict[int, Path]:
    return {int(path.stem[5:]): path for path in (run / run_folder.LOGS).glob("rank-*.log") if path.stem[5:].isdigit()}
