"""The file: a command's part stands between two marks, all the rest is the user's and stays as it is, byte for byte.

Such commands are discover and timeouts, each with marks of its own, to which the other's part is the user's. A key that
the user has outside of the marks is left out between them: it wins. docs/decisions/0014-discovers-part.md
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hpcinit.discover.describe import Entry, scalar
from hpcinit.facts.errors import RequestError


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


def parse(text: str, part: Part = DISCOVER) -> Document:
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


def first(choices: Sequence[Entry]) -> Document:
    """For a file that is not there yet."""
    return Document("".join(entry.text for entry in choices) + CANNOT_TELL)


def render(document: Document, facts: Sequence[Entry], heading: str) -> str:
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


def difference(document: Document, facts: Sequence[Entry]) -> list[str]:
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
