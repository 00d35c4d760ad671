"""Runs one command with a time limit; a failure is an error that quotes what the command said."""

import os
import subprocess
from collections.abc import Sequence

from tests.minislurm.errors import MiniSlurmError

# Daemons live in sbin, which is not on the PATH of everybody who becomes root with su.
PATH = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def run(command: Sequence[str], *, env: dict[str, str] | None = None, stdin: str = "", timeout_s: float = 120) -> str:
    """What the command printed. Its environment is PATH and `env`, nothing of the caller's."""
    try:
        done = subprocess.run(
            list(command), input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8"} | (env or {}),
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise MiniSlurmError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from expired
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise MiniSlurmError(f"{' '.join(command)}: exit status {done.returncode}\n  {said}")
    return done.stdout
