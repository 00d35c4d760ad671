"""Expands and compresses Slurm nodelists in pure Python: the public names of `hpcinit.slurm.nodelist`."""

from hpcinit.base.errors import NodelistError
from hpcinit.slurm.nodelist import MAX_HOSTS, compress, expand, expand_counts, first

__all__ = ["MAX_HOSTS", "NodelistError", "compress", "expand", "expand_counts", "first"]
