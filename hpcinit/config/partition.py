"""Nodes, time, GPUs, cores and memory against what is known of the partition, and the keys that a site requires."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace

from hpcinit.config.schema import Config, Partition

# The keys that a site can require, with what to call a value and where a user finds one.
#   sbatch without an account at such a site: "Batch job submission failed: Invalid account or account/partition
#   combination specified", or "Job violates accounting/QOS policy" after the queue
REQUIRED = {
    "account": ("an account (a project's budget)", "sacctmgr show associations user=$USER format=account,qos"),
    "qos": ("a QOS", "sacctmgr show associations user=$USER format=account,qos"),
    "partition": ("a partition", "sinfo -s"),
}


def ranks_per_node(config: Config) -> int:
    return config.ranks_per_node or config.cluster.gpus_per_node or 1


def known(config: Config) -> Partition:
    """What is known of the partition that the job goes to, with the cluster's own words where it has none."""
    cluster = config.cluster
    found = cluster.partitions.get(config.partition or cluster.partition or "") or Partition()
    gpus = cluster.gpus_per_node or None
    return replace(
        found,
        gpus_per_node=gpus if found.gpus_per_node is None else found.gpus_per_node,
        cpus_per_node=found.cpus_per_node or cluster.cpus_per_node,
    )


def problems(config: Config) -> Iterator[str]:
    """One message for each thing of which more is asked for than there is."""
    has = known(config)
    nodes = ("nodes + spare_nodes" if config.spare_nodes else "nodes", config.nodes + config.spare_nodes, has.nodes)
    for key, asked, most in (nodes, ("time_min", config.time_min, has.time_min)):
        if most is not None and asked > most:
            yield f"{key}={asked}, but {_where(config)} has at most {most}: {key}={most} or less"
    if has.mem_gb is not None and config.mem_gb and config.mem_gb > has.mem_gb:
        yield (
            f"mem_gb={config.mem_gb:g}, but a node of {_where(config)} has {has.mem_gb:g} GB for jobs: "
            f"mem_gb={has.mem_gb:g} or less, or 0 for all of it"
        )
    yield from _gpus(config, has)
    yield from _cores(config, has)


def missing_keys(config: Config) -> Iterator[str]:
    """Yield a message for each key that the cluster requires of every user and that is not set."""
    cluster = config.cluster
    for name in dict.fromkeys(cluster.needs):
        if name not in REQUIRED:
            yield f"cluster.needs has {name!r}, expected keys out of: {', '.join(REQUIRED)}"
        elif getattr(config, name) is None:
            what, command = REQUIRED[name]
            yield (
                f"{name} is not set, and cluster {cluster.name} needs {what}: {name}=..., or keep it in a cluster file "
                f"of your own with `defaults: [{cluster.name}]`; yours are listed by: {command}"
            )


def warnings(config: Config) -> Iterator[str]:
    """A partition that is not described. No error: Slurm knows them all, and is asked before anything is submitted."""
    name, described = config.partition, config.cluster.partitions
    if name and described and any(part not in described for part in name.split(",")):
        close = difflib.get_close_matches(name, described, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        yield (
            f"partition {name!r} is not in the description of cluster {config.cluster.name}, which has: "
            f"{', '.join(described)}{guess}"
        )


def _where(config: Config) -> str:
    name = config.partition or config.cluster.partition
    of = f"cluster {config.cluster.name}"
    return f"partition {name!r} of {of}" if name in config.cluster.partitions else of


def _gpus(config: Config, has: Partition) -> Iterator[str]:
    """Ranks want one each; GPUs are asked for with cluster.gpus_per_node, unless the site gives whole nodes."""
    ranks, asked = ranks_per_node(config), config.cluster.gpus_per_node
    own = config.cluster.partitions.get(config.partition or config.cluster.partition or "")
    listed = own is not None and own.gpus_per_node is not None
    key = "its gpus_per_node" if listed else "cluster.gpus_per_node"
    if asked and listed and asked > (has.gpus_per_node or 0):
        least = has.gpus_per_node or 0
        ask = f"cluster.gpus_per_node={least}" if least else "cluster.gpus_per_node=0 cluster.gpu_flag=null"
        yield f"cluster.gpus_per_node={asked}, but a node of {_where(config)} has {least} GPUs ({key}): {ask}"
    elif has.gpus_per_node and asked and ranks > has.gpus_per_node:
        yield (
            f"ranks_per_node={ranks}, but a node of {_where(config)} has {has.gpus_per_node} GPUs ({key}): a rank "
            f"needs one of its own; ranks_per_node={has.gpus_per_node} or less"
        )
    kind = own.gpu_type if own else None
    if kind and config.cluster.gpu_type and kind != config.cluster.gpu_type and config.cluster.gpu_flag:
        yield (
            f"cluster.gpu_type is {config.cluster.gpu_type!r}, but the GPUs of {_where(config)} are of type {kind!r}: "
            f"cluster.gpu_type={kind}"
        )


def _cores(config: Config, has: Partition) -> Iterator[str]:
    ranks, cluster = ranks_per_node(config), config.cluster.cpus_per_node
    each = config.cpus_per_rank or max(1, (cluster or 0) // ranks)  # as the script asks for them
    if has.cpus_per_node and ranks * each > has.cpus_per_node:
        most = has.cpus_per_node // ranks
        do = f"cpus_per_rank={most} or less" if most else f"ranks_per_node={has.cpus_per_node} or less"
        yield (
            f"{ranks} ranks x {each} cores = {ranks * each} cores per node, but a node of {_where(config)} has "
            f"{has.cpus_per_node} (cpus_per_node): {do}"
        )
