"""The checker of links finds dead ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import links


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](other.md) [b](other.md#two-of-them) [c](https://example.org/x) `[d](no.md)`", []),
        ("[a](no.md)", ["no.md"]),
        ("[a](other.md#three)", ["other.md#three: the page has no such heading"]),
        ("# Here\n[a](#here) [b](#there)", ["#there: the page has no such heading"]),
    ],
)
def test_dead_links(tmp_path: Path, text: str, found: list[str]) -> None:
    """A link to a missing page or heading is found; addresses and code are not links of the checkout."""
    (tmp_path / "other.md").write_text("# One\n\n## Two of [them](x)\n")
    (tmp_path / "page.md").write_text(text)
    assert list(links.dead(tmp_path / "page.md")) == found


def test_far_pages(tmp_path: Path) -> None:
    """A page that needs a third link is found; a link to a folder reaches its pages."""
    pages = {name: tmp_path / name for name in ("README.md", "one.md", "two.md", "three.md", "folder/four.md")}
    (tmp_path / "folder").mkdir()
    for name, text in zip(pages, ("[a](one.md)", "[b](two.md#x) [d](folder)", "[c](three.md)", "", ""), strict=True):
        pages[name].write_text(text)
    assert list(links.far(pages.values(), pages["README.md"])) == [pages["three.md"]]
