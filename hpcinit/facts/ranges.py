"""Numbers as the kernel and Slurm write them."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 240  # characters of an error in a headline


def ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} is '0-3,8'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def brief(error: str) -> str:
    """One line of an error, without our own module's name before it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    # A SyntaxError begins with the place: File "train.py", line 1
    line = lines[-1] if lines[0].startswith('File "') else lines[0]
    line = line.removeprefix("hpcinit.facts.errors.")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
