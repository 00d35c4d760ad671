"""What a rank reports to `hpcinit drill`: a line for each optimizer step, and one for each file outside of its folder.

The drill sets ENV_DRILL to a new folder for each attempt. runtime/drill_recorder.py writes, hpcinit/drill reads.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.records.run_folder import from_known_fields

ENV_DRILL = "HPCINIT_DRILL"  # environment variable: the folder of this attempt. All files in its parent may be written
OUTSIDE = "outside.jsonl"  # {path, action, refused} of each file that a rank wrote elsewhere, or wanted to
PROGRESS = "progress.jsonl"  # {step, time, values} of each run.progress() of rank 0; time: since 1970


@dataclass(frozen=True)
class Step:
    """One optimizer step of a rank, as it was before the step.

    at: size of the rank's log. time: since 1970. lr: learning rate of each parameter group. weights, state_sum: sums of
    absolute values of the parameters and of the optimizer's state, whose number of tensors is `states`. rng: checksums
    of the random states by library. batch: checksum of the inputs since the step before, 0 without any.
    """

    at: int
    time: float
    lr: tuple[float, ...]
    weights: float
    state_sum: float
    states: int
    rng: dict[str, int]
    batch: int


def append(path: Path, document: dict[str, Any]) -> None:
    """Append a JSON line in one write, or nothing if the disk is full: that must not end the program."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(document).encode() + b"\n")
        finally:
            os.close(descriptor)


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the complete JSON lines of a file from byte `start` on, and the position of the next one."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a line that a kill has cut
                found.append(json.loads(line))
        return found, start + len(whole)
    return [], start


def created_outside(root: Path) -> list[str]:
    """Return what the ranks of all attempts have created outside of the drill's folder."""
    reports = [one for path in root.glob(f"attempt-*/{OUTSIDE}") for one in read_lines(path)[0]]
    return [str(one["path"]) for one in reports if not one["refused"]]


def steps(folder: Path, rank: int) -> list[Step]:
    """Return the steps of a rank; [] if it made none, or not with an optimizer of torch."""
    return [from_known_fields(Step, one) for one in read_lines(folder / f"rank-{rank}.jsonl")[0]]
