"""Which device is this rank's, and which backend goes with it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from hpcinit.base.errors import BringUpError
from hpcinit.world import World, visible_devices


def choose(world: World, env: Mapping[str, str] = os.environ) -> torch.device:
    """This rank's device, already made current; the CPU where torch finds no accelerator.

    The index counts what this process sees, and is not the local rank: 0 where the rank has devices of its own
    (--gpus-per-task), else the local rank's place in the list that the ranks of the node share.

    Raises BringUpError, on every rank of the node, if there are more ranks than devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = visible_devices.index_of(env, kind(accelerator), torch.accelerator.device_count(), world)
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def unseen(device: torch.device, env: Mapping[str, str] = os.environ) -> str:
    """A warning where `device` is the CPU although the rank was given accelerators; '' otherwise."""
    given = visible_devices.given(env)
    if device.type != "cpu" or not given:
        return ""
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built = ", ".join(f"{name} {version}" for name, version in kinds.items() if version) or "CPUs only"
    return (
        f"this rank runs on the CPU: torch {torch.__version__} (built for {built}) finds no accelerator, although "
        f"{', '.join(given)}; install a build for this cluster's devices, or ask for none"
    )


def kind(device: torch.device) -> str:
    """cuda, rocm, xpu, cpu. ROCm's devices call themselves cuda."""
    return "rocm" if device.type == "cuda" and torch.version.hip else device.type


def backend(device: torch.device, asked: str = "auto") -> str:
    """The backend to use on `device`. Raises BringUpError if torch was built without the one asked for."""
    name = asked if asked != "auto" else torch.distributed.get_default_backend_for_device(device)
    if name == "nccl" and device.type == "cpu":
        raise BringUpError(
            f"backend nccl needs a GPU, and torch {torch.__version__} finds none here; use comm.backend=auto or gloo"
        )
    if not torch.distributed.is_backend_available(name):
        raise BringUpError(f"backend {name!r} is not in this build of torch {torch.__version__}")
    return name


def for_deepspeed(device: torch.device) -> None:
    """Have DeepSpeed use `device` where it would use the one whose index is LOCAL_RANK.

    DeepSpeed (0.19) passes LOCAL_RANK to its accelerator as an index wherever it wants this rank's device: the
    engine, zero.Init, pipeline modules, inference. Its accelerator object then answers with `device`; LOCAL_RANK
    stays what it is, since DeepSpeed and programs also mean the local rank by it. Other indices, and torch.devices,
    pass unchanged. Call it before deepspeed.initialize or zero.Init; it lasts, since DeepSpeed asks again whenever
    it makes an engine. Calling it again, for another device too, is fine.
    """
    if device.type == "cpu":
        return
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - over a second to import

    accelerator = get_accelerator()
    for name in ("set_device", "device_name", "device"):
        original = getattr(type(accelerator), name).__get__(accelerator)

        def translated(device_index=None, original=original):  # type: ignore[no-untyped-def]
            ours = isinstance(device_index, int | str) and str(device_index) == os.environ.get("LOCAL_RANK")
            return original(device.index if ours else device_index)

        setattr(accelerator, name, translated)


def describe(device: torch.device) -> dict[str, str]:
    """What identifies the device on its node: device, and name, uuid and pci as far as torch tells."""
    found = {"device": str(device)}
    if device.type == "cpu":
        return found
    properties = torch.get_device_module(device).get_device_properties(device)
    found["name"] = str(properties.name)
    if hasattr(properties, "uuid"):
        found["uuid"] = str(properties.uuid)
    address = pci_address(device)
    return {**found, "pci": address} if address else found


def pci_address(device: torch.device) -> str:
    """'0000:3b:00.0', as sysfs calls it; '' where torch does not tell.

    CUDA and ROCm builds tell; XPU's do not yet (https://github.com/intel/torch-xpu-ops/issues/4732).
    """
    properties = torch.get_device_module(device).get_device_properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return ""
