"""Seeds of everything that draws random numbers."""

from __future__ import annotations

import os
import random
from collections.abc import MutableMapping

import torch

BY = ("same", "rank", "data")


def of(seed: int, by: str, rank: int, data_rank: int) -> int:
    """This rank's seed, below 2**63. by: 'same', 'rank' (all differ) or 'data' (same in a tensor/pipeline group)."""
    raise NotImplementedError


def seed_all(seed: int) -> None:
    """Seed Python, NumPy (if it is there) and torch with all its accelerators; the same on every rank."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy  # noqa: PLC0415 - optional

        numpy.random.seed(seed % 2**32)  # NumPy takes 32 bits only
    except ImportError:
        return


def loader_options(seed: int, data_rank: int, epoch: int = 0) -> dict[str, torch.Generator]:
    """`DataLoader(dataset, **loader_options(...))`: workers that differ where the ranks' data differ."""
    raise NotImplementedError


def make_deterministic(environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Full determinism. Returns what it set and what it had to leave, a few words each, for the log line."""
    raise NotImplementedError
