"""Writes the results of `hpcinit discover` to conf/cluster/NAME.yaml. A comment shows the source of each value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpcinit.base import quoting, safe_files
from hpcinit.base.errors import Failure, RequestError
from hpcinit.base.text import counted
from hpcinit.discover import live_site
from hpcinit.discover.live_site import MIB_PER_GB, Kind, Partition, Site

DEFAULT_TIME_MIN = 60
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
MOST_KINDS, MOST_FEATURES = 6, 8  # shown in a comment


class Entry(NamedTuple):
    """A top-level key of the file, its value, and its text with comments."""

    key: str
    value: Any
    text: str


def site_facts(site: Site, partition: str | None) -> list[Entry]:
    """Return the entries for the values that Slurm reports. `hpcinit discover` rewrites them each time it runs.

    partition: the partition whose nodes define the top-level keys. If it is None or does not exist, Site.main() chooses
        another one.
    """
    main = site.main(partition)
    kind, count = main.kinds[0]
    of = f"most common node of partition {main.name}: {count} of {counted(main.nodes, 'node')}"
    yes_no = {True: "on", False: "off"}
    return [
        Entry("partitions", partitions(site), _partitions(site)),
        _entry("gpus_per_node", kind.gpus, live_site.NODES, f"{of}{_types(kind)}"),
        _entry("cpus_per_node", kind.cpus, live_site.NODES, f"{of}{_shares(kind)}{_threads(kind)}"),
        _entry("max_array_size", site.max_array_size, live_site.CONFIG, "MaxArraySize: indices are smaller"),
        _entry("accounting", site.accounting, live_site.CONFIG, f"AccountingStorageType: {yes_no[site.accounting]}"),
        _entry("preemption", site.preemption, live_site.CONFIG, "PreemptMode"),
        _entry("topology", site.topology, live_site.CONFIG, "TopologyPlugin"),
        _entry("pyxis", site.pyxis, live_site.SRUN, f"{'has' if site.pyxis else 'has no'} option --container-image"),
        _entry("slurm", site.slurm, live_site.CONFIG, "SLURM_VERSION"),
    ]


def site_choices(site: Site, name: str) -> list[Entry]:
    """Return the entries that `hpcinit discover` proposes in a new file. Only the user changes them later.

    name: the name of the cluster.
    """
    main, user = site.main(None), site.user
    limit = main.default_time_min or min(DEFAULT_TIME_MIN, main.time_min or DEFAULT_TIME_MIN)
    why = "DefaultTime" if main.default_time_min else "Slurm has no DefaultTime"
    types = sorted({gpu for kind, _ in main.kinds for gpu in kind.gpu_types})
    default = (
        "Slurm's default" if main.default else "Slurm has no default partition for you; this one has the most GPUs"
    )
    return [
        Entry("name", name, f"name: {scalar(name)}\n"),
        _entry("partition", main.name, live_site.PARTITIONS, default),
        _account("account", user.account, site, f"default account of {user.name}", user.accounts),
        _account("qos", user.default_qos, site, f"default QOS of {user.name}", user.qos),
        _entry("time_min", limit, live_site.PARTITIONS, f"{why} ({main.name})"),
        _entry("gpu_type", None, live_site.NODES, f"types: {', '.join(types) or 'none'}; set one to request it"),
        _entry("gpu_flag", site.gpu_flag, live_site.CONFIG, "gpus-per-node needs SelectType=select/cons_tres"),
        _entry(
            "mem_gb",
            None,
            live_site.PARTITIONS,
            f"null: a job gets {main.default_memory or 'no memory limit'} on partition {main.name}",
        ),
        _entry("exclusive", main.exclusive, live_site.PARTITIONS, f"OverSubscribe ({main.name})"),
    ]


def partitions(site: Site) -> dict[str, dict[str, Any]]:
    """Return the value of the key `partitions`: for each partition, the largest values of any of its nodes."""
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
    """Convert MiB to GB (2^30 bytes). Round down to a hundredth: Slurm refuses requests for more than a node has."""
    return mib * 100 // MIB_PER_GB / 100


def scalar(value: Any) -> str:
    """Return the value as YAML on one line, such as null, true, 4 or 'on'."""
    # PyYAML writes a text 1e5 without quotes, but OmegaConf reads that as a number, so only plain names stay unquoted.
    style = "'" if isinstance(value, str) and not _WORD.fullmatch(value) else None
    text: str = yaml.safe_dump(value, default_style=style, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.splitlines()[0]


def facts_comment(text: str) -> str:
    """Return `text` in a form that is safe in a YAML comment: on one line, without control characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _entry(key: str, value: Any, command: str, note: str) -> Entry:
    return Entry(key, value, f"{key}: {scalar(value)}  # {command}: {facts_comment(note)}\n")


