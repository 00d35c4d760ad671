"""Run a command with a time limit; the error for a failure quotes its output."""

import os
import subprocess
from collections.abc import Sequence

from tests.minislurm.errors import MiniSlurmError

# Daemons are in sbin, which is not on PATH after some kinds of su.
PATH = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def run(command: Sequence[str], *, env: dict[str, str] | None = None, stdin: str = "", timeout_s: float = 120) -> str:
    """Return the command's output. Its environment is PATH and `env`, without the caller's."""
    try:
        done = subprocess.run(
            list(command), input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8"} | (env or {}),
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise MiniSlurmError(f"{' '.join(command)}: no answer within {timeout_s:g} s") from expired
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise MiniSlurmError(f"{' '.join(command)}: exit status {done.returncode}\n  {output}")
    return done.stdout
