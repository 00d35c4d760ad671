"""Finds which line of the set-up (cluster.modules, venv, conda, setup) failed before the ranks started."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import failure_kinds, safe_files
from hpcinit.records import run_folder
from hpcinit.why.evidence import SetupLine, Verdict

_NOTED = re.compile(r"(?:(\d{1,3}) )?(\d{1,6}) (\S*)")  # status, number of the line, start of its command
_OURS = re.compile(r" \|\| \{ echo '?hpcinit: error: .*")  # the end of a line that hpcinit wrote, such as `module load`
_BASH = re.compile(r"^\S+: line \d+: (?=\S)")
_PROBLEM = re.compile(r"(?i)error|not found|no such|unknown|denied|fail|cannot")


def read(path: Path, attempt: Mapping[str, Any], output: Sequence[str]) -> SetupLine | None:
    """Return the set-up line that ended the script before the ranks started, or else the first that failed, or None.

    attempt: the content of exit.json.
    output: the last lines of the job's log, without the lines that Slurm wrote.
    """
    ended = _NOTED.fullmatch(str(attempt.get("line", "")))
    failed = _NOTED.fullmatch(str(attempt.get("failed", "")))
    if not (noted := ended or failed):
        return None
    status = attempt.get("exit_status") if ended else int(noted[1] or 0)
    number, word = int(noted[2]), noted[3]
    scripts = [path / run_folder.SCRIPT] if (path / run_folder.SCRIPT).exists() else sorted(path.parent.glob("job*.sh"))
    lines = {line for script in scripts if word in (line := _line(script, number))}
    typed = _OURS.sub("", lines.pop()) if len(lines) == 1 else ""
    printed = [_BASH.sub("", line) for line in output if not line.startswith("hpcinit: ")]
    about = next((_BASH.sub("", line) for line in output if f": line {number}: " in line), "")
    if ended and not about:  # another program printed the message, without a line number
        about = next((line for line in printed if _PROBLEM.search(line)), printed[-1] if printed else "")
    return SetupLine(typed, status if isinstance(status, int) else 0, about.strip(), bool(ended), tuple(printed))


def _line(script: Path, number: int) -> str:
    try:
        lines = safe_files.read_text(script).splitlines()
    except OSError:
        return ""
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def described(line: SetupLine) -> str:
    """Return the failed line with its exit status and its message, as text."""
    which = line.typed or "a line of cluster.modules or cluster.setup"
    return f"{which}: exit status {line.status}" + (f": {line.message}" if line.message else "")


def verdict(line: SetupLine) -> Verdict:
    """Return the verdict on a batch script that ended at this line, before the ranks started."""
    do = "correct cluster.modules, cluster.venv or cluster.setup, whichever has this line, and submit again"
    if line.status == 127:
        do = f"the command does not exist on that node, or is not in PATH: {do}"
    rest = tuple(text for text in line.output if text.strip() != line.message)
    head = f"the setup of the job failed before any rank started: {described(line)}"
    return Verdict(head, failure_kinds.SCRIPT, do, evidence=rest, error=described(line))
