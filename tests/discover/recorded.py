"""The output that tests.discover.record recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hpcinit.discover import live_site
from hpcinit.discover.live_site import SiteAnswers, User

DATA = Path(__file__).parent.parent / "data/discover"
VERSIONS = sorted(path.stem for path in DATA.glob("*.json"))
ANN = User("ann", 1000, frozenset({"users"}))


def answers(version: str, **changed: str) -> SiteAnswers:
    """Return the recorded output. changed: texts that replace it, by the command's name in hpcinit.discover.live_site."""
    texts = json.loads((DATA / f"{version}.json").read_text())
    return SiteAnswers(texts | {getattr(live_site, name): text for name, text in changed.items()})


def edited(version: str, question: str, old: str, new: str) -> SiteAnswers:
    """Return the recorded output with one text in one command's output replaced."""
    before = answers(version)
    text = before[getattr(live_site, question)]
    assert old in text, f"{old!r} was never recorded"
    return replace(before, texts={**before.texts, getattr(live_site, question): text.replace(old, new)})
