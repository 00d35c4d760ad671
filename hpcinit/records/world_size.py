"""Records a process group whose world size differs from the job's: world-size.json in the run folder.

This happens if a program starts ranks itself, inside ranks that hpcinit started. Each of them creates a small process
group that trains separately, often into the same checkpoint folder, and the job still ends as COMPLETED.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.records import run_folder

if TYPE_CHECKING:
    from hpcinit.records.spec import Spec


@dataclass(frozen=True)
class WrongWorldSize:
    """A process group whose size differs from the job's.

    launcher: what started the ranks of the group.
    world_size: the number of ranks in the group.
    host, pid: where rank 0 of the group runs.
    ranks: the number of ranks in the job.
    shape: the nodes and ranks of the job, such as '2 nodes x 4 ranks', or '2 nodes x 4 ranks + 1 node x 1 rank' for a
        heterogeneous job.
    """

    launcher: str
    world_size: int
    host: str
    pid: int
    ranks: int
    shape: str

    def __str__(self) -> str:
        return (
            f"{self.summary()} ({self.shape}): each such group is a separate training run. "
            f"Started by {self.launcher} (pid {self.pid} on {self.host}). hpcinit already starts one process per rank: "
            "submit the program itself (-- train.py), or set ranks_per_node=1 to start one launcher per node"
        )

    def summary(self) -> str:
        """Return a short description, such as 'a process group of 2 ranks in a job of 4 ranks'."""
        return f"a process group of {_ranks(self.world_size)} in a job of {_ranks(self.ranks)}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def differs(spec: Spec, size: int, nodes: int) -> bool:
    """Return whether a group of `size` ranks on `nodes` nodes differs from the submission.

    With one rank per node, each rank may be a launcher that starts more ranks. A group of any size is then fine if it
    spans all nodes.
    """
    if nodes == spec.nodes and all(part.ranks_per_node == 1 for part in spec.parts):
        return False
    return (size, nodes) != (spec.world_size, spec.nodes)


def record(folder: Path, found: WrongWorldSize) -> None:
    """Write `found` to world-size.json, unless an earlier call for this run did so. Raise OSError if that fails."""
    path = folder / run_folder.WORLD_SIZE
    new = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        new.write_text(json.dumps(asdict(found)) + "\n")
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink(missing_ok=True)


def read(folder: Path) -> WrongWorldSize | None:
    """Return what record() wrote for the run in `folder`, or None if it wrote nothing or the file cannot be read."""
    return run_folder.read_record(WrongWorldSize, folder / run_folder.WORLD_SIZE)
