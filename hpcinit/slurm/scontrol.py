"""What `scontrol show` prints, as values. Text of Slurm 22.05 and 24.11, recorded, is in tests/data/discover.

Its many-line form, not --oneliner: on one line nothing says where a free text (Reason=disk 3: bad=yes [root@...])
ends and the next key begins; in this form it ends with its line. Not --json either: it comes and goes with the
version and with how Slurm was built.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NOTHING = {"", "(null)", "N/A", "n/a", "NONE"}
# The rest of the line is the value: of a node, where Reason is first in its line, and of a job.
FREE_TEXT = ("OS", "Reason", "Comment", "Extra", "Command")
_KEY = re.compile(r"(?:^|\s+)([A-Za-z][A-Za-z_:/]*)=")
_FREE = re.compile(rf"^\s+({'|'.join(FREE_TEXT)})=(.*)$")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_COUNT = re.compile(r"(\d+)([KMGT]?)")  # 1 K of a GRES is 1024
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Gpus(NamedTuple):
    """type: '' where Slurm was told none."""

    type: str
    amount: int


def records(text: str, kind: str) -> list[dict[str, str]]:
    """Every record of `scontrol show node` (kind NodeName), `partition` (PartitionName) or `job` (JobId).

    Each key has its first value. A job's name may contain anything, and ends with its line.

    A line that begins at column 0 with anything else belongs to nobody: 'No nodes in the system'.
    """
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        if line.startswith(f"{kind}="):
            found.append({})
        elif not line.startswith(" "):
            continue
        if found:
            for key, value in _pairs(line):
                found[-1].setdefault(key, value)
    return found


def _pairs(line: str) -> list[tuple[str, str]]:
    free = _FREE.match(line)
    if free:
        return [(free[1], free[2].strip())]
    line, named, name = line.partition(" JobName=")
    if named:
        return [*_pairs(line), ("JobName", name)]
    keys = list(_KEY.finditer(line))
    ends = [*(key.start() for key in keys), len(line)][1:]
    return [(key[1], line[key.end() : end].strip()) for key, end in zip(keys, ends, strict=False)]


def config(text: str) -> dict[str, str]:
    """`scontrol show config`: lines 'MaxArraySize            = 1001'."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key.strip(), value.strip())
    return found


def told(value: str | None) -> str | None:
    """The value, or None where Slurm writes a word for 'none'."""
    return None if value is None or value in NOTHING else value


def names(value: str | None) -> frozenset[str] | None:
    """'phys,chem' of AllowAccounts and the like; None: everybody."""
    return None if told(value) is None or value == "ALL" else frozenset((value or "").split(","))


def minutes(text: str | None) -> int | None:
    """'2-12:00:00', '01:30:00', '10:30' (minutes and seconds) or '90', rounded down; None: no limit, or not told."""
    found = _TIME.fullmatch(text or "")
    if not found:
        return None
    days, *parts = found.groups()
    given = [int(part) for part in parts if part is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, mins, *_ = [*given, 0]
        return int(days) * 1440 + hours * 60 + mins
    return given[0] * 60 + given[1] if len(given) == 3 else given[0]


def number(text: str | None) -> int | None:
    """A whole number; None: no limit, or not told."""
    return int(text) if text is not None and text.isdigit() else None


def gpus(gres: str | None) -> list[Gpus]:
    """Of a node's Gres: 'gpu:a100:4(S:0-1),gpu:8,nvme:1T' -> a100 4 and '' 8.

    Also with 'no_consume', and a count with a letter. Without a count it is 1 (gres.conf's default).
    """
    found = []
    for word in re.sub(r"\([^)]*\)", "", told(gres) or "").split(","):
        name, *rest = word.split(":")
        if name != "gpu":
            continue
        rest = [part for part in rest if part != "no_consume"]
        count = _COUNT.fullmatch(rest[-1]) if rest else None
        kind = rest[0] if len(rest) > 1 or (rest and not count) else ""
        found.append(Gpus(kind, int(count[1]) * 1024 ** _POWER[count[2]] if count else 1))
    return found
