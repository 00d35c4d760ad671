"""Parse the output of `scontrol show`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.slurm import scontrol
from hpcinit.slurm.scontrol import Gpus, gpus, minutes, names

RECORDED = sorted((Path(__file__).parent.parent / "data/discover").glob("*.json"))
NODES, PARTITIONS = "scontrol --all show node", "scontrol --all show partition"


def recorded(path: Path, command: str) -> str:
    text: str = json.loads(path.read_text())[command]
    return text


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_reason_ends_with_its_line(path: Path) -> None:
    """A node's Reason that looks like keys is one value, and hides no real key."""
    nodes = scontrol.records(recorded(path, NODES), "NodeName")
    big = next(node for node in nodes if node["NodeName"] == "big1")
    assert big["Reason"].startswith("disk 3: CPUTot=999 RealMemory=9 is bad")
    assert (big["CPUTot"], big["RealMemory"], big["MemSpecLimit"]) == ("96", "1031000", "4096")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize(("command", "kind"), [(NODES, "NodeName"), (PARTITIONS, "PartitionName")])
def test_every_key_of_every_record_is_found(path: Path, command: str, kind: str) -> None:
    """There is one record per line that starts with the name, with every `key=` that a plain search finds."""
    text = recorded(path, command)
    found = scontrol.records(text, kind)
    blocks = [block for block in re.split(rf"(?m)^(?={kind}=)", text) if block.startswith(kind)]
    assert len(found) == len(blocks) >= 9
    for record, block in zip(found, blocks, strict=True):
        plain = re.sub(r"(?m)^\s+(OS|Reason)=.*$", r" \1=x", block)
        assert set(record) == set(re.findall(r"(?:^|\s)([\w:/]+)=", plain))


@given(st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=60))
def test_no_free_text_changes_another_value(reason: str) -> None:
    """No text in a Reason changes the CPUs or the next node."""
    text = f"NodeName=a CPUTot=4 \n   State=DOWN ThreadsPerCore=2\n   Reason={reason}\n\nNodeName=b CPUTot=8\n"
    a, b = scontrol.records(text, "NodeName")
    assert (a["CPUTot"], a["State"], a["ThreadsPerCore"], a["Reason"]) == ("4", "DOWN", "2", reason.strip())
    assert b == {"NodeName": "b", "CPUTot": "8"}


def test_lines_that_are_not_records() -> None:
    """'No nodes in the system' and lines before the first record are ignored."""
    assert scontrol.records("No nodes in the system\n   CPUTot=4\n", "NodeName") == []


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_minutes_of_every_time(days: int, hours: int, mins: int, seconds: int) -> None:
    """Slurm's time is its whole minutes, with days and without."""
    assert minutes(f"{days}-{hours:02}:{mins:02}:{seconds:02}") == days * 1440 + hours * 60 + mins
    assert minutes(f"{hours:02}:{mins:02}:{seconds:02}") == hours * 60 + mins


@pytest.mark.parametrize(
    ("text", "expected"),
    [("UNLIMITED", None), ("NONE", None), (None, None), ("90", 90), ("10:30", 10), ("2-12", 3600), ("1-00:30", 1470)],
)
def test_short_times(text: str | None, expected: int | None) -> None:
    """Shorter forms mean minutes, minutes:seconds, days-hours; no limit and no default are None."""
    assert minutes(text) == expected


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("(null)", []),
        ("gpu:8", [Gpus("", 8)]),
        ("gpu:a100:4(S:0-1)", [Gpus("a100", 4)]),
        ("gpu:a100:4(S:0,3),gpu:v100:2(S:1),nvme:1T", [Gpus("a100", 4), Gpus("v100", 2)]),
        ("craynetwork:4,gpu:mi250:8", [Gpus("mi250", 8)]),
        ("gpu:tesla:no_consume:2", [Gpus("tesla", 2)]),
        ("gpu:no_consume:2", [Gpus("", 2)]),
        ("gpu", [Gpus("", 1)]),
        ("gpu:a100", [Gpus("a100", 1)]),
        ("gpu:3g.20gb:2,gpu:1g.5gb:7", [Gpus("3g.20gb", 2), Gpus("1g.5gb", 7)]),
        ("shard:32,gpu:2,mps:gpu:200", [Gpus("", 2)]),
        ("gpu:1K", [Gpus("", 1024)]),
    ],
)
def test_gpus_of_a_node(gres: str, expected: list[Gpus]) -> None:
    """Types and counts of a node's GPUs, and nothing of its other GRES (gres.conf(5), slurm.conf(5) Gres)."""
    assert gpus(gres) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("ALL", None), ("(null)", None), (None, None), ("a,b", frozenset({"a", "b"}))]
)
def test_who_is_allowed(value: str | None, expected: frozenset[str] | None) -> None:
    """ALL and nothing mean everybody."""
    assert names(value) == expected
