"""How hpcinit calls Slurm's client commands: their environment, and the decoding of what they print."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

# Preferences of people at a terminal, which would hide jobs (SQUEUE_PARTITION), change the format that is parsed here
# (SCONTROL_ONELINER, SLURM_TIME_FORMAT), or ask a question (SCANCEL_INTERACTIVE). SLURM_CLUSTERS sends the query to
# another cluster, and puts a line 'CLUSTER: name' above the answer: docs/decisions/0029-one-cluster.md.
PREFERENCES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `env`, or this process's environment, without the variables that change what a client prints."""
    given = os.environ if env is None else env
    return {key: value for key, value in given.items() if not key.startswith(PREFERENCES)}


def start(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a client, whose output is read as text; a byte that is not UTF-8 becomes U+FFFD. Raises OSError."""
    return subprocess.Popen(
        command,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run(
    command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a client and return its status and output as text; a byte that is not UTF-8 becomes U+FFFD.

    It gets a session of its own, so that Ctrl-C in the terminal reaches the caller only. Raises OSError where it cannot
    be started, and subprocess.TimeoutExpired.
    """
    return subprocess.run(
        command,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        start_new_session=True,
        check=False,
    )
