"""Parses the output of `scontrol show`. tests/data/discover contains recorded output of Slurm 22.05 and 24.11.

hpcinit does not use --oneliner, because its output does not show where a value such as `Reason=disk 3: bad=yes
[root@...]` ends. In the default output, such a value ends at the end of the line. hpcinit does not use --json, because
some versions and builds do not have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

NOTHING = {"", "(null)", "N/A", "n/a", "NONE"}
# Keys whose value is the rest of the line.
FREE_TEXT = ("OS", "Reason", "Comment", "Extra", "Command")
_KEY = re.compile(r"(?:^|\s+)([A-Za-z][A-Za-z_:/]*)=")
_FREE = re.compile(rf"^\s+({'|'.join(FREE_TEXT)})=(.*)$")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_COUNT = re.compile(r"(\d+)([KMGT]?)")  # 1 K of a GRES is 1024
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Gpus(NamedTuple):
    """The GPUs of one type in a node.

    type: the type, or '' if slurm.conf has none.
    """

    type: str
    amount: int


def records(text: str, kind: str) -> list[dict[str, str]]:
    """Return the records that `scontrol show` prints for nodes, partitions or jobs, each as a dict.

    If a key occurs twice in a record, the first value counts. Lines that belong to no record, such as 'No nodes in the
    system', are ignored.

    kind: the key with which each record starts: NodeName, PartitionName or JobId.
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
    """Return the settings in the output of `scontrol show config`.

    A line looks like 'MaxArraySize = 1001'.
    """
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key.strip(), value.strip())
    return found


def value_or_none(value: str | None) -> str | None:
    """Return the value, or None if it is missing or if Slurm's text means 'none'."""
    return None if value is None or value in NOTHING else value


def preempted_at(job: Mapping[str, str]) -> str:
    """Return when Slurm preempted the job since its last start, such as '2026-11-21T14:02:00', or '' if it did not.

    When a job is requeued, Slurm keeps the time of an earlier preemption. Such a time is ignored.
    """
    at = value_or_none(job.get("PreemptTime")) or ""
    return at if at and at != "None" and at >= job.get("StartTime", "") else ""


def names(value: str | None) -> frozenset[str] | None:
    """Return the names in a setting such as AllowAccounts=phys,chem, or None if the setting allows all."""
    return None if value_or_none(value) is None or value == "ALL" else frozenset((value or "").split(","))


def minutes(text: str | None) -> int | None:
    """Convert a time limit ('2-12:00:00', '01:30:00', '10:30' or '90') to whole minutes, rounded down.

    If there is no limit or no value, return None.
    """
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
    """Convert a setting to a whole number. If there is no limit or no value, return None."""
    return int(text) if text is not None and text.isdigit() else None


def gpus(gres: str | None) -> list[Gpus]:
    """Return the GPUs in a node's Gres. For 'gpu:a100:4(S:0-1),gpu:8,nvme:1T': 4 of type a100, and 8 without a type.

    Gres may contain 'no_consume', and a count may end in a letter. A missing count is 1, as in gres.conf.
    """
    found = []
    for item in re.sub(r"\([^)]*\)", "", value_or_none(gres) or "").split(","):
        name, *rest = item.split(":")
        if name != "gpu":
            continue
        rest = [part for part in rest if part != "no_consume"]
        count = _COUNT.fullmatch(rest[-1]) if rest else None
        kind = rest[0] if len(rest) > 1 or (rest and not count) else ""
        found.append(Gpus(kind, int(count[1]) * 1024 ** _POWER[count[2]] if count else 1))
    return found
