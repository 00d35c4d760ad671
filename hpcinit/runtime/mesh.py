"""The device mesh of a layout."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcinit.facts.layout import DIMENSIONS, Layout


def build(layout: Layout, device: torch.device) -> DeviceMesh:
    """A mesh with the dimensions that are larger than 1, outermost first; a plain data parallel one if none is.

    layout: every degree known. Needs the process group.
    """
    degrees = {name: degree for name, degree in layout.degrees().items() if degree > 1} or {"dp_replicate": 1}
    names = tuple(name for name in DIMENSIONS if name in degrees)
    return init_device_mesh(device.type, tuple(degrees[name] for name in names), mesh_dim_names=names)
