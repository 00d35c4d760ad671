"""Generate pages of the site from the code: keys, messages, the front page, decisions, and files that pages link to."""

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
SOURCE = "source"  # the folder of the site for files of the checkout that are not pages
# Pages that have another name on the site.
PAGES = {
    "README.md": "index.md",
    "docs/decisions": "decisions.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")

# Title of the messages of a package.
PACKAGE_TITLES = {
    "config": "Config and overrides",
    "checks": "Checks before the queue",
    "submit": "Submitting",
    "slurm": "Slurm's commands and host names",
    "discover": "Describing a cluster",
    "local": "cluster=local",
    "observe": "Status, logs, cancel",
    "why": "Failures, hangs and excluded nodes",
    "report": "Start-up report",
    "timeouts": "Start-up timeouts",
    "doctor": "The doctor",
    "records": "Run folder, layout and batch",
    "world": "Environment of a rank",
    "deepspeed": "DeepSpeed",
    "rendezvous": "Rendezvous",
    "launch": "Starting the ranks",
    "runtime": "In the job",
    "": "Commands",
}

KEYS = """\
# All config keys

Generated from the schema. `hpcinit submit --help` prints the same list, and `--cfg job` prints a composed config.
[example.yaml](../../conf/cluster/example.yaml) shows how to use the keys of a cluster.
"""
API = """\
# Python API

Generated from the docstrings. A training program uses `import hpcinit` and these names. Everything else in the package
can change without notice. `hpcinit.session()` is what most programs need:

```python
import hpcinit

with hpcinit.session() as run:
    print(run.rank, run.world_size, run.device)
```

[Your own script](../your-script.md) explains which call helps with what.
"""
COMMANDS = "hpcinit.api"  # a module: submit and follow runs from Python
# Public names in the order of the page. Programs do not import the last two, but get them from run.wrap and run.load.
OBJECTS = {
    "hpcinit.session": "hpcinit.runtime.bringup.session",
    "hpcinit.init": "hpcinit.runtime.bringup.init",
    "hpcinit.Executor": "hpcinit.submit.function_executor.FunctionExecutor",
    "hpcinit.shutdown": "hpcinit.runtime.bringup.shutdown",
    "hpcinit.Runtime": "hpcinit.runtime.runtime.Runtime",
    "hpcinit.side_group": "hpcinit.runtime.side_groups.side_group",
    "hpcinit.World": "hpcinit.world.World",
    "hpcinit.Layout": "hpcinit.records.layout.Layout",
    "hpcinit.Samples": "hpcinit.records.spec.Samples",
    "hpcinit.Training": "hpcinit.records.spec.Training",
    "hpcinit.Precision": "hpcinit.records.spec.Precision",
    "hpcinit.HpcinitError": "hpcinit.base.errors.HpcinitError",
    "Wrapped": "hpcinit.train.wrap.wrapped.Wrapped",
    "Loaded": "hpcinit.train.checkpoint.Loaded",
}
MESSAGES = """\
# All messages

Generated from the source: the {count} error messages of hpcinit. `<...>` is replaced by a value. The text in italics
describes the function that raises the error. Exit status 2 means that the request is wrong and nothing was started; 1
means that a correct request failed. The first table lists errors of your program, torch, NCCL and the kernel, and how
`hpcinit why` explains them. Slurm's messages are in [troubleshooting](../troubleshooting.md).
"""
CAUSES = """\
## Errors of your program, torch and the kernel

`hpcinit why RUN` finds the rank that failed first, and uses the first row of this table that matches its error.

| error | cause | what to do |
|---|---|---|
"""
# Causes as the page shows them.
KINDS = {
    "cuda-memory": "the GPU's memory is full",
    "host-memory": "the node's memory is full",
    "shared-memory": "/dev/shm of the node is full",
    "disk": "a disk is full",
    "import": "a package is not in the ranks' Python",
    "no-gpu": "the rank does not have a GPU",
    "gpu": "a GPU or its driver has failed",
    "mismatch": "the ranks called different collectives",
    "signal": "a signal ended a rank",
    "unknown": "the message does not show the cause",
    "port": "another program uses the port",
    "not-a-number": "the loss is not a number",
    "file": "a file is missing or not readable",
    "network": "the network between the nodes",
    "node": "a node has a problem",
    "script": "a command in the batch script was not found",
    "start-up": "a rank did not start",
    "hang": "ranks wait for a rank that does not enter the collective",
    "program": "the program itself",
}


