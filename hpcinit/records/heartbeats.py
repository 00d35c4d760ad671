"""The heartbeats of a node's ranks during training: heartbeats/JOB/HOST.json in the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.records import run_folder

FOLDER = "heartbeats"
STOPPED, IN_KERNEL, GONE, MUTE = "stopped", "in the kernel", "gone", "mute"  # values of RankHeartbeat.state
FRESH_PERIODS = 3  # a heartbeat thread that is late by this many periods does not run


@dataclass(frozen=True)
class RankHeartbeat:
    """The heartbeat of one rank.

    step: the last reported one, or -1. silent_s: seconds since then, or None if there is none. state: '' while its
    thread runs; else the state of its process: 'stopped', 'in the kernel', 'gone', 'mute' (in C code).
    """

    rank: int
    pid: int
    step: int
    silent_s: float | None
    state: str = ""


@dataclass(frozen=True)
class NodeHeartbeats:
    """The heartbeats of one node. time: when they were written, in seconds since 1970 by the node's clock."""

    host: str
    time: float
    heartbeats: tuple[RankHeartbeat, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def read(folder: Path) -> list[NodeHeartbeats]:
    """Return the last heartbeats of all nodes in `folder` (heartbeats/JOB of a run), sorted by host.

    Skip unreadable files.
    """
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError:
        return []
    return [found for path in paths if (found := run_folder.read_record(NodeHeartbeats, path))]
