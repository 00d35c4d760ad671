"""hpcinit's own frames are never taken for the user's program, and a rank whose program is over does not count as stuck."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.records import hang_report, run_folder
from hpcinit.records.hang_report import ELSEWHERE, ENDED, PACKAGE, HangReport
from hpcinit.records.heartbeats import NodeHeartbeats, RankHeartbeat
from hpcinit.why import diagnosis
from hpcinit.why.evidence import Evidence

OWN = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
SHIPPED = {f"jobs/{name}.py" for name in ("__init__", "doctor", "smoke", "train_gpt")}


@pytest.mark.parametrize("root", [str(PACKAGE), "/home/me/hpcinit/hpcinit", "/v/lib64/python3.9/site-packages/hpcinit"])
def test_every_file_of_the_package_is_hpcinits(root: str) -> None:
    """The exceptions are the programs that ship. The rank's copy of the package may have another path."""
    theirs = {name for name in OWN if not hang_report.is_of_hpcinit(f"{root}/{name}")}
    assert theirs == SHIPPED and not hang_report.is_user_code(f"{root}/cli/main.py")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/home/me/hpcinit/train.py", True),
        ("/home/me/hpcinit/examples/cli/main.py", True),
        ("/home/me/myhpcinit/cli/main.py", True),
        (f"{PACKAGE}/jobs/smoke.py", True),
        ("<string>", True),
        ("/usr/lib64/python3.9/threading.py", False),
        ("/usr/lib/python3/dist-packages/numpy/x.py", False),
        ("<frozen runpy>", False),
    ],
)
def test_files_of_a_user(file: str, expected: bool) -> None:
    """A user may keep programs in a folder named hpcinit."""
    assert hang_report.is_user_code(file) == expected


OVER = """
import sys, threading, time, types
from pathlib import Path
from hpcinit.runtime.lifecycle import output_watch

sys.modules["torch"] = types.ModuleType("torch")  # with torch, hpcinit waits for the program's threads


def look():
    while not any(name == "end" for _, name, _ in output_watch.main_frames()):
        time.sleep(0.01)
    output_watch.write_stacks(Path("stack"))


threading.Thread(target=look).start()
"""


def test_the_stack_of_a_program_that_is_over(tmp_path: Path) -> None:
    """A real rank waits in the end of hpcinit for a thread of its program."""
    (tmp_path / "over.py").write_text(OVER)
    subprocess.run([sys.executable, "-m", "hpcinit.run", "over.py"], cwd=tmp_path, check=True, timeout=100)
    text = (tmp_path / "stack").read_text()
    assert "interpreter_exit.py" in text and "cli/main.py" in text
    place = hang_report.place(text)
    assert (place.waits_in, place.at, place.outside, place.host) == ("", "", True, os.uname().nodename)


THREAD = "main thread 0x1\n\nThread 0x1 (most recent call first):\n"
TORCH = '  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
HERE = f'  File "{PACKAGE}/cli/main.py", line 136 in guarded\n  File "<frozen runpy>", line 88 in _run_code\n'
WAITS = f'{THREAD}{TORCH}  File "/home/me/train.py", line 12 in step\n{HERE}'
READS = f'{THREAD}  File "/home/me/train.py", line 5 in read\n{HERE}'
IS_OVER = f'{THREAD}  File "/usr/lib/python3.11/selectors.py", line 468 in select\n{HERE}'
PACKAGED = f'{THREAD}  File "/v/site-packages/x/y.py", line 1 in z\n  File "/v/site-packages/x/__main__.py", line 7 in run\n{HERE}'


def test_a_program_that_is_an_installed_package() -> None:
    """It has no frame of the user; the outermost one of the package is shown, not one of hpcinit."""
    assert hang_report.place(PACKAGED).at == "__main__.py:7 in run"


def test_a_collective_in_hpcinits_end() -> None:
    """No line of the program called it."""
    where = hang_report.place(f"{THREAD}{TORCH}{HERE}")
    assert where.waits_in == "all_reduce" and not where.at
    assert str(hang_report.Waiting((1,), where.waits_in, where.at)) == "rank 1 waits in all_reduce"


