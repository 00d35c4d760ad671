"""Query a live Slurm and read its answers. Each answer is kept as text under the command that gave it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpcinit.base.errors import Failure
from hpcinit.slurm import nodelist, scontrol, slurm_client
from hpcinit.slurm.scontrol import minutes, names, number, told

CONFIG = "scontrol show config"
PARTITIONS = "scontrol --all show partition"  # --all: hidden ones, and those of other groups
NODES = "scontrol --all show node"
SRUN = "srun --help"
USER = "sacctmgr --noheader --parsable2 show user where name={user} format=DefaultAccount"
ASSOCIATIONS = (
    "sacctmgr --noheader --parsable2 show assoc where user={user} cluster={cluster} "
    "format=Account,Partition,QOS,DefaultQOS"
)


@dataclass(frozen=True)
class SiteAnswers:
    """texts: by command; sacctmgr's are missing without accounting. silent: what sacctmgr said instead, or ''."""

    texts: Mapping[str, str]
    silent: str = ""

    def __getitem__(self, command: str) -> str:
        return self.texts[command]


def query_site(user: str, env: Mapping[str, str]) -> SiteAnswers:
    """Five or six questions. Raises Failure where Slurm gives no answer; only sacctmgr may stay silent."""
    texts = {command: _run(command.split(), env) for command in (CONFIG, PARTITIONS, NODES, SRUN)}
    config = scontrol.config(texts[CONFIG])
    if not accounting(config):
        return SiteAnswers(texts)
    try:
        for template in (USER, ASSOCIATIONS):
            words = [word.format(user=user, cluster=config.get("ClusterName", "")) for word in template.split()]
            texts[template] = _run(words, env)
    except Failure as error:  # slurmdbd is away, or sacctmgr is not installed where users are
        return SiteAnswers(texts, str(error))
    return SiteAnswers(texts)


def accounting(config: Mapping[str, str]) -> bool:
    """22.05 says accounting_storage/none where there is none, 24.11 says (null)."""
    kind = scontrol.told(config.get("AccountingStorageType"))
    return kind is not None and not kind.endswith("/none")


def _run(command: list[str], env: Mapping[str, str]) -> str:
    try:
        done = slurm_client.run(command, env)
    except slurm_client.NotStarted as error:
        check = ", and discover asks Slurm itself: is this a login node, and is the slurm module loaded?"
        raise Failure(f"{error}{check if error.missing else ''}") from None
    except slurm_client.TimedOut as error:
        raise Failure(f"{error}: {slurm_client.CHECK}") from None
    if done.status != 0:
        raise Failure(f"{' '.join(command)!r} failed: {done.error}")
    return done.stdout


# What the answers say of the site, as values.

# Of a node's State, 'IDLE+DRAIN' or 'DOWN*': it takes no job now. Its partition counts it all the same.
AWAY = {"DOWN", "DRAIN", "FAIL", "FAILING", "NOT_RESPONDING", "INVAL", "FUTURE", "UNKNOWN", "ERROR"}
MIB_PER_GB = 1024


class Kind(NamedTuple):
    """Nodes that are alike. mem_mib: what jobs may use. features: such that every one has."""

    gpus: int
    gpu_types: tuple[str, ...]
    cpus: int
    threads_per_core: int
    mem_mib: int
    features: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """kinds: with how many nodes are of each, the commonest first. refused: why this user cannot submit, or ''."""

    name: str
    default: bool
    hidden: bool
    state: str
    nodes: int
    away: int
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
        """The most that a job may use on any node."""
        return min(max(kind.mem_mib for kind, _ in self.kinds), self.max_mem_mib or 2**62)


@dataclass(frozen=True)
class User:
    """uid 0 is in every group. accounts, qos: None where nobody said."""

    name: str
    uid: int
    groups: frozenset[str]
    accounts: frozenset[str] | None = None
    qos: frozenset[str] | None = None
    account: str | None = None
    default_qos: str | None = None


