"""The record of the software versions of a run."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hpcinit.submit import provenance


def test_versions_are_those_of_importlib_metadata() -> None:
    """The versions in the folder names are those that importlib.metadata reads. Of two versions the first counts."""
    installed: dict[str, str] = {}
    for found in metadata.distributions():  # in the order of sys.path, which has entries twice in make test-lowest
        installed.setdefault(found.metadata["Name"].lower(), found.version)
    assert _versions() == {name: installed[name] for name in provenance.PACKAGES if name in installed}
    assert {"hpcinit", "hydra-core", "submitit"} <= set(_versions())


@pytest.mark.parametrize(
    "name",
    [
        "numpy-1.24.2.dist-info",
        "NumPy-1.24.2.dist-info",
        "numpy-1.24.2.egg-info",
        "numpy-1.24.2-py3.11.egg-info",
    ],
)
def test_every_spelling_of_a_metadata_folder_is_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels, Debian packages and setuptools name the metadata folder differently, and all are read."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert _versions() == {"numpy": "1.24.2"}


def test_the_first_on_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two versions the imported one is recorded. Path entries that are not folders are skipped."""
    for place, version in (("first", "2.0"), ("second", "1.0")):
        (tmp_path / place / f"torch-{version}.dist-info").mkdir(parents=True)
    places = [tmp_path / "absent.zip", tmp_path / "first", tmp_path / "second"]
    monkeypatch.setattr(sys, "path", [str(place) for place in places])
    assert _versions() == {"torch": "2.0"}


def _versions() -> dict[str, str]:
    document = json.loads(provenance.Provenance(Path.cwd(), []).to_json())
    versions: dict[str, str] = document["versions"]
    return versions
