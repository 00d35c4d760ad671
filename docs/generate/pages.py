"""Pages of the site that come from the code: every key, every message, the front page, and files that pages link to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from docs.generate.messages import Message, about_module, all_messages
from hpcinit.config import keys as schema
from hpcinit.config.schema import Config
from hpcinit.records import causes

ROOT = Path(__file__).parents[2]
SOURCE = "source"  # where the site has files of the checkout that are no pages
PAGES = {"docs/decisions": "decisions.md", "CHANGELOG.md": "changes.md"}  # what has a page of another name
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")

# Where a message comes up, by the first part of its module's name.
ROOMS = {
    "config": "What is wrong with a config or its overrides",
    "submission": "Submitting",
    "discover": "Describing a cluster",
    "local": "cluster=local",
    "observe": "Looking at runs",
    "doctor": "The doctor",
    "facts": "Environment, host names, layout and options",
    "runtime": "In the job",
    "": "Commands",
}

KEYS = """\
# Every key

Made from the schema. `hpcinit submit --help` prints the same, `--cfg job` shows a composed config, and
[example.yaml](../../conf/cluster/example.yaml) has the keys of a cluster with their use.
"""
MESSAGES = """\
# Every message

Made from the source: what hpcinit ends with when something is wrong, {count} texts. What stands in `<...>` is put
in when it happens. A message says what was looked at, what was seen, what was expected and what to do; in italics,
what the code that says it is for. Exit status 2: the request is wrong and nothing was started; 1: it was right and
could not be carried out. All problems of a config are told at once. First, what your program, torch, NCCL and the
kernel say, as `hpcinit why` takes it; what Slurm says is in [troubleshooting](../troubleshooting.md).
"""
CAUSES = """\
## What your program, torch and the kernel say

`hpcinit why RUN` finds the rank that was first, and looks at its error from the top of this table down.

