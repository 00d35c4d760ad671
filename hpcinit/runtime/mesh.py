"""Builds the device mesh: process groups for each dimension of a layout, and for combinations that training needs."""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup, get_rank, get_world_size, new_group
from torch.distributed import group as default
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout

# Combinations of dimensions. dp: ranks with different samples. fsdp: ranks that share a sharded parameter. loss: ranks
# over which losses and gradients are averaged. sp: OpenRLHF's name for cp.
COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "sp": ("cp",),
}
# Expert parallelism splits a data parallel dimension in two: ep, and edp_*. Ranks along edp_* have the same experts.
SPLIT = {"dp_replicate": ("edp_replicate", "ep"), "dp_shard": ("edp_shard", "ep")}
# The names that size(), group(), place() and a Mesh accept: dimensions, and combinations of them.
NAMES = ("pp", "dp_replicate", "dp_shard", "edp_replicate", "edp_shard", "ep", "cp", "tp", *COMBINED)


def all_dimensions(layout: Layout) -> dict[str, int]:
    """Return the name and size of each mesh dimension, outermost first, including dimensions of size 1.

    layout: the parallelism, with every degree computed.
    """
    found: dict[str, int] = {}
    split = "dp_replicate" if layout.dp_shard == 1 else "dp_shard"
    for name, degree in layout.degrees().items():
        if name == split and layout.ep > 1:
            found |= dict(zip(SPLIT[name], (degree // layout.ep, layout.ep), strict=True))
        else:
            found[name] = degree
    return found


def mesh_dimensions(layout: Layout) -> dict[str, int]:
    """Return the name and size of each mesh dimension that is in use, outermost first. If none is, return dp_replicate.

    layout: the parallelism, with every degree computed.
    """
    return _in_use(all_dimensions(layout)) or {"dp_replicate": 1}


def _in_use(sizes: dict[str, int]) -> dict[str, int]:
    """Return the dimensions larger than 1, and all dimensions whose names start with edp_.

    An edp_ dimension shows from which data parallel dimension the ranks of `ep` are taken.
    """
    return {name: size for name, size in sizes.items() if size > 1 or name.startswith("edp_")}


def members(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the dimensions in `names` that make up `name`, or () if `name` has size 1."""
    if name in names:
        return (name,)
    parts = [each for part in COMBINED.get(name, (name,)) for each in (part, *SPLIT.get(part, ()))]
    # Only one of the two data parallel dimensions is split, and `ep` is a part of that dimension.
    split = [pair[0] for pair in SPLIT.values() if pair[0] in names]
    if split and split[0] not in parts:
        parts = [each for each in parts if each != "ep"]
    return tuple(each for each in names if each in parts)


# The device mesh of a layout.


class NotMade:
    """A placeholder for the group that contains only this rank. Mesh.of_one() creates the group when it is needed."""

    group_name = "the group of one rank, which is created at its first use"


class Mesh(DeviceMesh):
    """torch's DeviceMesh with all dimensions, plus the combinations and alternative names in NAMES.

    `mesh["dp", "sp"]` is a mesh of two dimensions. `mesh.get_group("tp")` is this rank's group. If the dimension has
    size 1, this group contains only this rank. `dp`, `fsdp` and `loss` are combinations of dimensions, and `sp` is
    another name for `cp`. A plain DeviceMesh does not have these names, and warns when you select a combination.
    """

    alone: DeviceMesh | None = None

    def of_one(self) -> DeviceMesh:
        """Return a mesh that contains only this rank. It can be joined with other parts of this mesh.

        The first call creates a process group that contains only this rank. The other ranks do not take part. init()
        does not create the group, because rank 0 may exit before a slow rank has created it with rank 0's store.
        """
        if self.alone is None:
            world = default.WORLD
            assert world is not None, "the process group was destroyed"
            one = world if get_world_size() == 1 else new_group([get_rank()], use_local_synchronization=True)
            names = ("world", "alone")
            both = DeviceMesh.from_group(
                [world, one], self.device_type, mesh=self.mesh.reshape(-1, 1), mesh_dim_names=names
            )
            self.alone = both["alone"]
        return self.alone

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of one or more dimensions or combinations, given by their names.

        Raise KeyError for an unknown name, and for names that overlap or are not in the order of the mesh.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if names == self.mesh_dim_names:
            return self
        used = [each for name in names if name in NAMES for each in _members(self, name)]
        if used != [name for name in self.mesh_dim_names or () if name in used]:
            raise KeyError(
                f"mesh dimensions {names} overlap or are in the wrong order, expected the order {self.mesh_dim_names}"
            )
        found = DeviceMesh._concatenate([self._one(name) for name in names])  # as fully_shard does, see mesh_part
        found._mesh_dim_names, found._root_mesh = names, self
        return found

    def _one(self, name: str) -> DeviceMesh:
        """Return the mesh of one dimension or combination. Raise KeyError for an unknown name."""
        if name not in NAMES:
            return self.part((name,))  # a name that the program itself passed to _flatten()
        return mesh_part(self, name) or self.of_one()

    def part(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return a part of the mesh as torch's own DeviceMesh does. Raise KeyError for an unknown name."""
        return super().__getitem__(names)

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's process group for a dimension or combination. Raise KeyError for an unknown name."""
        name = (self.mesh_dim_names or ())[mesh_dim] if isinstance(mesh_dim, int) else mesh_dim
        return super().get_group(None) if name is None else self._one(name).get_group()

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's process group for each dimension."""
        return [self.get_group(name) for name in self.mesh_dim_names or ()]


def build_mesh(layout: Layout, device: torch.device) -> Mesh:
    """Create the mesh with all dimensions, outermost first. The default process group must already exist.

    This function creates all groups with several ranks, because every rank must create them in the same order. There is
    one for each dimension larger than 1, and one for each combination of several such dimensions.

    layout: the parallelism, with every degree computed.
    """
    wide, sizes = mesh_dimensions(layout), all_dimensions(layout)
    used = init_device_mesh(device.type, tuple(wide.values()), mesh_dim_names=tuple(wide))
    groups = [used.get_group(name) if sizes[name] > 1 else NotMade() for name in sizes]
    mesh = DeviceMesh.from_group(
        groups,  # type: ignore[arg-type]  # only their names are read
        device.type,
        mesh=used.mesh.reshape(tuple(sizes.values())),
        mesh_dim_names=tuple(sizes),
    )
    mesh.__class__ = Mesh  # from_group() is a static method, which cannot create a subclass
    assert isinstance(mesh, Mesh)
    for name in (*SPLIT, *COMBINED):
        if len(_members(mesh, name)) > 1 and _called(mesh, name) == name:
            _flattened(mesh, name)
    return mesh


def size(mesh: DeviceMesh, name: str) -> int:
    """Return how many ranks are in a dimension or combination.

    Raise RequestError if NAMES does not contain the name.
    """
    sizes = _sizes(mesh)
    return math.prod([sizes[each] for each in _members(mesh, name)])


def mesh_part(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Return the mesh of some dimensions or combinations, without those of size 1. If all have size 1, return None.

    For example, `mesh_part(mesh, "dp_replicate", "fsdp")` is the mesh that fully_shard expects for HSDP. Raise
    RequestError if NAMES does not contain a name.
    """
    found = tuple(_called(mesh, name) for name in names if size(mesh, name) > 1)
    if not found:
        return None
    flat = [name for name in found if name not in (mesh.mesh_dim_names or ())]
    if not flat:
        return mesh[found] if not isinstance(mesh, Mesh) else mesh.part(found)
    if len(found) == 1:
        return _flattened(mesh, found[0])
    # fully_shard does the same (torch/distributed/fsdp/_fully_shard/_fsdp_init.py)
    return DeviceMesh._concatenate([_flattened(mesh, name) if name in flat else mesh[name] for name in found])


def group(mesh: DeviceMesh, name: str) -> ProcessGroup:
    """Return this rank's process group for a dimension or combination. With size 1, it contains only this rank.

    Raise RequestError if NAMES does not contain the name.
    """
    _check(name)
    return mesh[name].get_group()


def place(mesh: DeviceMesh, name: str) -> int:
    """Return this rank's number in its group, 0 to size - 1.

    Raise RequestError if NAMES does not contain the name.
    """
    found = mesh_part(mesh, name)
    return 0 if found is None else found.get_local_rank()


def _members(mesh: DeviceMesh, name: str) -> tuple[str, ...]:
    """Return the mesh dimensions of size above 1 that together form the dimension or combination `name`."""
    _check(name)
    return members(tuple(_in_use(_sizes(mesh))), name)


def _check(name: str) -> None:
    if name not in NAMES:
        raise RequestError(f"unknown mesh dimension {name!r}; expected one of: {', '.join(NAMES)}")


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a combination as a mesh of one dimension. torch caches it by name."""
    members = _members(mesh, name)
    part = mesh.part(members) if isinstance(mesh, Mesh) else mesh[members]
    return part._flatten(name)  # private, but the only way; torchtitan uses it too


def _called(mesh: DeviceMesh, name: str) -> str:
    """Return the name that the mesh uses for a dimension or combination.

    If several combinations consist of the same dimensions, the mesh contains only the first of them.
    """
    made = _members(mesh, name)
    if len(made) == 1:
        return made[0]
    return next(each for each in (*SPLIT, *COMBINED) if _members(mesh, each) == made)
