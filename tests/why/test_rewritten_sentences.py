"""hpcinit decides by the fields of its records, never by the text of its messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BY_MESSAGE = "do"  # advice is a message too: a reader whose sentences are rewritten gives other advice


def run(what: str, folder: Path, seed: int) -> str:
    command = [sys.executable, "-m", "tests.why.scenarios", what, str(folder), str(seed)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def decided(folder: Path, seed: int = 0) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(run("decide", folder, seed))
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    run("build", folder, 0)
    return decided(folder)


def test_the_scenarios_have_different_verdicts(plain: dict[str, dict[str, Any]]) -> None:
    """The run folders of the other tests lead to different verdicts, blame and exclusions."""
    verdicts = {name: (one["kind"], one["rank"]) for name, one in plain.items() if "kind" in one}
    assert verdicts == {
        "exception": ("program", 3),
        "missing_rank": ("start-up", 0),
        "missing_node": ("start-up", 1),
        "peer_lost": ("import", 2),
        "only_peers_of_a_lost_rank": ("unknown", None),
        "ports_taken": ("port", 0),
        "no_memory_for_a_command": ("host-memory", 1),
        "stuck_rank": ("hang", 2),
        "stuck_rank_of_which_only_a_record_is_left": ("hang", 2),
        "silent_node": ("hang", None),
        "lost_node": ("node", None),
    }
    assert plain["silent_node"]["counted"] == [["n2", "no heartbeats"]] and plain["silent_node"]["excluded"] == "n2"
    assert plain["lost_node"]["excluded"] == "n2" and plain["lost_node"]["nothing_to_do_when_requeued"]
    assert plain["stuck_rank"]["replaced"] == plain["silent_node"]["replaced"] == "n2"
    assert "another process stopped it" in plain["stuck_rank"]["do"]
    assert plain["only_peers_of_a_lost_rank"]["waits_for_a_cause"] and not plain["missing_rank"]["waits_for_a_cause"]
    assert plain["missing_rank"]["at_fault"] == [["start-up", 3, ""]] * 3
    assert plain["missing_node"]["at_fault"] == [["start-up", None, "n2"]] * 2
    assert plain["peer_lost"]["at_fault"] == [["peer-lost", 2, "n2"]] * 2
    assert plain["silent_node"]["at_fault"] == [["hang", None, "n2"]]
    assert plain["refused_submissions"] == {"sweep": False, "chain": False}


@pytest.mark.parametrize("seed", [1, 2])
def test_records_with_random_sentences(plain: dict[str, dict[str, Any]], tmp_path: Path, seed: int) -> None:
    """Ranks whose messages are random text write records that lead to the same decisions and advice."""
    run("build", tmp_path, seed)
    assert decided(tmp_path) == plain


def test_a_reader_with_random_sentences(plain: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Other random messages on the login node change no decision."""
    run("build", tmp_path, 3)

    def decisions(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {name: {key: value for key, value in one.items() if key != BY_MESSAGE} for name, one in found.items()}

    assert decisions(decided(tmp_path, 4)) == decisions(plain)


def test_sentences_are_rewritten(tmp_path: Path) -> None:
    """The hook changes the written sentences; otherwise the tests above could not fail."""
    run("build", tmp_path, 1)
    record = json.loads((tmp_path / "missing_rank/errors/rank-0.json").read_text())
    assert "missing" not in record["error"] and "arrived" not in record["error"]
    report = (tmp_path / "stuck_rank/hang/5.0.0/report.txt").read_text()
    assert "stopped" not in report and "wait" not in report
