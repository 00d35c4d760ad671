"""Pages of the site that come from the code: every key, every message, the front page, and files that pages link to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from docs.generate.messages import Message, all_messages
from hpcinit.config import checks, reference
from hpcinit.config.schema import Config

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
could not be carried out. All problems of a config are told at once. What Slurm, torch and DeepSpeed say themselves
is in [troubleshooting](../troubleshooting.md).
"""


def keys() -> str:
    """The page of all keys, a table for each group."""
    parts = [KEYS, _table("", Config)]
    for item in sorted((item for item in fields(Config) if reference.table(item)), key=lambda item: item.name):
        parts.append(
            f"## {item.name}\n\n{_about(reference.table(item))}\n\n{_table(f'{item.name}.', reference.table(item))}"
        )
    return "\n".join(parts)


def _about(table: type) -> str:
    return " ".join((table.__doc__ or "").split())


def _table(prefix: str, table: type) -> str:
    return "| key | default | |\n|---|---|---|\n" + "".join(_rows(prefix, table))


def _rows(prefix: str, table: type) -> Iterator[str]:
    for item in fields(table):
        name = f"{prefix}{item.name}"
        if below := reference.table(item):
            if prefix:
                yield from _rows(f"{name}.", below)
            continue
        words = ", ".join(f"`{'null' if word is None else word}`" for word in checks.CHOICES.get(name, ()))
        shown = reference.shown(item)
        default = f"`{shown}`" if shown else "a file must say it"
        yield f"| `{name}` | {default} | {_cell(item.metadata['help'])}{f' ({words})' if words else ''} |\n"


def messages() -> str:
    """The page of all messages, by where they come up."""
    found = all_messages()
    parts = [MESSAGES.format(count=len(found))]
    for room, title in ROOMS.items():
        here = [message for message in found if _room(message) == room]
        if here:
            parts.append(f"## {title}\n")
            parts += [_of_module(module, list(those)) for module, those in groupby(here, lambda each: each.module)]
    return "\n".join(parts)


def _room(message: Message) -> str:
    first = message.module.partition(".")[0]
    return first if first in ROOMS else ""


def _of_module(module: str, found: list[Message]) -> str:
    lines = [f"### `{module}`\n"]
    for about, those in groupby(found, lambda message: message.about):
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
