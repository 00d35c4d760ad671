"""How long does `hpcinit why` take for large dumps of the flight recorder and for a log of many failing ranks, and how
much memory does it use?

    python -m benchmarks.dumps [--share 1.0]

It measures whole processes. The dumps are written for this benchmark, as torch writes them: pickles of protocol 2 and
JSON. In each folder one rank has not made the last call. In the log of srun, each rank fails with its own message.
`--share` changes the size of all dumps, and the number of ranks in the log."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MB = 1_000_000
FRAMES = [{"name": f"f{number}", "filename": f"/opt/train/model_{number}.py", "line": number} for number in range(40)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the sizes below")
    options = parser.parse_args(arguments)
    print("| dumps | size of each, MB | wall s | CPU s | peak memory MB | first line |\n|---|--:|--:|--:|--:|---|")
    for ranks, large, form, frames in (
        (4, 200 * MB, "pickle", 0),
        (4, 200 * MB, "pickle", 40),
        (4, 200 * MB, "JSON", 8),
        (64, 5 * MB, "pickle", 8),
        (512, MB // 5, "pickle", 8),
    ):
        with tempfile.TemporaryDirectory() as place:
            if (writer := os.fork()) == 0:  # a child's peak memory counts from that of its parent
                _write(Path(place), ranks, int(large * options.share), form, frames)
                os._exit(0)
            os.waitpid(writer, 0)
            sizes = sorted(path.stat().st_size for path in Path(place).iterdir())
            print(f"| {ranks}, {form}, {frames} frames | {sizes[-1] / MB:.1f} | {_measure(place)} |", flush=True)
    for ranks in (1_000, 4_000, 16_000):
        with tempfile.TemporaryDirectory() as place:
            log = Path(place, "job.log")
            log.write_text(failing_ranks(int(ranks * options.share)))
            print(f"| a log of {ranks:,} ranks | {log.stat().st_size / MB:.1f} | {_measure(str(log))} |", flush=True)
    return 0


def failing_ranks(ranks: int) -> str:
    """Return a log of `srun -l` in which each rank fails with another message."""
    lines = []
    for rank in range(ranks):
        error = f"RuntimeError: shard {rank} is not readable"
        traceback = [
            "Traceback (most recent call last):",
            '  File "/home/u/train.py", line 8, in main',
            "    load()",
            error,
        ]
        lines += [f"{rank}: {line}" for line in traceback]
    lines += [f"srun: error: n{rank // 8}: task {rank}: Exited with exit code 1" for rank in range(ranks)]
    return "\n".join(lines)


def _write(folder: Path, ranks: int, size: int, form: str, frames: int) -> None:
    """Write dumps of `ranks` ranks; of four, only the first one is large. Rank 1 has not made the last call."""
    one = len(_dump(2_000, 1, ranks, form, frames)) - len(_dump(1_000, 1, ranks, form, frames))
    calls = size * 1_000 // one
    for rank in range(ranks):
        first = 1 if ranks > 4 or rank == 0 else max(calls - 2_000, 1)
        document = _dump(calls - (rank == 1), first, ranks, form, frames, waits=rank != 1)
        (folder / f"trace_rank_{rank}").write_bytes(document)


def _dump(calls: int, first: int, ranks: int, form: str, frames: int, *, waits: bool = False) -> bytes:
    entries = [
        _call(number, frames, "started" if waits and number == calls else "completed")
        for number in range(first, calls + 1)
    ]
    document = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {"0": {"last_enqueued_collective": calls}},
        "entries": entries,
    }
    return json.dumps(document).encode() if form == "JSON" else pickle.dumps(document, 2)


def _call(number: int, frames: int, state: str) -> dict[str, Any]:
    started = 1_795_338_319_044_102_866 + 1_000 * number
    done = started if state == "completed" else None
    return {
        "frames": [FRAMES[at % len(FRAMES)] for at in range(number, number + frames)],
        "record_id": number - 1, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce", "state": state, "is_p2p": False,
        "time_created_ns": 1_795_338_319_044_102_866 + number, "time_discovered_started_ns": started,
        "time_discovered_completed_ns": done, "retired": done is not None, "timeout_ms": 600_000,
        "input_sizes": [[number % 97, 1024]], "output_sizes": [[number % 97, 1024]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
    }  # fmt: skip


def _measure(folder: str) -> str:
    """Return wall time, CPU time, peak memory and the first line of `hpcinit why FOLDER`."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcinit", "why", folder], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall, cpu = time.monotonic() - started, used.ru_utime + used.ru_stime
    return f"{wall:.1f} | {cpu:.1f} | {used.ru_maxrss // 1000} | {text.splitlines()[0][:48]}"


if __name__ == "__main__":
    sys.exit(main())
