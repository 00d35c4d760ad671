"""The heartbeats that a node's ranks send during training: heartbeats/JOB/HOST.json in the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.records import run_folder

FOLDER = "heartbeats"
STOPPED, IN_KERNEL, GONE, MUTE = "stopped", "in the kernel", "gone", "mute"  # values of RankHeartbeat.state
FRESH_PERIODS = 3  # a heartbeat that is late by this many periods shows that its thread does not run


@dataclass(frozen=True)
class RankHeartbeat:
    """The heartbeat of one rank.

    step: the last training step that the rank reported, or -1.
    silent_s: seconds since that step, or None if the rank has not reported any.
    state: '' while the rank's heartbeat thread runs. Otherwise, why it does not run: the process is 'stopped', 'in the
        kernel', 'gone', or 'mute' (C code holds the GIL).
    """

    rank: int
    pid: int
    step: int
    silent_s: float | None
    state: str = ""


@dataclass(frozen=True)
class NodeHeartbeats:
    """The heartbeats of all ranks on one node.

    time: when they were written, in seconds since 1970, by the node's clock.
    """

    host: str
    time: float
    heartbeats: tuple[RankHeartbeat, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read(folder: Path) -> list[NodeHeartbeats]:
    """Return the last heartbeats of every node in `folder` (heartbeats/JOB of a run), sorted by host.

    Unreadable files are skipped.
    """
    return list(run_folder.read_records(NodeHeartbeats, folder, "*.json"))
