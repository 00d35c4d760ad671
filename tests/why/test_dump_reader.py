"""Dumps from any process: what is read equals what Python's own readers give, and no file runs anything or runs forever.

The hostile files are written for these tests. tests/data/flight has dumps that torch wrote.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcinit.why import dump_reader, flight_recorder, hang_verdict, plain_pickle
from tests.conftest import Run
from tests.corpus.generate import nested_pickle
from tests.why import hang_dumps

RECORDED = sorted((Path(__file__).parents[1] / "data/flight").iterdir())


def document(count: int, seed: int = 0) -> dict[str, Any]:
    """A dump of `count` calls, with values that many calls share, as Python's pickler and torch's write them."""
    rng = random.Random(seed)
    frames = [{"name": f"f{number}", "filename": "train.py", "line": number} for number in range(20)]
    sizes = [[[number, 8]] for number in range(5)]
    return {
        "version": "2.10",
        "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}},
        "entries": [
            {
                "frames": rng.choice(([], frames[number % 20 : number % 20 + 3], [dict(frames[0]), frames[1]])),
                "record_id": number,
                "process_group": rng.choice((("0", "default_pg"), ["1", f"tp{number % 7}"])),
                "collective_seq_id": number + 1,
                "profiling_name": f"nccl:all_reduce{number // 500}",
                "time_created_ns": hang_dumps.CREATED_NS + number,
                "duration_ms": number / 3,
                "input_sizes": rng.choice((sizes[number % 5], [[number]], [])),
                "output_sizes": [[70_000 + number, 2**33]],
                "state": rng.choice(("completed", "scheduled")),
                "time_discovered_started_ns": rng.choice((None, 2**70, -1)),
                "is_p2p": number % 3 == 0,
            }
            for number in range(count)
        ],
        "pg_status": {0: {"last_enqueued_collective": count}},
    }


def fields(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields that a verdict needs: nested lists as tuples, without None and numbers of more than 64 bits."""

    def plain(value: Any) -> Any:
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else value

    kept = {name: plain(value) for name, value in entry.items() if name in dump_reader.FIELDS and value is not None}
    return {name: value for name, value in kept.items() if not (isinstance(value, int) and value >= 2**64)}


@pytest.mark.parametrize("form", [2, 3, 4, 5, "json"])
@pytest.mark.parametrize("most", [10, 700, 20_000])
def test_the_newest_calls_are_read(form: int | str, most: int) -> None:
    """The newest calls of a dump are those that Python's own reader gives, in each form, whatever is skipped."""
    written = document(1_700)
    data = json.dumps(written).encode() if form == "json" else pickle.dumps(written, int(form))
    assert len(data) > 100_000, "large enough to skip calls"
    limits = dump_reader.ReadLimits()
    limits.entries = most
    read = dump_reader.load(data, limits)
    assert read["entries"] == [fields(entry) for entry in written["entries"][-most:]]
    assert read["pg_config"] == {"0": {"desc": "default_pg", "ranks": (0, 1)}}
    assert read["pg_status"] == {"0": {"last_enqueued_collective": 1_700}}


