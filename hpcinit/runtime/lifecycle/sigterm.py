"""Handles SIGTERM in a rank that can save: delays a SIGTERM in the first step, and ends a rank that is stuck."""

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

STUCK_S = 10.0  # a rank counts as stuck this long after SIGTERM, plus the duration of the longest step so far
FIRST_STEP_S = 600.0  # the same limit during the first step, which may compile
TURN_S = 0.25  # interval of checks for a stuck rank
# In these files, the main thread waits for another process or thread of this rank, such as torch.compile's compiler.
OWN_WORK = ("/subprocess.py", "/concurrent/futures/_base.py")
LONGEST_PHASE_S = 3600.0  # a longer save is stuck; most clusters' grace time is shorter


class FirstStepWatch:
    """Delays a SIGTERM until the first should_stop(), so that the rank can save before it ends.

    If the program has reported a step, or 10 minutes have passed since init(), the program probably never calls
    should_stop(). SIGTERM then ends the rank at once. Create this object in the main thread.
    """

    def __init__(self) -> None:
        self._began, self._over = time.monotonic(), threading.Event()
        self._watch = Watch({signal.SIGTERM}, self._noted)

    def hand_over(self, numbers: Iterable[int], noted: Callable[[int], None]) -> Watch:
        """Return the Watch for later signals. It replaces this object.

        If a SIGTERM has already arrived, the Watch calls `noted` for it.
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
        longest = time.monotonic() - self._began  # the first step has taken at least this long
        if not self._over.is_set() and (longest > FIRST_STEP_S or phase.now()[1] >= 0):
            signals.end_by(signal.SIGTERM)
        arguments = (self._over.is_set, longest)
        threading.Thread(target=end_if_stuck, args=arguments, name="hpcinit-stuck", daemon=True).start()


def watch_first_step(asked: Stopping) -> FirstStepWatch | None:
    """Return a FirstStepWatch, or None if a SIGTERM in the first step should end the rank at once.

    There is a FirstStepWatch only if all of these are true:
    - A later job continues the run, or sbatch's --signal is used.
    - The program has not set its own handler for SIGTERM.
    - This is the main thread.
    """
    wanted = asked.continues or asked.signal
    if not wanted or threading.current_thread() is not threading.main_thread():
        return None
    return FirstStepWatch() if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None


def end_if_stuck(is_over: Callable[[], bool], longest_s: float) -> None:
    """After SIGTERM, end this rank if it is stuck in a collective that waits for a dead rank.

    Otherwise it would run until Slurm sends SIGKILL. A rank that saves or is in a declared phase is not stuck. A rank
    that computes or waits for a compiler has FIRST_STEP_S seconds before it is ended.

    The time is counted in checks, so that it stops while the process is suspended.

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
    """Return the main thread's stack and its number of voluntary context switches.

    Both stay the same while the thread waits for a dead rank.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # the kernel restricts /proc
        status = ""
    return output_watch.main_frames(), status.partition("\nvoluntary_ctxt_switches:")[2].partition("\n")[0]
