"""Implements `run.should_save()`: all ranks agree, at the same step, that it is time for a checkpoint.

Rank 0 decides. It considers how long a save takes and how often this run has failed. The ranks do not communicate at
every step. When they do, rank 0 also sends after how many calls they communicate again. This is at most half of the
steps that remain until the next save.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpcinit.base.console import say
from hpcinit.base.text import counted
from hpcinit.records import elastic_restarts, requeues, run_folder, training_spans
from hpcinit.records.save_interval import best_interval_s
from hpcinit.world import World

# The assumed rate of failures before a run has failed: 6.5 per 1,000 node-days, as on Meta's RSC-1 (arXiv:2410.21680).
NODE_DAYS = 1000 / 6.5
DAY_S = 86400.0
LEAST_COST_S = 0.01  # the least cost of a save, because the measured cost of an asynchronous save may be 0


class SaveTiming:
    """Decides for one rank when to save.

    least, most: the shortest and the longest time between two saves.
    """

    def __init__(
        self, world: World, folder: Path | None, timeout: timedelta, least: timedelta, most: timedelta
    ) -> None:
        self._world, self.bounds = world, (least, most)
        self._least_s, self._most_s = least.total_seconds(), most.total_seconds()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if world.world_size > 1 else None
        self._began = self._saved = self._called = time.monotonic()
        self._failures, self._before_s = history(folder) if world.rank == 0 and folder is not None else (0, 0.0)
        self._cost_s: float | None = None
        self._steps: list[float] = []
        self._saves_now = self._told = False
        self._look_in = 1  # the ranks communicate after this many calls
        self._calls = 0

    def ask(self) -> bool:
        """Return whether to save now. Every rank must call it after every step."""
        now = time.monotonic()
        took, self._called = now - self._called, now
        if self._saves_now:  # `took` is the time of one step and of the save
            self._saves_now = False
            usual = sorted(self._steps)[len(self._steps) // 2] if self._steps else 0.0
            cost = max(LEAST_COST_S, took - usual)
            self._cost_s = cost if self._cost_s is None else (self._cost_s + cost) / 2
            self._saved = now
        elif self._calls:  # skip the first call, before which this object did not exist, so `took` is no whole step
            self._steps = [*self._steps[-20:], took]
        self._calls += 1
        self._look_in -= 1
        if self._look_in > 0:
            return False
        left_s = self._saved + self.interval_s(now) - now
        step_s = max(1e-4, sorted(self._steps)[len(self._steps) // 2]) if self._steps else 1.0
        # The first steps may be slower than usual. So wait for at most as many calls as there have been so far.
        steps = min(int(left_s / step_s / 2), self._calls)
        self._look_in = self._agreed(steps if left_s > step_s / 2 else -1)
        self._saves_now = self._look_in < 0
        self._look_in = max(1, self._look_in)
        return self._saves_now

    def interval_s(self, now: float) -> float:
        """Return the time between two saves in seconds.

        Until the first save is measured, this is the shortest allowed time.
        """
        if self._cost_s is None:
            return self._least_s
        between_s = self.between_failures_s(now)
        best = best_interval_s(self._cost_s, between_s)
        chosen = min(max(best, self._least_s), self._most_s)
        if self._world.rank == 0 and not self._told:
            self._told = True
            within = (
                "" if chosen == best else f". The best would be {best / 60:.3g} min, which is outside of your limits"
            )
            say(
                f"run.should_save() requests a save every {chosen / 60:.3g} min. Training waits {self._cost_s:.2g} s "
                f"for a save, and a failure is expected every {between_s / 3600:.3g} h on "
                f"{counted(self._world.nodes, 'node')} ({counted(self._failures, 'failure')} in this run so far)"
                + within
            )
        return chosen

    def between_failures_s(self, now: float) -> float:
        """Return the expected time between two failures, in seconds."""
        expected_s = NODE_DAYS * DAY_S / self._world.nodes
        return (expected_s + self._before_s + now - self._began) / (1 + self._failures)

    def _agreed(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, 0, self._group)
        return int(tensor)


def history(folder: Path) -> tuple[int, float]:
    """Return how often earlier attempts of the run in `folder` failed, and how many seconds they trained in all."""
    reasons: Sequence[str] = [one.reason for one in requeues.read(folder)]
    failures = sum(reason != run_folder.TIME_LIMIT for reason in reasons) + len([*elastic_restarts.read(folder)])
    starts = [
        training_spans.read(path.parent) for path in folder.glob(f"{run_folder.TIMELINE}/*/{training_spans.FILE}")
    ]
    return failures, sum(max(spans[-1].end, spans[-1].begin) - spans[0].begin for spans in starts if spans)