def silence(folder: Path, stacks: list[str], returned: int | None = None) -> HangReport:
    """Return the report on a run whose ranks printed nothing for 300 s. returned: a rank that ended with status 0."""
    timeline = folder / run_folder.TIMELINE / "7.0.0"
    timeline.mkdir(parents=True)
    ranks = [{"rank": rank, "pid": 40 + rank, "interpreter": 1.0} for rank in range(len(stacks))]
    ends = [{"rank": returned, "returned": 9.0}] if returned is not None else []
    (timeline / "n1.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (*ranks, *ends)))
    hang = folder / run_folder.HANG_REPORTS / "7.0.0"
    hang.mkdir(parents=True)
    (hang / hang_report.SILENT).write_text(json.dumps({"silent_s": 300, "complete": True}))
    for rank, text in enumerate(stacks):
        noted = text.replace("\n", "\ncpu_s 1 of_s 30 same_s 290\n", 1)
        (hang / hang_report.STACK.format(rank=rank)).write_text(noted)
    found = hang_report.without_output(folder, "7", 0)
    assert found
    return found


def test_a_stuck_rank_and_one_whose_program_is_over(tmp_path: Path) -> None:
    """The rank that is in its program is stuck. The one whose program is over waits for it."""
    found = silence(tmp_path, [IS_OVER, WAITS, READS])
    assert [(one.rank, one.state) for one in found.stuck] == [(2, ELSEWHERE)] and found.certain
    verdict = diagnosis.diagnose_silence(Evidence("RUNNING"), found, "the job is RUNNING")
    assert verdict.headline.startswith(
        "the ranks seem to hang: rank 2 on n1 is not in a collective: it is at train.py:5"
    )
    assert "main.py" not in " ".join((verdict.headline, *verdict.evidence))


def test_all_programs_are_over(tmp_path: Path) -> None:
    """Ranks that wait for each other at the end of hpcinit do not hang in the program."""
    found = silence(tmp_path, [IS_OVER, IS_OVER])
    assert not found.stuck and not found.certain and found.rank is None


@pytest.mark.parametrize("left", [IS_OVER, ""], ids=["waits at its end", "without a stack"])
def test_a_rank_that_returned_early(tmp_path: Path, left: str) -> None:
    """The others wait for it in a collective, and no other rank is outside one: it is named, and not as stuck."""
    found = silence(tmp_path, [WAITS, left or READS], returned=None if left else 1)
    assert [(one.rank, one.state) for one in found.stuck] == [(1, ENDED)] and found.certain
    assert found.headline == "rank 1 on n1 is not running its program: the program has ended, or has not started"


TIMED_OUT = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in step
    dist.all_reduce(loss)
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce
    work.wait()
RuntimeError: Timed out waiting 15000ms for recv operation to complete"""


def test_a_program_that_a_timeout_of_its_collective_has_ended(tmp_path: Path) -> None:
    """A stack that was written after the error shows no collective, but the rank waited in one as the others did."""
    assert silence(tmp_path / "before", [IS_OVER, WAITS, WAITS]).rank == 0
    silence(tmp_path, [IS_OVER, WAITS, WAITS])
    raised = {0: hang_report.place_of_error(TIMED_OUT)}
    found = hang_report.without_output(tmp_path, "7", 0, raised=raised)
    assert found and found.rank is None and [one.ranks for one in found.waiting] == [(0, 1, 2)]


def test_steps_were_reported() -> None:
    """The report of a hang of a program that reports steps names the rank that is in its program."""
    node = NodeHeartbeats("n1", 1000.0, tuple(RankHeartbeat(rank, 40 + rank, 3, 9.0) for rank in range(3)))
    stacks = dict(enumerate(map(hang_report.place, (IS_OVER, WAITS, READS))))
    assert [one.rank for one in hang_report.report([node], stacks, 1001.0, 3).stuck] == [2]
    del stacks[2]
    early = hang_report.report([NodeHeartbeats("n1", 1000.0, node.heartbeats[:2])], stacks, 1001.0, 2)
    assert [(one.rank, one.state) for one in early.stuck] == [(0, ENDED)]
