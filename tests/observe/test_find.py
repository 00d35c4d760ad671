"""Runs are found by folder, name and job id."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.observe import find_runs, state
from hpcinit.observe.logs import Tail
from hpcinit.submit import folder
from tests.conftest import Run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = folder.claim(tmp_path, "x")
    folder.fill(path, {"job.sh": ""})
    folder.mark_submitted(path, {"job_id": "77", "engine": "local"})
    return path


def test_by_folder_name_and_job_id(run: Path) -> None:
    """A run folder, its name and its job id all mean the same run."""
    assert [find_runs.find_run(word, run.parent) for word in (str(run), "x-0001", "77")] == [run] * 3


def test_unknown_run_says_what_there_is(run: Path) -> None:
    """A word that means no run is answered with the last ones."""
    with pytest.raises(RequestError, match=r"no run 'y': neither a run folder nor a job id; .*x-0001"):
        find_runs.find_run("y", run.parent)


def test_a_folder_that_never_became_a_job(tmp_path: Path) -> None:
    """A folder without a submission record is said to be just that."""
    path = folder.claim(tmp_path, "x")
    with pytest.raises(RequestError, match="is not a run folder"):
        state.read(path)
    folder.fill(path, {"job.sh": ""})
    with pytest.raises(
        RequestError, match=r"nobody could say whether there is a job\. Look for it: squeue --all --me .*/job\.sh"
    ):
        state.read(path)
    (path / "exit.json").write_text('{"job": "7", "pid": 1, "restart": 0, "began": 1}')
    with pytest.raises(RequestError, match="job 7 has begun its script: squeue --jobs=7 tells of it; its logs are in"):
        state.read(path)
    (path / "exit.json").write_text('{"job": "7", "pid": 1, "restart": 0, "ended": 1, "exit_status": 3}')
    with pytest.raises(RequestError, match="job 7 has begun its script and ended with exit status 3; its logs"):
        state.read(path)


def test_tail_yields_whole_lines_only(tmp_path: Path) -> None:
    """A line comes when its end is there, also when the file appears late or a character is cut in two."""
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes("one\ntw\N{GREEK SMALL LETTER OMEGA}".encode()[:-1])
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as file:
        file.write("\N{GREEK SMALL LETTER OMEGA}".encode()[-1:] + b"\n")
    assert list(tail.lines()) == ["tw\N{GREEK SMALL LETTER OMEGA}"]


def test_last_words_without_a_line_end(tmp_path: Path) -> None:
    """What a killed rank printed last is there, once, also without a line end."""
    (tmp_path / "log").write_text("one\nfatal: last words")
    tail = Tail(tmp_path / "log")
    assert (list(tail.lines()), tail.rest(), tail.rest()) == (["one"], "fatal: last words", "")


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_an_odd_record_is_said_to_be_one(run: Path, text: str) -> None:
    """A submission record that was edited or cut off is named, and does not hide other runs."""
    (run / "submission.json").write_text(text)
    with pytest.raises(RequestError, match=r"submission.json (cannot be read|does not say job_id and engine)"):
        state.read(run)
    with pytest.raises(RequestError, match="no run '78'"):
        find_runs.find_run("78", run.parent)


def test_no_name_at_all(hpcinit: Run, tmp_path: Path) -> None:
    """Which runs there are is told."""
    for command in ("logs", "why", "report"):
        done = hpcinit(command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"hpcinit: error: which run? Name one, or its job id; the last in {tmp_path}/runs: none\n"


@pytest.mark.parametrize(
    ("word", "over"),
    [("COMPLETED", True), ("OUT_OF_MEMORY", True), ("RUNNING", False), ("REQUEUE_HOLD", False), ("A_NEW_WORD", False)],
)
def test_only_final_states_are_over(word: str, over: bool) -> None:
    """A word that Slurm may invent tomorrow does not end the waiting for a job that runs."""
    assert state.State(word, "1", "slurm").over is over
