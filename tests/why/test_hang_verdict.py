"""The verdict on flight-recorder dumps: exactly the ranks that cause a hang, and never a healthy one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hpcinit.why import flight_recorder, hang_verdict, why_command
from hpcinit.why.hang_verdict import HangVerdict
from tests import json_documents
from tests.why import hang_dumps, hang_scenarios
from tests.why.hang_dumps import DEVICE_STUCK, MISMATCH, NO_DUMP, NOT_CALLED, PEER_LOST, SYMMETRIC

# `HPCINIT_HANGS=10000 pytest tests/why/test_hang_verdict.py` tries that many training runs of each kind.
CASES = int(os.environ.get("HPCINIT_HANGS", "150"))
RECORDED = Path(__file__).parents[1] / "data/flight"


def named(found: HangVerdict) -> set[tuple[int, str]]:
    return {(one.rank, one.kind) for one in found.culprits}


@pytest.mark.parametrize("kind", [NOT_CALLED, DEVICE_STUCK, MISMATCH, NO_DUMP, PEER_LOST])
def test_one_rank_causes_the_hang(kind: str) -> None:
    """In random training runs with data, tensor, pipeline and expert groups, the verdict is the injected rank and kind."""
    for seed in range(CASES):
        training = hang_dumps.training(seed, kinds=[kind])
        [fault] = training.faults
        assert named(hang_verdict.verdict(hang_dumps.dumps(training))) == {(fault.rank, kind)}, seed


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("timed", [True, False], ids=["starts recorded", "starts not recorded"])
@pytest.mark.parametrize("kinds", [(NOT_CALLED, DEVICE_STUCK), (NO_DUMP,)])
def test_two_ranks_cause_the_hang(kinds: tuple[str, ...], timed: bool) -> None:
    """Each fault that the dumps show is found, no healthy rank is named, and a fault that another one hides is not."""
    for seed in range(CASES):
        training = hang_dumps.training(seed, faults=2, kinds=kinds)
        found = named(hang_verdict.verdict(hang_dumps.dumps(training, timed=timed)))
        injected = {(fault.rank, fault.kind) for fault in training.faults}
        assert hang_dumps.expected(training, timed=timed) <= found <= injected, seed


def test_without_recorded_starts() -> None:
    """Without TORCH_NCCL_ENABLE_TIMING no healthy rank is named; what the dumps do not show is reported as unknown."""
    for seed in range(CASES):
        training = hang_dumps.training(seed)
        found = hang_verdict.verdict(hang_dumps.dumps(training, timed=False))
        expected = hang_dumps.expected(training, timed=False)
        assert expected <= named(found) <= {(fault.rank, fault.kind) for fault in training.faults}, seed
        assert found.culprits or found.unknown, seed


CALLS_AND_SENDS = ("send", "send", "send", "send", *SYMMETRIC)
SIZES = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")


def test_recorders_without_sizes() -> None:
    """Ranks whose entries have no sizes and types make no mismatch with the others."""
    for seed in range(CASES):
        training = hang_dumps.training(seed, kinds=[NOT_CALLED, DEVICE_STUCK])
        found = hang_dumps.dumps(training)
        for rank in list(found)[::2]:
            found[rank]["entries"] = [{k: v for k, v in e.items() if k not in SIZES} for e in found[rank]["entries"]]
        assert named(hang_verdict.verdict(found)) == {(one.rank, one.kind) for one in training.faults}, seed


def test_recorders_that_have_overwritten_calls() -> None:
    """A recorder of 3 to 20 calls may have lost the unfinished one, or a part of a batch: no healthy rank is named."""
    for seed in range(CASES):
        training = hang_dumps.training(seed, kinds=[NOT_CALLED, DEVICE_STUCK, NO_DUMP])
        dumps = hang_dumps.dumps(training, size=(3, 5, 10, 20)[seed % 4])
        found = hang_verdict.verdict(dumps)
        assert named(found) <= {(one.rank, one.kind) for one in training.faults}, seed
        kept = [entry for dump in dumps.values() for entry in dump["entries"]]
        waits = any(one["state"] == "started" and not one["profiling_name"].endswith("coalesced") for one in kept)
        assert found.culprits or found.unknown or not waits, seed


def test_a_message_whose_other_end_is_overwritten() -> None:
    """The sender's device is stuck, or the receiver has not called. A receiver that has overwritten calls may have
    received the message before the calls that it kept: only a long list of later calls makes that implausible."""
    send = call(1, "send 0->1", is_p2p=True, state="started")
    kept = [call(number, "all_reduce", state="completed") for number in range(1, 81)]
    for since, kind in ((0, {(1, NOT_CALLED)}), (1, {(1, NOT_CALLED)}), (17, set()), (77, set())):
        found = of([send], kept[since:])
        assert named(found) == kind, since
        asked = (
            "whether rank 1 called send/recv 0->1 of the default group: its recorder has overwritten its older calls"
        )
        assert any(line.startswith(asked) for line in found.unknown) == (not kind)


def test_a_finished_call_may_be_an_overwritten_one() -> None:
    """pg_status shows that rank 1 called all_reduce number 1 of group 5. Its recorder shows later calls of other groups
    alone: whether number 1 is finished, so that rank 0's device is stuck, is unknown."""
    config = {name: {"desc": name, "ranks": "[0, 1]"} for name in ("5", "6")}
    waits = {**call(1, "all_reduce", state="started"), "process_group": ("5", "5"), "pg_id": 0}
    later = [call(n, "all_reduce", state="completed", process_group=("6", "6"), pg_id=1) for n in range(1, 81)]
    status = {"0": {"last_enqueued_collective": 1}, "1": {"last_enqueued_collective": 80}}
    for since, kind in ((1, {(0, DEVICE_STUCK)}), (77, set())):
        full = {"pg_config": config, "pg_status": status, "entries": later[since:]}
        found = hang_verdict.verdict({0: {"pg_config": config, "entries": [waits]}, 1: full})
        assert named(found) == kind and bool(found.unknown) == (not kind), since


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("timed", [True, False], ids=["starts recorded", "starts not recorded"])
def test_a_stuck_device_with_an_unfinished_send(timed: bool) -> None:
    """The dumps do not show whether it is stuck or waits for the receiver. No healthy rank is named."""
    for seed in range(max(3, CASES // 50)):
        training = hang_dumps.training(seed, kinds=[DEVICE_STUCK], calls=CALLS_AND_SENDS, after_a_send=True)
        found = hang_verdict.verdict(hang_dumps.dumps(training, timed=timed))
        assert named(found) <= {(one.rank, one.kind) for one in training.faults}, seed
        assert found.culprits or found.unknown, seed


@pytest.mark.parametrize("kind", [NOT_CALLED, DEVICE_STUCK, NO_DUMP])
def test_dumps_of_unfinished_calls_alone(kind: str) -> None:
    """With TORCH_INCLUDE_ONLY_ACTIVE a missing call may have finished: no healthy rank is named."""
    refused = 0
    for seed in range(CASES):
        training = hang_dumps.training(seed, kinds=[kind])
        dumps = hang_dumps.dumps(training)
        for dump in dumps.values():
            dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]
        found = hang_verdict.verdict(dumps)
        assert named(found) <= {(one.rank, one.kind) for one in training.faults}, seed
        refused += found.unknown == (hang_verdict.ONLY_UNFINISHED,)
    assert refused > 0.9 * CASES


def test_an_all_to_all_whose_sizes_do_not_add_up() -> None:
    """The ranks send 9 elements and expect 8. No dump shows whose size is wrong, so no rank is named."""
    one = call(1, "all_to_all", input_sizes=[[5]], output_sizes=[[4]])
    other = call(1, "all_to_all", input_sizes=[[4]], output_sizes=[[4]])
    found = of([one], [other])
    assert not found.culprits and found.unknown == (
        "ranks 0-1 have called all_to_all number 1 of the default group, and send 9 elements but expect 8: the sizes of "
        "one of them are wrong, and the dumps do not show whose",
    )
    usual = of([{**one, "output_sizes": [[5]]}], [other])
    assert not usual.culprits and "is stuck" in usual.unknown[0]


def test_three_ranks_without_a_dump() -> None:
    for seed in range(CASES):
        training = hang_dumps.training(seed, faults=3, kinds=[NO_DUMP])
        found = named(hang_verdict.verdict(hang_dumps.dumps(training)))
        injected = {(one.rank, one.kind) for one in training.faults}
        assert hang_dumps.expected(training, timed=True) <= found <= injected, seed


def test_ranks_that_have_ended() -> None:
    """A rank whose program ended with status 0 writes no dump. It has not called, and is not dead."""
    for seed in range(CASES):
        training = hang_dumps.training(seed, kinds=[NO_DUMP])
        [fault] = training.faults
        found = hang_verdict.verdict(hang_dumps.dumps(training), ended=[fault.rank])
        assert named(found) == {(fault.rank, NOT_CALLED)}, seed
        assert found.lines()[0].endswith("its program has ended with exit status 0"), seed


def test_ranks_without_a_dump_beside_a_rank_that_has_ended() -> None:
    """They may have failed when it ended, before they wrote one: only the rank that ended is a cause."""
    calls = [call(1, "all_reduce", state="completed"), call(2, "all_reduce")]
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    waits, has_left = ({"pg_config": config, "entries": entries} for entries in (calls, calls[:1]))
    for dumps in ({1: waits}, {1: waits, 3: has_left}):
        found = hang_verdict.verdict(dumps, ended=[3])
        assert named(found) == {(3, NOT_CALLED)} and "ranks 0,2 left no dump" in found.unknown


def test_a_dump_that_is_older_than_the_call() -> None:
    """It does not show whether its rank called later."""
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1, 2]"}}
    waits = call(1, "all_reduce", time_created_ns=100 * 10**9)
    for at_s, expected in ((20, set()), (95, {(2, NOT_CALLED)}), (200, {(2, NOT_CALLED)})):
        dumps = {rank: {"pg_config": config, "entries": [waits], "written_ns": 150 * 10**9} for rank in (0, 1)}
        found = hang_verdict.verdict({**dumps, 2: {"pg_config": config, "entries": [], "written_ns": at_s * 10**9}})
        assert named(found) == expected
        assert any("its dump is older than that call" in line for line in found.unknown) == (not expected)


