"""What a terminal would obey in the text of other programs is shown instead."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.base import console

ATTACKS = {
    "window title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "cursor up, erase": "\x1b[1A\x1b[2Knothing failed",
    "device status, which the terminal answers": "\x1b[6n\x1b[c\x05",
    "DCS": '\x1bP$q"p\x1b\\',
    "8-bit CSI and OSC": "\x9b2J\x9d0;owned\x9c",
    "backspace": "safe\b\b\b\bevil",
    "alternate charset": "\x1b(0\x0e",
    "colors with something else": "\x1b[31;?25lx",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_control_sequences_are_shown(name: str) -> None:
    """Control characters are replaced by visible text."""
    for shown in (console.plain(ATTACKS[name]), console.colored(ATTACKS[name])):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown) and "\\x" in shown


def test_colors_tabs_and_other_scripts_are_kept() -> None:
    """colored() keeps colors and resets them at the end; tabs, line feeds and letters of any script are unchanged."""
    assert console.colored("\x1b[1;31mred\x1b[0m\tx\n") == "\x1b[1;31mred\x1b[0m\tx\n\x1b[0m"
    assert console.plain("\x1b[1;31mred") == "\\x1b[1;31mred"
    text = "é ü 漢字 \U0001f600 \ttab\n"
    assert console.plain(text) == console.colored(text) == text


@given(st.text(st.characters(max_codepoint=0xFF)))
def test_only_colors_remain(text: str) -> None:
    """After colored(), only complete color sequences remain of any text."""
    left = re.sub(r"\x1b\[[0-9;:]*m", "", console.colored(text))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", left)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", console.plain(text))
