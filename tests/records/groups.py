"""The ranks of each group of a layout, by arithmetic, as an oracle for the meshes that torch builds."""

from __future__ import annotations

import math

from hpcinit.records.layout import Layout
from hpcinit.runtime.mesh import members, mesh_dimensions


def group_members(layout: Layout, name: str) -> list[range]:
    """Return the ranks of each group of a dimension or combination, in rank order."""
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
