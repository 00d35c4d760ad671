"""Failures of nodes: which messages blame a node, and how failures are recorded and counted."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from hpcinit.records import causes, job_log, node_records
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.hang_report import HangReport, SilentNode
from hpcinit.records.node_records import ADDED, FORGOTTEN, NodeFailure
from hpcinit.why import node_exclusion
from hpcinit.why.evidence import Evidence
from tests.records.test_job_log import KILLED, LIMIT, LOST, OOM

NOW = 1795267388.0
H = 3600.0


def failed(host: str, kind: str = "NODE_FAIL", job: str = "1", ago_h: float = 1) -> NodeFailure:
    return NodeFailure(NOW - ago_h * H, host, kind, f"/runs/{job}", job)


def counts(*known: NodeFailure, expiry_h: float = 24) -> dict[str, int]:
    return {one.host: len(one.failures) for one in node_records.node_states(known, NOW, expiry_h)}


def blamed(error: str = "", log: str = "", **more: object) -> list[tuple[str, str]]:
    found = [Found(ErrorRecord(NOW, 0, "n1", error, ""), NOW)] if error else []
    evidence = Evidence("FAILED", found=found, log=job_log.read(log), **more)  # type: ignore[arg-type]
    return [(fault.host, fault.kind) for fault in node_exclusion.faulty_nodes(evidence)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "ECC"),
        ("torch.AcceleratorError: CUDA error: Uncorrectable NVLink error detected during the execution", "NVLink"),
        ("NVRM: Xid (PCI:0000:10:1c): 79, pid=1896, GPU has fallen off the bus.", "Xid 79"),
        ("health check: Xid 94 on GPU 3", "Xid 94"),
        ("NVMLError_GpuIsLost: GPU is lost", "GPU lost"),
    ],
)
def test_broken_hardware_blames_the_node(error: str, kind: str) -> None:
    """A message of broken hardware blames the node of the rank."""
    assert blamed(error) == [("n1", kind)]


@pytest.mark.parametrize(
    "error",
    [
        "ValueError: bad sample 17",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: device-side assert triggered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 79.00 GiB",
        "NVRM: Xid (PCI:0000:10:1c): 31, pid=79, MMU Fault",  # a wrong address in the program
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping",
        "RuntimeError: NCCL communicator was aborted on rank 3: GPU is lost",  # secondary
        "KeyError: 'Xid'",
    ],
)
def test_failures_of_the_program_blame_no_node(error: str) -> None:
    """Errors that a program can cause, and secondary errors, blame no node."""
    assert blamed(error) == []


def test_node_failures_that_slurm_reports() -> None:
    """A lost node and a node without a working slurmd are blamed; other ends of a job blame no node."""
    assert blamed(log=LOST) == [("n2", "NODE_FAIL")]
    assert blamed(nodes={"n3": "Not responding"}) == [("n3", "NODE_FAIL")]
    # Recorded with Slurm 22.05.8; 'Application launch failed' follows, and names no node.
    away = "srun: error: Task launch for StepId=5.0 failed on node n{}: Communication connection failure\n"
    assert blamed(log=away.format(2)) == [("n2", "slurmd unreachable")]
    assert blamed(log=away.format(2) + away.format(3)) == []  # an image that starts on no node
    assert blamed(log=KILLED) == [] and blamed(log=LIMIT) == []


def test_a_node_lost_after_the_oom_killer_is_not_blamed() -> None:
    """After the OOM killer, the program's memory use is the cause of the lost node."""
    assert blamed(log=f"{OOM}\n{LOST}") == []


def test_a_silent_node_is_blamed_if_it_has_several_ranks() -> None:
    """A single silent rank may be stopped or hold the GIL, which is not the fault of its node."""
    assert blamed(hang=HangReport(silent_nodes=(SilentNode("n2", 75.0, (2, 3)),))) == [("n2", "no heartbeats")]
    assert blamed(hang=HangReport(silent_nodes=(SilentNode("n2", 75.0, (2,)),))) == []


def test_the_last_output_of_a_rank_without_a_record() -> None:
    """The output blames the host in srun's message; a message about several hosts blames none."""
    tails = {1: "CUDA error: uncorrectable ECC error encountered"}
    assert blamed(log="srun: error: n1: task 1: Aborted\n", tails=tails) == [("n1", "ECC")]
    assert blamed(log="srun: error: n[1-2]: tasks 1-2: Aborted\n", tails=tails) == []


def test_counted_messages_have_advice_about_the_node() -> None:
    """`hpcinit why` has the kind `gpu` for the messages that are counted."""
    assert {
        causes.kind(text)[0] for text in ("NVRM: Xid (PCI:0000:3b:00): 79", "uncorrectable ECC error", "GPU is lost")
    } == {"gpu"}


