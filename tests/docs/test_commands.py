"""Each command of hpcinit in the text of a page exists, and accepts the options that the page shows.

tests/docs/test_pages_run.py runs the commands on separate lines, and tests/test_replayed_pages.py the blocks with output.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")])
SPAN = re.compile(r"`hpcinit ([^`\n]+)`")
PROGRAM = {
    "submit",
    "drill",
    "run",
    "exec",
    "export",
    "shell",
}  # the rest is the user's program, or overrides of submit
OVERRIDE = re.compile(r"[+~]*[a-z][\w./]*=")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield each command and its arguments, without comments and redirections."""
    for found in SPAN.findall(page.read_text()):
        text = re.split(r"[;|>&]", found)[0]
        words = re.sub("['\"]", "", text).split()
        if words and re.fullmatch("[a-z][a-z-]*", words[0]):  # not --version, nor an example of output
            yield words


def wrong(page: Path) -> Iterator[str]:
    """Yield the commands that do not exist, and those whose arguments the parser refuses."""
    for words in commands(page):
        if words[0] not in COMMANDS:
            yield f"no such command: {words}"
        elif words[0] not in PROGRAM and len(words) > 1:
            parser = importlib.import_module(COMMANDS[words[0]].module).parser()
            given = [word for word in words[1:] if not OVERRIDE.match(word) and word != "..."]
            given += ["RUN"] * (words == ["cancel", "--save"])  # without the run where a page names the option
            try:
                console.parse_arguments(parser, given, intermixed=True)
            except RequestError as error:
                yield f"{words}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_a_page_are_accepted(page: Path) -> None:
    """Each command exists, and its parser accepts the arguments."""
    assert list(wrong(page)) == []


def test_a_wrong_command_is_found(tmp_path: Path) -> None:
    """The check finds an option and a command that do not exist."""
    page = tmp_path / "page.md"
    page.write_text("Type `hpcinit statos` or `hpcinit status --sorted loss`.\n")
    assert len(list(wrong(page))) == 2
