"""The documentation stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def words(page: Path) -> int:
    """Return the number of words, also in code and tables; a sign alone is none."""
    return sum(any(letter.isalnum() for letter in word) for word in page.read_text().split())


@pytest.mark.parametrize(
    ("folder", "most_pages", "most_words"), [(".", 25, 18_000), ("development", 15, 12_000), ("decisions", 50, 9_000)]
)
def test_the_pages_of_a_folder_are_few_and_short(folder: str, most_pages: int, most_words: int) -> None:
    """Users have at most 25 pages and 18,000 words; the pages for developers and the decisions have limits, too."""
    pages = sorted((DOCS / folder).glob("*.md"))
    assert len(pages) <= most_pages and sum(map(words, pages)) <= most_words


def test_the_measurements_are_those_of_today() -> None:
    """The page of measurements has at most 2,500 words: Git has the earlier numbers."""
    assert words(DOCS / "development/measurements.md") <= 2_500


LONGER = {"0005-dependencies.md"}  # a table with a line for each dependency
SHORT = [page for page in sorted((DOCS / "decisions").glob("*.md")) if page.name not in LONGER]


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.stem)
def test_a_decision_has_at_most_ten_lines(page: Path) -> None:
    """Each decision has at most ten lines of 160 characters. The title and empty lines count."""
    lines = page.read_text().splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 160