def keys() -> str:
    """Return the page of all keys, with a table for each group."""
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
        allowed = choices or schema.bounds(item.metadata)
        shown = schema.shown(item)
        default = f"`{shown}`" if shown else "required"
        yield f"| `{name}` | {default} | {_cell(item.metadata['help'])}{f' ({allowed})' if allowed else ''} |\n"


def api() -> str:
    """Return the page of the Python API, whose blocks mkdocstrings replaces by signatures and docstrings."""
    blocks = "".join(f"\n::: {path}\n" for path in (*OBJECTS.values(), COMMANDS))
    return API + blocks


def messages() -> str:
    """Return the page of all messages, by package."""
    found = all_messages()
    parts = [MESSAGES.format(count=len(found)), _causes()]
    for package, title in PACKAGE_TITLES.items():
        here = [message for message in found if _package(message) == package]
        if here:
            parts.append(f"## {title}\n")
            parts += [_of_module(module, list(those)) for module, those in groupby(here, lambda each: each.module)]
    return "\n".join(parts)


def _causes() -> str:
    """Return a row for each kind of error that `hpcinit why` recognizes, and for each signal."""
    rows = [(_readable(pattern), KINDS[kind], do) for kind, pattern, do in causes.KINDS]
    rows += [(f"`{signal}`", "a signal ended the rank", do) for signal, do in causes.SIGNALS.items()]
    return CAUSES + "".join(f"| {saw} | {why} | {_cell(do)} |\n" for saw, why, do in rows)


def _readable(pattern: str) -> str:
    """Return the alternatives of a regular expression as plain text: `No space left on device`, `Xid`."""
    depth, parts = 0, [""]
    pattern = re.sub(r"^\^\(\?!\w+\)\.\*", "", pattern)  # without an exception that the text must not name
    pattern = re.sub(r"\(\?P<\w+>.*?\)", "N", pattern).replace(r"^(?:\w+: )?", "").replace("(?:", "(")
    for letter in re.sub(r"\[(\w)\w\]", r"\1", pattern):
        depth += (letter == "(") - (letter == ")")
        parts = [*parts, ""] if letter == "|" and not depth else [*parts[:-1], parts[-1] + letter]
    shown = [
        re.sub(r"\\([.])", r"\1", re.sub(r"\\d\+", "N", part).replace("\\b", "").replace(".*", "...")) for part in parts
    ]
    alone = dict.fromkeys(word.strip("^$").replace("?", "") for word in _without_groups(shown))
    return ", ".join(f"`{_cell(word)}`" for word in alone)


def _without_groups(words: list[str]) -> Iterator[str]:
    """Replace a group (A|B) by one text for each alternative."""
    for word in words:
        group = re.search(r"\(([^()]*)\)", word)
        if group is None:
            yield word
        else:
            yield from _without_groups(
                [word[: group.start()] + one + word[group.end() :] for one in group[1].split("|")]
            )


def _package(message: Message) -> str:
    first = message.module.partition(".")[0]
    return first if first in PACKAGE_TITLES else ""


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
    """Return a page of the top folder, such as README.md, as a page of docs/."""
    return LINK.sub(lambda link: f"]({_from_docs(link[1])}{link[2] or ''})", (ROOT / name).read_text())


def _from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def linked(text: str, page: str) -> tuple[str, list[str]]:
    """Return a page's text with its links out of docs/ replaced by links into SOURCE, and the files that SOURCE needs.

    page: its path in docs/, such as decisions/0017-chains.md. A link to a folder becomes plain text.
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
    """Return the list of decisions."""
    lines = ["# Decisions\n"]
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}](decisions/{path.name})")
    return "\n".join(lines) + "\n"


# Pages without a file in docs/.
MADE: dict[str, Callable[[], str]] = {
    "index.md": lambda: at_the_top("README.md"),
    "changes.md": lambda: at_the_top("CHANGELOG.md"),
    "contributing.md": lambda: at_the_top("CONTRIBUTING.md"),
    "security.md": lambda: at_the_top("SECURITY.md"),
    "decisions.md": decisions,
    "reference/api.md": api,
    "reference/keys.md": keys,
    "reference/messages.md": messages,
}
