"""Check the shell syntax of the user's lines in cluster.setup with bash."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

BASH_S = 10  # parsing a script takes milliseconds
# extglob: the user's lines may contain `shopt -s extglob`, which -n does not run, and then !(x) is valid.
COMMAND = ("bash", "-O", "extglob", "-n")


def syntax_problem(script: str, setup: Sequence[str]) -> str | None:
    """Return bash's error and the lines of cluster.setup with their numbers in `script`, or None without an error.

    Return None as well if bash is missing or does not end.
    """
    try:
        # The user's environment is not passed on: bash would print a line about a missing locale.
        done = subprocess.run(
            COMMAND,
            input=script.encode(errors="replace"),
            capture_output=True,
            timeout=BASH_S,
            check=False,
            env={"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    output = done.stderr.decode(errors="replace").strip()
    if not done.returncode and not output:  # an unfinished here-document is only a warning, but it swallows srun
        return None
    output = "\n".join(f"  {line}" for line in output.splitlines())
    return f"bash cannot parse cluster.setup, expected complete commands:\n{output}\n{_numbered(script, setup)}"


def _numbered(script: str, setup: Sequence[str]) -> str:
    """Return a line such as '  23: module load gcc' for each line, with its number in the script."""
    lines = "\n".join(setup)
    first = script[: script.rindex(lines)].count("\n") + 1
    numbered = (f"  {first + at}: {line}" for at, line in enumerate(lines.split("\n")))
    return "\n".join(["cluster.setup is in these lines of the script:", *numbered])
