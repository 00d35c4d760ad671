"""Versions as values, and which version of a package is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import re

# PEP 440 without its epochs: 0.19.4, 0.19.4rc1, 2.13.0a0+git1234, 2.9.0+cu128, 0.18.5.post1, 0.20.dev3
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<phase>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<number>\d*))?"
    r"(?:-(?P<post1>\d+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post2>\d*))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_number>\d*))?"
    r"(?:\+.*)?",
    re.IGNORECASE,
)
_PHASES = {"alpha": "a", "beta": "b", "preview": "rc", "pre": "rc", "c": "rc"}
Key = tuple[tuple[int, ...], tuple[int, str, int], int, tuple[int, int]]


def key(version: str) -> Key:
    """A version as a value that sorts as PEP 440 says: '0.16.10' after '0.16.4', '0.19.4rc1' before '0.19.4'.

    What follows a '+' says how it was built, not how old it is, and is not looked at. Raises ValueError.
    """
    found = _VERSION.fullmatch(version.strip())
    if not found:
        raise ValueError(f"{version!r} is not a version, expected something like 0.19.4 or 2.9.0+cu128")
    release = [int(word) for word in found["release"].split(".")]
    while release[1:] and release[-1] == 0:
        release.pop()
    post = int(found["post1"] or found["post2"] or 0) if found["post1"] or found["post"] else -1
    dev = (0, int(found["dev_number"] or 0)) if found["dev"] else (1, 0)
    if found["phase"]:
        word = found["phase"].lower()
        phase = (1, _PHASES.get(word, word), int(found["number"] or 0))
    else:
        phase = (0, "", 0) if found["dev"] and post < 0 else (2, "", 0)
    return tuple(release), phase, post, dev


def installed(package: str) -> str:
    """The version of an installed package, read from its metadata and not by importing it; '' without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