def test_gloo_counts_messages_in_its_status() -> None:
    """Rank 1 has sent 9 messages, which gloo's recorder only counts, and has not called the second all_reduce."""
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}
    first = call(1, "all_reduce", profiling_name="gloo:all_reduce", retired=True, pg_id=0)
    second = call(2, "all_reduce", profiling_name="gloo:all_reduce", retired=False, pg_id=0)
    status = {"0": {"last_enqueued_collective": "10"}}
    waits = {"pg_config": config, "pg_status": status, "entries": [first, second]}
    found = hang_verdict.verdict({0: waits, 1: {"pg_config": config, "pg_status": status, "entries": [first]}})
    assert named(found) == {(1, NOT_CALLED)}


def test_gloo_lists_no_members() -> None:
    """gloo's recorder has neither members nor states: the verdict names no healthy rank, and lists what is unknown."""
    for seed in range(CASES):
        training = hang_dumps.training(seed, kinds=[NOT_CALLED], calls=(*SYMMETRIC, "broadcast"))
        found = hang_verdict.verdict(hang_dumps.dumps(training, timed=False, gloo=True))
        [fault] = training.faults
        assert named(found) <= {(fault.rank, NOT_CALLED)} and found.unknown, seed


def call(number: int, name: str, size: int = 4, state: str = "scheduled", **more: Any) -> dict[str, Any]:
    return {
        "record_id": number - 1,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[size]],
        "output_sizes": [[size]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": state,
        "is_p2p": False,
        **more,
    }


