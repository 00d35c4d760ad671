"""docs/reference/what-became-of.md names only tests that exist, and the numbers in its text are those of its rows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/what-became-of.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
STATUS = ("shown", "CPU only", "partly", "not")


def rows(page: str) -> list[list[str]]:
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row for row in cells if row[-1] != "test"]


@cache
def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def faults(page: str) -> list[str]:
    """Return the rows without a test, and the tests that do not exist."""
    found = [f"no test: {row[0]}" for row in rows(page) if not NAMED.search(row[-1]) and "not in hpcinit" not in row[1]]
    for file, test in NAMED.findall(page):
        if not (ROOT / file).exists() or (test and test not in functions(ROOT / file)):
            found.append(f"no such test: {file}::{test}")
    return found


def test_every_row_names_tests_that_exist() -> None:
    """Each function, option and capability has a test, and each status is one that the page explains."""
    assert len(rows(PAGE)) > 140 and faults(PAGE) == []
    found = Counter(row[1] for row in rows(PAGE.partition("## The feature map")[2]))
    assert set(found) <= set(STATUS)
    assert f"These are {found.total()} capabilities" in PAGE
    assert f"{found['shown']} are shown, {found['CPU only']} on CPUs only, and {found['partly']} partly." in PAGE


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("::test_openrlhf_set_up`", "::test_gone`", "no such test: tests/systems/test_openrlhf.py::test_gone"),
        (" | `tests/world/test_world.py::test_exports`", " | ", "no test: sets torch's variables for other libraries"),
    ],
)
def test_a_row_without_its_test_is_found(old: str, new: str, fault: str) -> None:
    """The check finds a renamed test, and a row without one."""
    changed = PAGE.replace(old, new, 1).replace(
        "<br>`tests/third_party/test_programs.py::test_trains_as_one_world`", ""
    )
    assert faults(changed) == [fault]
