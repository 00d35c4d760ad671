"""The answers that tests.discover.record kept."""

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
    """changed: texts in place of the recorded ones, by the name of the question in hpcinit.discover.live_site."""
    texts = json.loads((DATA / f"{version}.json").read_text())
    return SiteAnswers(texts | {getattr(live_site, name): text for name, text in changed.items()})


def edited(version: str, question: str, old: str, new: str) -> SiteAnswers:
    """The recorded answers with one text of one of them replaced."""
    before = answers(version)
    text = before[getattr(live_site, question)]
    assert old in text, f"{old!r} was never recorded"
    return replace(before, texts={**before.texts, getattr(live_site, question): text.replace(old, new)})
