"""What GPUs' links can do, in 10^9 bytes a second and one direction: half of what data sheets give for both."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcinit.facts.rank_report import Interface

# The first that is found in torch's name of the device. PCIe cards of the same name have other links: not in the table.
LINKS = (
    # NVLink 5, 1.8 TB/s: https://www.nvidia.com/en-us/data-center/nvlink/
    (re.compile(r"\bG?B[23]00\b"), 900.0),
    # NVLink 4, 900 GB/s: https://www.nvidia.com/en-us/data-center/h100/ and .../h200/
    (re.compile(r"\b(H100 80GB HBM3|H100 64GB|H200|GH200|H800)(?!.*(PCIe|NVL))"), 450.0),
    # NVLink 3, 600 GB/s: https://www.nvidia.com/en-us/data-center/a100/
    (re.compile(r"\bA100-SXM"), 300.0),
    # NVLink 2, 300 GB/s: https://www.nvidia.com/en-us/data-center/v100/
    (re.compile(r"\bV100-SXM"), 150.0),
)
# Of the peak, an assumption: below half something is wrong (a link that is down, the wrong interface, no GPUDirect),
# above it is nobody's fault. What is compared: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
HEALTHY = 0.5


def link_gb_s(device: str) -> float | None:
    """Of a GPU with others of its node; None where it is not known."""
    return next((speed for pattern, speed in LINKS if pattern.search(device)), None)


def network_gb_s(interfaces: Sequence[Interface]) -> float | None:
    """Of a node: its InfiniBand ports that are up, else its other interfaces, as their drivers tell. None: not told."""
    ports = [one for one in interfaces if one.up and one.gbit]
    chosen = [one for one in ports if one.infiniband] or ports
    return sum(one.gbit for one in chosen) / 8 or None
