"""Every promise of SECURITY.md has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises(page: str) -> list[str]:
    """Return the bullets below 'What is promised'."""
    promised = page.partition("## What is promised\n")[2].partition("\n## ")[0]
    promised = re.sub(r"<!--.*?-->", "", promised, flags=re.DOTALL)
    return [bullet.strip() for bullet in re.split(r"^- ", promised, flags=re.MULTILINE)[1:]]


def faults(page: str) -> list[str]:
    """Return what is wrong with the page's promises: promises without a test, and tests that do not exist."""
    found = [f"no test: {promise[:60]}" for promise in promises(page) if not NAMED.search(promise)]
    for file, test in NAMED.findall(page.partition("## What is promised\n")[2].partition("\n## ")[0].split("<!--")[0]):
        tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).exists() else ast.Module([], [])
        if test not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            found.append(f"no such test: {file}::{test}")
    return found


def test_every_promise_names_a_test_that_exists() -> None:
    """Each promise of SECURITY.md ends with the tests that prove it, and they exist."""
    page = (ROOT / "SECURITY.md").read_text()
    assert len(promises(page)) > 15 and faults(page) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            ("test_the_key_never_crosses_the_wire", "test_gone"),
            "no such test: tests/rendezvous/test_rendezvous.py::test_gone",
        ),
        (
            ("(`tests/submit/test_folder.py::test_numbers_go_up_and_are_private`)", ""),
            "no test: A run folder is created",
        ),
    ],
)
def test_a_promise_without_its_test_is_found(change: tuple[str, str], fault: str) -> None:
    """The check finds a renamed test, and a promise without a test."""
    found = faults((ROOT / "SECURITY.md").read_text().replace(*change))
    assert len(found) == 1 and found[0].startswith(fault)
