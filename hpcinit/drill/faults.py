"""Simulates the faults of a cluster in the attempts of a drill."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hpcinit.drill.attempt import Attempt, Record, Save, SaveWatch, file_size, handles, send
from hpcinit.drill.place import changes
from hpcinit.engine import local_job
from hpcinit.records import drill_records

PREEMPTED, RANK_KILLED, ALL_KILLED = "preempted", "rank killed", "all ranks killed"
TIME_LIMIT, WHILE_SAVING, FULL_DISK = "time limit", "killed while it saved", "full disk"
FEWER_RANKS = "fewer ranks"
SLICE_S = 0.001  # how long the ranks run between two checks of the files during a save
MOST_TORN, MOST_STATES = 2, 4  # most restarts from saves with a torn file, and from all unfinished saves
MOST_COPIES = 20  # how often the files are copied during a save
LEAST_TORN = 1024  # bytes; a smaller file is written in one piece
AFTER_FAILURE_S = 30.0  # how long the other ranks may take to end


@dataclass(frozen=True)
class Interruption:
    """An attempt that a fault ended.

    at: how many steps were complete at the time of the fault.
    done: how many steps were complete at the end of the attempt.
    record: the results of the attempt.
    saves: the complete saves, including a save after the signal.
    signal: how rank 0 handles SIGTERM, or '' if the fault sends no SIGTERM.
    ran_on: whether the job was still running at the end of the grace time.
    after_s: seconds from the fault to the last step.
    state: a copy of the folders for the restart. None: use the folders as they are.
    unfinished: the files of the interrupted save, with their sizes.
    expected: the files of the complete save, with their sizes.
    """

    fault: str
    at: int
    done: int
    record: Record
    saves: Sequence[Save]
    signal: str = ""
    ran_on: bool = False
    after_s: float = 0.0
    state: Path | None = None
    unfinished: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0


class Faults:
    """Ends attempts as a cluster does. limit_s: how many seconds an attempt may take until the fault."""

    def __init__(self, grace_s: float, limit_s: float) -> None:
        self.grace_s, self.limit_s = grace_s, limit_s

    def cut(self, fault: str, at: int, watch: SaveWatch) -> Interruption:
        """Wait until the training run has completed `at` steps, then simulate the fault called `fault`.

        watch: the attempt and its saves.
        """
        reached = self._reach(at, watch)
        attempt, ranks = watch.attempt, watch.attempt.ranks()
        rank, done = len(ranks) - 1, watch.done()
        does = handles(ranks[0], signal.SIGTERM) if ranks and fault != RANK_KILLED else ""
        if fault == PREEMPTED:
            send(attempt.of_ranks(), signal.SIGTERM)
        elif fault == TIME_LIMIT:
            local_job.cancel(attempt.run)
        else:
            send(ranks[-1:], signal.SIGKILL)  # the engine then ends the others, as srun does
        began = time.time()
        wait_s = AFTER_FAILURE_S if fault == RANK_KILLED else self.grace_s
        attempt.wait(watch.look, time.monotonic() + wait_s)
        killed = attempt.running()
        attempt.kill()
        watch.look()
        record, last = attempt.record(killed=reached), (attempt.times[-1] if attempt.times else time.time())
        return Interruption(fault, done, watch.done(), record, watch.saves(), does, killed, last - began, rank=rank)

    def full_disk(self, save: Save, at_bytes: int, watch: SaveWatch) -> Interruption:
        """Simulate a full disk from just before a save until two steps after it.

        save: the save, as recorded in the undisturbed run.
        at_bytes: the size beyond which a file can't grow.
        watch: the attempt and its saves.
        """
        self._reach(save.steps - 2, watch)  # a program can write `latest` before a thread writes the data
        before = watch.attempt.place.written()
        reached = self._reach(save.steps - 1, watch)
        attempt, earlier = watch.attempt, watch.saves()
        for one in attempt.of_ranks():
            with contextlib.suppress(psutil.Error, OSError):
                # Python ignores SIGXFSZ, so that write() fails with EFBIG instead of ENOSPC.
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (at_bytes, resource.RLIM_INFINITY))
        attempt.wait(lambda: watch.done() >= save.steps + 2, time.monotonic() + self.limit_s)
        attempt.kill()
        record, state = attempt.record(killed=reached), attempt.place.copy_state("full-disk")
        sizes = {name: seen.size for name, seen in changes(before, attempt.place.written()).items()}
        return Interruption(
            FULL_DISK, save.steps, watch.done(), record, earlier, state=state, unfinished=sizes, expected=save.files
        )

    def _reach(self, steps: int, watch: SaveWatch) -> bool:
        """Wait until the training run has completed `steps` steps. Return whether the program is still running."""
        deadline = time.monotonic() + self.limit_s
        watch.attempt.wait(lambda: watch.look() or watch.done() >= steps, deadline)
        return watch.attempt.running()


class Frozen:
    """Copies the files of an undisturbed attempt. A copy contains the files that a kill at that moment would leave.

    The ranks are stopped during a copy.

    at: make the first copy after this many steps.
    cut: saves to copy while they are incomplete. After this has worked for one of them, the others are skipped.
    """

    def __init__(self, attempt: Attempt, at: int, cut: Sequence[Save]) -> None:
        self.attempt, self.at, self.cut = attempt, at, list(cut)
        self.killed: Interruption | None = None
        self.while_saving: list[Interruption] = []

    def look(self, watch: SaveWatch) -> None:
        """Copy the files if the attempt has reached a step at which a copy is due."""
        steps = self.attempt.steps()
        if self.killed is None and steps >= self.at:
            processes = self.attempt.of_ranks()
            _run_for(processes, 0.0)
            watch.look()
            state, record = self.attempt.place.copy_state("killed"), self.attempt.record(True)
            steps = self.attempt.steps()
            self.killed = Interruption(ALL_KILLED, steps, steps, record, watch.saves(), state=state)
            send(processes, signal.SIGCONT)
        while self.cut and self.cut[0].steps <= steps:
            self.cut.pop(0)  # this save ended while a copy was made
        if self.cut and not self.while_saving and steps >= self.cut[0].steps - 1:
            self._save(self.cut.pop(0), watch)

    def _save(self, save: Save, watch: SaveWatch) -> None:
        """Copy the files several times during a save.

        A Python rank waits for a copy before it opens or renames a file. Programs in other languages do not wait, so
        the ranks run for only a millisecond at a time until the save is complete.
        """
        earlier, states = watch.saves(), list[State]()
        known: set[object] = set()
        place, pause = self.attempt.place, self.attempt.folder / drill_records.PAUSE
        before, processes, read_at = place.written(), self.attempt.of_ranks(), 0
        pause.touch()
        while self.attempt.running() and self.attempt.steps() <= save.steps + 1:
            _run_for(processes, SLICE_S)
            announced, read_at = drill_records.read_lines(self.attempt.folder / drill_records.CHANGES, read_at)
            changed = changes(before, place.written())
            complete = all(name in changed and changed[name].size == size for name, size in save.files.items())
            for one in announced or [{}]:
                name = os.path.relpath(str(one["path"]), place.now) if one else ""
                if name.startswith(".."):  # outside of the folders: the program may have written this line
                    continue
                # For other files, such as temporary files, only compare whether they exist.
                key = (name, *sorted((name, seen.size == save.files.get(name)) for name, seen in changed.items()))
                useful = changed or one.get("torn")
                if key not in known and useful and not complete and not place.is_own(name) and len(known) < MOST_COPIES:
                    known.add(key)
                    copy = place.copy_state(f"state-{save.steps}-{len(known)}")
                    sizes = {name: seen.size for name, seen in changed.items()}
                    states.append(State(copy, sizes, name if one.get("torn") else ""))
                if one:
                    (self.attempt.folder / Path(str(one["seen"])).name).touch()
            if complete:
                break
        record = self.attempt.record(True)
        chosen = _chosen(states, save, place.now)
        pause.unlink(missing_ok=True)
        send(processes, signal.SIGCONT)
        self.while_saving = [
            Interruption(
                WHILE_SAVING,
                save.steps,
                save.steps,
                record,
                earlier,
                state=one.path,
                unfinished=one.sizes,
                expected=save.files,
            )
            for one in chosen
        ]


@dataclass
class State:
    """A copy of the files in the middle of a save.

    sizes: the files that had changed, with their sizes.
    opened: the file that a rank was about to write, or ''.
    """

    path: Path
    sizes: dict[str, int]
    opened: str

    def tear(self, whole: Path) -> None:
        """Write only the first half of the opened file, as if a kill had interrupted the write.

        whole: a complete version of the file.
        """
        target, size = self.path / self.opened, file_size(whole) // 2
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole.open("rb") as file:
            target.write_bytes(file.read(size))
        self.sizes[self.opened] = size


def _chosen(states: Sequence[State], save: Save, now: Path) -> list[State]:
    """Return at most MOST_STATES states to restart from.

    At most MOST_TORN of them have a large file that was cut in half, as by a kill. The others are the first and the
    last of the remaining states.

    now: the folder as it is after the save.
    """
    whole = {}
    for one in states:
        if one.opened and not (one.path / one.opened).is_symlink():
            found = max([now, *(other.path for other in states)], key=lambda path: file_size(path / one.opened))
            if file_size(found / one.opened) >= LEAST_TORN:
                whole[one.opened] = (one, found / one.opened)
    largest = sorted(whole.values(), key=lambda pair: (pair[0].opened in save.files, file_size(pair[1])), reverse=True)
    for one, path in largest[:MOST_TORN]:
        one.tear(path)
    torn = [one for one, _ in largest[:MOST_TORN]]
    real = [one for one in states if one.sizes and one not in torn]
    return [*torn, *real[:1], *real[1:][-1:]]


def _run_for(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Let stopped processes run for `seconds`. Return when all of them have stopped again or ended."""
    send(processes, signal.SIGCONT)
    time.sleep(seconds)
    send(processes, signal.SIGSTOP)
    for one in processes:
        for _ in range(1000):
            with contextlib.suppress(OSError), Path(f"/proc/{one.pid}/stat").open("rb") as file:
                if file.read().rpartition(b") ")[2][:1] not in b"TtZX":
                    time.sleep(0.0002)
                    continue
            break
