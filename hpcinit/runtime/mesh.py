"""The device mesh: the groups of ranks for each dimension of a layout, and for the combinations that training needs."""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout

# Combinations of dimensions: ranks with different samples (dp), ranks that share a sharded parameter (fsdp), and ranks
# over which losses and gradients are averaged (loss).
COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
# With expert parallelism a data parallel dimension is split in two: ep, and the ranks that have the same experts.
SPLIT = {"dp_replicate": ("edp_replicate", "ep"), "dp_shard": ("edp_shard", "ep")}
MEANING = {
    "pp": "pipeline stages",
    "dp_replicate": "other samples, the same parameters",
    "dp_shard": "other samples, parameters divided",
    "edp_replicate": "the same experts",
    "edp_shard": "the same experts",
    "ep": "other experts",
    "cp": "parts of a sequence",
    "tp": "parts of a layer",
    "dp": "other samples",
    "fsdp": "parameters divided",
    "loss": "losses and gradients averaged",
}


def mesh_dimensions(layout: Layout) -> dict[str, int]:
    """Return name and size of each mesh dimension above size 1, outermost first; dp_replicate if there is none.

    layout: with every degree computed.
    """
    found: dict[str, int] = {}
    split = "dp_replicate" if layout.dp_shard == 1 else "dp_shard"
    for name, degree in layout.degrees().items():
        if name == split and layout.ep > 1:
            found |= dict(zip(SPLIT[name], (degree // layout.ep, layout.ep), strict=True))
        elif degree > 1:
            found[name] = degree
    return found or {"dp_replicate": 1}


def members(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return those dimensions of `names` that form `name`; empty if its size is 1."""
    if name in names:
        return (name,)
    parts = [each for part in COMBINED.get(name, (name,)) for each in (part, *SPLIT.get(part, ()))]
    # Only one of the two data parallel dimensions is split; `ep` belongs to that one.
    split = [pair[0] for pair in SPLIT.values() if pair[0] in names]
    if split and split[0] not in parts:
        parts = [each for each in parts if each != "ep"]
    return tuple(each for each in names if each in parts)


def group_members(layout: Layout, name: str) -> list[range]:
    """Return the groups of ranks of a dimension or combination, each in rank order.

    layout: with every degree computed. The dimensions of a combination are adjacent, so that each group is one range.
    """
    sizes = mesh_dimensions(layout)
    names = tuple(sizes)
    chosen = members(names, name)
    size = math.prod(sizes[each] for each in chosen)
    step = math.prod(sizes[each] for each in names[names.index(chosen[-1]) + 1 :]) if chosen else 1
    world_size = math.prod(sizes.values())
    return [
        range(block + first, block + first + size * step, step)
        for block in range(0, world_size, size * step)
        for first in range(step)
    ]


def rank_table(layout: Layout) -> str:
    """Return a table of the groups, one line per dimension and combination; '' for plain data parallelism."""
    if layout.pp * layout.dp_shard * layout.cp * layout.tp * layout.ep == 1:
        return ""
    sizes = mesh_dimensions(layout)
    rows = [(name, size, name) for name, size in sizes.items()]
    for name in (*SPLIT, *COMBINED):
        made = members(tuple(sizes), name)
        if len(made) > 1:
            rows.append((name, math.prod(sizes[each] for each in made), " x ".join(made)))
    lines = [("dimension", "size", "first group", "")]
    for name, size, of in rows:
        what = MEANING[name] + ("" if of == name else f" ({of})")
        lines.append((name, str(size), _shown(group_members(layout, name)[0]), what))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {ranks:<{widths[2]}}  {what}".rstrip()
        for name, size, ranks, what in lines
    )


def _shown(ranks: range) -> str:
    """Return the ranks in short, such as '0 8 16 ... 56'."""
    shown = [str(rank) for rank in ranks]
    return " ".join(shown if len(shown) <= 4 else [*shown[:3], "...", shown[-1]])


# The device mesh of a layout.


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Return a mesh of the dimensions larger than 1, outermost first; a plain data parallel one if there is none.

    It also contains the combinations (dp, fsdp, loss), which mesh_part() returns; `mesh["loss"]` works too, with a
    warning from torch 2.11 on. A combination that equals a dimension or another combination gets no separate group.
    All groups are created here, because every rank must create them in the same order. Needs the process group.

    layout: with every degree computed.
    """
    sizes = mesh_dimensions(layout)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in (*SPLIT, *COMBINED):
        made = members(tuple(sizes), name)
        if len(made) > 1 and _called(mesh, name) == name:
            _flattened(mesh, name)
    return mesh


def size(mesh: DeviceMesh, name: str) -> int:
    """Return the number of ranks in a dimension or combination. Raise RequestError if MEANING lacks the name."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return math.prod([sizes[each] for each in _members(mesh, name)])


def mesh_part(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Return the mesh of one or several dimensions or combinations, without those of size 1; None if all have size 1.

    `mesh_part(mesh, "dp_replicate", "fsdp")` is the mesh that fully_shard takes for HSDP. Raise RequestError if MEANING
    lacks a name.
    """
    found = tuple(_called(mesh, name) for name in names if size(mesh, name) > 1)
    if not found:
        return None
    flat = [name for name in found if name not in (mesh.mesh_dim_names or ())]
    if not flat:
        return mesh[found]
    if len(found) == 1:
        return _flattened(mesh, found[0])
    # fully_shard does the same (torch/distributed/fsdp/_fully_shard/_fsdp_init.py)
    return DeviceMesh._concatenate([_flattened(mesh, name) if name in flat else mesh[name] for name in found])


def mesh_group(mesh: DeviceMesh, name: str) -> ProcessGroup | None:
    """Return this rank's group, or None if its size is 1. Raise RequestError if MEANING lacks the name."""
    found = mesh_part(mesh, name)
    return None if found is None else found.get_group()


def place(mesh: DeviceMesh, name: str) -> int:
    """Return this rank's number in its group, 0 to size - 1. Raise RequestError if MEANING lacks the name."""
    found = mesh_part(mesh, name)
    return 0 if found is None else found.get_local_rank()


def _members(mesh: DeviceMesh, name: str) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    if name not in MEANING:
        raise RequestError(f"unknown mesh dimension {name!r}; expected one of: {', '.join(MEANING)}")
    return members(names, name)


def _flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a combination as one dimension; torch caches it by name."""
    return mesh[_members(mesh, name)]._flatten(name)  # private, but the only way; torchtitan uses it too


def _called(mesh: DeviceMesh, name: str) -> str:
    """Return the name in the mesh: the first one that is formed by the same dimensions."""
    made = _members(mesh, name)
    if len(made) == 1:
        return made[0]
    return next(each for each in (*SPLIT, *COMBINED) if _members(mesh, each) == made)
