"""Ports to meet at: computed by every rank on its own, outside the range that the kernel hands out."""

from __future__ import annotations

import hashlib

# Linux gives ports 32768-60999 to outgoing connections (net.ipv4.ip_local_port_range), so a listener
# there fails now and then: https://github.com/NVIDIA/enroot/issues/243. Below 20000 services live.
FIRST, LAST = 20_000, 32_767
COUNT = 8


def candidates(job: str) -> tuple[int, ...]:
    """COUNT different ports for one start of one job, the same on every rank.

    job: what names the job, its step and its restart. Spread by a hash, since consecutive job ids share
    nodes and consecutive ports collide as soon as one job needs two.
    """
    span = LAST - FIRST + 1
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    # A stride coprime to the span (12768 = 2^5 x 3 x 7 x 19) never repeats within it.
    return tuple(FIRST + (start + i * 1009) % span for i in range(COUNT))
