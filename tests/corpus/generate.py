"""Write the parts of cases that are too large or too regular to store: dumps, long logs, hostile pickles.

`generate` in truth.yaml names one function here and its arguments. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.corpus.recorder import recorder

START_NS = 1_760_000_000_000_000_000


def _call(
    number: int,
    op: str,
    state: str,
    size: int,
    group: Sequence[str],
    line: int = 41,
    out: int = 0,
    timing: bool = False,
) -> dict[str, Any]:
    """Return one entry of a flight recorder as torch 2.4 and later write it.

    timing: the job has TORCH_NCCL_ENABLE_TIMING=1. Without it, the recorder never has the start of a call on the device.
    """
    created = START_NS + number * 1_000_000_000
    over = state == "completed"
    begun = created + 10_000 if timing and state != "scheduled" else None
    return {
        "frames": [
            {
                "name": op,
                "filename": "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py",
                "line": 2810,
            },
            {"name": "train", "filename": "train.py", "line": line},
        ],
        "record_id": number - 1,
        "pg_id": int(group[0]),
        "process_group": list(group),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": created,
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_sizes": [[out or size]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": begun,
        "time_discovered_completed_ns": created + 900_000 if over else None,
        "retired": over,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def dumps(
    folder: Path,
    world: int,
    done: int = 80,
    last: Mapping[int, Sequence[Sequence[Any]]] | None = None,
    missing: Sequence[int] = (),
    truncated: Sequence[int] = (),
    form: str = "pickle",
    description: str = "default_pg",
    group: Sequence[int] | None = None,
) -> None:
    """Write a flight-recorder dump for each rank.

    done: all_reduces that every rank completed. last: for each rank its further calls [op, state, size, output size]; ranks
    that it omits made none. A state `started` implies that the job had TORCH_NCCL_ENABLE_TIMING=1. group: the members of the group that the calls use, default all ranks.
    """
    name = ("0", description) if group is None else ("1", description)
    members = list(range(world)) if group is None else list(group)
    timing = any(call[1] == "started" for calls in (last or {}).values() for call in calls)
    for rank in range(world):
        if rank in missing:
            continue
        calls = []
        if rank in members:
            calls = [
                _call(number, "all_reduce", "completed", 1024, name, timing=timing) for number in range(1, done + 1)
            ]
            for extra, (op, state, size, *more) in enumerate((last or {}).get(rank, ())):
                calls.append(_call(done + 1 + extra, op, state, size, name, 57, *more, timing=timing))
        groups = {"0": {"name": "0", "desc": "default_pg" if group else description, "ranks": str(list(range(world)))}}
        if group is not None:
            groups["1"] = {"name": "1", "desc": description, "ranks": str(members)}
        document = {
            "version": "2.10",
            "nccl_version": "2.27.5",
            "pg_config": groups,
            "pg_status": {
                name[0]: {
                    "last_enqueued_collective": len(calls),
                    "last_started_collective": sum(call["state"] != "scheduled" for call in calls),
                    "last_completed_collective": sum(call["state"] == "completed" for call in calls),
                }
            },
            "entries": calls,
        }
        data = pickle.dumps(document, 2) if form == "pickle" else json.dumps(document).encode()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data[: len(data) // 2] if rank in truncated else data)


def long_log(folder: Path, megabytes: int, error: Sequence[str], error_at: float, name: str = "train.log") -> None:
    """Write a log of steps with `error` at the share `error_at` of its size (1: at the end)."""
    block = "".join(
        f"0: step {number:07d} loss 2.{number % 1000:03d} tokens/s 184{number % 100:02d}\n" for number in range(20_000)
    )
    blocks = max(1, megabytes * 1_000_000 // len(block))
    where = min(blocks - 1, int(blocks * error_at)) if error_at < 1 else blocks
    with (folder / name).open("w") as file:
        for number in range(blocks):
            if number == where:
                file.write("\n".join(error) + "\n")
            file.write(block)
        if where == blocks:
            file.write("\n".join(error) + "\n")


def large_dump(folder: Path, megabytes: int, world: int, culprit: int) -> None:
    """Write dumps of which the first has `megabytes`: rank `culprit` did not make the last call."""
    last = {rank: [["all_reduce", "scheduled", 4096]] for rank in range(world) if rank != culprit}
    dumps(folder, world, 100, last)
    first = folder / "nccl_trace_rank_0"
    document = pickle.loads(first.read_bytes())
    kept = document["entries"]
    count = megabytes * 1_000_000 // 1_000
    old = [_call(number + 1, "all_reduce", "completed", 1024, ("0", "default_pg")) for number in range(count)]
    for number, call in enumerate(old):
        # The same numbers as in the other dumps at the end; before that, calls that the other recorders overwrote.
        call["collective_seq_id"] = call["op_id"] = number - count + 1
        call["frames"] = call["frames"] * 3
    document["entries"] = [call for call in old if call["collective_seq_id"] < 1][:-1] + kept
    first.write_bytes(pickle.dumps(document, 2))


def nested_pickle(folder: Path, depth: int = 60) -> None:
    """Write a pickle of less than 400 bytes whose tuples, memoized, contain 2**depth items when walked."""
    data = b"\x80\x02)q\x00"  # an empty tuple, memo 0
    for _ in range(depth):
        data += b"h\x00h\x00\x86q\x00"  # the pair (memo 0, memo 0) becomes memo 0
    (folder / "nccl_trace_rank_0").write_bytes(data + b"h\x00.")


def calling_pickle(folder: Path) -> None:
    """Write a pickle that creates the file `ran` in the working folder if a reader loads it without restrictions."""
    text = b"open('ran', 'w').close()"
    data = b"\x80\x02cbuiltins\nexec\nX" + len(text).to_bytes(4, "little") + text + b"\x85R."
    (folder / "nccl_trace_rank_0").write_bytes(data)


def huge_ranks(folder: Path) -> None:
    """Write two dumps whose group claims a rank of twelve digits."""
    dumps(folder, 2, 80, {0: [["all_reduce", "scheduled", 8]]}, form="json")
    for rank in range(2):
        path = folder / f"nccl_trace_rank_{rank}"
        document = json.loads(path.read_text())
        document["pg_config"]["0"]["ranks"] = "[999999999999, 5]"
        path.write_text(json.dumps(document))


FUNCTIONS: Mapping[str, Callable[..., None]] = {
    function.__name__: function
    for function in (dumps, long_log, large_dump, nested_pickle, calling_pickle, huge_ranks, recorder)
}


def generate(folder: Path, request: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what `generate` of a truth.yaml requests into `folder`."""
    for name, arguments in request.items():
        FUNCTIONS[name](folder, **arguments)
