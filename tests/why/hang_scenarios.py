"""Hangs in the form of torch's recorder for NCCL, each with the verdict that a person would give.

Nothing is shared with the generator of random training runs (hang_dumps.py). A scenario is a Job, on which the calls of each
rank are listed in order with the state that its recorder would show.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Expected = set[tuple[int, str]]
NOT_CALLED, DEVICE_STUCK, MISMATCH, NO_DUMP = "not-called", "device-stuck", "mismatch", "no-dump"
DONE, STARTED, SCHEDULED = "completed", "started", "scheduled"


@dataclass
class Job:
    """groups: name -> (description, global ranks in the group's order). timed: TORCH_NCCL_ENABLE_TIMING=1."""

    groups: dict[str, tuple[str, Sequence[int]]]
    timed: bool = True
    kept: int = 2000
    silent: frozenset[int] = frozenset()
    entries: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    numbers: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # collective, p2p and op ids so far
    clock: int = 1_795_338_319_000_000_000

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for _, ranks in self.groups.values() for rank in ranks})

    def call(
        self, rank: int, group: str, kind: str, state: str = DONE, *, size: Sequence[int] = (8, 1024),
        out: Sequence[int] | None = None, times: int = 1, dtype: str = "BFloat16",
    ) -> None:  # fmt: skip
        for _ in range(times):
            numbers = self.numbers.setdefault((rank, group), [0, 0, 0])
            numbers[0] += 1
            self._entry(rank, group, f"nccl:{kind}", state, False, size, size if out is None else out, dtype)

    def all(self, group: str, kind: str, state: str = DONE, *, but: Iterable[int] = (), **more: Any) -> None:
        for rank in self.groups[group][1]:
            if rank not in but:
                self.call(rank, group, kind, state, **more)

    def send(self, rank: int, group: str, to: int, state: str = DONE) -> None:
        self._message(rank, group, f"send {self._in(group, rank)}->{self._in(group, to)}", state)

    def recv(self, rank: int, group: str, of: int, state: str = DONE) -> None:
        self._message(rank, group, f"recv {self._in(group, rank)}<-{self._in(group, of)}", state)

    def batch(self, rank: int, group: str, parts: Sequence[tuple[str, int]], state: str = DONE) -> None:
        """batch_isend_irecv: the parts have no events, so only the entry at the end changes its state."""
        self.numbers.setdefault((rank, group), [0, 0, 0])[1] += 1
        own = self._in(group, rank)
        for kind, peer in parts:
            arrow = "->" if kind == "send" else "<-"
            self._entry(rank, group, f"nccl:{kind} {own}{arrow}{self._in(group, peer)}", SCHEDULED, True, (4, 512))
        self._entry(rank, group, "nccl:coalesced", state, False, None)  # torch marks the end as no message

    def _in(self, group: str, rank: int) -> int:
        return list(self.groups[group][1]).index(rank)

    def _message(self, rank: int, group: str, name: str, state: str) -> None:
        self.numbers.setdefault((rank, group), [0, 0, 0])[1] += 1
        self._entry(rank, group, f"nccl:{name}", state, True, (4, 512))

    def _entry(
        self, rank: int, group: str, name: str, state: str, p2p: bool, size: Sequence[int] | None,
        out: Sequence[int] | None = None, dtype: str = "BFloat16",
    ) -> None:  # fmt: skip
        numbers, entries = self.numbers[rank, group], self.entries.setdefault(rank, [])
        numbers[2] += 1
        self.clock += 1_000_000
        out = size if out is None else out
        shown = SCHEDULED if state == STARTED and not self.timed else state
        entries.append(
            {
                "frames": [{"name": "forward", "filename": "model.py", "line": 8}],
                "record_id": len(entries),
                "pg_id": self._ids(rank).index(group),
                "process_group": (group.partition("@")[0], self.groups[group][0]),
                "thread_name": "pt_autograd_0",
                "thread_id": "140383866674048",
                "collective_seq_id": numbers[0],
                "p2p_seq_id": numbers[1],
                "op_id": numbers[2],
                "profiling_name": name,
                "time_created_ns": self.clock,
                "input_sizes": [] if size is None else [list(size)],
                "input_dtypes": [] if size is None else [dtype],
                "output_sizes": [] if out is None else [list(out)],
                "output_dtypes": [] if out is None else [dtype],
                "state": shown,
                "time_discovered_started_ns": self.clock if self.timed and shown != SCHEDULED else None,
                "time_discovered_completed_ns": self.clock if shown == DONE else None,
                "retired": shown == DONE,
                "timeout_ms": 600000,
                "is_p2p": p2p,
            }
        )

    def _ids(self, rank: int) -> list[str]:
        return [name for name, (_, ranks) in self.groups.items() if rank in ranks]

    def dumps(self) -> dict[int, dict[str, Any]]:
        return {rank: self._dump(rank) for rank in self.ranks if rank not in self.silent}

    def _dump(self, rank: int) -> dict[str, Any]:
        used = [name for name in self._ids(rank) if (rank, name) in self.numbers]
        config, status = {}, {}
        for name in used:  # a group is listed when its communicator is made, at its first call
            desc, ranks = self.groups[name]
            shown = name.partition("@")[0]
            config[shown] = {"name": shown, "desc": desc, "ranks": str(list(ranks))}
            last = self.numbers[rank, name][0]
            status[str(self._ids(rank).index(name))] = {
                "last_enqueued_collective": last or -1,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
        return {
            "version": "2.10",
            "pg_config": config,
            "comm_lib_version": "2.27.3",
            "pg_status": status,
            "entries": self.entries.get(rank, [])[-self.kept :],
            "nccl_comm_state": {},
        }

    def files(self, *, as_json: bool) -> dict[str, bytes]:
        """The files as torch writes them; its JSON omits an empty list of entries, and has texts in pg_status."""
        found = {}
        for rank, dump in self.dumps().items():
            name = f"nccl_trace_rank_{rank}"
            if not as_json:
                found[name] = pickle.dumps(dump, protocol=2)
                continue
            dump["pg_status"] = {k: {a: str(b) for a, b in v.items()} for k, v in dump["pg_status"].items()}
            found[name] = json.dumps({k: v for k, v in dump.items() if k != "entries" or v}).encode()
        return found


def moe(**more: Any) -> Job:
    """8 ranks: tensor groups of 2, expert groups of 4, data groups of 2, one step done in each."""
    groups: dict[str, tuple[str, Sequence[int]]] = {"0": ("default_pg", range(8))}
    groups |= {str(1 + at): ("tp", (2 * at, 2 * at + 1)) for at in range(4)}
    groups |= {"5": ("ep", (0, 1, 2, 3)), "6": ("ep", (4, 5, 6, 7))}
    groups |= {str(7 + at): ("dp", (at, at + 4)) for at in range(4)}
    job = Job(groups, **more)
    job.all("0", "all_reduce_barrier", size=(1,))
    for group in ("1", "2", "3", "4", "7", "8", "9", "10"):
        job.all(group, "all_reduce")
    for group in ("5", "6"):
        for rank in job.groups[group][1]:
            job.call(rank, group, "all_to_all", size=(100 + rank, 64), out=(90 - rank, 64))
    return job


def expert_rank_not_called() -> tuple[Job, Expected]:
    """Rank 5 never calls the second all_to_all, whose sizes differ. Its tp and dp peers wait for it elsewhere or not at
    all; the others have run ahead into their data groups."""
    job = moe()
    for rank in (0, 1, 2, 3):
        job.call(rank, "5", "all_to_all", size=(7 * rank + 1, 64), out=(3 * rank + 2, 64))
        job.call(rank, str(7 + rank), "all_reduce", STARTED)
    for rank in (4, 6, 7):
        job.call(rank, "6", "all_to_all", STARTED, size=(5 * rank, 64), out=(rank, 64))
        job.call(rank, str(3 + rank), "all_reduce", SCHEDULED)
    return job, {(5, NOT_CALLED)}


def device_stuck_hosts_ahead() -> tuple[Job, Expected]:
    """All hosts have called everything. Only rank 2's device has not finished its second all_reduce of tp."""
    job = moe()
    job.call(2, "2", "all_reduce", STARTED)
    job.call(3, "2", "all_reduce")
    for group in ("1", "3", "4"):
        job.all(group, "all_reduce")
    for group in ("5", "6"):
        job.all(group, "all_to_all", STARTED if group == "5" else DONE, but=[2])
    job.call(2, "5", "all_to_all", SCHEDULED)
    for rank in range(8):
        job.call(rank, str(7 + rank % 4), "all_reduce", SCHEDULED if rank < 4 else STARTED)
    return job, {(2, DEVICE_STUCK)}


def device_never_starts() -> tuple[Job, Expected]:
    """Rank 6's compute kernel hangs: its device has not started what its peers have, and nothing later."""
    job = moe()
    for rank in (4, 5, 7):
        job.call(rank, "6", "all_to_all", STARTED)
    job.call(6, "6", "all_to_all", SCHEDULED)
    job.all("4", "all_reduce", SCHEDULED)
    for rank in (0, 1, 2, 3):
        job.call(rank, "5", "all_to_all")
        job.call(rank, str(7 + rank), "all_reduce", STARTED)
    return job, {(6, DEVICE_STUCK)}


def overwritten_calls() -> tuple[Job, Expected]:
    """The recorder keeps 12 calls. Rank 3 has no entry of the expert group any more: only pg_status shows that it has
    made one call there, and it has not made the second."""
    job = moe(kept=12, timed=False)
    for rank in range(8):
        job.call(rank, str(1 + rank // 2), "all_reduce", times=30)
    for rank in (0, 1, 2):
        job.call(rank, "5", "all_to_all", SCHEDULED)
    return job, {(3, NOT_CALLED)}


def group_in_another_order() -> tuple[Job, Expected]:
    """new_group([3, 1], sort_ranks=False): rank 0 of the group is rank 3, whose message rank 1 never receives."""
    job = Job({"0": ("default_pg", range(4)), "1": ("pp", (3, 1)), "2": ("tp", (0, 1))})
    job.all("0", "broadcast")
    job.send(3, "1", 1)
    job.recv(1, "1", 3)
    job.send(3, "1", 1, STARTED)
    job.call(0, "2", "all_reduce", STARTED)
    return job, {(1, NOT_CALLED)}


def never_called_anything() -> tuple[Job, Expected]:
    """Rank 2 has not called anything at all: its dump has no entries and no groups."""
    job = Job({"0": ("default_pg", range(4)), "1": ("dp", (0, 2)), "2": ("dp", (1, 3))})
    for rank in (0, 1, 3):
        job.call(rank, "0", "all_reduce", STARTED)
    return job, {(2, NOT_CALLED)}


def groups_of_one_split() -> tuple[Job, Expected]:
    """split_group gives all its groups one name. Rank 1 has not called in its part; the other part is healthy."""
    job = Job({"0": ("default_pg", range(4)), "1@a": ("tp", (0, 1)), "1@b": ("tp", (2, 3))})
    job.all("0", "broadcast")
    job.all("1@b", "all_reduce", times=3)
    job.all("1@a", "all_reduce")
    job.call(0, "1@a", "all_reduce", STARTED)
    job.call(2, "0", "all_reduce", STARTED)
    job.call(3, "0", "all_reduce", STARTED)
    return job, {(1, NOT_CALLED)}


def unreceived_message_of_the_culprit() -> tuple[Job, Expected]:
    """Rank 1 has an asynchronous send that rank 0 would receive later; then its program stops before the all_reduce."""
    job = Job({"0": ("default_pg", range(4)), "1": ("pp", (0, 1)), "2": ("tp", (0, 1, 2, 3))})
    job.all("0", "broadcast")
    job.all("2", "all_reduce")
    job.send(1, "1", 0, STARTED)
    job.all("2", "all_reduce", STARTED, but=[1])
    return job, {(1, NOT_CALLED)}


def skipped_collective() -> tuple[Job, Expected]:
    """Rank 2 skips an all_reduce: its second call is the all_gather that the others call third."""
    job = Job({"0": ("default_pg", range(4))})
    job.all("0", "all_reduce")
    job.all("0", "all_reduce", STARTED, but=[2], size=(16,))
    job.call(2, "0", "_all_gather_base", STARTED, size=(4,), out=(16,))
    job.all("0", "_all_gather_base", SCHEDULED, but=[2], size=(4,), out=(16,))
    return job, {(2, MISMATCH)}


def pipeline() -> tuple[Job, Expected]:
    """1F1B over 4 stages: stage 2 computes forever, so stage 3 waits for its output and stage 1 for its gradient."""
    job = Job({"0": ("default_pg", range(4)), "1": ("pp", range(4))})
    job.all("0", "all_reduce_barrier", size=(1,))
    for rank, parts in ((0, [("send", 1)]), (1, [("recv", 0)]), (1, [("send", 2)]), (2, [("recv", 1)])):
        job.batch(rank, "1", parts)
    job.batch(3, "1", [("recv", 2)], STARTED)
    job.batch(0, "1", [("send", 1)])
    job.batch(1, "1", [("recv", 0)])
    job.batch(1, "1", [("send", 2), ("recv", 2)], STARTED)
    job.batch(0, "1", [("send", 1), ("recv", 1)], STARTED)
    return job, {(2, NOT_CALLED)}


def pipeline_device_stuck() -> tuple[Job, Expected]:
    """The batch of both directions between stages 1 and 2 has finished on stage 1 and not on stage 2."""
    job = Job({"0": ("default_pg", range(3)), "1": ("pp", range(3))})
    job.all("0", "all_reduce_barrier", size=(1,))
    job.batch(1, "1", [("send", 2), ("recv", 2)])
    job.batch(2, "1", [("send", 1), ("recv", 1)], STARTED)
    job.batch(1, "1", [("send", 0), ("recv", 0)])
    job.batch(0, "1", [("send", 1), ("recv", 1)])
    job.all("0", "all_reduce", STARTED, but=[2])
    job.call(2, "0", "all_reduce", SCHEDULED)
    return job, {(2, DEVICE_STUCK)}


def dead_rank() -> tuple[Job, Expected]:
    """Rank 6 left no dump; its expert group waits for it, and all others for that group."""
    job = moe(silent=frozenset([6]))
    job.all("6", "all_to_all", STARTED, but=[6])
    job.all("5", "all_to_all")
    for rank in (0, 1, 2, 3):
        job.call(rank, str(7 + rank), "all_reduce", STARTED)
    return job, {(6, NO_DUMP)}


def two_causes() -> tuple[Job, Expected]:
    """Rank 1 has not called in its tensor group; rank 7's device has not finished what rank 6's has."""
    job = moe()
    job.call(0, "1", "all_reduce", STARTED)
    job.call(6, "4", "all_reduce")
    job.call(7, "4", "all_reduce", STARTED)
    for rank in (2, 3):
        job.call(rank, "5", "all_to_all", STARTED)
    for rank in (4, 5, 6):
        job.call(rank, "6", "all_to_all", STARTED)
    job.call(7, "6", "all_to_all", SCHEDULED)
    return job, {(1, NOT_CALLED), (7, DEVICE_STUCK)}


def same_ranks_in_two_groups() -> tuple[Job, Expected]:
    """Two groups have the same ranks. Rank 3 has called in the one and not in the other; a group of one rank is idle."""
    groups: dict[str, tuple[str, Sequence[int]]] = {
        "0": ("default_pg", range(4)),
        "1": ("dp", range(4)),
        "2": ("dp_cp", range(4)),
        "3": ("cp", (3,)),
    }
    job = Job(groups, timed=False)
    job.all("0", "all_reduce")
    job.call(3, "3", "all_reduce", times=5)
    job.all("1", "_reduce_scatter_base", size=(16,), out=(4,), times=9)
    job.all("2", "_reduce_scatter_base", STARTED, but=[3], size=(16,), out=(4,))
    for rank in (0, 1, 2):
        job.call(rank, "1", "_all_gather_base", SCHEDULED, size=(4,), out=(16,), times=3)
    return job, {(3, NOT_CALLED)}


def compute_kernel_hangs_alone() -> tuple[Job, Expected]:
    """Rank 1's device hangs before a collective of a group of one rank; its tensor peer waits for its next call."""
    job = Job({"0": ("default_pg", range(2)), "1": ("cp", (0,)), "2": ("cp", (1,))})
    job.all("0", "all_reduce")
    job.call(0, "1", "all_reduce")
    job.call(1, "2", "all_reduce", SCHEDULED)
    job.call(0, "0", "all_reduce", STARTED)
    job.call(1, "0", "all_reduce", SCHEDULED)
    return job, {(1, DEVICE_STUCK)}


def fsdp_prefetch() -> tuple[Job, Expected]:
    """Without recorded starts: all have called three all_gathers ahead, and rank 5's device has finished one less."""
    job = Job({"0": ("default_pg", range(8))}, timed=False)
    job.all("0", "_all_gather_base", size=(64,), out=(512,), times=40)
    job.all("0", "_all_gather_base", but=[5], size=(64,), out=(512,))
    job.call(5, "0", "_all_gather_base", SCHEDULED, size=(64,), out=(512,))
    job.all("0", "_all_gather_base", SCHEDULED, size=(64,), out=(512,), times=3)
    return job, {(5, DEVICE_STUCK)}


def late_group() -> tuple[Job, Expected]:
    """A group for evaluation made late: rank 0 has called in it, ranks 2-3 never; rank 1 waits in the old group."""
    job = Job({"0": ("default_pg", range(4)), "7": ("eval", (0, 1, 2, 3))}, kept=5)
    job.all("0", "all_reduce", times=50)
    job.call(0, "7", "all_gather", STARTED)
    job.call(1, "7", "all_gather", STARTED)
    return job, {(2, NOT_CALLED), (3, NOT_CALLED)}


def skipped_in_one_group() -> tuple[Job, Expected]:
    """Rank 3 skips one all_reduce of its tensor group and waits in the next of all ranks: the members wait crosswise."""
    job = Job({"0": ("default_pg", range(4)), "1": ("tp", (0, 1)), "2": ("tp", (2, 3))})
    for _ in range(20):
        for group in ("1", "2", "0"):
            job.all(group, "all_reduce")
    job.all("1", "all_reduce")
    job.call(2, "2", "all_reduce", STARTED)
    job.all("0", "all_reduce", STARTED, but=[2])
    return job, {(3, MISMATCH)}


SCENARIOS: Sequence[Callable[[], tuple[Job, Expected]]] = (
    expert_rank_not_called,
    device_stuck_hosts_ahead,
    device_never_starts,
    overwritten_calls,
    group_in_another_order,
    never_called_anything,
    groups_of_one_split,
    unreceived_message_of_the_culprit,
    skipped_collective,
    pipeline,
    pipeline_device_stuck,
    dead_rank,
    two_causes,
    same_ranks_in_two_groups,
    compute_kernel_hangs_alone,
    fsdp_prefetch,
    late_group,
    skipped_in_one_group,
)
