"""TAB completion of keys and choices by the schema gives the candidates that Hydra gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.cli import completion

LINES = (
    *(
        "",
        "c",
        "cluster=m",
        "cluster.",
        "cluster.n",
        "stop.",
        "deepspeed.",
        "cluster.container.",
    ),
    *("cluster=mini nodes=2 cluster.partitions.main.t", "mi"),
)
OF_HYDRA = (
    *("+x", "hydra.", "job.script=./", "job.args=", "'", "job.args.", "nope", "nope=", "nodes=1", "cluster.name="),
    *("cluster=mini cluster.env.", "+lr=1 lr"),
)


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COMP_LINE", "")
    for name in ("HPCINIT_CONF", "HPCINIT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "conf/mine").mkdir(parents=True)
    (tmp_path / "conf/mine/a.yaml").write_text("x: 1")


def test_the_same_candidates() -> None:
    """For keys, tables, groups, choices and values."""
    for line in LINES:
        *before, word = line.split(" ")
        expected = [found for found in completion.of_hydra([*before, word]) if found]
        assert completion.of_config(before, word) == expected, line


@pytest.mark.parametrize("line", OF_HYDRA)
def test_what_only_hydra_completes(line: str) -> None:
    """Values, additions, files, and what is in a list or in a table of the user's own names."""
    *before, word = line.split(" ")
    assert completion.of_config(before, word) == []
