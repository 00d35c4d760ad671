"""Queries Slurm and parses the output. The original output of each command is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpcinit.base.errors import Failure
from hpcinit.slurm import nodelist, scontrol, slurm_client
from hpcinit.slurm.scontrol import minutes, names, number, value_or_none

CONFIG = "scontrol show config"
PARTITIONS = "scontrol --all show partition"  # --all: also hidden partitions and those of other groups
NODES = "scontrol --all show node"
SRUN = "srun --help"
USER = "sacctmgr --noheader --parsable2 show user where name={user} format=DefaultAccount"
ASSOCIATIONS = (
    "sacctmgr --noheader --parsable2 show assoc where user={user} cluster={cluster} "
    "format=Account,Partition,QOS,DefaultQOS"
)


@dataclass(frozen=True)
class SiteAnswers:
    """The output of Slurm's commands.

    texts: the output of each command. sacctmgr's output is missing if Slurm has no accounting.
    silent: sacctmgr's error, or ''.
    """

    texts: Mapping[str, str]
    silent: str = ""

    def __getitem__(self, command: str) -> str:
        return self.texts[command]


def query_site(user: str, env: Mapping[str, str]) -> SiteAnswers:
    """Run four to six Slurm commands and return their output. Raise Failure if any except sacctmgr fails."""
    texts = {command: _run(command.split(), env) for command in (CONFIG, PARTITIONS, NODES, SRUN)}
    config = scontrol.config(texts[CONFIG])
    if not accounting(config):
        return SiteAnswers(texts)
    try:
        for template in (USER, ASSOCIATIONS):
            command = [part.format(user=user, cluster=config.get("ClusterName", "")) for part in template.split()]
            texts[template] = _run(command, env)
    except Failure as error:  # slurmdbd is down, or sacctmgr is not installed on login nodes
        return SiteAnswers(texts, str(error))
    return SiteAnswers(texts)


def accounting(config: Mapping[str, str]) -> bool:
    """Return whether Slurm uses accounting.

    Without accounting, Slurm 22.05 prints accounting_storage/none, and Slurm 24.11 prints (null).
    """
    kind = scontrol.value_or_none(config.get("AccountingStorageType"))
    return kind is not None and not kind.endswith("/none")


def _run(command: list[str], env: Mapping[str, str]) -> str:
    try:
        done = slurm_client.run(command, env)
    except slurm_client.NotStarted as error:
        check = ", but discover needs it: is this a login node, and is the slurm module loaded?"
        raise Failure(f"{error}{check if error.missing else ''}") from None
    except slurm_client.TimedOut as error:
        raise Failure(f"{error}: {slurm_client.CHECK}") from None
    if done.status != 0:
        raise Failure(f"{' '.join(command)!r} failed: {done.error}")
    return done.stdout


# Parse the output into a Site.

MIB_PER_GB = 1024


class Kind(NamedTuple):
    """A group of nodes with the same resources.

    mem_mib: the memory that jobs may use.
    features: the features that all nodes of the group have.
    """

    gpus: int
    gpu_types: tuple[str, ...]
    cpus: int
    threads_per_core: int
    mem_mib: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """A partition, as Slurm describes it.

    kinds: the kinds of nodes, each with the number of its nodes; the most common kind is first.
    refused: why this user can't submit to the partition, or ''.
    """

    name: str
    default: bool
    hidden: bool
    state: str
    nodes: int
    kinds: tuple[tuple[Kind, int], ...]
    time_min: int | None
    default_time_min: int | None
    max_nodes: int | None
    max_cpus: int | None
    max_mem_mib: int | None
    default_memory: str
    exclusive: bool
    preemption: str
    qos: str | None
    refused: str

    @property
    def mem_mib(self) -> int:
        """Return how much memory, in MiB, a job can get on the partition's largest node."""
        return min(max(kind.mem_mib for kind, _ in self.kinds), self.max_mem_mib or 2**62)


@dataclass(frozen=True)
class User:
    """The user who runs `hpcinit discover`.

    uid: the user id. Root (0) counts as a member of every group.
    accounts, qos: the accounts and QOS that the user may use, or None if they are unknown.
    account, default_qos: the defaults, or None.
    """

    name: str
    uid: int
    groups: frozenset[str]
    accounts: frozenset[str] | None = None
    qos: frozenset[str] | None = None
    account: str | None = None
    default_qos: str | None = None


@dataclass(frozen=True)
class Site:
    """What Slurm reports about a cluster.

    silent: why the user's accounts are unknown, or ''.
    """

    cluster: str
    slurm: str
    user: User
    partitions: tuple[Partition, ...]
    accounting: bool
    silent: str
    max_array_size: int | None
    preemption: str | None
    topology: str | None
    pyxis: bool
    gpu_flag: str

    @property
    def usable(self) -> list[Partition]:
        return [each for each in self.partitions if not each.refused]

    def main(self, name: str | None) -> Partition:
        """Return the partition called `name`.

        If there is none, return Slurm's default partition, or else the partition with the most GPUs.
        """
        byname = [each for each in self.usable if each.name == name]
        default = [each for each in self.usable if each.default]
        return (byname or default or sorted(self.usable, key=_gpu_total, reverse=True))[0]


def _gpu_total(partition: Partition) -> int:
    return sum(kind.gpus * count for kind, count in partition.kinds)


