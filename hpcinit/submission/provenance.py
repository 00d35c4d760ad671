"""What a run was made of: versions, git commit, command line."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.facts import telling, versions

PACKAGES = ("hpcinit", "hydra-core", "omegaconf", "submitit", "torch", "deepspeed", "numpy")


class Provenance:
    """Starts git at once and reads its answer when it is needed: a second process costs no waiting."""

    def __init__(self, workdir: Path, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._workdir = workdir
        command = ["git", "-C", str(workdir), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        self._started = telling.started(command)
        try:
            self._git: subprocess.Popen[str] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                errors="replace",
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
                telling.ended(["git"], time.monotonic() - self._started, self._git.returncode)
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
    """Those of PACKAGES that are installed. By the names of folders: to parse metadata is 5 % of a submission."""
    found = versions.by_folder(tuple(sys.path))
    return {name: found[name] for name in PACKAGES if name in found}
