"""The public functions of `hpcinit.slurm.nodelist`, which expand and compress Slurm nodelists in pure Python."""

from hpcinit.base.errors import NodelistError
from hpcinit.slurm.nodelist import MAX_HOSTS, compress, expand, expand_counts, first

__all__ = ["MAX_HOSTS", "NodelistError", "compress", "expand", "expand_counts", "first"]
