"""The program of the process that writes a rank's part of a checkpoint to the disk. It never imports torch.

See background_save.py.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hpcinit.base import processes, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import HpcinitError
from hpcinit.runtime.process_state import state
from hpcinit.train.checkpoint import checkpoint_folder
from hpcinit.train.checkpoint.background_save import DONE, FAILED
from hpcinit.train.checkpoint.checkpoint_folder import BUFFER, Description, File, Unfinished
from hpcinit.train.checkpoint.owner import Owner

WRITTEN = "written-{rank:05d}.json"  # a file in the unfinished step's folder: this rank's part is on the disk
POLL_S = 0.2
REMOVAL_S = 3600.0  # practically no limit, because the rank kills a writer that takes too long
REQUEST_BYTES, MOST_FILES = 1 << 18, 16


def main(channel_descriptor: int, rank_pid: int) -> None:
    """Write each checkpoint that the rank requests, until the rank closes the channel.

    channel_descriptor: the socket to the rank.
    rank_pid: the process id of the rank.
    """
    processes.die_with_parent(rank_pid)
    with socket.socket(fileno=channel_descriptor) as channel:
        while True:
            message, files, _, _ = socket.recv_fds(channel, REQUEST_BYTES, MOST_FILES)
            if not message:
                return
            channel.send(DONE if save(json.loads(message), files) else FAILED)


def save(request: Mapping[str, Any], descriptors: Sequence[int]) -> bool:
    """Save this rank's part of a checkpoint. On rank 0, also publish the checkpoint when all parts are complete.

    Return whether that worked. If not, print a warning.
    """
    path, rank, step = Path(request["path"]), request["rank"], request["described"]["step"]
    try:
        for (name, size), descriptor in zip(request["files"], descriptors, strict=True):
            _copy(descriptor, size, path, path / name)
        mine = checkpoint_folder.files_of(path, [name for name, _ in request["files"]], rank)
        if rank:
            text = json.dumps({name: asdict(file) for name, file in mine.items()})
            safe_files.write_atomically(path / WRITTEN.format(rank=rank), text)
        else:
            _publish(request, path, mine)
    except Exception as error:
        text = str(error) if isinstance(error, HpcinitError) else f"{type(error).__name__}: {error}"
        gone, left = not path.exists(), checkpoint_folder.what_is_left(path.parent)
        checkpoint_folder.abandon(path)
        if gone:
            text = "another rank failed to write its part, or another job has removed the unfinished checkpoint"
        if rank == 0 or not gone:  # otherwise the writer that failed has printed the reason
            where = f"rank {rank} on {os.uname().nodename}"
            say(f"warning: cannot save step {step} in {path.parent}: {where}: {text}; {left}; training continues")
        checkpoint_folder.wait_for_removals(REMOVAL_S)  # the next save needs the space
        return False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True


def _publish(request: Mapping[str, Any], path: Path, mine: Mapping[str, File]) -> None:
    owner = Owner(**request["owner"])
    # Copy the rank's state: it has owned the folder, so this process must not claim the folder again; and the damaged
    # checkpoints that the rank has found.
    state.claimed.add((path.parent, owner.token))
    state.damaged.update({(Path(damaged), save): wrong for damaged, save, wrong in request["damaged"]})
    files = {**mine, **_of_other_ranks(path, request["described"]["world_size"])}
    description = Description(**request["described"], files=files, save=request["save"], owner=owner)
    checkpoint_folder.publish(Unfinished(path, request["save"], owner), description)
    if request["keep"] is not None:
        checkpoint_folder.remove_later(partial(checkpoint_folder.prune, path.parent, request["keep"]))
        checkpoint_folder.wait_for_removals(REMOVAL_S)  # the next save needs the space


def _of_other_ranks(path: Path, world_size: int) -> dict[str, File]:
    """Wait until the other ranks have written their parts, and return the files in these parts.

    Raise FileNotFoundError if a rank has given up this step.
    """
    awaited = {WRITTEN.format(rank=rank) for rank in range(1, world_size)}
    while not awaited <= set(os.listdir(path)):  # noqa: PTH208 - names only
        time.sleep(POLL_S)
    found: dict[str, File] = {}
    for name in awaited:
        found |= {each: File(**file) for each, file in json.loads((path / name).read_text()).items()}
        (path / name).unlink()
    return found


def _copy(descriptor: int, size: int, unfinished: Path, path: Path) -> None:
    """Copy the file to `path` and sync it. If needed, create the folder of `path`.

    The folder `unfinished` is never created again, because another job may have removed it on purpose.
    """
    if path.parent != unfinished:
        path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        for begin in range(0, size, BUFFER):
            stream.write(os.pread(descriptor, min(BUFFER, size - begin), begin))
        stream.flush()
        os.fsync(stream.fileno())