def read_site(answers: SiteAnswers, user: User) -> Site:
    """Parse the output of Slurm's commands. Raise Failure if this user may not use any partition."""
    config = scontrol.config(answers[CONFIG])
    user = _with_accounts(answers, user)
    nodes = {node["NodeName"]: node for node in scontrol.records(answers[NODES], "NodeName")}
    records = scontrol.records(answers[PARTITIONS], "PartitionName")
    found = [_partition(each, nodes, config, user) for each in records]
    site = Site(
        cluster=config.get("ClusterName", ""),
        slurm=config.get("SLURM_VERSION", ""),
        user=user,
        partitions=tuple(found),
        accounting=accounting(config),
        silent=answers.silent,
        max_array_size=number(config.get("MaxArraySize")),
        preemption=value_or_none(config.get("PreemptMode")),
        topology=value_or_none(config.get("TopologyPlugin")),
        pyxis="--container-image" in answers[SRUN],
        gpu_flag="gpus-per-node" if config.get("SelectType", "").endswith("/cons_tres") else "gres",
    )
    if not site.usable:
        why = "; ".join(f"{each.name}: {each.refused}" for each in found) or "Slurm shows none"
        raise Failure(f"Slurm of cluster {site.cluster!r} has no partition that {user.name} may submit to: {why}")
    return site


def _with_accounts(answers: SiteAnswers, user: User) -> User:
    """Return `user` with the accounts and QOS that sacctmgr lists, if sacctmgr answered."""
    if ASSOCIATIONS not in answers.texts:
        return user
    rows = [line.split("|") for line in answers[ASSOCIATIONS].splitlines() if line.count("|") >= 3]
    account = answers[USER].strip().partition("|")[0] or None
    own = [row for row in rows if row[0] == account] or rows
    return User(
        user.name,
        user.uid,
        user.groups,
        # An empty list means that sacctmgr hides it from users (PrivateData), or that Slurm enforces nothing.
        frozenset(row[0] for row in rows) or None,
        frozenset(qos for row in rows for qos in row[2].split(",") if qos) or None,
        account,
        next((row[3] for row in own if row[3] and not row[1]), None),
    )


def _partition(
    record: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]], config: Mapping[str, str], user: User
) -> Partition:
    hosts = value_or_none(record.get("Nodes"))  # '(null)' if the partition has no nodes yet
    own = [nodes[host] for host in (nodelist.expand(hosts) if hosts else []) if host in nodes]
    kinds = _kinds(own)
    return Partition(
        name=record["PartitionName"],
        default=record.get("Default") == "YES",
        hidden=record.get("Hidden") == "YES",
        state=record.get("State", ""),
        nodes=number(record.get("TotalNodes")) or len(own),
        kinds=kinds,
        time_min=minutes(record.get("MaxTime")),
        default_time_min=minutes(record.get("DefaultTime")),
        max_nodes=number(record.get("MaxNodes")),
        max_cpus=number(record.get("MaxCPUsPerNode")),
        max_mem_mib=number(record.get("MaxMemPerNode")) or None,
        default_memory=_default_memory(record, config),
        exclusive=record.get("OverSubscribe") == "EXCLUSIVE",
        preemption=record.get("PreemptMode", ""),
        qos=value_or_none(record.get("QoS")),
        refused=_refused(record, user) or ("" if kinds else "it has no nodes"),
    )


def _default_memory(*sources: Mapping[str, str]) -> str:
    """Return how much memory a job gets by default, such as 'DefMemPerCPU=2000 MB', or '' if there is no default.

    sources: the partition's settings, then those of slurm.conf.
    """
    found = ((key, each.get(key)) for each in sources for key in ("DefMemPerCPU", "DefMemPerNode"))
    return next((f"{key}={value} MB" for key, value in found if number(value)), "")


def _kinds(nodes: Iterable[Mapping[str, str]]) -> tuple[tuple[Kind, int], ...]:
    """Return the nodes grouped by their resources. Each group has the features that all its nodes share."""
    alike: dict[Kind, list[frozenset[str]]] = {}
    for node in nodes:
        gpus = scontrol.gpus(node.get("Gres"))
        kind = Kind(
            sum(each.amount for each in gpus),
            tuple(sorted({each.type for each in gpus if each.type})),
            number(node.get("CPUEfctv")) or number(node.get("CPUTot")) or 0,
            number(node.get("ThreadsPerCore")) or 1,
            max(0, (number(node.get("RealMemory")) or 0) - (number(node.get("MemSpecLimit")) or 0)),
            (),
        )
        alike.setdefault(kind, []).append(names(node.get("AvailableFeatures")) or frozenset())
    shared = {kind: frozenset.intersection(*features) for kind, features in alike.items()}
    counts = Counter(
        {kind._replace(features=tuple(sorted(shared[kind]))): len(features) for kind, features in alike.items()}
    )
    return tuple(counts.most_common())


def _refused(record: Mapping[str, str], user: User) -> str:
    """Return which setting of the partition refuses this user's jobs, or '' if none does."""
    if record.get("RootOnly") == "YES" and user.uid != 0:
        return "RootOnly=YES"
    if record.get("State") == "INACTIVE":
        return "State=INACTIVE"
    groups = names(record.get("AllowGroups"))
    if groups is not None and user.uid != 0 and not groups & user.groups:
        return f"AllowGroups={record['AllowGroups']}"
    for allow, deny, own in (
        ("AllowAccounts", "DenyAccounts", user.accounts),
        ("AllowQos", "DenyQos", user.qos),
    ):
        allowed, denied = names(record.get(allow)), names(record.get(deny))
        if own is not None and allowed is not None and not allowed & own:
            return f"{allow}={record[allow]}"
        if own is not None and denied is not None and own <= denied:
            return f"{deny}={record[deny]}"
    return ""
