"""Runs small gloo programs with one process per rank, and shows where they block: `python replay_ranks.py PARENT`.

`hpcinit why RUN --replay` starts it (why/replay.py), possibly with the job's Python, so it imports nothing from
hpcinit. Each line of stdin is a program as JSON, and each line of stdout is the result of a program:

    program  groups: the ranks of each group. steps: the calls of each rank: [channel, group, what, peer, tag, after]
    result   states: for each rank, one character per call: 'n' not made, 'w' waits, 'f' finished. settled: whether all
             calls have finished or no rank can continue. error: why a rank failed, or ''

A channel is like a stream of a GPU: its calls run one after another, at the same time as the calls of other channels.
A call starts when the calls in `after` have finished on its rank. 'allreduce' waits for all ranks of the group. 'send'
and 'recv' wait for each other, because gloo sends a message only after the receiver has called. A rank
whose calls have all finished does not exit, because gloo reports an error if a peer has exited.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

WAITS, FINISHED, READY = b"wfr"
WINDOW_S, WINDOWS = 0.2, 4  # all threads must sleep during 4 windows of 0.2 s each
POLLS = 3  # gloo's threads wake up every 10 ms; after this many times, they have seen all data
LIMIT = timedelta(hours=1)  # gloo's timeout; the parent's deadline is earlier

Seen = dict[str, tuple[str, int]]


def main(parent: int) -> None:
    _die_with(parent)
    try:
        import torch.distributed  # noqa: PLC0415 - after prctl, because it takes seconds
    except ImportError as error:
        print(json.dumps({"no_torch": str(error)}), flush=True)
        return
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(replay(json.loads(line))), flush=True)


def replay(program: dict[str, Any]) -> dict[str, Any]:
    """Run one program until all its ranks have finished or are blocked, and return the result."""
    states = [mmap.mmap(-1, len(steps) + 1) for steps in program["steps"]]  # the last byte: whether the rank is ready
    ranks: list[int] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        try:
            for rank, own in enumerate(states):
                ranks.append(_fork(program, rank, own, Path(folder)))
            settled = _settle(ranks, states)
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            for pid in ranks:
                os.waitpid(pid, 0)
        error = next((path.read_text(errors="replace") for path in sorted(Path(folder).glob("error-*"))), "")
    made = [str(own[:-1].replace(b"\0", b"n"), "ascii") for own in states]
    return {"states": made, "settled": settled, "error": error}


def _fork(program: dict[str, Any], rank: int, states: mmap.mmap, folder: Path) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        _die_with(parent)
        _be(program, rank, states, folder)
    except BaseException as error:
        _fail(folder, rank, error)


def _be(program: dict[str, Any], rank: int, states: mmap.mmap, folder: Path) -> NoReturn:
    """Make the calls of a rank, then wait until the parent kills this process."""
    import torch  # noqa: PLC0415
    from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo  # noqa: PLC0415

    store = FileStore(str(folder / "store"), len(program["steps"]))
    groups = {}
    for number, members in enumerate(program["groups"]):
        if rank in members:
            prefix = PrefixStore(str(number), store)
            groups[number] = ProcessGroupGloo(prefix, members.index(rank), len(members), LIMIT)
    channels: dict[int, list[int]] = {}
    for place, step in enumerate(program["steps"][rank]):
        channels.setdefault(step[0], []).append(place)
    states[-1] = READY
    changed = threading.Condition()

    def make(places: Sequence[int]) -> None:
        try:
            for place in places:
                _, group, what, peer, tag, after = program["steps"][rank][place]
                with changed:
                    changed.wait_for(lambda after=after: all(states[other] == FINISHED for other in after))  # type: ignore[misc]
                    states[place] = WAITS
                arguments = () if what == "allreduce" else (peer, tag)
                getattr(groups[group], what)([torch.zeros(1)], *arguments).wait()
                with changed:
                    states[place] = FINISHED
                    changed.notify_all()
        except BaseException as error:
            _fail(folder, rank, error)

    for places in channels.values():
        threading.Thread(target=make, args=(places,), daemon=True).start()
    while True:
        signal.pause()


def _fail(folder: Path, rank: int, error: BaseException) -> NoReturn:
    with contextlib.suppress(OSError):
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}"[:2_000])
    os._exit(1)


def _settle(ranks: Sequence[int], states: Sequence[mmap.mmap]) -> bool:
    """Wait until all calls have finished, or no rank can continue. Return False if a rank has failed.

    No rank can continue if all threads have only slept or polled since the last change. It is not enough that nothing
    changes for some time, because this machine may be slow.
    """
    before: Seen | None = None
    last: list[bytes] = []
    windows = 0
    while True:
        time.sleep(WINDOW_S)
        now = [bytes(state) for state in states]
        if all(state == bytes([FINISHED]) * (len(state) - 1) + bytes([READY]) for state in now):
            return True
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in ranks):
            return False
        if now != last or any(state[-1] != READY for state in now):
            last, before, windows = now, None, 0
            continue
        threads = _threads(ranks)
        if before is None or before.keys() != threads.keys():
            before, windows = threads, 0
        elif _have_slept(before, threads):
            before, windows = threads, windows + 1
        if windows >= WINDOWS:
            return True


def _have_slept(before: Seen, now: Seen) -> bool:
    """Return whether all threads were idle between `before` and `now`.

    A thread is idle if it slept all the time, or if it polled: gloo's polling threads go to sleep again and again.
    """
    return bool(now) and all(
        (state == "S" and count == before[one][1]) or count >= before[one][1] + POLLS
        for one, (state, count) in now.items()
    )


def _threads(ranks: Sequence[int]) -> Seen:
    """Return the state of each thread of the ranks, and how often each thread has gone to sleep."""
    found: Seen = {}
    for pid in ranks:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                lines = (thread / "status").read_text(errors="replace").splitlines()
                fields = dict(line.split(":", 1) for line in lines if ":" in line)
                found[thread.name] = fields["State"].strip()[0], int(fields["voluntary_ctxt_switches"])
    return found


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.path[:] = [
        path for path in sys.path if path != str(Path(__file__).parent)
    ]  # none of them hides a module of torch
    main(int(sys.argv[1]))