def of(*ranks: list[dict[str, Any]]) -> HangVerdict:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(len(ranks))))}}
    return hang_verdict.verdict({rank: {"pg_config": config, "entries": entries} for rank, entries in enumerate(ranks)})


@pytest.mark.parametrize(
    ("usual", "odd", "sentence"),
    [
        (call(1, "all_reduce"), call(1, "broadcast"), "broadcast of [4] Float where ranks 0-1,3 called all_reduce"),
        (
            call(1, "all_reduce"),
            call(1, "all_reduce", 5),
            "all_reduce of [5] Float where ranks 0-1,3 called all_reduce",
        ),
        (
            call(1, "all_reduce"),
            call(1, "all_reduce", input_dtypes=["Half"]),
            "all_reduce of [4] Half where ranks 0-1,3",
        ),
        (
            call(1, "all_to_all"),
            call(1, "all_to_all", input_dtypes=["Half"]),
            "all_to_all of [4] Half where ranks 0-1,3 called all_to_all of [4] Float",
        ),
        (
            call(1, "broadcast"),
            call(1, "broadcast", input_dtypes=["Half"], output_dtypes=["Half"]),
            "broadcast of [4] Half where ranks 0-1,3 called broadcast of [4] Float",
        ),
        (
            call(1, "gather"),
            call(1, "gather", input_sizes=[[9]]),
            "gather of [9] Float where ranks 0-1,3 called gather",
        ),
    ],
)
def test_a_rank_calls_something_else(usual: dict[str, Any], odd: dict[str, Any], sentence: str) -> None:
    """Another collective, size or type than the others' is a mismatch of the rank that differs from the most."""
    found = of([usual], [usual], [odd], [usual])
    assert named(found) == {(2, "mismatch")} and found.lines()[0].startswith(f"rank 2 called {sentence}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(1, "all_to_all", 4), call(1, "all_to_all", 5)),
        (call(1, "scatter", input_sizes=[]), call(1, "scatter", input_sizes=[[4], [4]])),
        (call(1, "gather", output_sizes=[]), call(1, "gather", output_sizes=[[4], [4]])),
        (call(1, "broadcast", input_dtypes=["Half"]), call(1, "broadcast")),
    ],
)
def test_what_may_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Uneven sizes of an all_to_all, and what only the root of a collective has, are no mismatch."""
    assert named(of([one], [other], [])) == {(2, NOT_CALLED)}


def test_as_many_ranks_called_one_thing_as_the_other() -> None:
    """Where no majority shows which ranks are wrong, both calls are reported, and no rank is blamed: one is healthy."""
    found = of([call(1, "all_reduce")], [call(1, "broadcast")])
    assert not found.culprits
    (unknown,) = found.unknown
    assert unknown.startswith("rank 0 called all_reduce") and "; rank 1 called broadcast" in unknown
    assert unknown.endswith("number 1 of the default group): the dumps do not show whose call is wrong")


def test_ranks_call_in_different_orders() -> None:
    """Two ranks that wait for each other in two groups have called them in different orders."""
    config = {name: {"desc": name, "ranks": "[0, 1]"} for name in ("a", "b")}
    entries = {0: "a", 1: "b"}
    dumps = {
        rank: {"pg_config": config, "entries": [{**call(1, "all_reduce"), "process_group": (name, name)}]}
        for rank, name in entries.items()
    }
    found = hang_verdict.verdict(dumps)
    assert named(found) == {(0, "mismatch"), (1, "mismatch")} and "their calls differ in order" in found.lines()[0]


def test_a_message_of_another_size() -> None:
    """A send and its receive of different sizes are reported with both sizes. Which is wrong is unknown."""
    send = call(1, "send 0->1", 4, is_p2p=True)
    receive = call(1, "recv 1<-0", 5, is_p2p=True)
    found = of([send], [receive])
    assert not found.culprits
    assert found.lines()[0].startswith("rank 0 called send of [4] Float; rank 1 called recv of [5] Float (")
    untyped = [[{k: v for k, v in one.items() if "types" not in k} for one in ranks] for ranks in ([send], [receive])]
    (unknown,) = of(*untyped).unknown
    assert unknown.endswith("the dumps do not show whose call is wrong")


def test_ranks_that_finish_a_reduce_early() -> None:
    """A rank that only sends may finish before the root. Of two others one is the root, and only the other is stuck."""
    done, waits = call(1, "reduce", state="completed"), call(1, "reduce")
    found = of([done], [waits], [waits])
    assert not found.culprits and found.unknown


def test_the_oldest_wait_is_first() -> None:
    """Independent causes are sorted by the time at which ranks started to wait, over all groups."""
    config = {name: {"desc": name, "ranks": ranks} for name, ranks in (("x", "[0, 1]"), ("y", "[2, 3]"))}

    def dump(*entries: dict[str, Any]) -> dict[str, Any]:
        return {"pg_config": config, "entries": list(entries)}

    later = {**call(1, "all_reduce", time_created_ns=900), "process_group": ("x", "x")}
    earlier = {**call(1, "all_reduce", time_created_ns=500), "process_group": ("y", "y")}
    found = hang_verdict.verdict({0: dump(later), 1: dump(), 2: dump(earlier), 3: dump()}, {3: "n7"})
    assert [(one.rank, one.host) for one in found.culprits] == [(3, "n7"), (1, "")] and found.victims == (0, 2)


def test_many_ranks_share_a_sentence() -> None:
    """Ranks with the same cause are reported in one sentence."""
    found = of([call(1, "all_reduce")], [], [])
    assert found.lines()[0].startswith(
        "ranks 1-2 have not called all_reduce number 1 of the default group, in which rank 0 waits; "
        "their program made no call in that group, and they wait in no other group"
    )


def test_no_rank_waits() -> None:
    """Dumps of ranks that have finished all their calls show no hang."""
    done = call(1, "all_reduce", state="completed")
    assert not of([done], [done]) and not hang_verdict.verdict({})


def test_a_recorded_hang() -> None:
    """Of four real ranks with gloo, rank 3 never calls the all_reduce of group tp1: the other three are victims."""
    dumps = {rank: flight_recorder.load((RECORDED / f"gloo-2.13-groups.rank_{rank}").read_bytes()) for rank in range(4)}
    found = hang_verdict.verdict(dumps)
    [culprit] = found.culprits
    assert (culprit.rank, culprit.kind, culprit.description, culprit.number) == (3, NOT_CALLED, "tp1", 3)
    assert culprit.waiting_ranks == (2,) and found.victims == (0, 1, 2)


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [[]], -1, 10**400], ids=range(8))
@pytest.mark.parametrize("key", list(call(1, "all_reduce")))
def test_a_dump_with_strange_fields(key: str, value: object) -> None:
    """A field of another type than torch's never stops the verdict on the other ranks, or makes it unknown."""
    strange = {**call(1, "all_reduce"), key: value}
    found = hang_verdict.verdict(
        {
            0: pickle.loads(pickle.dumps({"pg_config": value, "pg_status": value, "entries": [strange, value]})),
            1: {"pg_config": {"0": {"desc": "default_pg", "ranks": value}}, "entries": [call(1, "all_reduce")]},
            2: {"entries": []},
        }
    )
    assert (2, NOT_CALLED) in named(found) or found.unknown == (hang_verdict.ONLY_UNFINISHED,)


