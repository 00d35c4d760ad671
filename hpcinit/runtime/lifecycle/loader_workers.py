"""Keeps DataLoader workers alive when a signal asks their rank to save and stop.

Slurm sends the signal to every process of a step, including the workers. If a worker dies, torch raises 'DataLoader
worker (pid N) is killed by signal' in the middle of a step. The rank then fails before it can save. A protected worker
therefore ignores the signal, unless the signal also ends the rank.

Only this module uses private names of torch, torchdata and multiprocessing for this. If one of them is missing, the
workers are not protected, or awaited() returns ''.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import get_start_method, popen_fork, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from hpcinit.base import processes, signals
from hpcinit.runtime.process_state import state

# Target functions of protected processes. The last one is of multiprocessing's manager, which data sets use to share
# data between workers.
PROTECTED = {
    ("torch.utils.data._utils.worker", "_worker_loop"),
    ("torchdata.stateful_dataloader.worker", "_worker_loop"),
    ("multiprocessing.managers", "_run_server"),
}
TORCH_SIGNALS = "torch.utils.data._utils.signal_handling"
FIELDS = re.compile(r"^Sig(?:Cgt|Ign|Blk):\s*([0-9a-f]+)$", re.MULTILINE)  # in /proc/PID/status, proc(5)
LOOKS, LOOK_S = 20, 0.05  # after a lost connection: number and interval of checks for a dead worker
PID = re.compile(r"\(pid (\d+)\)")


def install(numbers: Collection[int]) -> None:
    """Protect the DataLoader workers that this rank will start from the signals `numbers`.

    numbers: the signals after which a rank saves and stops. A second call replaces them.
    """
    mine = state.loader_workers
    first, mine.rank_pid, mine.numbers = mine.rank_pid is None, os.getpid(), frozenset(numbers)
    if not first:  # this process, or the process that forked it, has replaced the functions
        return
    _replace(BaseProcess, "start", _start)
    _replace(popen_fork.Popen, "terminate", _terminate)
    with suppress(ImportError):  # a later torch may lack it
        _replace(importlib.import_module(TORCH_SIGNALS), "_error_if_any_worker_fails", _check_workers)


def _replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace owner.name, so that owner.name(...) calls wrapper(original, ...)."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, lambda *args: wrapper(original, *args))


# The rank's side.


def _start(original: Callable[[BaseProcess], None], process: BaseProcess) -> None:
    """Replace Process.start(): start a protected process with blocked signals.

    The new process unblocks the signals when it has set its own handler. multiprocessing's fork server keeps them
    blocked: if a signal ended the server, its workers would end too. Its unprotected children unblock the
    signals with _Unblock.
    """
    mine = state.loader_workers
    protected = _is_protected(getattr(process, "_target", None))
    method = getattr(process, "_start_method", None) or get_start_method()
    if mine.rank_pid is None or os.getpid() != mine.rank_pid or not (protected or method == "forkserver"):
        return original(process)
    if protected:
        process._target = _Protected(process._target, mine.numbers, mine.rank_pid)  # type: ignore[attr-defined]
    else:
        process._hpcinit_unblock = _Unblock(mine.numbers)  # type: ignore[attr-defined]
    if method != "fork":
        resource_tracker.ensure_running()  # start it now, because its start unblocks SIGTERM in this thread
    with signals.blocked(mine.numbers):
        original(process)
    process._popen.hpcinit_protected = protected  # type: ignore[attr-defined]
    return None


def _is_protected(target: object) -> bool:
    return (getattr(target, "__module__", ""), getattr(target, "__name__", "")) in PROTECTED


def _terminate(original: Callable[[popen_fork.Popen], None], popen: popen_fork.Popen) -> None:
    """Replace Process.terminate(): end a protected process with SIGKILL, because SIGTERM has no effect on it."""
    if not getattr(popen, "hpcinit_protected", False):
        return original(popen)
    state.loader_workers.terminated.add(popen.pid)
    popen.kill()
    return None


def _check_workers(original: Callable[[], None]) -> None:
    """Replace the function with which torch's SIGCHLD handler raises an error if a DataLoader worker has failed.

    Ignore this error if this rank ended the worker itself, or can continue without it.
    """
    try:
        original()
    except RuntimeError as error:
        text, mine = str(error), state.loader_workers
        pid = PID.search(text)
        if pid and int(pid[1]) in mine.terminated:
            return
        if os.getpid() != mine.rank_pid or mine.on_death is None or not mine.on_death(text):
            raise


def behind(error: BaseException) -> BaseException:
    """Return torch's error about a dead DataLoader worker if that worker caused `error`, else return `error`.

    When a worker dies, the rank often sees a broken connection first. Call this after torch's SIGCHLD handler has been
    removed.
    """
    torch_signals = sys.modules.get(TORCH_SIGNALS)
    if torch_signals is None:
        return error
    cause = error.__cause__  # torch raises 'exited unexpectedly' from the error that names the signal
    if isinstance(cause, RuntimeError) and PID.search(str(cause)):
        return cause.with_traceback(error.__traceback__)
    for _ in range(LOOKS if isinstance(error, (ConnectionError, EOFError)) else 0):
        try:
            torch_signals._error_if_any_worker_fails()
        except RuntimeError as death:
            return death.with_traceback(error.__traceback__)
        time.sleep(LOOK_S)  # after a process dies, its connections close before torch can reap it
    return error


LOADER = "torch/utils/data/dataloader.py"
KERNEL = {"T": "is stopped", "t": "is stopped", "D": "waits for a disk or a driver", "R": "uses a core",
          "S": "sleeps", "Z": "has exited", "X": "has exited"}  # proc(5)  # fmt: skip


def awaited() -> str:
    """Return a description of the DataLoader worker for which the main thread waits, or '' if it waits for none.

    An example is 'pid 4242, which sleeps in pipe_read'. Call this in another thread. It never raises.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith(LOADER):
        frame = frame.f_back
    try:
        loader: Any = frame.f_locals["self"] if frame is not None else None
        workers, next_batch = loader._workers, loader._task_info[loader._rcvd_idx][0]
        pid = workers[next_batch].pid
    except Exception:  # another version of torch, or no worker
        return ""
    if not (status := processes.state(pid)):
        return ""
    try:
        inside = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        inside = ""
    doing = KERNEL.get(status, f"is in state {status}")
    return f"pid {pid}, which {doing}" + (f" in {inside}" if inside and status in "SD" else "")


