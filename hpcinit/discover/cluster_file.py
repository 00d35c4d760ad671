"""A site as the keys of conf/cluster/NAME.yaml, with the source of each value in a comment; where that file is."""

from __future__ import annotations

import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpcinit.base import quoting
from hpcinit.base.errors import Failure, RequestError
from hpcinit.discover import live_site
from hpcinit.discover.live_site import MIB_PER_GB, Kind, Partition, Site

DEFAULT_TIME_MIN = 60
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
MOST_KINDS, MOST_FEATURES = 6, 8  # in a comment


class Entry(NamedTuple):
    """A top-level key, its value, and both with comments as they stand in the file."""

    key: str
    value: Any
    text: str


def site_facts(site: Site, partition: str | None) -> list[Entry]:
    """What Slurm says, and discover writes again each time. partition: the one whose nodes the cluster's own keys
    describe; the default one where there is none of that name."""
    main = site.main(partition)
    kind, count = main.kinds[0]
    of = f"commonest of partition {main.name}: {count} of {main.nodes} nodes"
    yes_no = {True: "on", False: "off"}
    return [
        Entry("partitions", partitions(site), _partitions(site)),
        _entry("gpus_per_node", kind.gpus, live_site.NODES, f"{of}{_types(kind)}"),
        _entry("cpus_per_node", kind.cpus, live_site.NODES, f"{of}{_shares(kind)}{_threads(kind)}"),
        _entry("max_array_size", site.max_array_size, live_site.CONFIG, "MaxArraySize: indices are smaller"),
        _entry("accounting", site.accounting, live_site.CONFIG, f"AccountingStorageType: {yes_no[site.accounting]}"),
        _entry("preemption", site.preemption, live_site.CONFIG, "PreemptMode"),
        _entry("topology", site.topology, live_site.CONFIG, "TopologyPlugin"),
        _entry("pyxis", site.pyxis, live_site.SRUN, f"--container-image is {'' if site.pyxis else 'not '}an option"),
        _entry("slurm", site.slurm, live_site.CONFIG, "SLURM_VERSION"),
    ]


