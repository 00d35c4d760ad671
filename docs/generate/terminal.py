"""Draws the output of a command as a terminal shows it: COMMAND | python -m docs.generate.terminal COMMAND

README's picture is docs/drill.svg: tests/drill/train.py without the line that loads the optimizer's state.
"""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console
from rich.text import Text

COLORS = {r"FAILS$": "bold red", r"ok$": "green", r"^  [a-z_]+:": "yellow"}


def svg(title: str, output: str) -> str:
    """Return a picture of `output`. title: the command, as the window's title."""
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    for line in [f"$ {title}", *output.splitlines()]:
        text = Text(line)
        for pattern, style in COLORS.items():
            text.highlight_regex(pattern, style)
        console.print(text)
    # Without the fonts that rich would load from another site.
    return re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)


if __name__ == "__main__":
    print(svg(sys.argv[1], sys.stdin.read()))
