"""Finds the default cluster: $HPCINIT_CLUSTER, else settings.yaml in a config folder of the user, else this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from hpcinit.base import safe_files
from hpcinit.base.errors import ConfigError
from hpcinit.base.text import home
from hpcinit.config import folders
from hpcinit.config.schema import MISSING

VARIABLE = "HPCINIT_CLUSTER"
LOCAL = "local"


def choose() -> tuple[str, str]:
    """Return the default cluster, and the variable or file that sets it; ('', '') if none does. Raise ConfigError."""
    if name := os.environ.get(VARIABLE):
        return name, VARIABLE
    for place in folders.user_folders():
        path = place / f"{folders.SETTINGS}.yaml"
        if path.is_file():
            return _read(path), str(path)
    return "", ""


def settings_file() -> Path:
    """Return the user's own settings file."""
    return home() / ".config/hpcinit" / f"{folders.SETTINGS}.yaml"


def write(name: str) -> Path:
    """Write `name` as the default cluster to the user's settings file, and return the file. Raise OSError."""
    path = settings_file()
    safe_files.make_folders(path.parent)
    safe_files.write_atomically(path, f"# The cluster of `hpcinit submit` without cluster=...\ncluster: {name}\n")
    return path


def refusal() -> str:
    """Return why a job without a cluster is not run on this machine; '' if it may be: there is no sbatch on PATH."""
    if shutil.which("sbatch") is None:
        return ""
    known = ", ".join(folders.choices("cluster"))
    return (
        f"no cluster is chosen, and sbatch is on PATH: add cluster=NAME, one of: {known}; cluster=local runs the job "
        f"on this machine. To set a default: export {VARIABLE}=NAME, or `cluster: NAME` in {settings_file()}; "
        "hpcinit discover writes the file of a new cluster"
    )


def _read(path: Path) -> str:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and content.keys() == {"cluster"} and isinstance(content["cluster"], str):
        return content["cluster"]
    raise ConfigError(f"{path} contains {content!r}, expected one line: cluster: NAME")


def chosen(overrides: Sequence[str]) -> str:
    """Return the cluster that the overrides choose, else the default. Raise ConfigError if there is none."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("cluster=")]
    name = given[-1] if given else choice(required=True)
    if name == MISSING:
        raise ConfigError(refusal())
    return name


def choice(required: bool) -> str:
    """Return the cluster of a request that does not choose one.

    required: if there is no default and this machine has Slurm, return '???', for which Hydra requires a choice.
    """
    name, _ = choose()
    return name or (MISSING if required and refusal() else LOCAL)