def test_a_rank_whose_dump_cannot_be_read() -> None:
    """Such a rank is never blamed: what it has called is unknown, also if others wait for it."""
    config = {name: {"desc": name, "ranks": ranks} for name, ranks in (("x", "[0, 1]"), ("y", "[2, 3]"))}
    waits = {**call(1, "all_reduce"), "process_group": ("x", "x")}
    dumps: dict[int, dict[str, Any]] = {0: {"pg_config": config, "entries": [waits]}, 1: {"unreadable": "d_1: torn"}}
    alone = hang_verdict.verdict(dumps)
    assert not named(alone) and alone.lines()[0] == "what rank 1 has called: its dump cannot be read: d_1: torn"
    other = {**call(1, "all_reduce"), "process_group": ("y", "y")}
    found = hang_verdict.verdict({**dumps, 2: {"pg_config": config, "entries": [other]}, 3: {"entries": []}})
    assert named(found) == {(3, NOT_CALLED)} and "rank 1 has called: its dump cannot be read" in " ".join(found.unknown)


def test_a_lost_peer() -> None:
    """torch gave up on a call before its timeout: the connection to the rank without a dump broke."""
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1, 2]"}}
    waits = call(1, "all_reduce", retired=True, time_created_ns=10**18, timeout_ms=600_000)
    for seconds, kind in ((9, hang_verdict.PEER_LOST), (601, NO_DUMP)):
        dump = {"pg_config": config, "entries": [waits], "written_ns": 10**18 + seconds * 10**9}
        assert named(hang_verdict.verdict({0: dump, 1: dump})) == {(2, kind)}