def _account(key: str, value: str | None, site: Site, what: str, all_of: frozenset[str] | None) -> Entry:
    if site.silent:
        note = f"unknown: {facts_comment(site.silent)}"
    elif not site.accounting:
        note = "none, because Slurm has no accounting"
    else:
        others = f"; all: {', '.join(sorted(all_of))}" if all_of else ""
        note = f"sacctmgr show {'user' if key == 'account' else 'assoc'}: {what}{others}"
    return Entry(key, value, f"{key}: {scalar(value)}  # {facts_comment(note)}\n")


def _partitions(site: Site) -> str:
    lines = [
        f"# {live_site.PARTITIONS}; {live_site.NODES}",
        "# The largest value of any node of the partition. mem_gb: RealMemory less MemSpecLimit, in GB of 2^30 bytes.",
    ]
    lines += [
        f"# Not allowed for {site.user.name}: {facts_comment(p.name)} ({facts_comment(p.refused)})"
        for p in site.partitions
        if p.refused
    ]
    lines.append("partitions:")
    for each in site.usable:
        lines.append(f"  {scalar(each.name)}:{_marks(each)}")
        lines += [f"    # {facts_comment(line)}" for line in _nodes(each)]
        lines += [f"    {key}: {scalar(value)}" for key, value in _limits(each).items()]
    return "\n".join(lines) + "\n"


def _marks(each: Partition) -> str:
    marks = [
        "default" * each.default,
        "hidden" * each.hidden,
        f"State={each.state}" * (each.state != "UP"),
        "OverSubscribe=EXCLUSIVE: whole nodes" * each.exclusive,
        f"QOS {each.qos} may have lower limits" if each.qos else "",
        f"PreemptMode={each.preemption}" * (each.preemption not in ("", "OFF")),
        f"MaxNodes={each.max_nodes}" if each.max_nodes is not None else "",
        "" if each.time_min is not None else "no time limit",
    ]
    comments = [facts_comment(mark) for mark in marks if mark]
    return f"  # {', '.join(comments)}" if comments else ""


def _nodes(each: Partition) -> Iterator[str]:
    """Yield a line for each kind of node."""
    if len(each.kinds) > 1:
        yield f"{len(each.kinds)} kinds of nodes:"
    for kind, count in each.kinds[:MOST_KINDS]:
        yield f"{count} x {_described(kind)}"
    if len(each.kinds) > MOST_KINDS:
        yield f"... and {counted(len(each.kinds) - MOST_KINDS, 'more kind')}"


