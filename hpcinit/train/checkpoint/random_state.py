"""Saves and loads the loader's position, the states of the random generators, and the program's `extra` values.

torch.save writes them, and torch.load reads them with weights_only, so they may only contain plain values and tensors.
Each save reads them back at once, so that it fails if a later job could not load them.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout
from hpcinit.runtime import seeds
from hpcinit.train.checkpoint.checkpoint_folder import Description

EXTRA = "extra.pt"
Write = Callable[[str, bytes], None]  # writes one file of the checkpoint, given its relative path and its content


@runtime_checkable
class Stateful(Protocol):
    """The interface of a data loader that can save and restore its position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_loader(loader: object) -> None:
    """Raise RequestError if the data loader cannot save its position."""
    if loader is not None and not isinstance(loader, Stateful):
        raise RequestError(
            f"loader is a {type(loader).__name__}, which cannot save its position (no state_dict and load_state_dict). "
            "Use torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments"
        )


def save_loader_state(loader: Stateful | None, layout: Layout, rank: int, write: Write) -> list[str]:
    """Write the loader's position to a file, if this rank is the first with its share of the data.

    Return the file's relative path in a list, or [] if there is nothing to write. Raise RequestError if load() could
    not read the position, and OSError if the file cannot be written.
    """
    place = layout.coordinate(rank)
    if loader is None or place["pp"] or place["cp"] or place["tp"]:
        return []
    return save_plain(loader.state_dict(), _loader_file(layout.data_rank(rank)), write, "the loader's state_dict()")


def load_loader_state(loader: Stateful, layout: Layout, rank: int, folder: Path) -> None:
    loader.load_state_dict(load_plain(folder / _loader_file(layout.data_rank(rank))))


def is_in(files: Container[str]) -> bool:
    return _loader_file(0) in files


def save_plain(value: Any, relative: str, write: Write, called: str) -> list[str]:
    """Write one of the program's values to a file, and return the file's relative path in a list.

    Raise RequestError if load() could not read the value, and OSError if the file cannot be written.

    called: what the error message calls the value.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next(
            (line for line in lines if "Unsupported" in line), lines[0] if lines else ""
        )  # only the first line of torch's long message
        raise RequestError(
            f"{called} contains an object that is not a number, string, list, dict or tensor ({type(error).__name__}: "
            f"{why}). Convert it before saving: other objects need pickle, which can run code when it loads them"
        ) from error
    write(relative, stream.getvalue())
    return [relative]


def load_plain(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _loader_file(data_rank: int) -> str:
    return f"loader/data-{data_rank:05d}.pt"


# The states of each rank's random generators: Python's, NumPy's global one, and torch's on the CPU and the device.
#
# A state belongs to one rank of one layout. If the layout has changed, the generators are seeded from the run's seed,
# the step and the rank. The random numbers then differ from those of an uninterrupted run, but they are reproducible.


def save_random_state(rank: int, write: Write) -> list[str]:
    """Save the states of this rank's random generators and return the files. Raise OSError if that fails."""
    return save_plain(states(), _random_state_file(rank), write, "a generator's state")


def load_random_state(path: Path, saved: Description, layout: Layout, by: str) -> bool:
    """Restore the states of this rank's random generators and return True.

    If there are no states, or if the layout has changed, seed the generators instead, print a message and return False.
    Raise OSError, or RuntimeError if a file is truncated.

    by: how to seed the ranks, see seeds.of.
    """
    rank = dist.get_rank()
    there = _random_state_file(rank) in saved.files
    if there and layout.degrees() == dict(saved.layout):
        restore(load_plain(path / _random_state_file(rank)))
        return True
    seeds.seed_all(seeds.of(seeds.at_step(saved.seed, saved.step), by, rank, layout.data_rank(rank)))
    if rank == 0:
        was, now = _degrees(saved.layout), _degrees(layout.degrees())
        why = f"random generator states for {was}, not for {now}" if there else "no random generator states"
        say(f"{path.name} has {why}: seeding the generators from seed {saved.seed}, step {saved.step} and seed_by={by}")
    return False


def _degrees(layout: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in layout.items() if degree > 1) or "one rank"


def states() -> dict[str, Any]:
    """Return the states of all random generators as plain values and tensors."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := _numpy()) is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        found[device.type] = torch.get_device_module(device).get_rng_state()  # only the current device's
    return found


def restore(found: dict[str, Any]) -> None:
    """Restore what states() returned.

    A generator without a saved state, such as one for another device, is unchanged.
    """
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
