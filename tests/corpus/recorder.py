"""Write flight-recorder dumps of several process groups, sends, receives and batches, as torch 2.10 to 2.13 writes them.

`generate.dumps` writes those of one group. Here, `plan` is what the ranks call, in order. Each step is one of:

    {repeat: 20, plan: [...]}                                     the same steps 20 times
    {op: all_reduce, group: tp, size: [4096], state: scheduled}   a collective
    {send: [0, 1], group: pp, size: [8, 512]}                     a send of rank 0 and the receive of rank 1
    {batch: [[0, 1], [1, 0]], group: cp}                          a batch_isend_irecv of these sends and receives

A step without `state` is completed. `ranks` limits the ranks that call it, `end: send` or `end: recv` the side of a message.
`for` has other values for some ranks, such as {3: {state: started}}.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_NS = 1_763_000_000_000_000_000
NAMES = {"_all_gather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"}
NAMES |= {"all_to_all": "all_to_all_single", "all_reduce_barrier": "barrier", "coalesced": "batch_isend_irecv"}
Step = Mapping[str, Any]


class _Rank:
    """The recorder of one rank. clock_s: how much its clock differs from rank 0's, in seconds."""

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]], clock_s: float, timing: bool) -> None:
        self.rank, self.clock_s, self.timing = rank, clock_s, timing
        self.config = {
            str(number): {"name": str(number), "desc": name, "ranks": str(list(members))}
            for number, (name, members) in enumerate(groups.items())
            if rank in members
        }
        self.names = {entry["desc"]: name for name, entry in self.config.items()}
        self.counts = {name: [0, 0, 0] for name in self.config}  # collectives, messages, both
        self.entries: list[dict[str, Any]] = []
        self.status: dict[str, dict[str, int]] = {}

    def add(
        self, op: str, step: Step, at_s: float, message: bool = False, inside: bool = False, new: bool = True
    ) -> None:
        """Record a call. inside: it is part of a batch, whose calls have no state. new: it has a new sequence number."""
        step = {**step, **step.get("for", {}).get(self.rank, {})}
        op, state = step.get("op", op), "scheduled" if inside else step.get("state", "completed")
        name = self.names[step.get("group", "default_pg")]
        local = list(self.config).index(name)  # each process numbers its own groups
        count = self.counts[name]
        count[message] += new
        count[2] += op != "coalesced"
        created = START_NS + int((at_s + self.clock_s) * 1e9)
        sizes = [] if op == "coalesced" else [step.get("size", [4096])]
        kinds = [] if op == "coalesced" else [step.get("dtype", "BFloat16")]
        begun = created + 40_000 if self.timing and state != "scheduled" else None
        python = NAMES.get(op, "isend" if op.startswith("send") else "irecv" if op.startswith("recv") else op)
        at = (step.get("function", "train_step"), step.get("file", "train.py"), step.get("line", 88))
        self.entries.append(
            {
                "frames": [
                    dict(zip(("name", "filename", "line"), frame, strict=True))
                    for frame in (
                        (python, "/opt/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", 3025),
                        ("wrapper", "/opt/env/lib/python3.12/site-packages/torch/distributed/c10d_logger.py", 83),
                        at,
                        ("<module>", "train.py", 240),
                    )
                ],
                "record_id": len(self.entries),
                "pg_id": local,
                "process_group": (name, self.config[name]["desc"]),
                "thread_name": "pt_main_thread",
                "thread_id": str(139_800_000_000_000 + self.rank * 4096),
                "collective_seq_id": count[0],
                "p2p_seq_id": count[1],
                "op_id": count[2],
                "profiling_name": f"nccl:{op}",
                "time_created_ns": created,
                "input_sizes": sizes,
                "input_dtypes": kinds,
                "output_sizes": [step["out"]] if "out" in step else sizes,
                "output_dtypes": kinds,
                "state": state,
                "time_discovered_started_ns": begun,
                "time_discovered_completed_ns": created + 2_000_000 if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": message,
            }
        )
        if inside:
            return
        status = self.status.setdefault(
            str(local), dict.fromkeys((f"last_{what}_collective" for what in ("enqueued", "started", "completed")), -1)
        )
        status["last_enqueued_collective"] = count[message]
        if begun:
            status["last_started_collective"] = count[message]
        if state == "completed":
            status["last_completed_collective"] = count[message]

    def dump(self, form: str, buffer: int) -> bytes:
        """Return the dump with the newest `buffer` calls."""
        entries = self.entries[-buffer:]
        document = {"version": "2.10", "pg_config": self.config, "comm_lib_version": "2.28.9", "pg_status": self.status}
        if form == "pickle":
            return pickle.dumps({**document, "entries": entries}, 2)
        # The JSON of torch has no stacks, 0 for an unknown time, and numbers of pg_status as text.
        plain = [
            {key: value or 0 if key.endswith("ed_ns") else value for key, value in call.items()} for call in entries
        ]
        for call in plain:
            del call["frames"]
        status = {name: {key: str(value) for key, value in fields.items()} for name, fields in self.status.items()}
        return json.dumps({**document, "pg_status": status, "entries": plain}).encode()


def _flat(plan: Sequence[Step]) -> Iterator[Step]:
    for step in plan:
        if "repeat" in step:
            for _ in range(step["repeat"]):
                yield from _flat(step["plan"])
        else:
            yield step


def _message(
    ranks: Mapping[int, _Rank], step: Step, members: Sequence[int], at_s: float, inside: dict[int, bool]
) -> None:
    """Record both ends of a send. inside: for each rank whether it is the first call of a batch, or empty without a batch."""
    source, target = step["send"]
    ends = step.get("end", "both")
    for rank, peer, word, arrow in ((source, target, "send", "->"), (target, source, "recv", "<-")):
        if ends in ("both", word) and rank in step.get("ranks", members):
            op = f"{word} {members.index(rank)}{arrow}{members.index(peer)}"
            first = inside.get(rank, True)
            ranks[rank].add(op, step, at_s, message=True, inside=bool(step.get("inside")), new=first)
            inside[rank] = False


def recorder(
    folder: Path,
    world: int,
    plan: Sequence[Step],
    groups: Mapping[str, Sequence[int]] | None = None,
    missing: Sequence[int] = (),
    clock_s: Mapping[int, float] | None = None,
    buffer: int = 2000,
    timing: bool = False,
    form: str = "pickle",
    every_s: float = 0.05,
    name: str = "nccl_trace_rank_",
) -> None:
    """Write a dump for each rank that makes calls of `plan`. groups: besides default_pg, in the order of their creation."""
    members = {"default_pg": list(range(world)), **(groups or {})}
    ranks = {rank: _Rank(rank, members, (clock_s or {}).get(rank, 0.0), timing) for rank in range(world)}
    for number, step in enumerate(_flat(plan)):
        at_s, own = number * every_s, members[step.get("group", "default_pg")]
        if "send" in step:
            _message(ranks, step, own, at_s, {})
        elif "batch" in step:
            first: dict[int, bool] = {}
            for part in step["batch"]:
                ends = {"end": part[2]} if len(part) > 2 else {}
                call = {**step, "send": part[:2], "inside": True, **ends}
                _message(ranks, call, own, at_s, first)
            for rank in first:
                ranks[rank].add("coalesced", step, at_s, message=True, new=False)
        else:
            for rank in step.get("ranks", own):
                ranks[rank].add(step["op"], step, at_s)
    folder.mkdir(exist_ok=True)
    for rank, recorded in ranks.items():
        if rank not in missing:
            (folder / f"{name}{rank}").write_bytes(recorded.dump(form, buffer))
