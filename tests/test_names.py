"""Names follow the field's terms, and not hpcinit's own terms of the past."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

import hpcinit

PACKAGE = Path(hpcinit.__file__).parent
# Old term -> the field's term. A name is split at underscores and capitals: 'open_door', 'OpenDoor'.
OLD = {
    "door": "server, listener",
    "knock": "connect",
    "knocking": "connect",
    "guest": "peer",
    "guests": "peers",
    "stranger": "unauthenticated",
    "strangers": "unauthenticated",
    "visit": "client",
    "party": "endpoint",
    "roll": "roster",
    "meeting": "rendezvous",
    "mourn": "mark_dead",
    "witness": "signal monitor",
    "unborn": "prefork",
    "law": "formula",
    "laws": "formulas",
    "moment": "event",
    "moments": "events",
    "standing": "node history",
    "leftout": "exclusion",
    "budget": "max_restarts",
    "heed": "handle",
    "heeded": "handled",
    "mend": "fix",
    "echo": "secondary",
    "echoes": "secondary",
}
# Names that contain one of these terms in another sense.
ALLOWED = {
    "MOMENT_S",  # a moment, in seconds
}


def parts(name: str) -> set[str]:
    """Return the parts of an identifier in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names(path: Path) -> set[str]:
    """Return the identifiers of a module."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} | {path.stem}


def old_names(found: set[str]) -> dict[str, str]:
    """Return the names that contain an old term, each with the term to use."""
    return {name: OLD[word] for name in found - ALLOWED for word in parts(name) & OLD.keys()}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_the_fields(path: Path) -> None:
    """No name of a module, class, function, variable or config key contains an old term."""
    assert old_names(names(path)) == {}


def test_an_old_name_is_found() -> None:
    """The check finds an old term anywhere in a name, but not inside another word."""
    found = {"open_door", "KNOCK_S", "Guest", "lawful", "visitor", "flaw", "enroll"}
    assert old_names(found) == {"open_door": "server, listener", "KNOCK_S": "connect", "Guest": "peer"}
