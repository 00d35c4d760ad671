"""Checks nodes, time, GPUs, cores and memory against the partition's limits, and checks that required keys are set.

The checks apply to each component of a heterogeneous job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from hpcinit.base.text import counted
from hpcinit.config import hetjob, resources
from hpcinit.config.hetjob import COUNTS, KEYS, TEXTS
from hpcinit.config.resources import cpus_per_rank, ranks_per_node
from hpcinit.config.schema import Config, Partition, Qos
from hpcinit.engine import SLURM

# The keys that a site can require. For each: its description in the message, and the command that lists its values.
# Without an account, sbatch at such a site fails with "Invalid account or account/partition combination specified", or
# the job fails later with "Job violates accounting/QOS policy".
REQUIRED = {
    "account": ("an account (a project's budget)", "sacctmgr show associations user=$USER format=account,qos"),
    "qos": ("a QOS", "sacctmgr show associations user=$USER format=account,qos"),
    "partition": ("a partition", "sinfo -s"),
}
MODULES = "modules"  # a module with the site's plugin for NCCL
PLUGIN = "nccl_plugin"  # the plugin, which no module of the site contains; a request without it only gets a warning
# What may add the plugin: options of sbatch and srun, and variables of the job or of the shell that submits it.
PLUGIN_OPTIONS = {"uenv", "view", "environment", "container-image", "container-name", "export", "export-file"}
PLUGIN_VARIABLES = {"LD_LIBRARY_PATH", "LD_PRELOAD", "NCCL_NET_PLUGIN", "UENV_MOUNT_LIST", "UENV_VIEW"}


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each resource (nodes, time, GPUs, cores, memory) that exceeds the partition's limits."""
    has, memory = resources.partition(config), resources.mem_gb(config)
    yield from _nodes_and_time(config, has)
    if has.mem_gb is not None and memory and memory > has.mem_gb:
        yield (
            f"mem_gb={memory:g}, but a node of {_where(config)} has {has.mem_gb:g} GB for jobs: "
            f"mem_gb={has.mem_gb:g} or less, or 0 for all of it"
        )
    impossible = list(_gpus(config, has))
    yield from impossible
    if not impossible or config.ranks_per_node is not None:  # if not set, it depends on the number of GPUs
        yield from _cores(config, has)


def _nodes_and_time(config: Config, has: Partition) -> Iterator[str]:
    """Yield a message if nodes or time exceed the limits of the QOS.

    If the QOS has no limit, the partition's limit applies.
    """
    cluster, nodes, qos = config.cluster, config.nodes + config.spare_nodes, config.qos or config.cluster.qos
    own = cluster.qoses.get(qos or "") or Qos()
    here, there = _where(config), f"qos {qos!r} of cluster {cluster.name}"
    where, most = (there, own.nodes) if own.nodes is not None else (here, has.nodes)
    if most is not None and nodes > most:
        key = "nodes + spare_nodes" if config.spare_nodes else "nodes"
        yield f"{key}={nodes}, but {where} allows at most {most}: {key}={most} or less"
    where, most = (there, own.time_min) if own.time_min is not None else (here, has.time_min)
    if own.time_min is None and (fitting := [up_to for up_to in has.time_min_by_nodes if nodes <= up_to]):
        most = has.time_min_by_nodes[min(fitting)]
        where = f"{here}, with {nodes} nodes,"
    if most is not None and config.time_min > most:
        yield f"time_min={config.time_min}, but {where} allows at most {most}: time_min={most} or less"
    elif has.node_min is not None and nodes * config.time_min > has.node_min:
        fits = has.node_min // nodes
        yield (
            f"nodes x time_min = {nodes} x {config.time_min} = {nodes * config.time_min} node-minutes, but {here} "
            f"allows {has.node_min} per job: {f'time_min={fits} or less, or ' if fits else ''}fewer nodes"
        )