def site_choices(site: Site, name: str) -> list[Entry]:
    """What is proposed once, and is the user's from then on."""
    main, user = site.main(None), site.user
    limit = main.default_time_min or min(DEFAULT_TIME_MIN, main.time_min or DEFAULT_TIME_MIN)
    why = "DefaultTime" if main.default_time_min else "Slurm has no DefaultTime for it"
    types = sorted({gpu for kind, _ in main.kinds for gpu in kind.gpu_types})
    default = "Slurm's default" if main.default else "Slurm has no default for you; the one with the most GPUs"
    return [
        Entry("name", name, f"name: {scalar(name)}\n"),
        _entry("partition", main.name, live_site.PARTITIONS, default),
        _account("account", user.account, site, f"default account of {user.name}", user.accounts),
        _account("qos", user.default_qos, site, f"default QOS of {user.name}", user.qos),
        _entry("time_min", limit, live_site.PARTITIONS, f"{why} ({main.name})"),
        _entry("gpu_type", None, live_site.NODES, f"types: {', '.join(types) or 'none given'}; name one to ask for it"),
        _entry("gpu_flag", site.gpu_flag, live_site.CONFIG, "gpus-per-node needs SelectType=select/cons_tres"),
        _entry(
            "mem_gb",
            None,
            live_site.PARTITIONS,
            f"with null a job gets {main.default_memory or 'no limit'} ({main.name})",
        ),
        _entry("exclusive", main.exclusive, live_site.PARTITIONS, f"OverSubscribe ({main.name})"),
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


def facts_comment(text: str) -> str:
    """On one line, whatever Slurm was told to call its things."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _entry(key: str, value: Any, command: str, note: str) -> Entry:
    return Entry(key, value, f"{key}: {scalar(value)}  # {command}: {facts_comment(note)}\n")


def _account(key: str, value: str | None, site: Site, what: str, all_of: frozenset[str] | None) -> Entry:
    if site.silent:
        note = f"not known: {facts_comment(site.silent)}"
    elif not site.accounting:
        note = "no accounting, so there is none"
    else:
        others = f"; all: {', '.join(sorted(all_of))}" if all_of else ""
        note = f"sacctmgr show {'user' if key == 'account' else 'assoc'}: {what}{others}"
    return Entry(key, value, f"{key}: {scalar(value)}  # {facts_comment(note)}\n")


def _partitions(site: Site) -> str:
    lines = [
        f"# {live_site.PARTITIONS}; {live_site.NODES}",
        "# Of each the most that any of its nodes has; mem_gb: RealMemory less MemSpecLimit, in GB of 2^30 bytes.",
    ]
    lines += [
        f"# Not for {site.user.name}: {facts_comment(p.name)} ({facts_comment(p.refused)})"
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
        f"QoS={each.qos} may limit more" if each.qos else "",
        f"PreemptMode={each.preemption}" * (each.preemption not in ("", "OFF")),
        f"MaxNodes={each.max_nodes}" if each.max_nodes is not None else "",
        "" if each.time_min is not None else "no time limit",
    ]
    said = [facts_comment(mark) for mark in marks if mark]
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


# The file: a command's part stands between two marks, all the rest is the user's and stays as it is, byte for byte.
#
# Such commands are discover and timeouts, each with marks of its own, to which the other's part is the user's. A key
# that the user has outside of the marks is left out between them: it wins. docs/decisions/0014-discovers-part.md


@dataclass(frozen=True)
class Part:
    """What `hpcinit COMMAND` writes. name: the command's. says: who knows the values. explained: a comment."""

    name: str
    says: str
    explained: str

    @property
    def begin(self) -> str:
        return f"# >>> hpcinit {self.name}"

    @property
    def end(self) -> str:
        return f"# <<< hpcinit {self.name}"

    def find(self, text: str) -> re.Match[str] | None:
        line = rf"^{self.begin} (?P<crc>[0-9a-f]{{8}})[^\n]*\n(?P<body>.*?)^{self.end}[^\n]*(?:\n|\Z)"
        return re.search(line, text, re.MULTILINE | re.DOTALL)


DISCOVER = Part(
    "discover",
    "Slurm says",
    "# Written again by each `hpcinit discover`. To keep a value of your own move its line out of this part.",
)
TIMEOUTS = Part(
    "timeouts",
    "the runs say",
    "# Written again by `hpcinit timeouts fit --write`. To keep a value of your own move its line out of this part.",
)
BEGIN, END = DISCOVER.begin, DISCOVER.end
CANNOT_TELL = """\

# What Slurm cannot tell, and your site's documentation can: setup, env, interface, host_template, python, gpu_mem_gb.
# conf/cluster/example.yaml of hpcinit explains every key.

"""


@dataclass(frozen=True)
class Document:
    """before, after: the user's text around a command's part. body: that part; edited: by somebody else."""

    before: str = ""
    body: str = ""
    after: str = ""
    edited: bool = False
    part: Part = DISCOVER

    @property
    def own(self) -> dict[str, Any]:
        """The user's keys."""
        return _mapping(f"{self.before}\n{self.after}", f"outside of {self.part.name}'s part")

    @property
    def all(self) -> dict[str, Any]:
        return {**_mapping(self.body, f"in {self.part.name}'s part"), **self.own}


def parse_document(text: str, part: Part = DISCOVER) -> Document:
    """Raises RequestError where the marks do not match, or what they part is no YAML mapping."""
    marks = [line for line in text.splitlines() if line.startswith((part.begin, part.end))]
    found = part.find(text)
    if len(marks) != (2 if found else 0):
        raise RequestError(
            f"the lines {part.begin!r} and {part.end!r} are not there once each, in this order: put them right, or "
            "delete both and all that is between them"
        )
    document = Document(text, part=part)
    if found:
        body = found["body"]
        document = Document(text[: found.start()], body, text[found.end() :], found["crc"] != _crc(body), part)
    _ = document.all
    return document


def first_document(choices: Sequence[Entry]) -> Document:
    """For a file that is not there yet."""
    return Document("".join(entry.text for entry in choices) + CANNOT_TELL)


def render_document(document: Document, facts: Sequence[Entry], heading: str) -> str:
    """The whole file. Raises RequestError where its text would not mean what it should."""
    own = document.own
    part = document.part
    body = part.explained + "\n" + "".join(_line(entry, own, part) for entry in facts)
    before = document.before + "\n" * (bool(document.before) and not document.before.endswith("\n"))
    text = f"{before}{part.begin} {_crc(body)}: {heading}\n{body}{part.end}\n{document.after}"
    try:
        meant = yaml.safe_load(text)
    except yaml.YAMLError:
        meant = None
    if meant != {**{entry.key: entry.value for entry in facts}, **own}:
        raise RequestError(
            f"the keys of this file would change their meaning with {part.name}'s part in it: write its keys at the "
            "beginning of their lines, as conf/cluster/example.yaml does"
        )
    return text


def _line(entry: Entry, own: Mapping[str, Any], part: Part) -> str:
    if entry.key not in own:
        return entry.text
    if own[entry.key] == entry.value:
        return f"# {entry.key}: yours says the same\n"
    if isinstance(entry.value, dict):
        return f"# {entry.key}: yours wins; `hpcinit discover --diff` shows what Slurm says\n"
    return f"# {entry.key}: yours wins; {part.says} {scalar(entry.value)}\n"


def document_difference(document: Document, facts: Sequence[Entry]) -> list[str]:
    """Lines '-key: what the file says' and '+key: what Slurm says', of discover's keys; none where they agree."""
    was, own = document.all, document.own
    lines = []
    for entry in facts:
        mark = "  # yours, and stays" if entry.key in own else ""
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


def _crc(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RequestError(f"not YAML {where}: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{type(value).__name__} {where}, expected keys and values as in conf/cluster/example.yaml")
    return value


# Where the description is written, and that it is written whole or not at all.


def cluster_file_path(name: str) -> Path:
    """./conf/cluster/NAME.yaml, which cluster=NAME finds first. Raises RequestError for what is no name."""
    if not quoting.PLAIN_NAME.fullmatch(name):
        raise RequestError(
            f"--name is {name!r} (default: Slurm's ClusterName), expected letters, digits, '.', '_' and '-': it "
            "becomes a file's name and the word in cluster=NAME"
        )
    return Path("conf/cluster") / f"{name}.yaml"


def read_cluster_file(path: Path) -> str | None:
    """None where there is no such file."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def write_cluster_file(path: Path, text: str) -> None:
    """Through a file beside it that takes its place. A link stays one; a mode stays what it was. Raises Failure."""
    target = path.resolve()
    part = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(part).chmod(_mode(target))
        Path(part).replace(target)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}; what was there is untouched") from None
    finally:
        with suppress(OSError):
            if part:
                Path(part).unlink()


def _mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
