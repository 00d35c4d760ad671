"""Which ranks form a group, of each dimension of a layout and of the combinations that training needs."""

from __future__ import annotations

import math

from hpcinit.facts.layout import Layout

# What several dimensions are together: ranks that see different samples; ranks that a sharded parameter is divided
# among; ranks whose losses and gradients are averaged.
COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
# A data parallel dimension that experts are divided among is two: ep, and the ranks that hold the same experts.
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


def dimensions(layout: Layout) -> dict[str, int]:
    """Name and size of each dimension of the mesh, outermost first: those above 1, and dp_replicate if there is none.

    layout: every degree known.
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
    """The dimensions, of the `names` that a mesh has, that `name` is made of; none if it is of size 1 everywhere."""
    if name in names:
        return (name,)
    parts = [each for part in COMBINED.get(name, (name,)) for each in (part, *SPLIT.get(part, ()))]
    # Of the two that might be split, the other's `ep` is not meant.
    split = [pair[0] for pair in SPLIT.values() if pair[0] in names]
    if split and split[0] not in parts:
        parts = [each for each in parts if each != "ep"]
    return tuple(each for each in names if each in parts)


def groups(layout: Layout, name: str) -> list[range]:
    """The groups of ranks of a dimension or a combination of them, each in the order of its ranks.

    layout: every degree known. The dimensions of a combination are neighbours, so that a group is one range.
    """
    sizes = dimensions(layout)
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


def table(layout: Layout) -> str:
    """How the ranks are divided, one line per dimension and combination; '' for plain data parallelism."""
    if layout.pp * layout.dp_shard * layout.cp * layout.tp * layout.ep == 1:
        return ""
    sizes = dimensions(layout)
    rows = [(name, size, name) for name, size in sizes.items()]
    for name in (*SPLIT, *COMBINED):
        made = members(tuple(sizes), name)
        if len(made) > 1:
            rows.append((name, math.prod(sizes[each] for each in made), " x ".join(made)))
    lines = [("dimension", "size", "with rank 0", "")]
    for name, size, of in rows:
        what = MEANING[name] + ("" if of == name else f" ({of})")
        lines.append((name, str(size), _shown(groups(layout, name)[0]), what))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {ranks:<{widths[2]}}  {what}".rstrip()
        for name, size, ranks, what in lines
    )


def _shown(ranks: range) -> str:
    """'0 8 16 ... 56'"""
    shown = [str(rank) for rank in ranks]
    return " ".join(shown if len(shown) <= 4 else [*shown[:3], "...", shown[-1]])
