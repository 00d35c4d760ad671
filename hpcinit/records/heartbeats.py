"""What the ranks of a node tell of themselves while they train: beats/JOB/HOST.json in the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "beats"
STOPPED, IN_KERNEL, GONE, MUTE = "stopped", "in the kernel", "gone", "mute"  # values of Beat.state
FRESH_PERIODS = 3  # a thread that has not looked for so many periods does not run


@dataclass(frozen=True)
class RankHeartbeat:
    """One rank. step: the last it told, -1 before the first. silent_s: since it told one; None before the first.

    state: '' while its thread runs; else what the node sees of the process: 'stopped', 'in the kernel', 'gone', 'mute'.
    """

    rank: int
    pid: int
    step: int
    silent_s: float | None
    state: str = ""


@dataclass(frozen=True)
class NodeHeartbeats:
    """host: its name. time: when this was written, in seconds since 1970 by the node's own clock."""

    host: str
    time: float
    beats: tuple[RankHeartbeat, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read(folder: Path) -> list[NodeHeartbeats]:
    """All nodes' last words in `folder`, which is beats/JOB of a run, by host; what cannot be read is left out."""
    found = []
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError:
        return []
    for path in paths:
        try:
            document = json.loads(path.read_text())
            beats = tuple(RankHeartbeat(**beat) for beat in document["beats"])
            found.append(NodeHeartbeats(document["host"], document["time"], beats))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being replaced, or of another version
    return found
