"""Asking for the states of runs again and again, without becoming a burden for the controller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.observe import overview, state

QUICK_S, SLOW_S = 1.0, 10.0  # between two questions to the controller
PATIENCE = 5  # the longer nothing has happened the rarer: after n seconds every n/5
FORGOTTEN_S = 60.0  # after which a job that Slurm knows nothing of will not come back
FEW = 20  # jobs whose own records are looked at every time; of more, Slurm alone tells


class Polls:
    """`now`: the last answer, of each run; several runs cost one question. Raises RequestError where one is no run."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._happened = self._asked = self._known = time.monotonic()
        self.now = overview.read(paths)
        for run in self.now:
            if run.error:
                raise run.error
        self._told = self._last_words()

    def ask(self) -> bool:
        """Ask if it is time to, soon after a batch script has left its last word. True: all runs are over."""
        clock = time.monotonic()
        if (told := self._last_words()) != self._told:
            self._happened, self._told = clock, told
        pause = min(SLOW_S, max(QUICK_S, (clock - self._happened) / PATIENCE))
        if self._is_local() or clock - self._asked >= pause:
            before, self._asked = self._names(), clock
            fresh = {run.path: run for run in overview.read([run.path for run in self.now if not run.over])}
            self.now = [fresh.get(run.path, run) for run in self.now]
            if self._names() != before:
                self._happened = clock
        if not any(now.forgotten for run in self.now for _, now in run.parts):
            self._known = clock
        return all(run.over for run in self.now) or clock - self._known > FORGOTTEN_S

    def shown(self) -> list[overview.Run]:
        """The last answer, with the times moved on since."""
        seconds = round(time.monotonic() - self._asked)
        return [
            replace(run, now=_later(run.now, seconds) if run.now else None,
                    tasks=[replace(task, state=_later(task.state, seconds)) for task in run.tasks])
            for run in self.now
        ]  # fmt: skip

    def _is_local(self) -> bool:
        """Whether there is no controller to ask of what goes on."""
        return all(run.now is not None and run.now.engine == "local" for run in self.now if not run.over)

    def _names(self) -> list[tuple[str, str]]:
        return [(now.job_id, now.name) for run in self.now for _, now in run.parts]

    def _last_words(self) -> list[int | None]:
        open_ = [path for run in self.now for path, now in run.parts if not now.over and now.name != "PENDING"]
        return [state.exit_status(path) for path in open_] if len(open_) <= FEW else []


def _later(now: state.State, seconds: int) -> state.State:
    if now.name != "RUNNING" or now.elapsed_s is None:
        return now
    left = None if now.left_s is None else max(0, now.left_s - seconds)
    return replace(now, elapsed_s=now.elapsed_s + seconds, left_s=left)


class Poll:
    """Of one run."""

    def __init__(self, path: Path) -> None:
        self._polls = Polls([path])

    @property
    def now(self) -> state.State:
        """The last answer."""
        [run] = self._polls.now
        if run.now is None:
            raise run.error or AssertionError(f"{run.path} is a sweep")
        return run.now

    def ask(self) -> bool:
        """Ask if it is time to. True: the run is over."""
        return self._polls.ask()