def missing_keys(config: Config) -> Iterator[str]:
    """Yield a message for each required key that is not set. cluster.needs lists the keys that every user must set."""
    cluster = config.cluster
    for name in dict.fromkeys(cluster.needs):
        if name == MODULES:
            if "NCCL_NET" in cluster.env and not (cluster.modules or cluster.setup or config.container.image):
                yield (
                    f"cluster.modules is not set, but NCCL on {cluster.name} finds the fast network only with the "
                    "site's plugin. Set modules=[...] in your own cluster file; a comment in the site's file names "
                    "the module (docs/clusters.md). Or set container.image=... to an image with the plugin. To use "
                    "TCP instead, which is slow, add '~cluster.env.NCCL_NET'"
                )
        elif name == PLUGIN:
            continue  # a warning: see below
        elif name not in REQUIRED:
            yield f"cluster.needs has {name!r}, expected keys from: {', '.join((*REQUIRED, MODULES, PLUGIN))}"
        elif getattr(config, name) is None:
            what, command = REQUIRED[name]
            yield (
                f"{name} is not set, but cluster {cluster.name} requires {what}: add {name}=... ({command} lists the "
                f"values that you may use), or set it in your own cluster file with `defaults: [{cluster.name}]`"
            )


def warnings(config: Config) -> Iterator[str]:
    """Yield a warning if the cluster file was never tested on its cluster, or if nothing adds NCCL's plugin."""
    cluster = config.cluster
    if PLUGIN in cluster.needs and "NCCL_NET" in cluster.env and resources.gpus_per_node(config) and _no_plugin(config):
        yield (
            f"cluster.env sets NCCL_NET={cluster.env['NCCL_NET']!r}, but this request has no setting that adds NCCL's "
            "plugin of that name, such as a uenv or a container. Without the plugin, NCCL fails when the ranks start. "
            "A comment in the site's file shows the settings (docs/clusters.md). To use TCP instead, which is slow: "
            "'~cluster.env.NCCL_NET'. If the nodes have the plugin: 'cluster.needs=[]'"
        )
    if cluster.untested:
        yield (
            f"the file of cluster {cluster.name} was made from the site's documentation and never tested there: check "
            f"the script{'' if config.dry_run else ' with dry_run=true'} (cluster.untested=false hides this line)"
        )


def _no_plugin(config: Config) -> bool:
    """Return whether neither the request nor this shell has a setting that could add an NCCL plugin."""
    cluster = config.cluster
    return not (
        cluster.modules
        or cluster.conda
        or config.container.image
        or any(not line.startswith("ulimit ") for line in cluster.setup)
        or PLUGIN_OPTIONS & {*cluster.sbatch, *cluster.srun}
        or PLUGIN_VARIABLES & {*cluster.env, *config.job.env, *(name for name, value in os.environ.items() if value)}
    )


def _where(config: Config) -> str:
    name = config.partition or config.cluster.partition
    of = f"cluster {config.cluster.name}"
    return f"partition {name!r} of {of}" if name in config.cluster.partitions else of


def _gpus(config: Config, has: Partition) -> Iterator[str]:
    """Yield a message if a rank would get no GPU, or if the nodes lack the requested number or type of GPUs."""
    cluster, ranks, requested = config.cluster, ranks_per_node(config), resources.requested_gpus(config)
    own = cluster.partitions.get(config.partition or cluster.partition or "")
    listed = own is not None and own.gpus_per_node is not None
    source = "gpus_per_node of the partition" if listed else "cluster.gpus_per_node"
    there = has.gpus_per_node or 0
    if requested is not None:
        yield from _requested_gpus(config, requested, there, source)
    elif cluster.gpus_per_node and listed and cluster.gpus_per_node > there:
        advice = f"cluster.gpus_per_node={there}" if there else "cluster.gpus_per_node=0 cluster.gpu_flag=null"
        yield (
            f"cluster.gpus_per_node={cluster.gpus_per_node}, but a node of {_where(config)} has "
            f"{counted(there, 'GPU')} ({source}): set {advice}"
        )
    elif there and cluster.gpus_per_node and ranks > there:
        yield (
            f"ranks_per_node={ranks}, but a node of {_where(config)} has {counted(there, 'GPU')} ({source}), and each "
            f"rank needs one: set ranks_per_node={there} or less"
        )
    kind = own.gpu_type if own else None
    if kind and config.cluster.gpu_type and kind != config.cluster.gpu_type and config.cluster.gpu_flag:
        yield (
            f"cluster.gpu_type is {config.cluster.gpu_type!r}, but the GPUs of {_where(config)} are of type {kind!r}: "
            f"set cluster.gpu_type={kind}"
        )


