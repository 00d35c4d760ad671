"""Seeds of everything that draws random numbers."""

from __future__ import annotations

import random

import torch


def seed_all(seed: int) -> None:
    """Seed Python, NumPy (if it is there) and torch with all its accelerators; the same on every rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy  # noqa: PLC0415 - optional

        numpy.random.seed(seed % 2**32)  # NumPy takes 32 bits only
    except ImportError:
        return
