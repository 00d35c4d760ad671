"""Defines the files in which the ranks of `hpcinit drill` record their steps, and reads them.

A rank writes one line per optimizer step, and one per file that it creates outside of the drill's folder. The drill
sets the environment variable ENV_DRILL to a new folder for each attempt. runtime/drill_recorder.py writes the lines.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.records.run_folder import from_known_fields

ENV_DRILL = "HPCINIT_DRILL"  # environment variable: the folder of this attempt. Ranks may write anywhere in its parent
OUTSIDE = "outside.jsonl"  # {path, action, refused} for each file that a rank changed, or tried to change, elsewhere
PROGRESS = "progress.jsonl"  # {step, time, values} for each run.progress() of rank 0; time: seconds since 1970
# While the file PAUSE exists, a rank appends {seen, path, torn} to CHANGES before it changes a file, and then waits
# until the file `seen` exists.
PAUSE, CHANGES = "pause", "changes.jsonl"
# Keys of Step.rng. OWN: prefix of generators that the program created. LOADER, SHUFFLE: a loader, or a shuffling
# sampler, uses torch's default generator.
OWN, LOADER, SHUFFLE = "own ", "loader", "shuffle"
COPY = "copy "  # in Step.variables: tensors that have the shapes of the weights, such as a moving average (EMA)


@dataclass(frozen=True)
class Step:
    """The state of a rank just before an optimizer step.

    at: the size of the rank's log, in bytes.
    time: seconds since 1970.
    lr: the learning rate of each parameter group.
    weights, state_sum: the sums of the absolute values of the parameters and of the optimizer's state.
    states: the number of tensors in the optimizer's state.
    rng: a checksum of the random state of each library, before the first forward pass of the step.
    batch: a checksum of the inputs since the previous step, or 0 if there were none.
    inputs: how many input tensors `batch` contains.
    passes: how many passes over its training data the program has started, or 0 if it uses no DataLoader.
    generators: a number for each generator that the program created, by its key in `rng`. A new generator gets a new
        number.
    variables: the program's variables by name: numbers, lengths of lists, and sums of tensors.
    """

    at: int
    time: float
    lr: tuple[float, ...]
    weights: float
    state_sum: float
    states: int
    rng: dict[str, int]
    batch: int
    inputs: int = 0
    passes: int = 0
    generators: dict[str, int] = field(default_factory=dict)
    variables: dict[str, float] = field(default_factory=dict)


def append(path: Path, document: dict[str, Any]) -> None:
    """Append a line of JSON to the file in one write.

    If the disk is full, write nothing, because a full disk must not end the program.
    """
    with contextlib.suppress(OSError):
        safe_files.append(path, json.dumps(document) + "\n")


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the complete JSON lines of a file from byte `start` on, and the byte at which the next line starts."""
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
    """Return the files that the ranks created outside of the drill's folder, in all attempts."""
    reports = [one for path in root.glob(f"attempt-*/{OUTSIDE}") for one in read_lines(path)[0]]
    return [str(one["path"]) for one in reports if not one["refused"]]


def steps(folder: Path, rank: int) -> list[Step]:
    """Return the recorded optimizer steps of a rank. The list is empty if no torch optimizer took a step."""
    return [from_known_fields(Step, one) for one in read_lines(folder / f"rank-{rank}.jsonl")[0]]