# The worker's side.


class _Protected:
    """Runs the target function of a protected process, with a handler for the signals.

    This object is pickled for a spawned process.
    """

    def __init__(self, target: Callable[..., object], numbers: Collection[int], rank: int) -> None:
        self._target, self._numbers, self._rank = target, numbers, rank

    def __call__(self, *args: object, **kwargs: object) -> None:
        self._protect()
        if torch_signals := sys.modules.get(TORCH_SIGNALS):  # torch sets its own handler for SIGTERM, in C
            _replace(torch_signals, "_set_worker_signal_handlers", self._after_torch)
        self._target(*args, **kwargs)

    def _after_torch(self, original: Callable[[], None]) -> None:
        with signals.blocked(self._numbers):
            original()
            self._protect()

    def _protect(self) -> None:
        signals.Handlers(self._numbers, self._handle, restart_calls=True)
        signals.unblock(self._numbers)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not _survives(self._rank, number):
            signals.end_by(number)


class _Unblock:
    """An object that unblocks signals in the process that unpickles it."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int, Collection[int]]]:
        return signal.pthread_sigmask, (int(signal.SIG_UNBLOCK), self._numbers)  # works without importing hpcinit there


def _survives(pid: int, number: int) -> bool:
    """Return whether the process survives the signal, because it handles, ignores or blocks it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in FIELDS.findall(status))
