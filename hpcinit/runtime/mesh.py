"""The device mesh of a layout, and its parts by name, those of size 1 included."""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcinit.facts import grouping
from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import Layout


def build(layout: Layout, device: torch.device) -> DeviceMesh:
    """A mesh with the dimensions that are larger than 1, outermost first; a plain data parallel one if none is.

    Combinations of several dimensions (dp, fsdp, loss) are part of it, and part() finds them: `mesh["loss"]` does so
    too, and torch warns of it from 2.11 on. One that is a single dimension or the same as another makes no group of its
    own. All groups are made here, as every rank has to make them all in one order. layout: every degree known. Needs
    the process group.
    """
    sizes = grouping.dimensions(layout)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in (*grouping.SPLIT, *grouping.COMBINED):
        made = grouping.members(tuple(sizes), name)
        if len(made) > 1 and _called(mesh, name) == name:
            _flattened(mesh, name)
    return mesh


def size(mesh: DeviceMesh, name: str) -> int:
    """Ranks in a dimension or combination (grouping.MEANING); 1 if the mesh has none. Raises RequestError."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return math.prod([sizes[each] for each in _members(mesh, name)])


def part(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """The mesh of one or several dimensions or combinations, without those of size 1; None if all are.

    `part(mesh, "dp_replicate", "fsdp")` is what fully_shard takes for HSDP. Raises RequestError.
    """
    found = tuple(_called(mesh, name) for name in names if size(mesh, name) > 1)
    if not found:
        return None
    flat = [name for name in found if name not in (mesh.mesh_dim_names or ())]
    if not flat:
        return mesh[found]
    if len(found) == 1:
        return _flattened(mesh, found[0])
    # fully_shard's own way (torch/distributed/fsdp/_fully_shard/_fsdp_init.py)
    return DeviceMesh._concatenate([_flattened(mesh, name) if name in flat else mesh[name] for name in found])


def group(mesh: DeviceMesh, name: str) -> ProcessGroup | None:
    """This rank's group; None if it is alone in it. Raises RequestError."""
    found = part(mesh, name)
    return None if found is None else found.get_group()


def place(mesh: DeviceMesh, name: str) -> int:
    """This rank's place in its group, 0 to size - 1. Raises RequestError."""
    found = part(mesh, name)
    return 0 if found is None else found.get_local_rank()


def _members(mesh: DeviceMesh, name: str) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    if name not in grouping.MEANING:
        raise RequestError(f"a mesh has no part {name!r}, expected one of: {', '.join(grouping.MEANING)}")
    return grouping.members(names, name)


def _flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A combination as one dimension: made the first time, and torch keeps it by its name."""
    return mesh[_members(mesh, name)]._flatten(name)  # private, and the only way: torchtitan's too


def _called(mesh: DeviceMesh, name: str) -> str:
    """The name under which the mesh has it: the first that is made of the same dimensions."""
    made = _members(mesh, name)
    if len(made) == 1:
        return made[0]
    return next(each for each in (*grouping.SPLIT, *grouping.COMBINED) if _members(mesh, each) == made)
