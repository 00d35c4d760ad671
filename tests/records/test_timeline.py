"""The files in which ranks record their start-up events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hpcinit.records import timeline
from hpcinit.records.timeline import Attempt, Rank, Writer
from tests.small_disks import fill, small_disk

FIRST = {"job": "43.0.0", "world_size": 4, "nodes": 2, "launcher": "slurm"}


def test_ranks_of_two_nodes_and_two_attempts(tmp_path: Path) -> None:
    """The lines of a rank are merged; attempts are separate and sorted by their start."""
    for restart, started in ((1, 500.0), (0, 100.0)):
        for rank in range(4):
            about = {**FIRST, "job": f"43.0.{restart}", "local_rank": rank % 2, "pid": 70 + rank}
            writer = Writer(timeline.path(tmp_path, f"43.0.{restart}", f"n{1 + rank // 2}"))
            writer.write(rank, {**about, "started": started + rank, "interpreter": started + rank + 0.5})
            writer.write(rank, {"imported": started + rank + 2})
            if rank == 0:
                writer.write(0, {"hosts": "n[1-2]", "timeout_s": 307.0, "formula": "min(3600, ...) = 307 s"})
            writer.close()
    first, second = timeline.read(tmp_path)
    assert (first.job, second.job, second.restart) == ("43.0.0", "43.0.1", 1)
    assert (first.world_size, first.nodes, first.hosts, first.timeout_s) == (4, 2, ("n1", "n2"), 307.0)
    assert first.ranks[3] == Rank(
        3, "n2", 1, 73, {"started": 103.0, "interpreter": 103.5, "imported": 105.0}, clock=None
    )
    assert first.ranks[3].furthest == "imported" and not first.complete and first.absent == []


def test_a_rank_that_never_started(tmp_path: Path) -> None:
    """A rank without a line is absent, and other ranks have their last event."""
    writer = Writer(timeline.path(tmp_path, "43.0.0", "n1"))
    writer.write(0, {**FIRST, "started": 1.0, "interpreter": 2.0, "imported": 4.0})
    writer.write(2, {**FIRST, "started": 1.0})
    (attempt,) = timeline.read(tmp_path)
    assert attempt.absent == [1, 3]
    assert [rank.furthest for rank in attempt.ranks] == ["imported", "started"]


def test_other_lines_are_skipped(tmp_path: Path) -> None:
    """Incomplete lines and lines of other programs and versions do not hide the others."""
    file = timeline.path(tmp_path, "43.0.0", "n1")
    writer = Writer(file)
    writer.write(0, {**FIRST, "started": 1.0})
    with file.open("a") as text:
        text.write('[1]\n7\n{"rank": "x"}\n{"rank": 1, "started": "then"}\n{"rank": 2, "star')
    (attempt,) = timeline.read(tmp_path)
    assert [rank.rank for rank in attempt.ranks] == [0]
    Writer(timeline.path(tmp_path, "44.0.0", "n1")).write(0, {"world_size": "many", "started": 1.0})
    assert [attempt.job for attempt in timeline.read(tmp_path)] == ["43.0.0"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A start-up does not fail because its record cannot be written."""
    (tmp_path / "timeline").write_text("no folder")
    Writer(timeline.path(tmp_path, "43.0.0", "n1")).write(0, FIRST)
    assert timeline.read(tmp_path) == []


def test_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    """A line that could not be written, or only in part, is written before the next one."""
    with small_disk(tmp_path / "disk") as place:
        writer = Writer(timeline.path(place, "43.0.0", "n1"))
        writer.write(0, {**FIRST, "started": 1.0})
        other = fill(place)
        for number in range(100):  # more than the page that the file has
            writer.write(0, {"interpreter": 2.0, "pad": f"{number:099}"})
        writer.write(0, {"imported": 3.0})
        other.unlink()
        writer.write(0, {"device": 4.0})
        writer.close()
        (attempt,) = timeline.read(place)
    assert attempt.ranks[0].events == {"started": 1.0, "interpreter": 2.0, "imported": 3.0, "device": 4.0}


def test_processes_that_write_at_the_same_time(tmp_path: Path) -> None:
    """Every line of 8 processes is complete although they share no lock."""
    code = (
        "import sys; from pathlib import Path; from hpcinit.records import timeline\n"
        "rank = int(sys.argv[2]); writer = timeline.Writer(timeline.path(Path(sys.argv[1]), '43.0.0', 'n1'))\n"
        "for number in range(200): writer.write(rank, {'world_size': 8, 'started': float(number), 'pad': 'x' * 200})\n"
    )
    commands = [[sys.executable, "-c", code, str(tmp_path), str(rank)] for rank in range(8)]
    for process in [subprocess.Popen(line, env=dict(os.environ)) for line in commands]:
        assert process.wait(150) == 0
    (attempt,) = timeline.read(tmp_path)
    assert [rank.events["started"] for rank in attempt.ranks] == [199.0] * 8
    lines = timeline.path(tmp_path, "43.0.0", "n1").read_text().splitlines()
    assert len(lines) == 1600 and {len(line) > 200 for line in lines} == {True}


def test_how_long_a_rank_waited() -> None:
    """The timeout starts with the rendezvous and again in init; the longer of both waits counts."""
    early = {"interpreter": 1.0, "met": 1.5, "imported": 5.0, "collective": 12.0, "up": 30.0}
    late = {"interpreter": 1.0, "met": 9.0, "imported": 11.0, "collective": 12.5, "up": 30.0}
    ranks = (Rank(0, "n1", events=early), Rank(1, "n2", events=late))
    attempt = Attempt("43.0.0", 2, 2, ranks)
    assert attempt.waited_s == 8.0 and attempt.complete
    forked = Rank(0, "n1", events={"interpreter": 1.0, "forked": 6.0, "met": 6.5})
    assert Attempt("43.0.0", 1, 1, (forked,)).waited_s == 0.5
    assert Attempt("43.0.0", 1, 1, (Rank(0, "n1"),)).waited_s is None
