"""Find runs by folder, name and job id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.engine import SLURM
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


def test_an_unknown_run_lists_the_latest_runs(run: Path) -> None:
    """The message for an unknown name lists the latest runs."""
    with pytest.raises(RequestError, match=r"no run 'y': no run folder or job has this name; .*x-0001"):
        find_runs.find_run("y", run.parent)


def test_a_folder_that_never_became_a_job(tmp_path: Path) -> None:
    """The message for a folder without a submission record describes what the folder contains."""
    path = folder.claim(tmp_path, "x")
    with pytest.raises(RequestError, match="is not a run folder"):
        state.read(path)
    folder.fill(path, {"job.sh": ""})
    with pytest.raises(
        RequestError, match=r"Slurm did not confirm the job\. To find the job: squeue --all --me .*/x-0001/ ;"
    ):
        state.read(path)
    (path / "exit.json").write_text('{"job": "7", "pid": 1, "restart": 0, "began": 1}')
    with pytest.raises(RequestError, match="job 7 started its script; see squeue --jobs=7; its logs are in"):
        state.read(path)
    (path / "exit.json").write_text('{"job": "7", "pid": 1, "restart": 0, "ended": 1, "exit_status": 3}')
    with pytest.raises(RequestError, match="job 7 started its script and ended with exit status 3; its logs"):
        state.read(path)


def test_tail_yields_whole_lines_only(tmp_path: Path) -> None:
    """Tail yields a line after its newline, even if the file appears late or a character is cut in two."""
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes("one\ntw\N{GREEK SMALL LETTER OMEGA}".encode()[:-1])
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as file:
        file.write("\N{GREEK SMALL LETTER OMEGA}".encode()[-1:] + b"\n")
    assert list(tail.lines()) == ["tw\N{GREEK SMALL LETTER OMEGA}"]


def test_output_without_a_newline_at_the_end(tmp_path: Path) -> None:
    """The last output of a killed rank is returned once, even without a newline."""
    (tmp_path / "log").write_text("one\nfatal: last output")
    tail = Tail(tmp_path / "log")
    assert (list(tail.lines()), tail.rest(), tail.rest()) == (["one"], "fatal: last output", "")


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_an_invalid_record_is_reported(run: Path, text: str) -> None:
    """An edited or truncated submission record is named, and does not hide other runs."""
    (run / "submission.json").write_text(text)
    with pytest.raises(RequestError, match=r"submission.json (cannot be read|has no keys job_id and engine)"):
        state.read(run)
    with pytest.raises(RequestError, match="no run '78'"):
        find_runs.find_run("78", run.parent)


def test_no_name_at_all(hpcinit: Run, tmp_path: Path) -> None:
    """The message for a missing run name lists the latest runs."""
    for command in ("logs", "why", "report"):
        done = hpcinit(command)
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr
            == f"hpcinit: error: no run given, expected its name or job id; the latest in {tmp_path}/runs: none\n"
        )


@pytest.mark.parametrize(
    ("word", "over"),
    [("COMPLETED", True), ("OUT_OF_MEMORY", True), ("RUNNING", False), ("REQUEUE_HOLD", False), ("A_NEW_STATE", False)],
)
def test_only_final_states_are_over(word: str, over: bool) -> None:
    """An unknown state of a newer Slurm does not count as the end of a job."""
    assert state.State(word, "1", SLURM).over is over


def test_an_id_of_a_local_run_and_of_a_slurm_job(hpcinit: Run, tmp_path: Path) -> None:
    """The id of a local run is a process id. If a Slurm job has it too, cancel asks for the run's name."""
    for name, engine in (("train-0001", "slurm"), ("test-0001", "local")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.sh").touch()
        record = {"job_id": "4242", "engine": engine, "submitted": 1_790_000_000.0}
        (tmp_path / "runs" / name / "submission.json").write_text(json.dumps(record))
    done = hpcinit("cancel", "4242")
    assert done.returncode == 2 and "use the name of the run instead, test-0001 or train-0001" in done.stderr, done
