"""The lint of English finds what docs/development/style.md rejects, and nothing in plain text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import prose


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function that writes a file and returns the findings in it."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)

    def check(name: str, text: str) -> list[tuple[int, str]]:
        (tmp_path / name).write_text(text)
        return list(prose.findings(tmp_path / name, []))

    return check


def test_old_phrases_are_found(found) -> None:  # type: ignore[no-untyped-def]
    """A page, a docstring, a comment, a message and a YAML comment each give one finding, with the line."""
    assert [line for line, _ in found("a.md", "Plain.\n\nA rank that never comes is lost.\n")] == [3]
    text = '"""Slurm says so."""\n\nx = 1  # left out\nraise ValueError(f"no door at {x}")\n'
    assert sorted(line for line, _ in found("a.py", text)) == [1, 3, 4]
    assert [line for line, _ in found("a.yaml", "key: 1  # what it holds\n")] == [1]


def test_conflicts_are_found(found) -> None:  # type: ignore[no-untyped-def]
    """The markers of a merge that failed are findings in a page."""
    text = "| a |\n<<<<<<< HEAD\n| b |\n=======\n| c |\n>>>>>>> fcca50d (c)\n"
    assert [line for line, _ in found("a.md", text)] == [2, 6]


def test_code_and_plain_text_are_not_findings(found) -> None:  # type: ignore[no-untyped-def]
    """Code in backticks, links, identifiers and words that contain a rejected one are accepted."""
    plain = "Incoming ranks become peers; `say told` is code, [x](come.md) a link, and a lawful flaw holds the lock.\n"
    assert found("a.md", plain) == []
    assert found("a.py", 'told = "come"\nx = """A rank connects."""\n') == []


def test_long_sentences_and_lines_are_found(found) -> None:  # type: ignore[no-untyped-def]
    """31 words in a sentence are one finding, 30 are none; a line of 161 characters is one, a table's line is none."""
    assert found("a.md", "Rank " * 30 + ".\n") == []
    assert ["31 words" in message for _, message in found("a.md", "\n".join(["rank"] * 31) + ".\n")] == [True]
    line = "rank. " * 27
    assert [message for _, message in found("a.md", line + "\n")] == ["a line of 162 characters"]
    assert found("a.md", "| " + line + "|\n") == []


def test_an_exception_needs_path_and_line(found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """An exception covers the matching lines of the matching files only."""
    (tmp_path / "exceptions").write_text("# why\n^a\\.md$\tby hand\n")
    monkeypatch.setattr(prose, "EXCEPTIONS", tmp_path / "exceptions")
    (tmp_path / "a.md").write_text("Set it by hand.\nIt is known.\n")
    shutil.copy(tmp_path / "a.md", tmp_path / "b.md")
    skipped = prose.exceptions()
    assert [line for line, _ in prose.findings(tmp_path / "a.md", skipped)] == [2]
    assert [line for line, _ in prose.findings(tmp_path / "b.md", skipped)] == [1, 2]
