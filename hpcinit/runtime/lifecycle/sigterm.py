"""Handles SIGTERM in a rank that can save: a SIGTERM in the first step is remembered, and a stuck rank is ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hpcinit.base import signals
from hpcinit.records.stop_reasons import Stopping
from hpcinit.runtime.lifecycle import output_watch, phase
from hpcinit.runtime.lifecycle.signal_watch import Watch
from hpcinit.runtime.process_state import state

STUCK_S = 10.0  # time after SIGTERM, plus the longest step so far, after which a rank counts as stuck
FIRST_STEP_S = 600.0  # the same limit during the first step, which may compile
TURN_S = 0.25  # interval of checks for a stuck rank
# Where the main thread waits for another process or thread of this rank, such as torch.compile's C++ compiler.
OWN_WORK = ("/subprocess.py", "/concurrent/futures/_base.py")
LONGEST_PHASE_S = 3600.0  # a longer save is stuck; most clusters' grace time is shorter


class FirstStepWatch:
    """Remembers a SIGTERM that arrives before the first should_stop(), so that it does not end the rank.

    Create it in the main thread. If the program has reported a step, or has run for 10 minutes after init(), and has
    still not called should_stop(), it probably never will. SIGTERM then ends the rank at once.
    """

    def __init__(self) -> None:
        self._began, self._over = time.monotonic(), threading.Event()
        self._watch = Watch({signal.SIGTERM}, self._noted)

    def hand_over(self, numbers: Iterable[int], noted: Callable[[int], None]) -> Watch:
        """Return a Watch that replaces this object.

        It calls `noted` for later signals, and for a SIGTERM that has already arrived.
        """
        self._over.set()
        self._watch.listen(numbers, noted)
        return self._watch

    def close(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self._watch.close()

    def _noted(self, number: int) -> None:
        state.early_signals.add(number)
        longest = time.monotonic() - self._began  # the first step is as long, so far
        if not self._over.is_set() and (longest > FIRST_STEP_S or phase.now()[1] >= 0):
            signals.end_by(signal.SIGTERM)
        arguments = (self._over.is_set, longest)
        threading.Thread(target=end_if_stuck, args=arguments, name="hpcinit-stuck", daemon=True).start()


def watch_first_step(asked: Stopping) -> FirstStepWatch | None:
    """Return a FirstStepWatch, or None if a first SIGTERM should end the rank at once.

    Return None if no job continues the run and --signal is not used. Also return None if the program has set a handler,
    or outside the main thread.
    """
    wanted = asked.continues or asked.signal
    if not wanted or threading.current_thread() is not threading.main_thread():
        return None
    return FirstStepWatch() if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None


def end_if_stuck(is_over: Callable[[], bool], longest_s: float) -> None:
    """After SIGTERM, end this rank if it is stuck in a collective that waits for a dead rank.

    Otherwise the rank would run until Slurm sends SIGKILL. A rank is not stuck while it saves or is in another
    declared phase. It is not stuck either while its main thread computes (for example an evaluation) or waits for a
    compiler. The function counts checks instead of seconds, because a suspended process makes no checks.

    is_over: a function that returns True if the rank has made progress since SIGTERM, or no longer needs this check.
    longest_s: how long the longest step took, in seconds.
    """
    turns, working, before = 0, 0, None
    while turns * TURN_S < STUCK_S + longest_s and working * TURN_S < FIRST_STEP_S:
        time.sleep(TURN_S)
        if is_over():
            return
        place, _ = now = _main_thread()
        if phase.silence_is_expected(LONGEST_PHASE_S):
            turns = 0
        elif now != before or any(file.endswith(OWN_WORK) for file, *_ in place):
            turns, working, before = 0, working + 1, now
        else:
            turns += 1
    signals.end_by(signal.SIGTERM)


def _main_thread() -> tuple[Sequence[tuple[str, str, int]], str]:
    """Return the stack of the main thread, and how often that thread has waited.

    Neither value changes while the main thread waits for a dead rank.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # the kernel restricts /proc
        status = ""
    return output_watch.main_frames(), status.partition("\nvoluntary_ctxt_switches:")[2].partition("\n")[0]
