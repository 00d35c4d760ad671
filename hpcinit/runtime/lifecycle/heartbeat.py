"""Detects hangs: if no step finishes for too long, the ranks write their stacks, and one rank writes a report.

After each step, a rank writes its step number (the heartbeat) into a file on the node's own disk. This takes about a
microsecond. One rank per node copies the file to the run folder.

A thread of each rank checks the file. If C code holds the GIL, this thread cannot run. Another rank of the node then
reports that the thread does not run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import TrainingHang
from hpcinit.base.text import rank_names
from hpcinit.records import hang_report, heartbeats, run_folder, scratch
from hpcinit.records.hang_report import HangReport
from hpcinit.records.heartbeats import FRESH_PERIODS, NodeHeartbeats, RankHeartbeat
from hpcinit.records.spec import Hang
from hpcinit.runtime import program
from hpcinit.runtime.lifecycle import flight_dump, output_watch, phase
from hpcinit.world import World

# The table has a slot of bytes for each rank of the node.


class Table:
    """A file with one slot per rank, written with pwrite(2).

    The file is not memory-mapped, because a write to a mapping ends the process with SIGBUS if the disk is full or
    another process truncates the file.
    """

    def __init__(self, path: Path, size: int, at: int, slot: bytes) -> None:
        """Open or create the file, and write this rank's first `slot`. Raise OSError if that fails.

        This allocates the disk space of the slot, so later writes succeed even on a full disk.

        size: the size of the file in bytes.
        at: the offset of this rank's slot.
        """
        self._size = size
        # A file object is closed automatically.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self._fd = self._file.fileno()
        if os.pwrite(self._fd, slot, at) < len(slot):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write(self, at: int, data: bytes) -> None:
        """Write a slot at the offset `at`. Never raise, because a lost heartbeat must not fail a training step."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, data, at)

    def read(self) -> bytes:
        """Return all slots as bytes. The slots of ranks that have not written are zero.

        Raise OSError if the file cannot be read.
        """
        return os.pread(self._fd, self._size, 0).ljust(self._size, b"\0")


SLOT = struct.Struct("<qqqdd")  # rank, pid, step, time of the step, time of the thread's last check (time.monotonic)
TOLD, LOOKED = struct.Struct("<qd"), struct.Struct("<d")
TOLD_AT, LOOKED_AT = 16, 32  # offsets in a slot
TABLE = "heartbeats"  # file name, in the ranks' folder on the node's own disk
PERIOD_S = 5.0
PATIENCE = 5  # a hang is at least this many times as long as the longest step so far
END_S = 2.0  # the rank that decides that all ranks exit waits this long before it exits
SETTLE_PERIODS = 1  # after this many periods, the other ranks have written their stacks and dumps
LEAST_S = 0.2  # the shortest time between two checks of the thread
STATES = {"T": heartbeats.STOPPED, "t": heartbeats.STOPPED, "D": heartbeats.IN_KERNEL}  # proc(5)


