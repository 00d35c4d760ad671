"""What bash says of a script whose set-up lines are the user's own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

BASH_S = 10  # to parse a script takes milliseconds
# extglob: with `shopt -s extglob` in the lines, which -n does not run, !(x) is right.
COMMAND = ("bash", "-O", "extglob", "-n")


def syntax_problem(script: str, setup: Sequence[str]) -> str | None:
    """bash's own words, and the lines of cluster.setup by their numbers in `script`; None if all is well.

    None too where there is no bash to ask, or it does not answer.
    """
    try:
        # Nothing of the user's environment: a locale that is not there would be a line of bash's too.
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
    said = done.stderr.decode(errors="replace").strip()
    if not done.returncode and not said:  # a here-document without an end is a warning only, and takes in srun
        return None
    said = "\n".join(f"  {line}" for line in said.splitlines())
    return f"cluster.setup is no shell that bash can read, expected whole commands:\n{said}\n{_numbered(script, setup)}"


def _numbered(script: str, setup: Sequence[str]) -> str:
    """'  23: module load gcc' for each line, in the script's numbers."""
    lines = "\n".join(setup)
    first = script[: script.rindex(lines)].count("\n") + 1
    numbered = (f"  {first + at}: {line}" for at, line in enumerate(lines.split("\n")))
    return "\n".join(["it stands in these lines of the script:", *numbered])
