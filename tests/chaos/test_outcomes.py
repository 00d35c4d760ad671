"""The table of docs/development/chaos.md contains the measured outcomes."""

from __future__ import annotations

import json
import re
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.chaos import outcomes
from tests.chaos.outcomes import BEGIN, DOCS, END, JSON, TABLE, Outcome


def test_the_page_shows_what_was_measured() -> None:
    """The table matches docs/development/chaos.json."""
    known = json.loads((DOCS / JSON).read_text())
    assert f"{BEGIN}\n{outcomes.table(known)}\n{END}" in (DOCS / TABLE).read_text()


def test_a_fault_that_is_measured_again(tmp_path: Path) -> None:
    """A new outcome replaces only its own numbers; a fault has one row; messages of the day are only in the JSON file."""
    (tmp_path / TABLE).write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    for seconds in (7.0, 9.0):
        outcomes.keep(Outcome("kill", "srun", "a | /tmp/x/test_y0/b", seconds, 3, "FAILED"), tmp_path)
    outcomes.keep(Outcome("hang", "srun", "c", None, None, "FAILED at restart 3: `no | rank`"), tmp_path)
    outcomes.keep(Outcome("kill", "fork", "d", 1, 2, "COMPLETED"), tmp_path)
    page = (tmp_path / TABLE).read_text()
    assert page.startswith("before\n") and page.endswith(f"{END}\nafter\n")
    assert "| kill | 9 | 1 | 3 | 2 | FAILED or COMPLETED |\n" in page and page.count("| kill |") == 1
    assert "| hang |  |  |  |  | FAILED at restart 3 |" in page
    assert "a | /.../b" in (tmp_path / JSON).read_text()


def test_a_page_without_a_place_for_it(tmp_path: Path) -> None:
    (tmp_path / TABLE).write_text("no place\n")
    with pytest.raises(ValueError, match=re.escape("chaos.md has no lines '<!-- written by make chaos -->' and")):
        outcomes.keep(Outcome("kill", "srun", "a", 1, 1, "FAILED"), tmp_path)


def test_outcomes_of_tests_that_run_side_by_side(tmp_path: Path) -> None:
    """Four processes keep ten outcomes each: none is lost."""
    (tmp_path / TABLE).write_text(f"{BEGIN}\n{END}\n")

    def keep(name: str) -> None:
        for number in range(10):
            outcomes.keep(Outcome(f"{name}-{number}", "srun", "a", 1, 1, "FAILED"), tmp_path)

    processes = [get_context("fork").Process(target=keep, args=(name,)) for name in "abcd"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(json.loads((tmp_path / JSON).read_text())) == 40