class Heartbeat:
    """Sends the heartbeats of one rank, and checks in a thread whether the training hangs.

    The training loop calls step_done() after each step. Raise OSError if the table cannot be written.

    table: the path of the table, on the node's own disk.
    """

    def __init__(self, world: World, asked: Hang, folder: Path, table: Path) -> None:
        self._world, self._asked = world, asked
        job = scratch.folder_name(world.job)
        self._folder = folder
        self._heartbeats, self._hang = folder / heartbeats.FOLDER / job, folder / run_folder.HANG_REPORTS / job
        self._period = min(PERIOD_S, asked.after_s / 4)
        self._at = world.local_rank * SLOT.size
        self._last, self._step = 0.0, -1  # time and number of the last reported step
        self._longest = self._recent = 0.0  # duration of the longest step: so far, and since the thread's last check
        self._due = float("inf")  # next wake-up of the thread
        self._stopped = self._stopped_at = 0.0  # seconds and time of suspension (SIGSTOP, scontrol suspend)
        slot = SLOT.pack(world.rank, os.getpid(), -1, 0.0, time.monotonic())
        self._table = Table(table, world.local_world_size * SLOT.size, self._at, slot)
        self._dumped = 0.0
        self._reported = self._decides = False
        self._closed = threading.Event()
        try:
            threading.Thread(target=self._run, name="hpcinit-heartbeat", daemon=True).start()
        except RuntimeError as error:  # the user's limit of threads is reached
            raise OSError(str(error)) from None

    def step_done(self, step: int) -> None:
        now = time.monotonic()
        if self._last and step != self._step:  # progress() and should_stop() both report a step
            self._recent = max(self._recent, self._quiet(now))
        first, self._last, self._step = not self._last, now, step
        if first:  # write the first step at once, so that other ranks see that training has started
            self._write_step()

    def _write_step(self) -> None:
        """Write the last step to the table. Call this only in the thread of this object.

        A write may have to wait for the disk, or forever for a dead file server.
        """
        self._table.write(self._at + TOLD_AT, TOLD.pack(self._step, self._last))

    def _quiet(self, now: float) -> float:
        """Return the seconds since the last heartbeat, without the time in which the process was suspended.

        A heartbeat is a step, or the end of a save or of a declared phase.
        """
        since = max(self._last, phase.last_end())
        return now - since - (self._stopped if since < self._stopped_at else 0.0)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        # Publish before the first wait, so that the report also lists a node that hangs at once.
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
            wait_s = self._wait_s()
            self._due = time.monotonic() + wait_s
            if self._closed.wait(wait_s):
                return

    def _wait_s(self) -> float:
        """Return the seconds until the next check: a period, or less if a hang or its report is due earlier."""
        if self._reported:
            return min(self._period, END_S / 4) if self._asked.action == "end" else self._period
        due = self._limit() - self._silent()
        if self._dumped:
            due = self._dumped + SETTLE_PERIODS * self._period - time.monotonic()
        return min(self._period, max(due, 0.0) + LEAST_S)

    def _slots(self) -> list[tuple[int, int, int, float, float]]:
        return [slot for slot in SLOT.iter_unpack(self._table.read()) if slot[1]]

    def _leads(self) -> bool:
        """Return whether this rank leads on its node: it is the first of the node's ranks with a running heartbeat
        thread.
        """
        fresh = time.monotonic() - FRESH_PERIODS * self._period
        return next((slot[0] for slot in self._slots() if slot[4] > fresh), -1) == self._world.rank

    def _publish(self) -> None:
        now = time.monotonic()
        found = []
        for rank, pid, step, told, looked in self._slots():
            state = "" if now - looked < FRESH_PERIODS * self._period else _state(pid)
            found.append(RankHeartbeat(rank, pid, step, round(now - told, 1) if told else None, state))
        host = self._world.host or os.uname().nodename
        _write(self._heartbeats / f"{host}.json", NodeHeartbeats(host, time.time(), tuple(found)).to_json())

    def _measure(self) -> None:
        """Update the duration of the longest step, without the time in which the process was suspended.

        If this thread wakes up late, it assumes that the process was suspended.
        """
        late = time.monotonic() - self._due
        stopped = late if late > self._period else 0.0
        if stopped:
            phase.not_counted(stopped)
            again = max(self._last, phase.last_end()) < self._stopped_at  # no heartbeat since the last suspension
            self._stopped, self._stopped_at = stopped + (self._stopped if again else 0.0), self._due
        recent, self._recent = self._recent, 0.0
        self._longest = max(self._longest, recent - stopped)

    def _silent(self) -> float:
        """Return the seconds without a heartbeat, or 0 before the first step and in a phase that may take long."""
        if not self._last or phase.silence_is_expected(phase.LONG * self._asked.after_s):
            return 0.0
        return self._quiet(time.monotonic())

    def _limit(self) -> float:
        if not self._longest:  # no step has been measured yet
            return phase.LONG * self._asked.after_s
        return max(self._asked.after_s, PATIENCE * self._longest)

    def _look(self) -> None:
        silent, now = self._silent(), time.monotonic()
        if silent <= self._limit():
            if self._dumped:
                self._dumped, self._reported, self._decides = 0.0, False, False
                say(f"rank {self._world.rank} continues after the reported hang")
                names = (hang_report.RECORD, hang_report.REPORT, hang_report.NO_STEPS)
                for path in (self._stack(), *(self._hang / name for name in names)):
                    path.unlink(missing_ok=True)
                flight_dump.remove(self._world, self._folder)
            return
        if self._reported and self._asked.action == "end":
            if (self._hang / hang_report.ENDS).exists():
                self._exit(silent)
            if now - self._dumped > self._limit():  # the last report did not lead to an end, so report again
                self._dumped, self._reported = 0.0, False
        if not self._dumped:
            self._dumped = now
            self._dump()
        elif self._is_settled(now - self._dumped):
            self._report(silent)

    def _is_settled(self, since_s: float) -> bool:
        """Return whether all ranks have had enough time to write their stacks.

        A rank that has reported no step needs more time, because it rarely checks whether other ranks hang.
        """
        if self._reported or since_s <= SETTLE_PERIODS * self._period:
            return self._reported
        if since_s > output_watch.period(self._asked.after_s) + 2 * self._period:
            return True
        stacks = {path.stem.rpartition("-")[2] for path in self._hang.glob(hang_report.STACK.format(rank="*"))}
        known = {heartbeat.rank for node in heartbeats.read(self._heartbeats) for heartbeat in node.heartbeats}
        return all(rank in known or str(rank) in stacks for rank in range(self._world.world_size))

    def _stack(self) -> Path:
        return self._hang / hang_report.STACK.format(rank=self._world.rank)

    def _dump(self) -> None:
        output_watch.write_stacks(self._stack(), self._world.host)
        (self._hang / hang_report.NO_STEPS).touch()
        flight_dump.write(self._world, self._folder)

    def _report(self, silent: float) -> None:
        """Report the hang, if this rank is the first to do so.

        With hang.action=end, also decide whether all ranks end.
        """
        fresh_s = FRESH_PERIODS * self._period
        told, stacks = heartbeats.read(self._heartbeats), hang_report.places(self._hang)
        report = hang_report.report(told, stacks, time.time(), self._world.world_size, fresh_s)
        self._reported, again = True, self._decides
        self._decides = again or _is_first(self._hang, report)
        if not self._decides:
            return
        if not again:
            say("the training hangs: " + "\n  ".join(report.lines()))
        if self._asked.action != "end":
            return
        lines = "; ".join(report.lines())
        # The stack of a rank that waits for its GPU shows no collective.
        if not report.shows_who_is_late and (at_fault := flight_dump.ranks_at_fault(self._world, self._folder)):
            host = stacks[at_fault[0]].host if at_fault[0] in stacks else ""
            report = replace(report, rank=at_fault[0], host=host)
            lines += f"; the dumps show that the others wait for {rank_names(at_fault)}"
        elif not report.shows_who_is_late:
            if not again:
                say("the ranks continue despite hang.action=end, because no rank waits for another one in a collective")
            return
        error = TrainingHang(f"the training hangs: {lines}", rank_at_fault=report.rank, host_at_fault=report.host)
        program.record(error, self._world)
        with background_writer.suppressed("the decision to end all ranks"):
            safe_files.write_atomically(self._hang / hang_report.RECORD, report.to_json())
            (self._hang / hang_report.ENDS).touch()
        time.sleep(END_S)
        self._exit(silent)

    def _exit(self, silent: float) -> None:
        say(f"rank {self._world.rank} exits after {silent:.0f} s without a step (hang.action=end)")
        with contextlib.suppress(OSError, ValueError):  # the disk is full, or the program has closed stdout
            sys.stdout.flush()
        os._exit(run_folder.HUNG)


def _is_first(folder: Path, report: HangReport) -> bool:
    """Write the report of a hang, unless another rank has written one. Return whether this rank wrote it.

    If the disk is full, also return True, so that each rank prints the report.
    """
    # Write the text last: hpcinit.after waits for it, and then reads the record.
    text = "".join(f"{line}\n" for line in report.lines())
    for name, content in {hang_report.RECORD: report.to_json(), hang_report.REPORT: text}.items():
        try:
            with (folder / name).open("x" if name == hang_report.RECORD else "w") as file:
                file.write(content)
        except FileExistsError:
            return False
        except OSError as error:
            say(f"warning: cannot write the report of the hang to {folder / name}: {error}")
    return True


def _state(pid: int) -> str:
    """Return why the heartbeat thread of the process `pid` does not run, from /proc/PID/stat."""
    try:
        # The name in the second field may contain spaces and parentheses; the state follows the last ')'.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return heartbeats.GONE
    return heartbeats.GONE if state in "ZX" else STATES.get(state, heartbeats.MUTE)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    safe_files.write_atomically(path, text)
