"""`hpcinit timeouts`: the start-up timeout in force."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcinit.config import compose, job_spec
from hpcinit.records.startup_timeout import StartupTimeout
from tests.conftest import Run

OWN = "# my cluster\nname: x\npartition: main  # the only one\ntime_min: 60\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The user's own cluster file."""
    path = tmp_path / "conf/cluster/x.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(OWN)
    return path


def test_the_timeout_in_force(hpcinit: Run, own: Path) -> None:
    """The command prints the default formula, or that of the cluster with the source of each value."""
    done = hpcinit("timeouts")
    assert done.returncode == 0 and "min(3600, 300 + 3.5 x 1 node) = 304 s" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-15].split() == ["1", "304"] and done.stdout.splitlines()[-1].split() == [
        "16384",
        "3600",
    ]
    own.write_text(OWN + "timeout_base_s: 90\ntimeout_per_node_s: 0.5\n")
    document = json.loads(hpcinit("timeouts", "cluster=x", "comm.timeout_max_s=900", "--json").stdout)
    assert document["formula"] == {
        "base_s": {"value": 90, "from": "cluster.timeout_base_s"},
        "per_node_s": {"value": 0.5, "from": "cluster.timeout_per_node_s"},
        "max_s": {"value": 900, "from": "comm.timeout_max_s"},
    }
    assert document["start_up_s"]["256"] == 90 + 128 and document["start_up_s"]["16384"] == 900


def test_a_request_uses_the_timeout_of_its_cluster(hpcinit: Run, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each coefficient is that of the request, else of the cluster, else the default."""
    own.write_text(OWN + "timeout_base_s: 90\ntimeout_per_node_s: 0.5\n")
    monkeypatch.chdir(own.parents[2])
    config = compose.compose(["cluster=x", "comm.timeout_per_node_s=7"])
    assert job_spec.startup_timeout(config) == StartupTimeout(90, 7, 3600)


def test_an_unknown_option(hpcinit: Run) -> None:
    """An unknown option is refused with a message."""
    done = hpcinit("timeouts", "--nodes")
    assert done.returncode == 2 and "--nodes: no such option" in done.stderr
