"""Implements run.save(..., wait=False): each rank has a writer process, which saves a copy of the rank's state.

The rank copies its files into memory (staged_files.py) and passes them to its writer, which runs writer_process.py.
When all writers have finished, rank 0's writer publishes the checkpoint. If a writer fails or is killed, the unfinished
checkpoint folder is renamed. The other writers then fail, too, and no checkpoint is published.

The writer is a new Python process, not a fork, because a rank has threads and a device. The kernel kills the writer
together with its rank, so that it cannot publish a checkpoint after another attempt has started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from hpcinit.base import signals
from hpcinit.base.console import say
from hpcinit.runtime.process_state import state
from hpcinit.train.checkpoint import checkpoint_folder
from hpcinit.train.checkpoint.checkpoint_folder import Unfinished
from hpcinit.train.checkpoint.staged_files import StagedFiles

DONE, FAILED = b"1", b"0"  # the answers of a writer
CODE = "import sys; sys.path[:] = {path!r}; from hpcinit.train.checkpoint import writer_process as w; w.main({args})"
# Slurm sends these signals to every process of the step. The writer ignores them, because its rank may still save.
IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
END_S = 5.0  # long enough, because a writer that is not saving ends in milliseconds


class BackgroundSaves:
    """This rank's writer process, and the save that it is writing, if any.

    staged: the rank's files in memory.
    """

    def __init__(self, ranks_here: int) -> None:
        self.staged = StagedFiles(ranks_here)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._running: tuple[Unfinished, int, int] | None = None  # the running save, its step, and this rank
        self._began, self._longest_s = 0.0, 0.0

    def start(self) -> str:
        """Start the writer if there is none. If that fails, return the reason, else ''."""
        if self._process is not None and self._process.poll() is None:
            return ""
        self._end()
        # A sequence of packets: each request and its descriptors arrive together.
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = CODE.format(path=sys.path, args=f"{its.fileno()}, {os.getpid()}")
        # -I: Python's own modules are used, even if the working folder contains modules with the same names.
        command = [sys.executable, "-I", "-c", code]
        with its, signals.blocked(IGNORED):  # the writer inherits the blocked signals
            try:
                self._process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
            except OSError as error:
                return f"cannot start the process that writes checkpoints: {error}"
        return ""

    def hand_over(
        self, unfinished: Unfinished, described: dict[str, Any], names: list[str], rank: int, keep: int | None
    ) -> None:
        """Send the writer a request to save the files `names`, which are in memory.

        unfinished: the checkpoint folder to write into.
        described: fields for the Description.
        keep: how many checkpoints to keep, or None for all.
        """
        assert self._channel is not None
        request = {
            "path": str(unfinished.path.absolute()),
            "save": unfinished.save,
            "owner": asdict(unfinished.owner),
            "described": described,
            "files": [(name, self.staged[name].size) for name in names],
            "rank": rank,
            "keep": keep,
            "damaged": [(str(path.absolute()), save, wrong) for (path, save), wrong in state.damaged.items()],
        }
        self._running, self._began = (unfinished, described["step"], rank), time.monotonic()
        with suppress(OSError):  # if the writer was killed, poll() reports it
            descriptors = [self.staged[name].descriptor for name in names]
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` for the running save. Return True if no save is running anymore.

        If the writer was killed, print a warning.
        """
        if self._running is None or self._channel is None or self._process is None:
            return True
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        if not waiting.poll(1000 * seconds):
            return False
        try:
            answer = self._channel.recv(1)
        except ConnectionResetError:  # the writer was killed before it read the request
            answer = b""
        (unfinished, step, rank), self._running = self._running, None
        if answer == DONE:
            self._longest_s = max(self._longest_s, time.monotonic() - self._began)
        elif not answer:
            checkpoint_folder.abandon(unfinished.path)
            status, left = self._process.wait(), checkpoint_folder.what_is_left(unfinished.path.parent)
            say(
                f"warning: step {step} was not saved: the process that wrote it for rank {rank} on "
                f"{os.uname().nodename} ended with status {status} (-9: killed, for example because the node's memory "
                f"is full); {left}; training continues"
            )
        return True

    def finish(self, timeout: timedelta) -> None:
        """Wait until this rank's writer has finished.

        After the timeout, kill the writer and give up this checkpoint.
        """
        if not self.poll(timeout.total_seconds()) and self._process is not None:
            self._process.kill()
            if not self.poll(END_S):  # the file system does not respond
                self._end()
                self._running = None

    def longest_s(self) -> float:
        """Return how many seconds the longest save has taken, including a save that is still running."""
        running = not self.poll()
        return max(self._longest_s, time.monotonic() - self._began if running else 0.0)

    def close(self, timeout: timedelta) -> None:
        """Wait for the running save, end the writer and free the memory."""
        self.finish(timeout)
        self._end()
        self.staged.free()

    def _end(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)  # close() is not enough: forked children may have a copy
            self._channel.close()
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._channel = self._process = None


def of_this_process() -> BackgroundSaves:
    """Return the BackgroundSaves of this rank. The first call creates it."""
    if state.background_saves is None:
        state.background_saves = BackgroundSaves(state.runtime.local_world_size if state.runtime else 1)
    saves: BackgroundSaves = state.background_saves
    return saves


def finish(timeout: timedelta) -> None:
    """If a save of this rank is running in the background, wait for it."""
    if state.background_saves is not None:
        of_this_process().finish(timeout)
