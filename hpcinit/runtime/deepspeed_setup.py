"""Initializes DeepSpeed on top of torch's process group, and resets it when the group is destroyed."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta

import torch

from hpcinit.base.errors import BringUpError
from hpcinit.base.versions import installed
from hpcinit.deepspeed import deepspeed_versions
from hpcinit.runtime import devices, ops


def deepspeed_version() -> str:
    """Return the version of the installed DeepSpeed, without importing it.

    Raise BringUpError if DeepSpeed is missing or too old.
    """
    found = installed("deepspeed")
    if not found:
        raise BringUpError(
            f"DeepSpeed is not installed for {sys.executable}, but comm.deepspeed is true: install hpcinit[deepspeed]"
        )
    if wrong := deepspeed_versions.too_old(found):
        raise BringUpError(f"{wrong}: {deepspeed_versions.UPDATE}")
    return found


def start_deepspeed(backend: str, timeout: timedelta, device: torch.device) -> bool:
    """Initialize DeepSpeed's communication. It uses the existing process group and ignores `backend` and `timeout`.

    Return False if the program has already initialized DeepSpeed. Raise BringUpError if DeepSpeed cannot be imported.
    """
    try:
        import deepspeed  # noqa: PLC0415 - over a second to import
    except ImportError as error:
        raise BringUpError(
            f"DeepSpeed cannot be imported, but comm.deepspeed is true: {error}", quoted=str(error)
        ) from error
    devices.for_deepspeed(device)
    if deepspeed.comm.is_initialized():
        return False
    if device.type == "cpu":
        ops.start_uncompiled(deepspeed)  # saves a minute of compiling an op that training does not use
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout)
    return True


def forget_deepspeed() -> None:
    """Clear DeepSpeed's references to the process group, so that a later init() does not use the destroyed group."""
    comm = sys.modules.get("deepspeed.comm.comm")
    for name in ("cdb", "nccl_backend", "mpi_backend", "ccl_backend", "hccl_backend"):
        if comm is not None and hasattr(comm, name):
            setattr(comm, name, None)
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        importlib.reload(groups)  # DeepSpeed 0.18.5 keeps process groups in variables of this module
