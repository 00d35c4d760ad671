"""Check the links between the files of the checkout: python -m tests.links prints each dead one, with exit status 1.

It reads Markdown pages and docstrings. The page of a link must be a file of the checkout, and contain the heading. README.md must
reach each page of docs/ in two steps; a link to a folder reaches all pages in it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")  # in docstrings and messages
MOST_STEPS = 2


def dead(path: Path) -> Iterator[str]:
    """Yield each link of a page, or page that a Python file names, that leads nowhere."""
    text = path.read_text()
    if path.suffix == ".py":
        for name in PAGE.findall(text):
            if not (ROOT / name).is_file():
                yield name
        return
    for found in LINK.finditer(CODE.sub("", text)):
        target, heading = found[1], found[2]
        page = (path.parent / target).resolve() if target else path
        if not page.exists():
            yield found[0][2:-1]
        elif heading and page.suffix == ".md" and heading not in _headings(page):
            yield f"{found[0][2:-1]}: the page has no such heading"


@cache
def _headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub makes them of its headings."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).lower() for line in lines)
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in plain}


def far(pages: Iterable[Path], start: Path = ROOT / "README.md") -> Iterator[Path]:
    """Yield the pages that `start` does not reach within MOST_STEPS links."""
    reached = {start}
    for _ in range(MOST_STEPS):
        reached |= {target for page in reached if page.suffix == ".md" for target in _targets(page)}
    yield from (page for page in pages if page not in reached)


def _targets(page: Path) -> Iterator[Path]:
    for found in LINK.finditer(CODE.sub("", page.read_text())):
        target = (page.parent / found[1]).resolve()
        yield from target.glob("*.md") if target.is_dir() else [target]


def main() -> int:
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--", "*.md", "hpcinit/*.py"], capture_output=True, text=True, check=True
    )
    found = [f"{name}: {link}" for name in names.stdout.split() for link in dead(ROOT / name)]
    pages = [ROOT / name for name in names.stdout.split() if name.startswith("docs/") and name.endswith(".md")]
    found += [f"{page.relative_to(ROOT)}: README.md does not reach it in {MOST_STEPS} steps" for page in far(pages)]
    print("\n".join(found), end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
