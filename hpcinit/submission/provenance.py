"""What a run was made of: versions, git commit, command line."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("hpcinit", "hydra-core", "omegaconf", "submitit", "torch", "deepspeed", "numpy")
# hydra_core-1.3.8.dist-info; from Debian's packages numpy-1.24.2.egg-info and pip-23.0-py3.11.egg-info
METADATA = re.compile(r"([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


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
        except OSError:  # no git, or none that we may run
            self._git = None

    def to_json(self, snapshot: Mapping[str, Any] | None = None) -> str:
        """{command, workdir, git_commit (null: no repository; '-dirty': uncommitted changes), versions, host}.

        snapshot: what is said of the copy that the run runs from, if there is one.
        """
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
            "versions": _versions(),
            "host": platform.node(),
            **({"snapshot": dict(snapshot)} if snapshot else {}),
        }
        return json.dumps(document, indent=2) + "\n"


def _versions() -> dict[str, str]:
    """Those of PACKAGES that are installed, from the names of their metadata folders.

    importlib.metadata gives the same answer, but reads and parses every package's description for it: 5 % of
    a submission. Importing torch to ask it would cost a second.
    """
    found: dict[str, str] = {}
    for place in sys.path:
        for name in os.listdir(place or ".") if Path(place).is_dir() else ():  # noqa: PTH208 - names only, it is quicker
            if match := METADATA.fullmatch(name):
                found.setdefault(match[1].replace("_", "-").lower(), match[2])
    return {name: found[name] for name in PACKAGES if name in found}