| you saw | why | what to do |
|---|---|---|
"""
# In words where the kind alone says too little.
KINDS = {
    "cuda-memory": "the GPU's memory is full",
    "host-memory": "the node's memory is full",
    "shared-memory": "/dev/shm of the node is full",
    "disk": "no room on a disk",
    "import": "a package is not in the ranks' Python",
    "no-gpu": "this torch finds no GPU",
    "gpu": "a GPU has failed, or what the program ran on it",
    "port": "two programs, one port",
    "not-a-number": "the loss is no number any more",
    "file": "a file is not there, or not yours",
    "network": "the network between the nodes",
    "start-up": "a rank has not come",
    "hang": "ranks wait for one that does not come",
    "program": "the program itself",
}


def keys() -> str:
    """The page of all keys, a table for each group."""
    parts = [KEYS, _table("", Config)]
    for item in sorted((item for item in fields(Config) if schema.table(item)), key=lambda item: item.name):
        parts.append(f"## {item.name}\n\n{_about(schema.table(item))}\n\n{_table(f'{item.name}.', schema.table(item))}")
    return "\n".join(parts)


def _about(table: type) -> str:
    return " ".join((table.__doc__ or "").split())


def _table(prefix: str, table: type) -> str:
    return "| key | default | |\n|---|---|---|\n" + "".join(_rows(prefix, table))


def _rows(prefix: str, table: type) -> Iterator[str]:
    for item in fields(table):
        name = f"{prefix}{item.name}"
        if below := schema.table(item):
            if prefix:
                yield from _rows(f"{name}.", below)
            continue
        choices = ", ".join(f"`{'null' if choice is None else choice}`" for choice in schema.choices(name))
        words = choices or schema.bounds(item.metadata)
        shown = schema.shown(item)
        default = f"`{shown}`" if shown else "a file must say it"
        yield f"| `{name}` | {default} | {_cell(item.metadata['help'])}{f' ({words})' if words else ''} |\n"


def messages() -> str:
    """The page of all messages, by where they come up."""
    found = all_messages()
    parts = [MESSAGES.format(count=len(found)), _causes()]
    for room, title in ROOMS.items():
        here = [message for message in found if _room(message) == room]
        if here:
            parts.append(f"## {title}\n")
            parts += [_of_module(module, list(those)) for module, those in groupby(here, lambda each: each.module)]
    return "\n".join(parts)


def _causes() -> str:
    """A row for each kind of error that `hpcinit why` knows, and for each signal."""
    rows = [(_readable(pattern), KINDS[kind], do) for kind, pattern, do in causes.KINDS]
    rows += [(f"`{signal}`", "a signal ended the rank", do) for signal, do in causes.SIGNALS.items()]
    return CAUSES + "".join(f"| {saw} | {why} | {_cell(do)} |\n" for saw, why, do in rows)


def _readable(pattern: str) -> str:
    """The alternatives of a regular expression as a person would write them: `No space left on device`, `Xid`."""
    depth, words = 0, [""]
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        words = [*words, ""] if letter == "|" and not depth else [*words[:-1], words[-1] + letter]
    shown = [
        re.sub(r"\\([.])", r"\1", re.sub(r"\\d\+", "N", word).replace("\\b", "").replace(".*", "...")) for word in words
    ]
    alone = dict.fromkeys(word.strip("^$").replace("?", "") for word in _without_groups(shown))
    return ", ".join(f"`{_cell(word)}`" for word in alone)


def _without_groups(words: list[str]) -> Iterator[str]:
    """(A|B) as two words; 'ranks? (is|are) missing' is one that has its first."""
    for word in words:
        group = re.search(r"\(([^()]*)\)", word)
        if group is None:
            yield word
        else:
            yield from _without_groups(
                [word[: group.start()] + one + word[group.end() :] for one in group[1].split("|")]
            )


def _room(message: Message) -> str:
    first = message.module.partition(".")[0]
    return first if first in ROOMS else ""


def _of_module(module: str, found: list[Message]) -> str:
    title = about_module(module) or module
    lines = [f"### {title.replace('<', '&lt;')}\n", f"In `{module}`.\n"]
    for about, those in groupby(found, lambda message: message.about):
        if about.rstrip(".") != title:
            lines.append(f"*{_cell(about)}*\n")
        lines += [
            f"- `{message.template.replace('`', chr(39))}` ({message.kind}, {message.exit_status})" for message in those
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def at_the_top(name: str) -> str:
    """README.md or CHANGELOG.md, as a page of docs/."""
    return LINK.sub(lambda link: f"]({_from_docs(link[1])}{link[2] or ''})", (ROOT / name).read_text())


def _from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def linked(text: str, page: str) -> tuple[str, list[str]]:
    """A page's text with its links out of docs/ led into SOURCE, and the files that must be there.

    page: its path below docs/, as in decisions/0001-x.md. A folder is no file: its name stays, without a link.
    """
    wanted = []

    def instead(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
        if path.startswith("docs/") and (ROOT / path).suffix == ".md":
            return link[0]
        if path in PAGES:
            return f"[{link[1]}]({posixpath.relpath(PAGES[path], posixpath.dirname(page) or '.')})"
        if (ROOT / path).is_dir():
            return link[1]
        if path.startswith("docs/"):
            return link[0]
        wanted.append(path)
        up = posixpath.relpath(SOURCE, posixpath.dirname(page) or ".")
        return f"[{link[1]}]({up}/{path}{link[3] or ''})"

    return re.sub(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)", instead, text), wanted


def decisions() -> str:
    """The list of decisions."""
    lines = ["# Decisions\n"]
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}](decisions/{path.name})")
    return "\n".join(lines) + "\n"


# Pages that no file in docs/ holds.
MADE: dict[str, Callable[[], str]] = {
    "index.md": lambda: at_the_top("README.md"),
    "changes.md": lambda: at_the_top("CHANGELOG.md"),
    "decisions.md": decisions,
    "reference/keys.md": keys,
    "reference/messages.md": messages,
}
