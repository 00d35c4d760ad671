"""The flight recorder's dumps: who has not entered a collective, and that nothing in such a file is ever called.

tests/data/flight has what torch 2.13 itself wrote (torch._C._distributed_c10d._dump_fr_trace, without stacks) of two ranks
with gloo, of which the first is in a third collective; NCCL's recorder is the same and needs GPUs. The others are made by
hand in that form.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hpcinit.facts import flight


def dump(*entries: tuple[int, str, list[int]], group: str = "default_pg", p2p: int = 0) -> bytes:
    """Of collectives (number, name, size), and so many sends after them."""
    found: list[dict[str, Any]] = [
        {
            "process_group": ("0", group),
            "collective_seq_id": number,
            "profiling_name": f"nccl:{name}",
            "input_sizes": [size],
            "state": "scheduled",
            "is_p2p": False,
        }
        for number, name, size in entries
    ]
    found += [{**found[-1], "is_p2p": True, "collective_seq_id": 99, "profiling_name": "nccl:send 0->1"}] * p2p
    return pickle.dumps({"version": "2.10", "pg_config": {}, "entries": found}, protocol=2)


RECORDED = Path(__file__).parents[1] / "data/flight"
AT_41, AT_42 = (41, "broadcast", [4]), (42, "all_reduce", [1024, 8])


def told(run: Path, *dumps: bytes, job: str = "5.0.0") -> tuple[str, ...]:
    (run / "flight").mkdir(exist_ok=True)
    for rank, data in enumerate(dumps):
        (run / f"flight/{job}.rank_{rank}").write_bytes(data)
    return flight.lines(flight.of_attempt(run, "5", 0))


def test_who_has_not_entered(tmp_path: Path) -> None:
    """The rank that is behind in a group, what it was in last, and who waits for it; sends are no collectives."""
    assert told(tmp_path, dump(AT_41, AT_42), dump(AT_41, p2p=1), dump(AT_41, AT_42), dump(AT_41, AT_42)) == (
        "rank 1 has not entered all_reduce of [1024, 8] (number 42), in which ranks 0,2-3 wait; "
        "the last entered: broadcast of [4] (number 41)",
    )


def test_what_torch_itself_wrote(tmp_path: Path) -> None:
    """It needs no code to be read, and names the rank."""
    dumps = [(RECORDED / f"gloo-2.13.rank_{rank}").read_bytes() for rank in range(2)]
    assert told(tmp_path, *dumps) == (
        "rank 1 has not entered all_reduce of [5] (number 3), in which rank 0 waits; the last entered: barrier (number 2)",
    )


def test_different_collectives(tmp_path: Path) -> None:
    """Ranks that are at the same number in collectives of another kind or size wait for ever too."""
    assert told(tmp_path, dump(AT_42), dump((42, "all_gather", [7])), dump(AT_42)) == (
        "the ranks are in different collectives at number 42: ranks 0,2 in all_reduce [1024, 8], rank 1 in all_gather [7]",
    )


def test_a_group_is_named_where_it_is_not_the_first(tmp_path: Path) -> None:
    [line] = told(tmp_path, dump(AT_42, group="tp"), dump(AT_41, group="tp"))
    assert "rank 1 has not entered all_reduce of [1024, 8] (number 42) of group 0 tp, in which rank 0 waits" in line


def test_ranks_that_are_at_the_same_place_and_other_attempts(tmp_path: Path) -> None:
    """Nothing is told of ranks that agree, and nothing of another job, of another attempt or of a torn file."""
    assert told(tmp_path, dump(AT_42), dump(AT_42), dump(AT_42)[:40]) == ()
    assert told(tmp_path, dump(AT_41), job="4.0.0") == () and told(tmp_path, dump(AT_41), job="5.0.1") == ()


class Calls:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("called",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """A file that somebody put there, whose pickle would make a folder, is refused and makes none."""
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps({"version": "2.10", "entries": [Calls()]}, protocol)
    with pytest.raises(ValueError, match=r"it names \w+\.mkdir, and a flight recorder's dump names nothing"):
        flight.load(evil)
    assert not (tmp_path / "called").exists()
    pickle.loads(evil)
    assert (tmp_path / "called").exists(), "the test's file does what it is for"


@pytest.mark.parametrize("data", [b"", b"hello", pickle.dumps([]), pickle.dumps({"entries": 3}), b"\x80\x02Q."])
def test_what_is_no_dump(data: bytes) -> None:
    with pytest.raises(ValueError, match="no flight recorder's dump"):
        flight.load(data)