def _requested_gpus(config: Config, requested: int, there: int, source: str) -> Iterator[str]:
    """Yield a message if gpus or gpus_per_node can't be satisfied.

    requested: how many GPUs are requested per node.
    there: how many GPUs a node has.
    source: the key from which hpcinit read `there`.
    """
    key = f"gpus={config.gpus}" if config.gpus_per_node is None else f"gpus_per_node={requested}"
    ranks, where = ranks_per_node(config), _where(config)
    if config.gpus is not None and config.gpus_per_node is not None:
        yield f"gpus={config.gpus} and gpus_per_node={config.gpus_per_node} are both set; remove one"
    elif config.gpus is not None and config.gpus % config.nodes:
        below = config.gpus // config.nodes * config.nodes
        near = " or ".join(f"gpus={number}" for number in (below, below + config.nodes) if number)
        yield f"gpus={config.gpus} is not a multiple of nodes={config.nodes}: set {near}"
    elif config.cluster.gpu_flag is None and requested != there:
        yield (
            f"{key}, but cluster {config.cluster.name} has no option that requests GPUs (cluster.gpu_flag is null): "
            f"set ranks_per_node={max(1, requested)}"
        )
    elif requested > there:
        if config.gpus_per_node is not None or not there:
            advice = f"set gpus_per_node={there} or less" if there else "remove it"
        else:
            gpus, most = config.gpus or requested, resources.partition(config).nodes
            nodes = -(-gpus // there)
            too_many = most is not None and nodes > most
            advice = f"expected at most nodes={most} gpus={(most or 0) * there}" if too_many else f"set nodes={nodes}"
        yield f"{key}, but a node of {where} has {counted(there, 'GPU')} ({source}): {advice}"
    elif requested and ranks > requested:
        yield (
            f"ranks_per_node={ranks}, but {key} requests {requested} GPUs per node, and each rank needs one: "
            f"set ranks_per_node={requested} or less"
        )


def _cores(config: Config, has: Partition) -> Iterator[str]:
    ranks, each = ranks_per_node(config), cpus_per_rank(config) or 1
    if has.cpus_per_node and ranks * each > has.cpus_per_node:
        most = has.cpus_per_node // ranks
        advice = f"cpus_per_rank={most} or less" if most else f"ranks_per_node={has.cpus_per_node} or less"
        yield (
            f"{ranks} ranks x {each} cores = {ranks * each} cores per node, but a node of {_where(config)} has "
            f"{has.cpus_per_node} (cpus_per_node): set {advice}"
        )


def hetjob_problems(config: Config) -> Iterator[str]:
    """Yield a message for each problem in `hetjob`, and for each problem with the resources of its components."""
    if not config.hetjob:
        if config.worlds != hetjob.ONE:
            yield f"worlds is {config.worlds}, but hetjob is empty: remove worlds, or add components"
        return
    for key, value, usual in (
        ("cluster.engine", config.cluster.engine, SLURM.name),
        ("launch.kind", config.launch.kind, "srun"),
        ("spare_nodes", config.spare_nodes, 0),
        ("chain", config.chain, 1),
        ("restart.max_restarts", config.restart.max_restarts or 0, 0),
    ):
        if value != usual:
            yield f"hetjob is set and {key} is {value}, expected {usual}: heterogeneous jobs support no other value"
    wrong = [text for at, each in enumerate(config.hetjob) for text in _component(at, dict(each))]
    yield from wrong
    if not wrong:
        for at, each in enumerate(hetjob.components(config)[1:]):
            yield from (f"hetjob[{at}]: {text}" for text in problems(each))


def _component(at: int, each: dict[str, object]) -> Iterator[str]:
    for key, value in each.items():
        name = f"hetjob[{at}].{key}"
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key not in KEYS:
            yield f"{name} is not a key of a component, expected one of: {', '.join(KEYS)}"
        elif key in COUNTS and (type(value) is not int or value < COUNTS[key]):
            yield f"{name} is {value!r}, expected a whole number, {COUNTS[key]} or more"
        elif key == "mem_gb" and not (number and value >= 0):  # type: ignore[operator]
            yield f"{name} is {value!r}, expected a number, 0 or more"
        elif key in TEXTS and (not isinstance(value, str) or not value):
            yield f"{name} is {value!r}, expected a name"
