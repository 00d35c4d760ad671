"""One module installs handlers and blocks signals, and puts back what was there."""

from __future__ import annotations

import ast
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import hpcinit
from hpcinit.base import signals
from tests.waiting import until

PACKAGE = Path(hpcinit.__file__).parent
CALLS = {"signal", "pthread_sigmask", "set_wakeup_fd", "siginterrupt", "sigwaitinfo", "sigwait", "sigtimedwait"}
# The submitter's handlers while sbatch runs, and a wrapper process that ignores signals in favor of its child.
OTHERS = {"submit/duplicates.py"}


def calls(path: Path) -> Iterator[str]:
    """Return 'file:line' of each call of Python's own signal functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called.partition(".")[0] == "signal" and called.partition(".")[2] in CALLS:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_one_module_installs_handlers_and_blocks_signals() -> None:
    """Every other module of the job and of the local engine uses base/signals.py."""
    found = {line.partition(":")[0] for path in PACKAGE.rglob("*.py") for line in calls(path)}
    assert found == {"base/signals.py", *OTHERS}


def test_handlers_put_back_what_was_there() -> None:
    """restore() sets the earlier handler again; only_free leaves a handler of the program alone."""
    came: list[int] = []

    def programs(number: int, frame: object) -> None:
        came.append(-number)

    before = signal.signal(signal.SIGUSR1, programs)
    try:
        free = signals.Handlers([signal.SIGUSR1, signal.SIGUSR2], lambda number, _: came.append(number), only_free=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        free.restore()
        assert came == [-signal.SIGUSR1, signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        taken = signals.Handlers([signal.SIGUSR1], lambda number, _: came.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        taken.restore()
        assert came[2:] == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is programs
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_the_program_set_later_stays() -> None:
    """restore() does not replace a handler that is not its own any more."""
    ours = signals.Handlers([signal.SIGUSR2], lambda number, frame: None)
    later = signals.Handlers([signal.SIGUSR2], lambda number, frame: None)
    ours.restore()
    assert signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
    later.restore()  # to what it replaced
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_wakeup_calls_back_and_passes_on() -> None:
    """Each signal reaches the callback, and the wake-up descriptor that was set before, as asyncio's."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    handlers = signals.Handlers([signal.SIGUSR2], lambda number, frame: None)
    came: list[int] = []
    try:
        wakeup = signals.Wakeup(came.append)
        os.kill(os.getpid(), signal.SIGUSR2)
        until(lambda: came == [signal.SIGUSR2], pause_s=0.01)
        assert os.read(read, 1) == bytes([signal.SIGUSR2])
        wakeup.close()
        assert signal.set_wakeup_fd(-1) == write
    finally:
        handlers.restore()
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_blocked_signals_wait_for_the_descriptor() -> None:
    """A signal that is blocked ends nothing; the descriptor returns it, and None once nothing is left."""
    with signals.blocked([signal.SIGUSR2]):
        descriptor = signals.Descriptor([signal.SIGUSR2])
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        assert descriptor.wait(5.0) == signal.SIGUSR2
        assert descriptor.wait(0.0) is None
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