@dataclass(frozen=True)
class Site:
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
        """The partition of that name, or Slurm's default, or the one with the most GPUs of those that are left."""
        byname = [each for each in self.usable if each.name == name]
        default = [each for each in self.usable if each.default]
        return (byname or default or sorted(self.usable, key=_gpu_total, reverse=True))[0]


def _gpu_total(partition: Partition) -> int:
    return sum(kind.gpus * count for kind, count in partition.kinds)


def read_site(answers: SiteAnswers, user: User) -> Site:
    """Raises Failure where no partition is left that this user may use."""
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
        preemption=told(config.get("PreemptMode")),
        topology=told(config.get("TopologyPlugin")),
        pyxis="--container-image" in answers[SRUN],
        gpu_flag="gpus-per-node" if config.get("SelectType", "").endswith("/cons_tres") else "gres",
    )
    if not site.usable:
        why = "; ".join(f"{each.name}: {each.refused}" for each in found) or "it shows none"
        raise Failure(f"Slurm of cluster {site.cluster!r} has no partition that {user.name} may submit to: {why}")
    return site


def _with_accounts(answers: SiteAnswers, user: User) -> User:
    if ASSOCIATIONS not in answers.texts:
        return user
    rows = [line.split("|") for line in answers[ASSOCIATIONS].splitlines() if line.count("|") >= 3]
    account = answers[USER].strip().partition("|")[0] or None
    own = [row for row in rows if row[0] == account] or rows
    return User(
        user.name,
        user.uid,
        user.groups,
        # Nobody listed: sacctmgr hides it from users here (PrivateData), or nothing is enforced.
        frozenset(row[0] for row in rows) or None,
        frozenset(qos for row in rows for qos in row[2].split(",") if qos) or None,
        account,
        next((row[3] for row in own if row[3] and not row[1]), None),
    )


def _partition(
    record: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]], config: Mapping[str, str], user: User
) -> Partition:
    hosts = told(record.get("Nodes"))  # (null) of a partition that waits for its nodes
    own = [nodes[host] for host in (nodelist.expand(hosts) if hosts else []) if host in nodes]
    kinds = _kinds(own)
    return Partition(
        name=record["PartitionName"],
        default=record.get("Default") == "YES",
        hidden=record.get("Hidden") == "YES",
        state=record.get("State", ""),
        nodes=number(record.get("TotalNodes")) or len(own),
        away=sum(1 for node in own if _away(node.get("State", ""))),
        kinds=kinds,
        time_min=minutes(record.get("MaxTime")),
        default_time_min=minutes(record.get("DefaultTime")),
        max_nodes=number(record.get("MaxNodes")),
        max_cpus=number(record.get("MaxCPUsPerNode")),
        max_mem_mib=number(record.get("MaxMemPerNode")) or None,
        default_memory=_default_memory(record, config),
        exclusive=record.get("OverSubscribe") == "EXCLUSIVE",
        preemption=record.get("PreemptMode", ""),
        qos=told(record.get("QoS")),
        refused=_refused(record, user) or ("" if kinds else "it has no nodes"),
    )


def _default_memory(*sources: Mapping[str, str]) -> str:
    """'DefMemPerCPU=2000 MB': what a job gets that asks for none; '' where nobody says.

    sources: the partition, which says UNLIMITED where it has none of its own, then slurm.conf.
    """
    found = ((key, each.get(key)) for each in sources for key in ("DefMemPerCPU", "DefMemPerNode"))
    return next((f"{key}={value} MB" for key, value in found if number(value)), "")


def _away(state: str) -> bool:
    return state.endswith("*") or bool(AWAY & set(state.rstrip("*~#!%$@^-").split("+")))


def _kinds(nodes: Iterable[Mapping[str, str]]) -> tuple[tuple[Kind, int], ...]:
    """Nodes by what they have, then the features that all of a kind share."""
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
    """Why the controller would turn this user's jobs away, as far as the partition says; ''."""
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