def test_failures_expire_and_are_counted_once_per_job() -> None:
    """Old failures do not count, and a job counts once."""
    known = [failed("n1"), failed("n1"), failed("n1", job="2"), failed("n2", ago_h=23.9), failed("n3", ago_h=24.1)]
    assert counts(*known) == {"n1": 2, "n2": 1}
    assert counts(*known, expiry_h=48) == {"n1": 2, "n2": 1, "n3": 1}


def test_failures_before_a_node_was_cleared_do_not_count() -> None:
    """Also if they are recorded later; failures after the clearing count."""
    known = [failed("n1"), failed("n1", FORGOTTEN, ago_h=0.5), failed("n1", job="2", ago_h=0.7)]
    assert counts(*known) == {}
    assert counts(*known, failed("n1", job="3", ago_h=0.1)) == {"n1": 1}
    assert node_records.new_record([failed("n1")], known) == []  # no second line for a recorded failure, cleared or not


def test_the_limit_and_the_summary() -> None:
    """A node at the limit is excluded, and the summary has the number and the kinds of failures."""
    [one] = node_records.node_states([failed("n1"), failed("n1", "Xid 79", "2")], NOW, 24)
    assert (one.is_bad(2), one.is_bad(3)) == (True, False)
    assert one.summary(24) == "2 failures in 24 h: NODE_FAIL, Xid 79"
    [one] = node_records.node_states([NodeFailure(NOW, "n1", ADDED, about="slow network")], NOW, 24)
    assert one.is_bad(9) and one.summary(24) == "added manually: slow network"
    many = [failed("n1", f"Xid {number}") for number in (46, 48, 62, 64, 74, 79)]
    [one] = node_records.node_states(many, NOW, 24)
    assert one.summary(24) == "6 failures in 24 h: Xid 46, Xid 48, Xid 62, Xid 64, and 2 more"


def test_when_an_exclusion_expires() -> None:
    """It expires when fewer failures than the limit are recent; a manual exclusion has its own expiry."""
    known = [failed("n1", ago_h=20), failed("n1", "Xid 79", ago_h=10), failed("n1", "ECC", ago_h=1)]
    [one] = node_records.node_states(known, NOW, 24)
    assert [one.until(limit, 24) for limit in (1, 2, 3, 4)] == [NOW + 23 * H, NOW + 14 * H, NOW + 4 * H, None]
    [one] = node_records.node_states([*known, failed("n1", ADDED, ago_h=2)], NOW, 24)
    assert [one.until(limit, 24) for limit in (1, 5)] == [NOW + 23 * H, NOW + 22 * H]
    for limit in (1, 2, 5):
        assert one.is_bad(limit)
        until = one.until(limit, 24) or 0
        [later], [still] = (node_records.node_states(one.failures, until + by, 24) or [one] for by in (1, -1))
        assert still.is_bad(limit) and (later is one or not later.is_bad(limit))


def test_the_worst_node_is_first() -> None:
    """Manually added nodes are first, then those with the most failures, then those with the latest."""
    known = [failed("n1", ago_h=3), failed("n2", ago_h=2), failed("n3"), failed("n3", job="2"), failed("n4", ADDED)]
    assert [one.host for one in node_records.node_states(known, NOW, 24)] == ["n4", "n3", "n2", "n1"]


def test_a_file_with_anything_in_it_is_read(tmp_path: Path) -> None:
    """Incomplete lines and other documents are skipped, and unknown keys are ignored."""
    path = tmp_path / "deep/er/x.jsonl"
    assert node_records.read(path) == []
    node_records.append(path, [failed("n1")])
    with path.open("a") as file:
        file.write('{"time": 1, "host"\n[1]\n7\n\n{"time": "x", "host": "n1", "kind": "ECC"}\n{"host": "n5"}\n')
        file.write(json.dumps({"time": 5.0, "host": "n2", "kind": "ECC", "color": "red"}) + "\n")
    assert [(one.host, one.kind) for one in node_records.read(path)] == [("n1", "NODE_FAIL"), ("n2", "ECC")]
    assert path.stat().st_mode & 0o777 == 0o600


def _append(path: Path, host: str) -> None:
    for job in range(50):
        node_records.append(path, [failed(host, job=str(job))])


def test_several_processes_append_at_a_time(tmp_path: Path) -> None:
    """No line of four writers is lost or incomplete."""
    path = tmp_path / "x.jsonl"
    writers = [multiprocessing.Process(target=_append, args=(path, f"n{number}")) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert counts(*node_records.read(path)) == {f"n{number}": 50 for number in range(4)}


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_STATE_HOME is used if it is an absolute path, and a cluster's name cannot leave the folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert node_records.file({"XDG_STATE_HOME": "/state"}, "x") == Path("/state/hpcinit/nodes/x.jsonl")
    for env in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert node_records.file(env, "../x/y") == tmp_path / ".local/state/hpcinit/nodes/.._x_y.jsonl"
