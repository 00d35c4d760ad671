"""Computes the GPUs, cores and memory that a job requests per node: a share for its ranks, or the whole node.

For example, on nodes with 8 GPUs, this requests 2 GPUs and a quarter of the cores and the memory:

    hpcinit submit cluster=x ranks_per_node=2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcinit.config.schema import Config, Partition


def ranks_per_node(config: Config) -> int:
    """Return ranks_per_node if it is set. Otherwise, return the requested GPUs per node, or a node's GPUs, or 1."""
    if config.ranks_per_node is not None:
        return config.ranks_per_node
    requested = requested_gpus(config)
    return (config.cluster.gpus_per_node if requested is None else requested) or 1


def requested_gpus(config: Config) -> int | None:
    """Return the GPUs per node that gpus_per_node or gpus requests, or None if neither key is set."""
    if config.gpus_per_node is not None or config.gpus is None:
        return config.gpus_per_node
    return -(-config.gpus // max(1, config.nodes))


def partition(config: Config) -> Partition:
    """Return the limits of the job's partition. The cluster's GPUs, cores and whole_nodes replace missing values."""
    cluster = config.cluster
    found = cluster.partitions.get(config.partition or cluster.partition or "") or Partition()
    gpus = cluster.gpus_per_node or None
    return replace(
        found,
        gpus_per_node=gpus if found.gpus_per_node is None else found.gpus_per_node,
        cpus_per_node=found.cpus_per_node or cluster.cpus_per_node,
        whole_nodes=cluster.whole_nodes if found.whole_nodes is None else found.whole_nodes,
    )


def whole_nodes(config: Config) -> bool:
    """Return whether the job gets whole nodes, however many ranks it has.

    It does if the job requests them (--exclusive), if the partition allocates only whole nodes, or if the site has no
    option that requests GPUs.
    """
    cluster = config.cluster
    no_option = bool(cluster.gpus_per_node) and cluster.gpu_flag is None
    return cluster.exclusive or bool(partition(config).whole_nodes) or no_option


def gpus_per_node(config: Config) -> int:
    """Return how many GPUs the job requests per node."""
    there, requested = config.cluster.gpus_per_node, requested_gpus(config)
    if requested is not None:
        return requested
    return there if whole_nodes(config) else min(there, ranks_per_node(config))


def _share(config: Config) -> tuple[int, int]:
    """Return the share of a node that the job requests, as a fraction: (2, 8) for 2 of 8 GPUs, (1, 1) for a whole node.

    The numerator is the number of requested GPUs or of ranks per node, whichever is larger. The denominator is the
    number of GPUs of a node. Without GPUs, the job requests whole nodes.
    """
    there = config.cluster.gpus_per_node
    used = max(gpus_per_node(config), ranks_per_node(config))
    return (1, 1) if not there or whole_nodes(config) or used >= there else (used, there)


def cpus_per_rank(config: Config) -> int | None:
    """Return cpus_per_rank if it is set, otherwise the rank's share of the cores that the job requests.

    Return None if cluster.cpus_per_node is not set either.
    """
    if config.cpus_per_rank is not None or config.cluster.cpus_per_node is None:
        return config.cpus_per_rank
    requested, there = _share(config)
    return max(1, config.cluster.cpus_per_node * requested // there // ranks_per_node(config))


def mem_gb(config: Config) -> float | None:
    """Return mem_gb if it is set, otherwise the job's share of cluster.mem_gb, in GB per node.

    0: all memory of the node. None: the script does not request memory.
    """
    memory = config.cluster.mem_gb
    if config.mem_gb is not None or memory is None:
        return config.mem_gb
    requested, there = _share(config)
    if not memory and requested < there:  # 0 means all memory of a node; only the partition shows how much that is
        memory = partition(config).mem_gb or 0
    return memory * requested / there


@dataclass(frozen=True)
class Resources:
    """What the job requests per node, for the submission summary.

    cores: None if hpcinit requests no cores.
    mem_gb: 0 for all memory, None if hpcinit requests no memory.
    """

    gpus: int
    cores: int | None
    mem_gb: float | None
    whole_nodes: bool

    def described(self) -> str:
        """Return a text such as '2 GPUs, 8 cores and 52 GB per node', or '' if the job requests none of these."""
        found = [f"{self.gpus} GPU{'s' * (self.gpus != 1)}"] if self.gpus else []
        found += [f"{self.cores} core{'s' * (self.cores != 1)}"] if self.cores else []
        if self.mem_gb is not None:
            found.append(f"{self.mem_gb:g} GB" if self.mem_gb else "all memory")
        text = " and ".join(", ".join(found).rsplit(", ", 1))
        return f"{text} per node{' (whole nodes)' * self.whole_nodes}" if text else ""


def requested(config: Config) -> Resources:
    """Return the resources that the job requests per node."""
    if not config.engine.has_queue:
        return Resources(gpus=0, cores=None, mem_gb=None, whole_nodes=whole_nodes(config))
    cores = cpus_per_rank(config)
    return Resources(
        gpus=gpus_per_node(config),
        cores=None if cores is None else cores * ranks_per_node(config),
        mem_gb=mem_gb(config),
        whole_nodes=whole_nodes(config),
    )
