"""Check the links between the files of the checkout: python -m tests.links prints each dead one, with exit status 1.

It reads Markdown pages and docstrings. The page of a link must be a file of the checkout, and contain the heading.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")  # in docstrings and messages


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


def main() -> int:
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--", "*.md", "hpcinit/*.py"], capture_output=True, text=True, check=True
    )
    found = [f"{name}: {link}" for name in names.stdout.split() for link in dead(ROOT / name)]
    print("\n".join(found), end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