def _described(kind: Kind) -> str:
    gpus = f"{counted(kind.gpus, 'GPU')}{_types(kind)}, " if kind.gpus else "no GPU, "
    features = ",".join(kind.features[:MOST_FEATURES]) + ",..." * (len(kind.features) > MOST_FEATURES)
    return (
        f"({gpus}{counted(kind.cpus, 'CPU')}, {gb(kind.mem_mib):g} GB{_shares(kind)}{_threads(kind)})"
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


# The file. `hpcinit discover` rewrites the lines between its two marker lines. It never changes the user's other lines.
#
# If the user sets a key outside these lines, `hpcinit discover` omits that key from them.

BEGIN, END = "# >>> hpcinit discover", "# <<< hpcinit discover"
EXPLAINED = "# `hpcinit discover` rewrites this part. To set a value yourself, move its line out of this part.\n"
PART = re.compile(rf"^{BEGIN}[^\n]*\n(?P<body>.*?)^{END}[^\n]*(?:\n|\Z)", re.MULTILINE | re.DOTALL)
NOT_REPORTED = """\

# Slurm does not report these keys. Add those that you need, as in:
#   modules: [gcc, cuda]
#   conda: /project/me/envs/train    or venv: /project/me/venv
# See your site's documentation for: setup, env, interface, host_template, python, gpu_mem_gb.
# hpcinit's conf/cluster/example.yaml explains every key.

"""


@dataclass(frozen=True)
class Document:
    """A cluster file, split into the lines that `hpcinit discover` rewrites and the user's text around them.

    before: the user's text before these lines.
    body: the lines that `hpcinit discover` rewrites.
    after: the user's text after these lines.
    """

    before: str = ""
    body: str = ""
    after: str = ""

    @property
    def own(self) -> dict[str, Any]:
        """Return the keys that the user set outside the lines of `hpcinit discover`."""
        return _mapping(f"{self.before}\n{self.after}", "outside the lines that hpcinit discover wrote")

    @property
    def all(self) -> dict[str, Any]:
        return {**_mapping(self.body, "in the lines that hpcinit discover wrote"), **self.own}


def parse_document(text: str) -> Document:
    """Split the text of a cluster file at discover's two marker lines.

    Raise RequestError if the marker lines do not match, or if a part is not a YAML mapping.
    """
    marks = [line for line in text.splitlines() if line.startswith((BEGIN, END))]
    found = PART.search(text)
    if len(marks) != (2 if found else 0):
        raise RequestError(
            f"expected the lines {BEGIN!r} and {END!r} once each, in this order: correct them, or delete "
            "both and everything between them"
        )
    document = Document(text)
    if found:
        document = Document(text[: found.start()], found["body"], text[found.end() :])
    _ = document.all
    return document


def first_document(choices: Sequence[Entry]) -> Document:
    """Return the document of a new file.

    choices: the entries that discover proposes.
    """
    return Document("".join(entry.text for entry in choices) + NOT_REPORTED)


def render_document(document: Document, facts: Sequence[Entry], heading: str) -> str:
    """Return the text of the whole file. Raise RequestError if it would not have the expected values.

    facts: the entries for the lines of `hpcinit discover`.
    heading: the text of the first marker line.
    """
    own = document.own
    body = EXPLAINED + "".join(_line(entry, own) for entry in facts)
    before = document.before + "\n" * (bool(document.before) and not document.before.endswith("\n"))
    text = f"{before}{BEGIN}: {heading}\n{body}{END}\n{document.after}"
    try:
        meant = yaml.safe_load(text)
    except yaml.YAMLError:
        meant = None
    if meant != {**{entry.key: entry.value for entry in facts}, **own}:
        raise RequestError(
            "hpcinit discover cannot add its lines to this file without changing other keys: write each top-level "
            "key at the start of a line, as in conf/cluster/example.yaml"
        )
    return text


def _line(entry: Entry, own: Mapping[str, Any]) -> str:
    if entry.key not in own:
        return entry.text
    if own[entry.key] == entry.value:
        return f"# {entry.key}: your value is the same\n"
    if isinstance(entry.value, dict):
        return f"# {entry.key}: your value is used; see Slurm's value with `hpcinit discover --diff`\n"
    return f"# {entry.key}: your value is used; Slurm reports {scalar(entry.value)}\n"


def document_difference(document: Document, facts: Sequence[Entry]) -> list[str]:
    """Return the differences between the file and Slurm, one line for each value.

    A line '-KEY: VALUE' shows the value in the file, and a line '+KEY: VALUE' shows the value that Slurm reports.
    """
    was, own = document.all, document.own
    lines = []
    for entry in facts:
        mark = "  # your value, not changed" if entry.key in own else ""
        old = _flat(entry.key, was[entry.key]) if entry.key in was else {}
        new = _flat(entry.key, entry.value)
        for key in sorted({*old, *new}, key=lambda key: (key.split("."), key)):
            if key in old and key in new and old[key] == new[key]:
                continue
            lines += [f"-{key}: {scalar(old[key])}{mark}"] if key in old else []
            lines += [f"+{key}: {scalar(new[key])}"] if key in new else []
    return lines


def _flat(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {name: leaf for inner, each in value.items() for name, leaf in _flat(f"{key}.{inner}", each).items()}


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RequestError(f"the text {where} is not YAML: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(
            f"the text {where} is a {type(value).__name__}, expected lines of key: value, as in "
            "conf/cluster/example.yaml"
        )
    return value


# The file is replaced atomically.


def cluster_file_path(name: str) -> Path:
    """Return ./conf/cluster/NAME.yaml, where hpcinit looks first for the file of cluster=NAME.

    Raise RequestError if the name is invalid.
    """
    if not quoting.PLAIN_NAME.fullmatch(name):
        raise RequestError(
            f"--name is {name!r} (default: Slurm's ClusterName), expected only letters, digits, '.', '_' and '-'"
        )
    return Path("conf/cluster") / f"{name}.yaml"


def read_cluster_file(path: Path) -> str | None:
    """Return the text of the file, or None if the file does not exist."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def write_cluster_file(path: Path, text: str) -> None:
    """Replace the file atomically. A link stays a link, and the mode stays the same.

    Raise Failure if it can't be written.
    """
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.stat().st_mode & 0o777 if target.exists() else None
        safe_files.write_atomically(target, text, 0o666 if before is None else before)
        if before is not None:
            target.chmod(before)  # the umask may have removed bits
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; the old file was not changed") from None
