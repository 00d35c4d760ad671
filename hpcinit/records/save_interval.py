"""Computes the best time between two checkpoints with the formula of Young (1974) and Daly (2006)."""

from __future__ import annotations

import math


def best_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return how long to train between two saves so that the least time is lost to saves and to repeated steps.

    This is equation 37 in Daly, 'A higher order estimate of the optimum checkpoint interval'. Both arguments must be
    more than 0.

    save_s: for how many seconds a save blocks training.
    between_failures_s: the mean time between two failures, in seconds.
    """
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    share = save_s / (2 * between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s
