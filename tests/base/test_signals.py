"""One module installs handlers and blocks signals, and restores the earlier ones."""

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
# Ctrl-C during `hpcinit exec`; SIGTERM to `hpcinit drill`; and torch's handler of SIGCHLD, which would interrupt the writing of an error record.
OTHERS = {"drill/drill_command.py", "slurm/slurm_client.py", "runtime/program.py"}


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


def test_restore_puts_earlier_handlers_back() -> None:
    """restore() sets the earlier handler again; only_free leaves a handler of the program alone."""
    received: list[int] = []

    def programs(number: int, frame: object) -> None:
        received.append(-number)

    before = signal.signal(signal.SIGUSR1, programs)
    try:
        free = signals.Handlers(
            [signal.SIGUSR1, signal.SIGUSR2], lambda number, _: received.append(number), only_free=True
        )
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        free.restore()
        assert received == [-signal.SIGUSR1, signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        taken = signals.Handlers([signal.SIGUSR1], lambda number, _: received.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        taken.restore()
        assert received[2:] == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is programs
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_restore_keeps_a_later_handler() -> None:
    """restore() does not replace a handler that was installed later."""
    ours = signals.Handlers([signal.SIGUSR2], lambda number, frame: None)
    later = signals.Handlers([signal.SIGUSR2], lambda number, frame: None)
    ours.restore()
    assert signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
    later.restore()  # puts back what it replaced
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_wakeup_calls_back_and_passes_on() -> None:
    """Each signal reaches the callback and the earlier wake-up descriptor, such as asyncio's."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    handlers = signals.Handlers([signal.SIGUSR2], lambda number, frame: None)
    received: list[int] = []
    try:
        wakeup = signals.Wakeup(received.append)
        os.kill(os.getpid(), signal.SIGUSR2)
        until(lambda: received == [signal.SIGUSR2], pause_s=0.01)
        assert os.read(read, 1) == bytes([signal.SIGUSR2])
        wakeup.close()
        assert signal.set_wakeup_fd(-1) == write
    finally:
        handlers.restore()
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def test_blocked_signals_wait_for_the_descriptor() -> None:
    """A blocked signal does not end the process; the descriptor returns it, then None."""
    with signals.blocked([signal.SIGUSR2]):
        descriptor = signals.Descriptor([signal.SIGUSR2])
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        assert descriptor.wait(5.0) == signal.SIGUSR2
        assert descriptor.wait(0.0) is None
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
