"""Which device the first barrier of a process group uses, in every layout of ranks that Slurm can make.

A fake: no GPU is used. The number of visible devices is faked, no group is created, and the barrier's arguments are
recorded. The environments are real ones, recorded from Slurm. tests/gpu can import wrong_devices and run it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpcinit
from hpcinit.jobs import doctor
from hpcinit.runtime import devices, process_group
from hpcinit.world import launchers, visible_devices
from tests.records.recordings import Shape, Task, shapes

GPUS = 8  # on each node, more than it has ranks
REFUSED = {"preserve_env"}  # hpcinit reports this environment as an error


def _visible(task: Task) -> int:
    """Return how many devices the rank sees on a node of GPUS devices. A fake of what the driver makes of the variable."""
    names = task.env.get("CUDA_VISIBLE_DEVICES")
    return GPUS if names is None else 0 if names in visible_devices.NONE else len(names.split(","))


STEPS = [
    shape
    for shape in shapes()
    if shape.version[0].isdigit()  # recorded from this version of Slurm, not from another launcher
    and shape.name not in REFUSED
    and all(task.rank is not None and _visible(task) for task in shape.tasks)
]


class _Recorded(Exception):
    """Ends a measurement at its first barrier."""


def _device_ids(
    monkeypatch: pytest.MonkeyPatch, task: Task, act: Callable[[torch.device], object]
) -> tuple[Any, torch.device]:
    """Return the device_ids of the first barrier that `act` enters as the rank of `task`, and the rank's device."""
    passed: list[Any] = []

    def barrier(group: object = None, device_ids: object = None, **_: object) -> None:
        passed.append(device_ids)
        raise _Recorded

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: _visible(task))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dist, "init_process_group", lambda *words, **names: None)
    monkeypatch.setattr(dist, "barrier", barrier)
    device = devices.choose(launchers.read(task.env), task.env)
    with pytest.raises(_Recorded):
        act(device)
    return passed[0], device


def _start_up(task: Task) -> Callable[[torch.device], object]:
    store, timeout = dist.HashStore(), timedelta(seconds=1)
    world = launchers.read(task.env)
    return lambda device: process_group._in_torch(world, store, "nccl", timeout, device, None)


def wrong_devices(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> list[str]:
    """Return a line for each rank whose first barrier does not name its own device; [] if all do."""
    found = []
    for task in shape.tasks:
        passed, device = _device_ids(monkeypatch, task, _start_up(task))
        if passed != [device.index]:
            found.append(f"rank {task.rank} on {task.host} has {device}, and its first barrier uses {passed}")
    return found


def guessed_wrong(shape: Shape) -> bool:
    """Return whether torch's guess, the global rank modulo the number of visible devices, is another rank's device."""
    return any((task.rank or 0) % _visible(task) != task.local_rank % _visible(task) for task in shape.tasks)


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_the_first_barrier_uses_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """Each rank passes its own device to the first barrier, in every recorded layout (faked devices)."""
    assert wrong_devices(monkeypatch, shape) == []


def test_layouts_where_torch_guesses_wrong_are_recorded() -> None:
    """The recordings contain layouts in which torch's own guess is another rank's device, so the test above can fail."""
    wrong = {shape.name for shape in STEPS if guessed_wrong(shape)}
    assert {"cyclic", "cyclic_uneven", "plane", "ntasks_uneven", "het_colon", "block"} <= wrong


@pytest.mark.parametrize("rank", [0, 3])
def test_barriers_of_the_measurements_use_the_device_of_their_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The doctor's measurements pass the rank's device to each of their barriers (faked devices)."""
    shape = next(shape for shape in STEPS if shape.name == "cyclic")
    task = shape.tasks[rank]

    def act(device: torch.device) -> None:
        monkeypatch.setattr(torch, "ones", lambda *words, **names: None)
        monkeypatch.setattr(dist, "all_reduce", lambda *words, **names: None)
        doctor.all_reduce(device, 4, None, 4)

    passed, device = _device_ids(monkeypatch, task, act)
    assert passed == [device.index]


def test_a_barrier_on_the_cpu_names_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the barrier has no device_ids: torch would take them for those of an accelerator."""
    passed: list[object] = []
    monkeypatch.setattr(dist, "barrier", lambda group=None, device_ids=None: passed.append(device_ids))
    process_group.barrier(torch.device("cpu"))
    assert passed == [None]


def test_every_barrier_names_a_device() -> None:
    """No file of hpcinit outside of the checkpoint package calls torch's barrier without device_ids."""
    package = Path(hpcinit.__file__).parent
    calls = [
        f"{path.relative_to(package)}:{number}"
        for path in package.rglob("*.py")
        if "checkpoint" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "dist.barrier(" in line and "device_ids" not in line
    ]
    assert calls == []
