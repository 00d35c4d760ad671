"""A rank tells each step it takes; a silence that is too long leaves stacks and a report of who waits for whom.

Ranks of a node share a table (a file on its own disk), so that a step costs a microsecond and one rank writes
for its node. A thread looks after it. Where C code keeps Python's lock it does not run, and the node's other ranks see.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import struct
import sys
import threading
import time
from pathlib import Path

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import TrainingHang
from hpcinit.records import hang_report, heartbeats, plain_files, scratch
from hpcinit.records.hang_report import HangReport
from hpcinit.records.heartbeats import FRESH_PERIODS, NodeHeartbeats, RankHeartbeat
from hpcinit.records.spec import Hang
from hpcinit.runtime import program
from hpcinit.runtime.lifecycle import phase
from hpcinit.world import World

# What the ranks of a node share while they train: a slot of bytes for each, in a file on the node's own disk.


class Table:
    """Written with pwrite(2) and not through a mapping: where the disk is full, or another process cuts the file short,
    a write to a mapping ends the process with SIGBUS. A write costs about a microsecond."""

    def __init__(self, path: Path, size: int, at: int, slot: bytes) -> None:
        """Open the file of `size` bytes, or make it, and write this rank's first `slot` at the offset `at`. Raise
        OSError where that fails; afterwards the bytes of this slot are allocated, and writing them needs no room."""
        self._size = size
        # A file object closes itself.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self._fd = self._file.fileno()
        if os.pwrite(self._fd, slot, at) < len(slot):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write(self, at: int, data: bytes) -> None:
        """Never raises: a heartbeat that is lost is no reason to end a step."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, data, at)

    def read(self) -> bytes:
        """All slots; zeros where no rank has written. Raises OSError."""
        return os.pread(self._fd, self._size, 0).ljust(self._size, b"\0")


SLOT = struct.Struct("<qqqdd")  # rank, pid, step, when it was told, when the thread last looked (time.monotonic)
TOLD, LOOKED = struct.Struct("<qd"), struct.Struct("<d")
TOLD_AT, LOOKED_AT = 16, 32  # in a slot
TABLE = "beats"  # of the ranks of a node, in their folder on its own disk
PERIOD_S = 5.0
PATIENCE = 5  # a silence is none before it is so many times as long as the longest between two steps so far
SETTLE_PERIODS = 2  # until the other ranks have left their stacks too
STATES = {"T": heartbeats.STOPPED, "t": heartbeats.STOPPED, "D": heartbeats.IN_KERNEL}  # of /proc/PID/stat, proc(5)


