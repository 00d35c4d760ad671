"""The files that a kill in the middle of a save would leave."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from hpcinit.drill.attempt import Save, states
from hpcinit.drill.faults import State, _chosen
from hpcinit.records import drill_records

WHOLE = b"x" * 5000
# A rank that saves to a temporary file and renames it, and then appends to a log.
RANK = """
import os
import sys
from pathlib import Path
from hpcinit.runtime import drill_recorder
folder = Path(sys.argv[1])
sys.addaudithook(drill_recorder._Guard(folder).on_event)
Path("saving").write_bytes(b"x" * 5000)
os.rename("saving", "last.pt")
with open("log", "a") as file:
    file.write("saved")
"""


def test_a_rank_waits_before_each_change(tmp_path: Path) -> None:
    """The drill sees the files as they are before each change. Only a file that is written from its start may be torn."""
    work, folder = tmp_path / "now/work", tmp_path / "attempt-1"
    work.mkdir(parents=True)
    folder.mkdir()
    (folder / drill_records.PAUSE).touch()
    seen: list[tuple[str, bool, list[str]]] = []
    read_at = 0
    with subprocess.Popen([sys.executable, "-c", RANK, str(folder)], cwd=work) as rank:
        while rank.poll() is None:
            held, read_at = drill_records.read_lines(folder / drill_records.CHANGES, read_at)
            for one in held:
                seen.append((Path(one["path"]).name, one["torn"], sorted(path.name for path in work.iterdir())))
                (folder / one["seen"]).touch()
            time.sleep(0.01)
    assert rank.returncode == 0
    assert seen == [("saving", True, []), ("saving", False, ["saving"]), ("log", False, ["last.pt"])]


def test_the_largest_file_is_torn(tmp_path: Path) -> None:
    """Only half of it is there, and its size shows this. A small file is written in one piece."""
    (tmp_path / "now").mkdir()
    found = []
    for number, name in enumerate(("last.pt", "latest", "")):
        (tmp_path / str(number)).mkdir()
        found.append(State(tmp_path / str(number), {"latest": 4} if number else {}, name))
    (tmp_path / "now/last.pt").write_bytes(WHOLE)
    (tmp_path / "now/latest").write_text("last")
    chosen = _chosen(found, Save(6, {"last.pt": 5000, "latest": 4}), tmp_path / "now")
    assert chosen == found
    assert (tmp_path / "0/last.pt").read_bytes() == WHOLE[:2500] and found[0].sizes == {"last.pt": 2500}
    assert not list((tmp_path / "1").iterdir())


def test_a_table_and_the_best_weights_are_no_training_state() -> None:
    """A program that resumes from an older complete checkpoint is correct."""
    saves = [
        Save(6, {"step-6.pt": 3000, "losses.csv": 9000}),
        Save(8, {"best.pt": 1000}),
        Save(12, {"step-12.pt": 3000}),
        Save(14, {"losses.csv": 9500}),
    ]
    assert [save.steps for save in states(saves, max(save.largest for save in saves))] == [6, 12]