def test_old_calls_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dump as torch writes it, the values of old calls are never created."""
    written = document(3_000)
    for entry in written["entries"]:
        entry["input_sizes"], entry["process_group"] = [[entry["record_id"]]], ["0", "default_pg"]
    readers: list[plain_pickle.Reader] = []
    init = plain_pickle.Reader.__init__

    def remember(self: plain_pickle.Reader, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        readers.append(self)

    monkeypatch.setattr(plain_pickle.Reader, "__init__", remember)
    limits = dump_reader.ReadLimits()
    limits.entries = 10
    assert len(dump_reader.load(pickle.dumps(written, 2), limits)["entries"]) == 10
    [reader] = readers
    assert sum(isinstance(value, list) for value in reader.memo.values()) < 500 < len(written["entries"])


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_no_part_of_a_dump_is_taken_for_a_dump(path: Path) -> None:
    """A dump that ends early, because its rank was killed or is writing it, is refused, wherever it ends."""
    data = path.read_bytes()
    dump_reader.load(data)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"not a (complete )?flight recorder's dump: it "):
            dump_reader.load(data[:end])
    with pytest.raises(ValueError, match=r"it ends after \d+ bytes. The rank is still writing it, or"):
        dump_reader.load(data[: len(data) // 2])


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def _pickle(entries: bytes) -> bytes:
    """A pickled dump whose list of entries is made by the opcodes `entries`."""
    return b"\x80\x02}(" + _text("entries") + entries + b"u."


def _nested(folder: Path) -> bytes:
    nested_pickle(folder)
    return (folder / "nccl_trace_rank_0").read_bytes()


# A list of 2**60 items as the sizes of a call.
DOUBLED = b"](}(%b](]q\x01" + b"".join(b"]q\x02(h\x01h\x01eq\x01" for _ in range(60)) + b"e%bh\x01ue"
SIZES = b"](}(" + _text("input_sizes") + b"%bue"
HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "nested tuples": (_nested, "it is no dictionary"),
    "nested tuples as a key": (lambda at: b"\x80\x02}" + _nested(at)[2:-1] + b"K\x01s.", "a key is neither"),
    "nested lists as sizes": (
        lambda _: _pickle(DOUBLED % (_text("frames"), _text("input_sizes"))),
        "the tensor sizes of a call have more than 100000 values",
    ),
    "a list that contains itself": (lambda _: _pickle(SIZES % b"]q\x01h\x01a"), "recursion"),
    "a call that contains all calls": (lambda _: _pickle(b"]q\x07(}(" + _text("state") + b"h\x07ue"), ""),
    "keys with one hash": (
        lambda _: b"\x80\x02}(" + b"".join(pickle.dumps(k * (2**61 - 1), 2)[2:-1] + b"N" for k in range(1, 99)) + b"u.",
        "a key is a number above",
    ),
    "open lists": (lambda _: b"\x80\x02" + b"](" * 10**6, "nested more than 1000 levels deep"),
    "open lists in JSON": (lambda _: b'{"entries": ' + b"[" * 10**6, "recursion|Stack overflow"),
    "empty lists": (lambda _: b"\x80\x02" + b"]" * 10**6, "more than 16 MB of memory"),
    "empty lists in JSON": (lambda _: b'{"a": [' + b"[]," * (4 << 20), "it ends after"),
    "one value many times": (lambda _: b"\x80\x02Nq\x01" + b"h\x01" * (10 << 20), "more than 16 MB of memory"),
    "many texts": (
        lambda _: b"\x80\x02(" + b"".join(_text(str(number)) for number in range(1_200_000)),
        "more than 16 MB of memory",
    ),
    "a text of 4 GB": (lambda _: b"\x80\x02X\xff\xff\xff\xffa", "it ends after"),
    "an empty stack": (
        lambda _: b"\x80\x02}(" + _text("entries") + b"eeeu." + b"N" * 99,
        "not a pickle of plain values",
    ),
    "a value that was never stored": (
        lambda _: _pickle(b"](}(" + _text("state") + b"h\x63ue"),
        "not a pickle of plain",
    ),
    "an object": (lambda _: b"\x80\x02}\x81.", r"an opcode that torch's dumps do not have: b'\\x81'"),
    "an extension": (lambda _: b"\x80\x02\x82\x01.", "an opcode that torch's dumps do not have"),
    "a text opcode": (lambda _: b"(dp0\nVentries\n", "an opcode that torch's dumps do not have: b'd'"),
    "another format": (lambda _: b'{"version": "3.1", "entries": []}', "its format is 3.1, .* up to 2.x"),
    "two numbers": (lambda _: b'{"entries": [], 3: 4}', "it is not JSON: Expecting property name"),
    "no list": (lambda _: b'{"entries": 3}', "it has no entries"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A hostile file is refused with a reason, or read as harmless; it uses neither much time nor much memory."""
    monkeypatch.setattr(dump_reader, "MOST_MEMORY", 16 << 20)
    write, reason = HOSTILE[name]
    data = write(tmp_path)
    before, started = dump_reader._memory(), time.process_time()
    found = ""
    try:
        dump_reader.load(data)
    except ValueError as error:
        found = str(error)
    assert re.search(reason, found) and bool(reason) == bool(found)
    assert time.process_time() - started < 20
    assert dump_reader._memory() - before < 400 << 20


def recorded(rank: int) -> bytes:
    return (RECORDED[0].parent / f"gloo-2.13-groups.rank_{rank}").read_bytes()


