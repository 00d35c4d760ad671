"""Reading the flight recorder's dumps, and that no function named in such a file is called.

tests/data/flight has dumps that torch 2.13 wrote with gloo (torch._C._distributed_c10d._dump_fr_trace, without stacks):
of two ranks, of which the first is in a third collective; and of four ranks with groups, as pickles and as JSON, of which
rank 3 never makes its second call in group tp1. NCCL's recorder writes the same form and needs GPUs. The other dumps are
written for the tests in that form.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcinit.why import flight_recorder

RECORDED = Path(__file__).parents[1] / "data/flight"


def written(run: Path, *dumps: bytes, job: str = "5.0.0") -> dict[int, Mapping[str, Any]]:
    """What is read of attempt 0 of job 5, when the ranks of `job` have left these dumps in the run folder."""
    (run / "flight").mkdir(parents=True, exist_ok=True)
    for rank, data in enumerate(dumps):
        (run / f"flight/{job}.rank_{rank}").write_bytes(data)
    return flight_recorder.read_attempt(run, "5", 0)


def recorded(rank: int) -> bytes:
    return (RECORDED / f"gloo-2.13.rank_{rank}").read_bytes()


def test_dumps_of_an_attempt(tmp_path: Path) -> None:
    """The dumps of one attempt are read; those of another job or attempt are not. A torn file is reported as such."""
    dumps = written(tmp_path, recorded(0), recorded(1), recorded(1)[:40])
    assert sorted(dumps) == [0, 1, 2] and "5.0.0.rank_2: not a flight" in dumps[2][flight_recorder.UNREADABLE]
    assert sorted(flight_recorder.recordings(dumps)) == [0, 1]
    assert written(tmp_path / "a", recorded(0), job="4.0.0") == written(tmp_path / "b", recorded(0), job="5.0.1") == {}


def test_what_torch_itself_wrote(tmp_path: Path) -> None:
    """A recorded dump is read without any code of torch's: the calls, their sizes and what is pending."""
    first, second = flight_recorder.recordings(written(tmp_path, recorded(0), recorded(1))).values()
    [(group, number)] = first.pending
    call = first.call((group, number))
    assert (str(group), number) == ("group default_pg (0)", 3) and call is not None
    assert (call.name, call.state, call.input_sizes) == ("all_reduce", "scheduled", (((5,),),))
    assert second.pending == [] and dict(second.last) == {group: 2}


@pytest.mark.parametrize("form", ["groups.rank_", "groups-json_"])
def test_a_folder_of_dumps(tmp_path: Path, form: str) -> None:
    """Pickles and JSON of one attempt give the same; the rank is the number at the end of a file's name."""
    for path in RECORDED.glob(f"gloo-2.13-{form}*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "notes.txt").write_text("no dump")
    ranks = flight_recorder.recordings(flight_recorder.read_folder(tmp_path))
    assert sorted(ranks) == [0, 1, 2, 3]
    pending = {rank: [(group.description, number) for group, number in one.pending] for rank, one in ranks.items()}
    assert pending == {0: [("default_pg", 3)], 1: [("default_pg", 3)], 2: [("tp1", 3)], 3: []}


def test_a_folder_of_several_attempts(tmp_path: Path) -> None:
    """Of dumps with different prefixes the newest count, so that a restart's are not mixed with those before it."""
    for job, rank, when in (("4.0.0", 0, 100), ("4.0.0", 1, 100), ("4.0.1", 0, 200)):
        path = tmp_path / f"{job}.rank_{rank}"
        path.write_bytes(recorded(rank))
        os.utime(path, (when, when))
    assert sorted(flight_recorder.read_folder(tmp_path)) == [0]


class Calls:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("called",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """A pickle of another user that would create a folder is refused and creates none."""
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps({"version": "2.10", "entries": [Calls()]}, protocol)
    reason = r"it refers to \w+\.mkdir, and a flight recorder's dump contains" if protocol else "an opcode that"
    with pytest.raises(ValueError, match=reason):
        flight_recorder.load(evil)
    assert not (tmp_path / "called").exists()
    pickle.loads(evil)
    assert (tmp_path / "called").exists(), "the test's file creates the folder if it is loaded"


@pytest.mark.parametrize(
    "data", [b"", b"hello", pickle.dumps([]), pickle.dumps({"entries": 3}), b"\x80\x02Q.", b"{}", b'{"entries":']
)
def test_what_is_no_dump(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a flight recorder's dump"):
        flight_recorder.load(data)


def test_an_empty_dump_in_json() -> None:
    """torch's JSON has no entries for a rank that has called nothing, and texts for the numbers in pg_status."""
    empty = b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
    dumps = {
        0: flight_recorder.load(empty),
        1: flight_recorder.load((RECORDED / "gloo-2.13-groups-json_1").read_bytes()),
    }
    ranks = flight_recorder.recordings(dumps)
    assert not ranks[0].pending and not ranks[0].last and ranks[1].pending
    called = {**flight_recorder.load(empty), "pg_config": {"4": {"ranks": "[0, 1]"}}}
    called["pg_status"] = {"0": {"last_enqueued_collective": "41"}}
    assert {group.name: number for group, number in flight_recorder.recordings({0: called})[0].last.items()} == {
        "4": 41
    }


def test_a_folder_as_people_collect_them(tmp_path: Path) -> None:
    """A folder for each node, other files beside the dumps, a name with more after the rank, and a truncated dump."""
    names = ("n1/trace_0", "n1/trace_12", "n2/trace_3.json", "n2/dump_rank7_of_16.pkl")
    for at, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(recorded(at % 2))
    (tmp_path / "n2/trace_4").write_bytes(recorded(0)[:100])
    (tmp_path / "n2/trace_5").write_bytes(b"")
    (tmp_path / "n1/config_1.json").write_text('{"rank": 1}')
    (tmp_path / "n1/log_2").write_text("a log\n")
    (tmp_path / "notes 9").mkdir()
    found = flight_recorder.read_folder(tmp_path)
    unreadable = {rank for rank, dump in found.items() if flight_recorder.UNREADABLE in dump}
    assert sorted(found) == [0, 3, 4, 5, 7, 12] and unreadable == {4, 5}


def test_a_rank_in_thousands_of_groups(tmp_path: Path) -> None:
    """A rank waits in a limited number of calls, the oldest, whatever a dump lists: the search stays short."""
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "state": "scheduled"}
    entries = [{**entry, "record_id": at, "pg_id": at, "process_group": (str(at), "")} for at in range(2000)]
    dumps = written(tmp_path, pickle.dumps({"version": "2.4", "entries": entries}))
    [found] = flight_recorder.recordings(dumps).values()
    assert [group.name for group, _ in found.pending] == list(map(str, range(flight_recorder.MOST_PENDING)))


def test_unchanged_dumps_are_read_once(tmp_path: Path) -> None:
    """--replay uses what `why` has read. A dump that changes is read again."""
    first = written(tmp_path, recorded(0), recorded(1))
    assert flight_recorder.read_attempt(tmp_path, "5", 0) is first
    os.utime(tmp_path / "flight/5.0.0.rank_0", (1, 1))
    again = flight_recorder.read_attempt(tmp_path, "5", 0)
    assert again is not first and again.keys() == first.keys()
