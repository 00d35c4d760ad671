"""Compares versions, and finds the installed version of a package without importing it."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# 0.19.4, 0.19.4rc1, 2.13.0a0+git1234, 2.9.0+cu128, 0.18.5.post1, 0.20.dev3
_VERSION = re.compile(r"v?(?P<release>\d+(?:\.\d+)*)(?P<before>[-_.]?(?:a|b|c|rc|pre|dev))?.*", re.IGNORECASE)


class Tested(NamedTuple):
    """The oldest and the newest version of a package that hpcinit's tests run with.

    pyproject.toml sets the versions that pip accepts.
    """

    oldest: str
    newest: str


TESTED = {"torch": Tested("2.10.0", "2.15.0"), "deepspeed": Tested("0.18.5", "0.19.8")}


def newer_than_tested(package: str, version: str) -> str:
    """Return a note if `version` is newer than every version that hpcinit was tested with, otherwise ''."""
    newest = TESTED[package].newest
    if key(version) <= key(newest):
        return ""
    return f"{version} is newer than {newest}, the newest {package} that hpcinit is tested with"


def key(version: str) -> tuple[tuple[int, ...], bool]:
    """Return a sort key for a version. It puts '0.16.10' after '0.16.4', and '0.19.4rc1' before '0.19.4'.

    Pre-releases of the same release are equal, and so are its builds, such as 2.9.0+cu128 and 2.9.0. Raise ValueError
    if `version` is not a version.
    """
    found = _VERSION.fullmatch(version.strip())
    if not found:
        raise ValueError(f"{version!r} is not a version, expected something like 0.19.4 or 2.9.0+cu128")
    release = [int(part) for part in found["release"].split(".")]
    while release[1:] and release[-1] == 0:
        release.pop()
    return tuple(release), found["before"] is None


def installed(package: str) -> str:
    """Return the installed version of a package without importing it, or '' if it is not installed.

    The result is cached.
    """
    return _installed(package, tuple(sys.path))


@functools.cache
def _installed(package: str, path: tuple[str, ...]) -> str:
    if found := by_folder(path).get(package.replace("_", "-").lower()):
        return found
    import importlib.metadata  # noqa: PLC0415 - 25 ms

    try:  # the folder deepspeed.egg-info of `setup.py develop` has no version in its name
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# Matches hydra_core-1.3.8.dist-info, and Debian's numpy-1.24.2.egg-info and pip-23.0-py3.11.egg-info.
_FOLDER = re.compile(r"([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


@functools.cache
def by_folder(path: tuple[str, ...]) -> Mapping[str, str]:
    """Return the packages in the folders of `path` with their versions, as in {'hydra-core': '1.3.8'}.

    Only the names of the metadata folders are read: each contains a package's name and version. importlib.metadata
    would be slower, because it also parses each package's description.
    """
    found: dict[str, str] = {}
    for place in path:
        for name in os.listdir(place or ".") if Path(place).is_dir() else ():  # noqa: PTH208 - names only, which is faster
            if match := _FOLDER.fullmatch(name):
                found.setdefault(match[1].replace("_", "-").lower(), match[2])
    return found
