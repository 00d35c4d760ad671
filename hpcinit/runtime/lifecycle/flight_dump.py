"""Writes a dump of torch's flight recorder when hpcinit detects a hang, long before a collective times out.

NCCL writes its own dump when this module writes a byte to its pipe. gloo writes no dump, so this module writes the
file, and adds the members of the rank's groups.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.records import scratch
from hpcinit.records.safeguards import FLIGHT
from hpcinit.world import World

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"


def path(world: World, folder: Path) -> Path:
    """Return the path of this rank's flight recorder dump. NCCL uses the same path (records/safeguards.py)."""
    return folder / FLIGHT / f"{scratch.folder_name(world.job)}.rank_{world.rank}"


def _distributed() -> Any:
    """Return torch.distributed if the program has a process group, else None. Never import torch."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)  # torch lacks this while it is being imported
    return dist if dist and dist.is_available() and dist.is_initialized() else None


def collectives() -> tuple[int, ...]:
    """Return how many collectives this rank has called in each of its groups, or () without groups. Never raise."""
    found: list[int] = []
    with contextlib.suppress(AttributeError):  # torch is being imported
        dist = _distributed()
        for group in list(dist.distributed_c10d._world.pg_map) if dist else ():
            with contextlib.suppress(RuntimeError):  # the backend does not count them
                found.append(group._get_sequence_number_for_group())
    return tuple(found)


def write(world: World, folder: Path) -> None:
    """Write this rank's flight recorder dump, or make NCCL write it. Without a process group, do nothing.

    Raise OSError if the file cannot be written.
    """
    dist = _distributed()
    if dist is None:
        return
    if _ask_nccl(world.rank):
        return
    import torch._C._distributed_c10d as compiled  # noqa: PLC0415 - torch is loaded already

    recorder = getattr(compiled, "_dump_fr_trace_json", None)
    if recorder is None:
        return
    try:
        document = json.loads(recorder())
        document["pg_config"] = _groups(dist.distributed_c10d)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return  # a later torch may differ; the report of the hang works without the dump
    document["written_ns"] = time.time_ns()
    target = path(world, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    safe_files.write_atomically(target, json.dumps(document))


def ranks_at_fault(world: World, folder: Path) -> tuple[int, ...]:
    """Return the ranks that cause the hang, according to the dumps of all ranks, or () if the dumps do not show it."""
    from hpcinit.why import flight_recorder, hang_verdict  # noqa: PLC0415 - only in a hang

    job, _, rest = scratch.folder_name(world.job).partition(".")
    dumps = flight_recorder.read_attempt(folder, job, rest.rpartition(".")[2])
    return tuple(one.rank for one in hang_verdict.verdict(dumps).culprits)


def remove(world: World, folder: Path) -> None:
    """Remove this rank's dump, because the rank continues."""
    with contextlib.suppress(OSError):
        path(world, folder).unlink(missing_ok=True)


def _ask_nccl(rank: int) -> bool:
    """Request a dump from NCCL through its pipe. Return whether the pipe exists."""
    prefix = os.environ.get(PIPE)
    if not prefix:
        return False
    try:
        pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.suppress(OSError), os.fdopen(pipe, "wb", buffering=0) as file:
        file.write(b"1")
    return True


def _groups(c10d: Any) -> dict[str, dict[str, str]]:
    """Return this rank's groups as NCCL's recorder lists them: name, description, and ranks in order."""
    found = {}
    for group, name in list(c10d._world.pg_names.items()):
        numbers = c10d._world.pg_group_ranks.get(group, {})
        order = sorted(numbers, key=lambda rank: numbers[rank])
        found[name] = {"name": name, "desc": getattr(group, "group_desc", ""), "ranks": str(order)}
    return found
