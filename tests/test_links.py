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
