"""What a run was made of: versions, git commit, command line."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = ("hpcinit", "hydra-core", "omegaconf", "submitit", "torch", "deepspeed", "numpy")


class Provenance:
    """Starts git at once and reads its answer when it is needed: a second process costs no waiting."""

    def __init__(self, workdir: Path, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._workdir = workdir
        try:
            self._git: subprocess.Popen[str] | None = subprocess.Popen(
                ["git", "-C", str(workdir), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        except FileNotFoundError:
            self._git = None

    def to_json(self) -> str:
        """{command, workdir, git_commit (null: no repository; '-dirty': uncommitted changes), versions, host}."""
        commit = ""
        if self._git is not None:
            try:
                commit = self._git.communicate(timeout=10)[0].strip()
            except subprocess.TimeoutExpired:
                self._git.kill()
        document = {
            "command": self._argv,
            "workdir": str(self._workdir),
            "git_commit": commit or None,
            "python": platform.python_version(),
            "versions": {name: version for name in PACKAGES if (version := _version(name))},
            "host": platform.node(),
        }
        return json.dumps(document, indent=2) + "\n"


def _version(package: str) -> str | None:
    """From the installed metadata: importing torch to ask would cost a second."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