def in_group(entries: list[dict[str, Any]], name: str, desc: str) -> list[dict[str, Any]]:
    return [{**one, "process_group": (name, desc), "record_id": place} for place, one in enumerate(entries)]


def batch(*parts: str, numbers: tuple[int, int], state: str = "completed") -> list[dict[str, Any]]:
    """A batch as torch records it: the parts never change their state, and the end is marked as no message."""
    seq: dict[str, Any] = {"collective_seq_id": numbers[0], "p2p_seq_id": numbers[1]}
    end = call(1, "coalesced", input_sizes=[], output_sizes=[], input_dtypes=[], output_dtypes=[], state=state, **seq)
    return [*(call(1, part, **{**seq, "is_p2p": True}) for part in parts), end]


# By how much a batch increases the number of collectives and of messages: torch 2.7, 2.4, and forks between them.
NUMBERINGS = [(0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("step", NUMBERINGS)
def test_batches_of_messages(step: tuple[int, int]) -> None:
    """Pipeline stages have made batches of messages, 2 in the first and last stage and 3 in the middle, and then an
    all_reduce that the last stage has not called. The same torch numbers it 1, or 3 and 4."""
    config = {"5": {"desc": "pp", "ranks": "[0, 1, 2]"}}
    parts = {
        0: [["send 0->1"], ["recv 0<-1"]],
        1: [["recv 1<-0"], ["send 1->2", "recv 1<-2"], ["send 1->0"]],
        2: [["recv 2<-1"], ["send 2->1"]],
    }
    dumps = {}
    for rank, batches in parts.items():
        at = [(step[0] * place, step[1] * place) for place in range(1, len(batches) + 1)]
        entries = [entry for one, numbers in zip(batches, at, strict=True) for entry in batch(*one, numbers=numbers)]
        reduce = call(1, "all_reduce", collective_seq_id=at[-1][0] + 1, p2p_seq_id=at[-1][1], state="started")
        entries += [reduce] if rank < 2 else []
        dumps[rank] = {"pg_config": config, "entries": in_group(entries, "5", "pp")}
    found = hang_verdict.verdict(dumps)
    assert named(found) == {(2, NOT_CALLED)} and not found.unknown
    assert found.culprits[0].waiting_ranks == (0, 1) and found.culprits[0].collective == "all_reduce"


@pytest.mark.parametrize("step", NUMBERINGS)
def test_a_batch_that_waits(step: tuple[int, int]) -> None:
    """Rank 1 received the first batch of rank 0 and has not called the second."""
    config = {"5": {"desc": "pp", "ranks": "[0, 1]"}}
    first, second = step, (2 * step[0], 2 * step[1])
    waits = [*batch("send 0->1", numbers=first), *batch("send 0->1", numbers=second, state="started")]
    entries = {0: waits, 1: batch("recv 1<-0", numbers=first)}
    dumps = {rank: {"pg_config": config, "entries": in_group(found, "5", "pp")} for rank, found in entries.items()}
    assert named(hang_verdict.verdict(dumps)) == {(1, NOT_CALLED)}


def test_a_batch_whose_parts_are_overwritten() -> None:
    """The end of a batch alone does not show that it was of messages. Rank 1 finished collective number 1, and rank 0
    has not finished a batch after it, whose end has the same number."""
    config = {"5": {"desc": "pp", "ranks": "[0, 1]"}}
    [part, end] = batch("send 0->1", numbers=(1, 2), state="scheduled")
    both = {0: [{**end, "record_id": 3}], 1: [{**part, "profiling_name": "nccl:recv 1<-0", "record_id": 2}]}
    dumps = {
        rank: {"pg_config": config, "entries": [{**one, "process_group": ("5", "pp")} for one in entries]}
        for rank, entries in both.items()
    }
    found = hang_verdict.verdict(dumps)
    assert not found.culprits and found.unknown


def test_messages_name_ranks_of_the_group() -> None:
    """new_group([3, 1, 0], sort_ranks=False): rank 1 of the group is rank 1, and rank 2 of the group is rank 0."""
    config = {"5": {"desc": "pp", "ranks": "[3, 1, 0]"}}
    done = [call(1, "send 0->1", state="completed", is_p2p=True), call(2, "send 0->2", is_p2p=True)]
    received = [call(1, "recv 1<-0", state="completed", is_p2p=True)]
    dumps = {3: done, 1: received, 0: []}
    found = hang_verdict.verdict(
        {
            rank: {"pg_config": config, "entries": [{**entry, "process_group": ["5", "pp"]} for entry in entries]}
            for rank, entries in dumps.items()
        }
    )
    assert named(found) == {(0, NOT_CALLED)}


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_scenarios(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    """`hpcinit why FOLDER --json` on the files of each scenario gives the verdict that a person would."""
    for scenario in hang_scenarios.SCENARIOS:
        job, expected = scenario()
        folder = tmp_path / scenario.__name__
        folder.mkdir()
        for name, data in job.files(as_json=form == "json").items():
            (folder / name).write_bytes(data)
        assert why_command.main([str(folder), "--json"]) == 0
        [document] = json_documents.parse(capsys.readouterr().out, "why")
        assert {(one["rank"], one["kind"]) for one in document["culprits"]} == expected, scenario.__name__
        keys = ["rank", "host", "kind", "group", "description", "collective", "number", "waiting_ranks", "evidence"]
        assert all(list(one) == keys for one in document["culprits"])
        assert {"verdict", "secondary", "unknown"} <= document.keys()
