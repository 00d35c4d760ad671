"""The time between two checkpoints that loses the least, after Young (1974) and Daly (2006)."""

from __future__ import annotations

import math


def best_interval_s(save_s: float, between_failures_s: float) -> float:
    """Return the training time between two saves at which saving and repeated steps together cost the least.

    save_s: how long a save blocks the training. between_failures_s: the mean time between two failures. Both are in
    seconds and more than 0. Daly, 'A higher order estimate of the optimum checkpoint interval', equation 37.
    """
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    share = save_s / (2 * between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s
