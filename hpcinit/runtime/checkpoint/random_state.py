"""The program's own state in a checkpoint: the place in its data, random numbers, and what else it passes.

Written with torch.save and read with weights_only: plain values and tensors. Whether they can be read back is tried
before they are written, not when a later job needs them.
"""

from __future__ import annotations

import io
import random
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout
from hpcinit.runtime import seeds
from hpcinit.runtime.checkpoint import checkpoint_folder as of_steps
from hpcinit.runtime.checkpoint.checkpoint_folder import Description

EXTRA = "extra.pt"


@runtime_checkable
class Stateful(Protocol):
    """torchdata's StatefulDataLoader, or anything else that can tell and take its place."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_loader(loader: object) -> None:
    """Raises RequestError for one that cannot tell its place."""
    if loader is not None and not isinstance(loader, Stateful):
        raise RequestError(
            f"loader is a {type(loader).__name__}, which cannot tell its place (no state_dict and load_state_dict): "
            "torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and can"
        )


def save_loader_state(loader: Stateful | None, layout: Layout, rank: int, folder: Path) -> list[str]:
    """One file for each share of the data, by the first rank of those that work on it. Raises RequestError, OSError."""
    place = layout.coordinate(rank)
    if loader is None or place["pp"] or place["cp"] or place["tp"]:
        return []
    return save_plain(loader.state_dict(), _loader_file(layout.data_rank(rank)), folder, "the loader's state_dict()")


def load_loader_state(loader: Stateful, layout: Layout, rank: int, folder: Path) -> None:
    loader.load_state_dict(load_plain(folder / _loader_file(layout.data_rank(rank))))


def is_in(files: Container[str]) -> bool:
    return _loader_file(0) in files


def save_plain(value: Any, relative: str, folder: Path, called: str) -> list[str]:
    """Write one file and return its relative path. Raises RequestError for what could not be read back, OSError."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next(
            (line for line in lines if "Unsupported" in line), lines[0] if lines else ""
        )  # torch advises at length
        raise RequestError(
            f"{called} holds more than numbers, text, lists, dicts and tensors: it could be written and not be read "
            f"back without running what the file says ({type(error).__name__}: {why})"
        ) from error
    of_steps.write(folder / relative, stream.getvalue())
    return [relative]


def load_plain(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _loader_file(data_rank: int) -> str:
    return f"loader/data-{data_rank:05d}.pt"


# Where each rank's generators of random numbers stand: Python's, NumPy's global one, torch's on CPU and device.
#
# A state belongs to one rank of one layout. Where that is another one, the generators are seeded from the run's seed,
# the step and the rank: not the numbers that would have come, but the same ones each time, and none that came before.


def save_random_state(rank: int, folder: Path) -> list[str]:
    """The files that this rank wrote into `folder`. Raises OSError."""
    return save_plain(states(), _random_state_file(rank), folder, "a generator's state")


def load_random_state(path: Path, saved: Description, layout: Layout, by: str) -> bool:
    """Whether this rank's generators stand where they stood; if not they are seeded, and rank 0 says so in a line.

    by: whose seeds are alike (seeds.of). Raises OSError, RuntimeError for a file that is not whole.
    """
    rank = dist.get_rank()
    there = _random_state_file(rank) in saved.files
    if there and layout.degrees() == dict(saved.layout):
        restore(load_plain(path / _random_state_file(rank)))
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


def _random_state_file(rank: int) -> str:
    return f"random/rank-{rank:05d}.pt"
