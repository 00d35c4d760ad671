"""Runs `hpcinit drill` on programs that someone else wrote, each correct and with one planted bug, and prints a table.

    python -m tests.drill.judge [PROGRAM ...]

People who had not read the drill wrote the programs in November 2026, in the style of public examples, and checked them
without the drill. train.txt is the correct program, bug.diff plants the bug, truth.yaml describes it. Only the first
result with a program shows how good the drill is: docs/development/measurements.md has these results.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
LIMIT_S = 900


def drill(program: Path, options: Sequence[str], bug: bool) -> tuple[int, list[str], float]:
    """Return the exit status of a drill, the causes that it named, and its seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text((program / "train.txt").read_text())
        if bug:
            subprocess.run(["git", "apply", str(program / "bug.diff")], cwd=folder, check=True)
        command = [sys.executable, "-m", "hpcinit", "drill", "--json", *options, "--", "train.py"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False, timeout=LIMIT_S)
        found: dict[str, Any] = json.loads(done.stdout or "{}")
        return done.returncode, [one["cause"] for one in found.get("findings", ())], time.monotonic() - began


def main(names: Sequence[str]) -> int:
    programs = sorted(path.parent for name in names or ["*"] for path in HERE.glob(f"{name}/train.txt"))
    found = named = alarms = 0
    for program in programs:
        truth = yaml.safe_load((program / "truth.yaml").read_text())
        status, causes, seconds = drill(program, truth["options"], bug=True)
        correct, false, more = drill(program, truth["options"], bug=False)
        right = causes[:1] != [] and causes[0] in truth["cause"]
        found, named, alarms = found + (status == 1), named + right, alarms + (correct != 0)
        print(
            f"{program.name:20} {'named' if right else 'found' if status == 1 else 'missed':7} {seconds:4.0f} s  ",
            end="",
        )
        print(
            f"{', '.join(causes)}; correct version: {', '.join(false) or f'exit status {correct}'}, {more:.0f} s",
            flush=True,
        )
    print(f"{len(programs)} programs: {found} bugs found, {named} named first, {alarms} false alarms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