class Heartbeat:
    """Of one rank. tell() is called by the training; all else happens in a thread. Raises OSError where `table`, a path
    on the node's own disk, cannot be written."""

    def __init__(self, world: World, asked: Hang, folder: Path, table: Path) -> None:
        self._world, self._asked = world, asked
        job = scratch.folder_name(world.job)
        self._beats, self._hang = folder / heartbeats.FOLDER / job, folder / hang_report.FOLDER / job
        self._period = min(PERIOD_S, asked.after_s / 4)
        self._at = world.local_rank * SLOT.size
        self._last, self._step = 0.0, -1  # when a step was told, and which
        self._longest = self._recent = 0.0  # step: so far, and since the thread last looked
        self._due = float("inf")  # when the thread wakes up
        self._stopped = self._stopped_at = 0.0  # seconds, and when: the process did not run (SIGSTOP, scontrol suspend)
        slot = SLOT.pack(world.rank, os.getpid(), -1, 0.0, time.monotonic())
        self._table = Table(table, world.local_world_size * SLOT.size, self._at, slot)
        self._dumped = 0.0
        self._reported = False
        self._closed = threading.Event()
        try:
            threading.Thread(target=self._run, name="hpcinit-heartbeat", daemon=True).start()
        except RuntimeError as error:  # this user may have no more threads
            raise OSError(str(error)) from None

    def tell(self, step: int) -> None:
        now = time.monotonic()
        if self._last and step != self._step:  # progress() and should_stop() both tell it
            self._recent = max(self._recent, self._quiet(now))
        first, self._last, self._step = not self._last, now, step
        if first:  # the others see at once that this rank has begun; later steps are written by the thread
            self._write_step()

    def _write_step(self) -> None:
        """Not from the training: a write to a disk can wait for its journal, or for ever for a dead file server."""
        self._table.write(self._at + TOLD_AT, TOLD.pack(self._step, self._last))

    def _quiet(self, now: float) -> float:
        """Seconds since the last sign of life: a step, or the end of a save or of a phase that the program declares.

        Time in which the process was stopped does not count.
        """
        since = max(self._last, phase.last_end())
        return now - since - (self._stopped if since < self._stopped_at else 0.0)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        # Once before the first wait: a node that falls silent at once is known by name all the same.
        while True:
            if self._last:
                self._write_step()
            self._table.write(self._at + LOOKED_AT, LOOKED.pack(time.monotonic()))
            self._measure()
            with background_writer.suppressed("the heartbeats of this node"):
                if self._leads():
                    self._publish()
            with background_writer.suppressed("the report of a hang"):
                self._look()
            self._due = time.monotonic() + self._period
            if self._closed.wait(self._period):
                return

    def _slots(self) -> list[tuple[int, int, int, float, float]]:
        return [slot for slot in SLOT.iter_unpack(self._table.read()) if slot[1]]

    def _leads(self) -> bool:
        """The first rank of the node whose thread runs."""
        fresh = time.monotonic() - FRESH_PERIODS * self._period
        return next((slot[0] for slot in self._slots() if slot[4] > fresh), -1) == self._world.rank

    def _publish(self) -> None:
        now = time.monotonic()
        found = []
        for rank, pid, step, told, looked in self._slots():
            state = "" if now - looked < FRESH_PERIODS * self._period else _state(pid)
            found.append(RankHeartbeat(rank, pid, step, round(now - told, 1) if told else None, state))
        host = self._world.host or os.uname().nodename
        _write(self._beats / f"{host}.json", NodeHeartbeats(host, time.time(), tuple(found)).to_json())

    def _measure(self) -> None:
        """The longest step so far. This thread wakes up every period: when it does not, the process was stopped."""
        late = time.monotonic() - self._due
        stopped = late if late > self._period else 0.0
        if stopped:
            phase.not_counted(stopped)
            again = max(self._last, phase.last_end()) < self._stopped_at  # no sign of life since it was stopped before
            self._stopped, self._stopped_at = stopped + (self._stopped if again else 0.0), self._due
        recent, self._recent = self._recent, 0.0
        self._longest = max(self._longest, recent - stopped)

    def _silent(self) -> float:
        """Seconds of silence that is not expected."""
        if not self._last or phase.silence_is_expected(phase.LONG * self._asked.after_s):
            return 0.0
        return self._quiet(time.monotonic())

    def _limit(self) -> float:
        if not self._longest:  # no step has been measured yet
            return phase.LONG * self._asked.after_s
        return max(self._asked.after_s, PATIENCE * self._longest)

    def _look(self) -> None:
        silent = self._silent()
        if silent <= self._limit():
            if self._dumped:
                self._dumped, self._reported = 0.0, False
                say(f"rank {self._world.rank} goes on")
                files = (self._hang / name for name in (hang_report.RECORD, hang_report.NODE, hang_report.REPORT))
                for path in (self._stack(), *files):
                    path.unlink(missing_ok=True)
            return
        if not self._dumped:
            self._dumped = time.monotonic()
            self._dump()
        elif time.monotonic() - self._dumped > SETTLE_PERIODS * self._period:
            self._report(silent)

    def _stack(self) -> Path:
        return self._hang / hang_report.STACK.format(rank=self._world.rank)

    def _dump(self) -> None:
        path = self._stack()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            print(hang_report.MAIN.format(ident=threading.main_thread().ident), file=file, flush=True)
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _report(self, silent: float) -> None:
        """By the rank that comes first; then, where it is asked for, the end of this one."""
        fresh_s = FRESH_PERIODS * self._period
        told, stacks = heartbeats.read(self._beats), hang_report.places(self._hang)
        report = hang_report.report(told, stacks, time.time(), self._world.world_size, fresh_s)
        if not self._reported and _is_first(self._hang, report):
            lines = report.lines()
            say("the training hangs: " + "\n  ".join(lines))
            if self._asked.action == "end":
                message = "the training hangs: " + "; ".join(lines)
                program.record(TrainingHang(message, report.document()), self._world)
        self._reported = True
        if self._asked.action == "end":
            say(f"rank {self._world.rank} ends after {silent:.0f} s without a step (hang.action=end)")
            with contextlib.suppress(OSError, ValueError):  # its disk is full too, or the program has closed it
                sys.stdout.flush()
            os._exit(hang_report.HUNG)


def _is_first(folder: Path, report: HangReport) -> bool:
    """Write the report of a hang, which the first rank does for all. Where the disk is full, none can know which rank
    is the first, and each reports."""
    # The report last: the batch script looks for it, and for what is beside it then.
    node = {hang_report.NODE: plain_files.text({"node": report.host})} if report.host else {}
    text = "".join(f"{line}\n" for line in report.lines())
    for name, content in {hang_report.RECORD: report.to_json(), **node, hang_report.REPORT: text}.items():
        try:
            with (folder / name).open("x" if name == hang_report.RECORD else "w") as file:
                file.write(content)
        except FileExistsError:
            return False
        except OSError as error:
            say(f"warning: {folder / name} cannot be written: {error}")
    return True


def _state(pid: int) -> str:
    """What the node sees of a process whose thread does not run."""
    try:
        # The name in the second field may hold blanks and brackets; the state follows the last ')'.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return heartbeats.GONE
    return heartbeats.GONE if state in "ZX" else STATES.get(state, heartbeats.MUTE)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    safe_files.write_atomically(path, text)
