"""A site as the keys of conf/cluster/NAME.yaml, each with a comment that says who told it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from hpcinit.discover import ask
from hpcinit.discover.site import MIB_PER_GB, Kind, Partition, Site

DEFAULT_TIME_MIN = 60
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
MOST_KINDS, MOST_FEATURES = 6, 8  # in a comment


class Entry(NamedTuple):
    """A top-level key, its value, and both with comments as they stand in the file."""

    key: str
    value: Any
    text: str


def facts(site: Site, partition: str | None) -> list[Entry]:
    """What Slurm says, and discover writes again each time. partition: the one whose nodes the cluster's own keys
    describe; the default one where there is none of that name."""
    main = site.main(partition)
    kind, count = main.kinds[0]
    of = f"commonest of partition {main.name}: {count} of {main.nodes} nodes"
    yes_no = {True: "on", False: "off"}
    return [
        Entry("partitions", partitions(site), _partitions(site)),
        _entry("gpus_per_node", kind.gpus, ask.NODES, f"{of}{_types(kind)}"),
        _entry("cpus_per_node", kind.cpus, ask.NODES, f"{of}{_shares(kind)}{_threads(kind)}"),
        _entry("max_array_size", site.max_array_size, ask.CONFIG, "MaxArraySize: indices are smaller"),
        _entry("accounting", site.accounting, ask.CONFIG, f"AccountingStorageType: {yes_no[site.accounting]}"),
        _entry("preemption", site.preemption, ask.CONFIG, "PreemptMode"),
        _entry("topology", site.topology, ask.CONFIG, "TopologyPlugin"),
        _entry("pyxis", site.pyxis, ask.SRUN, f"--container-image is {'' if site.pyxis else 'not '}an option"),
        _entry("slurm", site.slurm, ask.CONFIG, "SLURM_VERSION"),
    ]


def choices(site: Site, name: str) -> list[Entry]:
    """What is proposed once, and is the user's from then on."""
    main, user = site.main(None), site.user
    limit = main.default_time_min or min(DEFAULT_TIME_MIN, main.time_min or DEFAULT_TIME_MIN)
    why = "DefaultTime" if main.default_time_min else "Slurm has no DefaultTime for it"
    types = sorted({gpu for kind, _ in main.kinds for gpu in kind.gpu_types})
    default = "Slurm's default" if main.default else "Slurm has no default for you; the one with the most GPUs"
    return [
        Entry("name", name, f"name: {scalar(name)}\n"),
        _entry("partition", main.name, ask.PARTITIONS, default),
        _account("account", user.account, site, f"default account of {user.name}", user.accounts),
        _account("qos", user.default_qos, site, f"default QOS of {user.name}", user.qos),
        _entry("time_min", limit, ask.PARTITIONS, f"{why} ({main.name})"),
        _entry("gpu_type", None, ask.NODES, f"types: {', '.join(types) or 'none given'}; name one to ask for it"),
        _entry("gpu_flag", site.gpu_flag, ask.CONFIG, "gpus-per-node needs SelectType=select/cons_tres"),
        _entry(
            "mem_gb", None, ask.PARTITIONS, f"with null a job gets {main.default_memory or 'no limit'} ({main.name})"
        ),
        _entry("exclusive", main.exclusive, ask.PARTITIONS, f"OverSubscribe ({main.name})"),
    ]


def partitions(site: Site) -> dict[str, dict[str, Any]]:
    """The value of the key `partitions`: of each the most that any of its nodes has."""
    return {each.name: _limits(each) for each in site.usable}


def _limits(each: Partition) -> dict[str, Any]:
    kinds = [kind for kind, _ in each.kinds]
    types = {gpu for kind in kinds for gpu in kind.gpu_types}
    cpus = max(kind.cpus for kind in kinds)
    limits = {
        "nodes": min(each.nodes, each.max_nodes or each.nodes),
        "time_min": each.time_min,
        "gpus_per_node": max(kind.gpus for kind in kinds),
        "gpu_type": types.pop() if len(types) == 1 else None,
        "cpus_per_node": min(cpus, each.max_cpus or cpus),
        "mem_gb": gb(each.mem_mib) or None,
    }
    return {key: value for key, value in limits.items() if value is not None}


