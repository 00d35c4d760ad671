"""Text that other programs wrote (ranks, their errors, file names), before it is printed to a terminal.

A terminal obeys control sequences in what it prints: they move the cursor over other text, change the window's title,
write to the clipboard, or make the terminal answer as if the user had typed.
"""

from __future__ import annotations

import re

# ESC [ 1 ; 31 m: a color or a style, which is harmless. Else C0 but tab and line feed, DEL, and C1 (0x9b is ESC [ too).
_CONTROL = re.compile(r"(\x1b\[[0-9;:]{0,40}m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return `text` with each control character as '\\x1b', but for tabs and line feeds."""
    return _CONTROL.sub(lambda found: "".join(map(_shown, found[0])), text)


def colored(text: str) -> str:
    """Return `text` with each control character as '\\x1b', but for tabs, line feeds, and colors, which end with it."""
    safe = _CONTROL.sub(lambda found: found[1] or _shown(found[0]), text)
    return f"{safe}\x1b[0m" if "\x1b" in safe else safe


def _shown(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x20 or 0x7F <= code < 0xA0 else character
