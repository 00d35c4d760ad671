"""Where each rank's generators of random numbers stand: Python's, NumPy's global one, torch's on CPU and device.

A state belongs to one rank of one layout. Where that is another one, the generators are seeded from the run's seed, the
step and the rank: not the numbers that would have come, but the same ones each time, and none that came before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcinit.facts.layout import Layout
from hpcinit.facts.saying import say
from hpcinit.runtime import seeds
from hpcinit.runtime.checkpoint.folder import Description
from hpcinit.runtime.checkpoint.loader import load_plain, save_plain


def save(rank: int, folder: Path) -> list[str]:
    """The files that this rank wrote into `folder`. Raises OSError."""
    return save_plain(states(), _file(rank), folder, "a generator's state")


def load(path: Path, saved: Description, layout: Layout, by: str) -> bool:
    """Whether this rank's generators stand where they stood; if not they are seeded, and rank 0 says so in a line.

    by: whose seeds are alike (seeds.of). Raises OSError, RuntimeError for a file that is not whole.
    """
    rank = dist.get_rank()
    there = _file(rank) in saved.files
    if there and layout.degrees() == dict(saved.layout):
        restore(load_plain(path / _file(rank)))
        return True
    seeds.seed_all(seeds.of(seeds.at_step(saved.seed, saved.step), by, rank, layout.data_rank(rank)))
    if rank == 0:
        was, now = _degrees(saved.layout), _degrees(layout.degrees())
        why = f"states of random generators for {was}, and this is {now}" if there else "no states of random generators"
        say(f"{path.name} has {why}: they are seeded anew, from seed {saved.seed}, step {saved.step} and seed_by={by}")
    return False


def _degrees(layout: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in layout.items() if degree > 1) or "one rank"


def states() -> dict[str, Any]:
    """Plain values and tensors, as save_plain wants them."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := _numpy()) is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        found[device.type] = torch.get_device_module(device).get_rng_state()  # of the current index
    return found


def restore(found: dict[str, Any]) -> None:
    """What states() gave. A generator that it does not tell of, as on another kind of device, is left."""
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if (numpy := _numpy()) is not None and "numpy" in found:
        numpy.random.set_state(tuple(found["numpy"]))
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in found:
        torch.get_device_module(device).set_rng_state(found[device.type])


def _numpy() -> Any:
    try:
        import numpy  # noqa: PLC0415 - optional
    except ImportError:
        return None
    return numpy


def _file(rank: int) -> str:
    return f"random/rank-{rank:05d}.pt"