def gb(mib: int) -> float:
    """GB of 2^30 bytes, rounded down to a hundredth: more than there is would be refused."""
    return mib * 100 // MIB_PER_GB / 100


def scalar(value: Any) -> str:
    """As YAML writes it on one line: null, true, 4, 'on'."""
    # Quoted unless it can be a word only: OmegaConf reads 1e5 as a number, PyYAML, which writes it, does not.
    style = "'" if isinstance(value, str) and not _WORD.fullmatch(value) else None
    text: str = yaml.safe_dump(value, default_style=style, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.splitlines()[0]


def comment(text: str) -> str:
    """On one line, whatever Slurm was told to call its things."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _entry(key: str, value: Any, command: str, note: str) -> Entry:
    return Entry(key, value, f"{key}: {scalar(value)}  # {command}: {comment(note)}\n")


def _account(key: str, value: str | None, site: Site, what: str, all_of: frozenset[str] | None) -> Entry:
    if site.silent:
        note = f"not known: {comment(site.silent)}"
    elif not site.accounting:
        note = "no accounting, so there is none"
    else:
        others = f"; all: {', '.join(sorted(all_of))}" if all_of else ""
        note = f"sacctmgr show {'user' if key == 'account' else 'assoc'}: {what}{others}"
    return Entry(key, value, f"{key}: {scalar(value)}  # {comment(note)}\n")


def _partitions(site: Site) -> str:
    lines = [
        f"# {ask.PARTITIONS}; {ask.NODES}",
        "# Of each the most that any of its nodes has; mem_gb: RealMemory less MemSpecLimit, in GB of 2^30 bytes.",
    ]
    lines += [
        f"# Not for {site.user.name}: {comment(p.name)} ({comment(p.refused)})" for p in site.partitions if p.refused
    ]
    lines.append("partitions:")
    for each in site.usable:
        lines.append(f"  {scalar(each.name)}:{_marks(each)}")
        lines += [f"    # {comment(line)}" for line in _nodes(each)]
        lines += [f"    {key}: {scalar(value)}" for key, value in _limits(each).items()]
    return "\n".join(lines) + "\n"


def _marks(each: Partition) -> str:
    marks = [
        "default" * each.default,
        "hidden" * each.hidden,
        f"State={each.state}" * (each.state != "UP"),
        "OverSubscribe=EXCLUSIVE: whole nodes" * each.exclusive,
        f"QoS={each.qos} may limit more" if each.qos else "",
        f"PreemptMode={each.preemption}" * (each.preemption not in ("", "OFF")),
        f"MaxNodes={each.max_nodes}" if each.max_nodes is not None else "",
        "" if each.time_min is not None else "no time limit",
    ]
    said = [comment(mark) for mark in marks if mark]
    return f"  # {', '.join(said)}" if said else ""


def _nodes(each: Partition) -> Iterator[str]:
    """A line for each kind of node, and one for those that are away."""
    if len(each.kinds) > 1:
        yield f"{len(each.kinds)} kinds of nodes:"
    for kind, count in each.kinds[:MOST_KINDS]:
        yield f"{count} x {_words(kind)}"
    if len(each.kinds) > MOST_KINDS:
        yield f"... and {len(each.kinds) - MOST_KINDS} kinds more"
    if each.away:
        yield f"{each.away} of {each.nodes} nodes were down or drained when Slurm was asked"


def _words(kind: Kind) -> str:
    gpus = f"{kind.gpus} GPUs{_types(kind)}, " if kind.gpus else "no GPU, "
    features = ",".join(kind.features[:MOST_FEATURES]) + ",..." * (len(kind.features) > MOST_FEATURES)
    return (
        f"({gpus}{kind.cpus} CPUs, {gb(kind.mem_mib):g} GB{_shares(kind)}{_threads(kind)})"
        f"{f'; features {features}' if features else ''}"
    )


def _types(kind: Kind) -> str:
    return f" of type {' and '.join(kind.gpu_types)}" if kind.gpu_types else ""


def _shares(kind: Kind) -> str:
    if not kind.gpus:
        return ""
    return f"; per GPU {kind.cpus / kind.gpus:.4g} CPUs and {gb(kind.mem_mib // kind.gpus):g} GB"


def _threads(kind: Kind) -> str:
    return f"; {kind.threads_per_core} threads per core, each one a CPU" if kind.threads_per_core > 1 else ""
