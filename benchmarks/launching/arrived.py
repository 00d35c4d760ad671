"""Record for each rank the end of its first all-reduce and its memory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

KEYS = ("Pss", "Rss", "Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty")  # kB


def memory(pid: str) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {word[0].rstrip(":"): int(word[1]) for line in lines if (word := line.split())[0].rstrip(":") in KEYS}


def at(when: float, barrier: object) -> None:
    """Write the record. when: time.monotonic() at the end of the all-reduce. barrier: a function that waits for all."""
    barrier()  # type: ignore[operator]
    found = {"at": when, "memory": [memory("self")]}
    parent = str(os.getppid())
    if os.environ["LOCAL_RANK"] == "0" and not Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
        found["memory"].append(memory(parent))  # type: ignore[attr-defined]
    place = Path(os.environ["BENCH_OUT"])
    temporary = place / f"{os.environ['RANK']}.tmp"
    temporary.write_text(json.dumps(found))
    temporary.rename(place / f"{os.environ['RANK']}.json")
    barrier()  # type: ignore[operator]


def now() -> float:
    return time.monotonic()
