"""Computes the start-up timeout from the number of nodes and the time that the job has left.

    start_up = min(max, base + per_node x nodes, remaining time of the job - 30)

docs/reference/timeouts.md explains the default coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

from hpcinit.base.errors import RequestError

# torch's own timeouts of collectives, which hpcinit keeps during training: docs/reference/timeouts.md.
COLLECTIVE_NCCL_S, COLLECTIVE_OTHER_S = 600.0, 1800.0
CHECKPOINT_S = 3600.0  # timeout of collectives that save or load a checkpoint: docs/reference/timeouts.md
# hpcinit must print the error that names the missing ranks before Slurm ends the job. Reserve 15 s because the watchdog
# may be late, and 15 s because clocks differ.
RESERVE_S = 30.0
# The job's end in seconds since 1970. Slurm 24.11 sets the first variable. Slurm 22.05 does not set it
# (tests/data/slurm), so the batch script sets the second variable.
JOB_END = ("SLURM_JOB_END_TIME", "HPCINIT_JOB_END_TIME")
ENV_LIMIT_S = "HPCINIT_JOB_LIMIT_S"  # the job's time limit in seconds, as it was requested
CLOCK_SLACK_S = 120.0  # Slurm rounds a limit up to minutes, and clocks of healthy nodes differ by seconds


@dataclass(frozen=True)
class StartupTimeout:
    """The numbers in the timeout formula, in seconds. Raise RequestError if the formula could yield 0 or less."""

    base_s: float = 300.0
    per_node_s: float = 3.5
    max_s: float = 3600.0

    def __post_init__(self) -> None:
        if not (self.base_s > 0 and self.per_node_s >= 0 and self.max_s > 0):
            raise RequestError(
                f"timeout_base_s is {self.base_s:g}, timeout_per_node_s is {self.per_node_s:g} and timeout_max_s is "
                f"{self.max_s:g}, expected at least 0 for timeout_per_node_s, and more than 0 for the others"
            )

    def start_up(self, nodes: int, left: timedelta | None = None) -> timedelta:
        """Return the start-up timeout: how long the ranks of `nodes` nodes may take to connect, in whole seconds.

        Raise RequestError if the job has too little time left.

        left: the time that the job has left, as left_of_job() returns it, or None if unknown.
        """
        seconds = min(self.max_s, self.base_s + math.ceil(self.per_node_s * nodes))
        if left is None:
            return timedelta(seconds=seconds)
        usable = math.floor(left.total_seconds() - RESERVE_S)
        if usable <= 0:
            raise RequestError(
                f"the job ends in {left.total_seconds():.0f} s (see {' or '.join(JOB_END)}), but hpcinit reserves the "
                f"last {RESERVE_S:g} s for error messages. Request more time with time_min. If the limit was raised "
                "after the job started, pass a timeout to hpcinit.init()"
            )
        return timedelta(seconds=min(seconds, usable))

    def text(self, nodes: int, left: timedelta | None = None) -> str:
        """Return the timeout formula with its numbers, such as 'min(3600, 300 + 3.5 x 8 nodes) = 328 s'.

        With `left`, a third term is added: 'min(3600, 300 + 3.5 x 8 nodes, 200 left of the job - 30) = 170 s'.
        """
        seconds = self.start_up(nodes, left).total_seconds()
        terms = f"{self.base_s:g} + {self.per_node_s:g} x {nodes} node{'s' if nodes != 1 else ''}"
        if left is not None:
            terms += f", {math.floor(left.total_seconds())} left of the job - {RESERVE_S:g}"
        return f"min({self.max_s:g}, {terms}) = {seconds:g} s"


def left_of_job(env: Mapping[str, str], now_s: float) -> timedelta | None:
    """Return how much time the job has left. After the job's end, the result is negative.

    If the environment does not contain the end time of the job, return None.

    now_s: the current time in seconds since 1970.
    """
    for name in JOB_END:
        text = env.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return timedelta(seconds=int(text) - now_s)
    return None


def check_clock(environ: MutableMapping[str, str], now_s: float) -> str:
    """Correct the job's end in `environ` if it is impossible by this node's clock. Return a warning, or ''.

    Slurm's controller computes the end with its own clock. If this node's clock is wrong, or the limit was changed, the
    end may be in the past, or later than the time limit allows. In this case, set the end to now plus the time limit.
    If the limit is unknown, remove the end.

    now_s: the current time in seconds since 1970, by this node's clock.
    """
    left = left_of_job(environ, now_s)
    limit_s = _limit_s(environ)
    if left is None or 0 < left.total_seconds() <= limit_s + CLOCK_SLACK_S:
        return ""
    name = next(name for name in JOB_END if environ.get(name, "").isdecimal())
    seen = f"{name}={environ[name]} is {abs(left.total_seconds()):.0f} s {'ago' if left <= timedelta() else 'ahead'}"
    for other in JOB_END:
        environ.pop(other, None)
    if math.isinf(limit_s):
        return f"warning: {seen} by this node's clock, so hpcinit ignores it. Is the node's clock wrong?"
    environ.update({JOB_END[1]: str(int(now_s + limit_s)), ENV_LIMIT_S: f"{limit_s:.0f}"})
    return (
        f"warning: {seen} by this node's clock, but the job's time limit is {limit_s:.0f} s: hpcinit assumes that the "
        "whole limit remains. Is the node's clock wrong?"
    )


def _limit_s(env: Mapping[str, str]) -> float:
    """Return the job's time limit in seconds, or inf if unknown."""
    end, start = env.get("SLURM_JOB_END_TIME", ""), env.get("SLURM_JOB_START_TIME", "")
    if end.isdecimal() and start.isdecimal():  # Slurm 24.11
        return float(int(end) - int(start))
    own = env.get(ENV_LIMIT_S, "")
    return float(own) if own.isdecimal() else math.inf
