"""DataLoader workers survive the signal that asks their rank to save and stop.

Slurm signals every process of a step, workers too. A worker that dies of it takes its rank with it: torch raises
'DataLoader worker (pid N) is killed by signal' in the middle of a step, and nothing is saved. So in a worker a signal
has an effect only if it would end the rank as well.

All private names of torch and multiprocessing that this needs are used in this file: `_worker_loop` of torch and
torchdata, `_set_worker_signal_handlers`, `_error_if_any_worker_fails`, `BaseProcess._target`, `_popen` and
`_start_method`. Where a version lacks one, workers end by the signal as they do without hpcinit.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import get_start_method, popen_fork, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from hpcinit.base import signals
from hpcinit.rendezvous.process_state import state

# Targets of the processes that are protected. A manager is where data sets keep what their workers share.
PROTECTED = {
    ("torch.utils.data._utils.worker", "_worker_loop"),
    ("torchdata.stateful_dataloader.worker", "_worker_loop"),
    ("multiprocessing.managers", "_run_server"),
}
TORCH_SIGNALS = "torch.utils.data._utils.signal_handling"
FIELDS = re.compile(r"^Sig(?:Cgt|Ign|Blk):\s*([0-9a-f]+)$", re.MULTILINE)  # of /proc/PID/status, proc(5)
PID = re.compile(r"\(pid (\d+)\)")


def install(numbers: Collection[int]) -> None:
    """Protect the workers that this process, a rank, starts from now on against these signals.

    numbers: those that ask a rank to save and stop. Calling it again replaces them.
    """
    mine = state.loader_workers
    first, mine.rank_pid, mine.numbers = mine.rank_pid is None, os.getpid(), frozenset(numbers)
    if not first:  # also in a rank that was forked from one
        return
    _replace(BaseProcess, "start", _start)
    _replace(popen_fork.Popen, "terminate", _terminate)
    with suppress(ImportError):  # a later torch
        _replace(importlib.import_module(TORCH_SIGNALS), "_error_if_any_worker_fails", _check_workers)


def _replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """owner.name(...) becomes wrapper(original, ...)."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, lambda *args: wrapper(original, *args))


# --- in the rank


def _start(original: Callable[[BaseProcess], None], process: BaseProcess) -> None:
    """Process.start(): until a protected process has its own handler, the signals are blocked in it.

    A process inherits blocked signals from the one that starts it. So multiprocessing's fork server, whose death would
    end its workers too, has them blocked for good, and its other children unblock them when they are unpickled.
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
        resource_tracker.ensure_running()  # it would unblock SIGTERM in this thread when it is started
    with signals.blocked(mine.numbers):
        original(process)
    process._popen.hpcinit_protected = protected  # type: ignore[attr-defined]
    return None


def _is_protected(target: object) -> bool:
    return (getattr(target, "__module__", ""), getattr(target, "__name__", "")) in PROTECTED


def _terminate(original: Callable[[popen_fork.Popen], None], popen: popen_fork.Popen) -> None:
    """Process.terminate(): SIGTERM would do nothing to a protected process."""
    if not getattr(popen, "hpcinit_protected", False):
        return original(popen)
    state.loader_workers.terminated.add(popen.pid)
    popen.kill()
    return None


def _check_workers(original: Callable[[], None]) -> None:
    """torch's handler of SIGCHLD calls this: it raises for a worker that has failed."""
    try:
        original()
    except RuntimeError as error:
        text, mine = str(error), state.loader_workers
        pid = PID.search(text)
        if pid and int(pid[1]) in mine.terminated:
            return
        if os.getpid() != mine.rank_pid or mine.on_death is None or not mine.on_death(text):
            raise


# --- in the worker


class _Protected:
    """The target of a protected process; pickled to one that is spawned."""

    def __init__(self, target: Callable[..., object], numbers: Collection[int], rank: int) -> None:
        self._target, self._numbers, self._rank = target, numbers, rank

    def __call__(self, *args: object, **kwargs: object) -> None:
        self._protect()
        if torch_signals := sys.modules.get(TORCH_SIGNALS):  # it sets a handler of its own, in C, for SIGTERM
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
    """Unblocks signals in the process that unpickles it."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int, Collection[int]]]:
        return signal.pthread_sigmask, (int(signal.SIG_UNBLOCK), self._numbers)  # needs no import of hpcinit there


def _survives(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, ignores or blocks it; False if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in FIELDS.findall(status))