def test_why_a_dump_cannot_be_read(tmp_path: Path) -> None:
    """Each dump that cannot be read is named with its reason. A FIFO or a device beside the dumps is not read."""
    flight = tmp_path / "flight"
    flight.mkdir()
    files = {rank: flight / f"5.0.0.rank_{rank}" for rank in range(8)}
    files[0].write_bytes(recorded(0))
    files[1].write_bytes(b"")
    files[2].write_bytes(recorded(2)[:500])
    files[3].write_text("a log")
    os.mkfifo(files[4])
    files[5].symlink_to("/dev/zero")
    files[6].symlink_to("nowhere")
    with files[7].open("wb") as file:
        file.truncate(dump_reader.MOST_BYTES + (1 << 20))
    read = flight_recorder.read_attempt(tmp_path, "5", 0)
    reasons = {rank: dump[flight_recorder.UNREADABLE] for rank, dump in read.items() if rank}
    assert read[0]["entries"] and list(read) == list(range(8))
    expected = [
        "it is empty", "it ends after 500 bytes", "it is not a dump", "it is not a regular file", "it is not a regular file",
        "No such file", "it is 257 MB, expected at most 256 MB",
    ]  # fmt: skip
    for rank, reason in enumerate(expected, 1):
        assert reasons[rank].startswith(f"5.0.0.rank_{rank}: ") and reason in reasons[rank]


def test_a_rank_whose_dump_cannot_be_read_is_not_at_fault(tmp_path: Path) -> None:
    """What such a rank has called is unknown: it is neither missing nor at fault, and no other rank is blamed for it."""
    for rank in range(4):
        data = recorded(rank)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data[:500] if rank == 3 else data)
    found = hang_verdict.verdict(flight_recorder.read_folder(tmp_path))
    assert not found.culprits
    assert any("rank 3" in line and "it ends after 500 bytes" in line for line in found.unknown)


def test_no_hang_from_dumps_that_cannot_be_read(tmp_path: Path) -> None:
    """If no rank waits in the dumps that can be read, those that cannot be read show no hang."""
    (tmp_path / "trace_rank_0").write_bytes(recorded(3))
    (tmp_path / "trace_rank_1").write_bytes(b"")
    found = hang_verdict.verdict(flight_recorder.read_folder(tmp_path))
    assert not found and "trace_rank_1: it is empty" in found.lines()[0]
    (tmp_path / "trace_rank_0").write_bytes(b"{")
    assert flight_recorder.read_folder(tmp_path) == {}, "files beside logs are no dumps"
    assert sorted(flight_recorder.read_folder(tmp_path, unreadable=True)) == [0, 1]


def test_only_dumps_that_cannot_be_read(hpcinit: Run, tmp_path: Path) -> None:
    """If a folder has no other dumps, `hpcinit why` prints why they cannot be read."""
    nested_pickle(tmp_path)
    (tmp_path / "nccl_trace_rank_1").write_bytes(b"")
    text = hpcinit("why", str(tmp_path)).stdout
    assert "nccl_trace_rank_0: not a flight recorder's dump: it is no dictionary" in text
    assert "nccl_trace_rank_1: it is empty" in text


def test_the_time_for_all_dumps(tmp_path: Path) -> None:
    """When the time for the dumps has passed, the others count as unreadable. Large files are the last."""
    limits = dump_reader.ReadLimits()
    (tmp_path / "0").write_bytes(recorded(0))
    assert dump_reader.read(tmp_path / "0", limits)
    limits.end = time.process_time()
    with pytest.raises(ValueError, match="reading the dumps takes more than 30 s of CPU time"):
        dump_reader.read(tmp_path / "0", limits)
    (tmp_path / "dump_rank_0").write_bytes(pickle.dumps(document(2_000)))
    for rank in range(1, 4):
        (tmp_path / f"dump_rank_{rank}").write_bytes(recorded(rank))
    order: list[str] = []

    def read(path: Path, _: dump_reader.ReadLimits) -> dict[str, Any]:
        order.append(path.name)
        return {"entries": []}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dump_reader, "read", read)
        assert list(flight_recorder.read_folder(tmp_path)) == [0, 1, 2, 3]
    assert order[-1] == "dump_rank_0"


def test_fewer_calls_of_each_of_many_dumps() -> None:
    """The number of calls that are kept of a dump gets smaller with the number of dumps, and is never below 500."""
    assert [dump_reader.ReadLimits(files).entries for files in (0, 1, 50, 100_000)] == [20_000, 20_000, 3_000, 500]
