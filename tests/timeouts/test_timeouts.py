"""`hpcinit timeouts`: the start-up timeout in force, and one proposed from past runs for the cluster's YAML."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpcinit.config import compose, job_spec
from hpcinit.records import run_folder, spec, timeline
from hpcinit.records.spec import Program, Spec
from hpcinit.records.startup_timeout import StartupTimeout
from hpcinit.timeouts import fit
from tests.conftest import Run

OWN = "# my cluster\nname: x\npartition: main  # the only one\ntime_min: 60\n"


def run_of(runs: Path, name: str, nodes: int, *waited_s: float, cluster: str = "x", whole: bool = True) -> Path:
    """Create a run folder with one attempt per value of `waited_s`. whole: all ranks completed start-up."""
    folder = runs / name
    (folder / "timeline").mkdir(parents=True)
    made = Spec(name, cluster, nodes, 1, Program("command", "true"), "/", "n")
    (folder / run_folder.SPEC).write_text(json.dumps({"format": spec.FORMAT, **asdict(made)}))
    (folder / run_folder.SUBMISSION).write_text(json.dumps({"job_id": "7", "engine": "slurm", "cluster": cluster}))
    for restart, waited in enumerate(waited_s):
        job = f"7.0.{restart}"
        for rank in range(nodes):
            first = 1000.0 + restart * 100
            events = {"started": first, "interpreter": first + 1, "met": first + 1.5, "imported": first + 3}
            end = {"collective": first + 3 + waited - rank * 0.001, "up": first + 3 + waited}
            writer = timeline.Writer(timeline.path(folder, job, f"n{rank + 1}"))
            known = {"job": job, "world_size": nodes, "nodes": nodes}
            writer.write(rank, {**known, **events, **(end if whole else {})})
            writer.close()
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Twelve starts on 1, 2 and 4 nodes, which took at most 10 + 2 x nodes seconds."""
    for nodes in (1, 2, 4):
        run_of(tmp_path / "runs", f"train-{nodes:04}", nodes, 10 + 2 * nodes, 9.0, 8.0 + nodes, 7.0)
    return tmp_path / "runs"


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


def test_a_timeout_is_proposed_from_timelines(hpcinit: Run, runs: Path) -> None:
    """The output is YAML that gives every number of nodes twice its longest start; without --write no file changes."""
    run_of(runs, "train-0009", 2, 5.0, whole=False)
    done = hpcinit("timeouts", "fit")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == {"timeout_base_s": 60, "timeout_per_node_s": 0}
    assert "# not counted: 1 starts that did not complete" in done.stdout
    assert "# for cluster=x: 2 x the longest start, and 60 s or more" in done.stdout
    assert ["#", "2", "4", "9.5", "14.0", "60"] in [line.split() for line in done.stdout.splitlines()]
    assert not (runs.parent / "conf").exists()
    document = json.loads(hpcinit("timeouts", "fit", "--json", "--factor", "10", "train-0001", "train-0004").stdout)
    assert document["proposed"] == {"timeout_base_s": 120, "timeout_per_node_s": 15}  # 180 s for 4 nodes
    assert document["factor"] == 10 and len(document["starts"]) == 8


STARTS = st.dictionaries(
    st.integers(1, 512), st.lists(st.floats(0.01, 2000), min_size=1, max_size=3), min_size=1, max_size=6
)


@given(STARTS, st.floats(1, 10))
def test_every_start_that_was_seen_fits_into_the_timeout(starts: dict[int, list[float]], factor: float) -> None:
    """Every number of nodes that was seen gets at least `factor` times its longest start, and more nodes get no less."""
    formula = fit.fit(fit.History(dict(sorted(starts.items())), 0, (), "x", 1e9), factor)
    for nodes, waited in starts.items():
        assert formula.start_up(nodes).total_seconds() >= factor * max(waited) - 1e-6
    assert formula.per_node_s >= 0 and formula.base_s >= 60


def test_one_number_of_nodes_leaves_the_default_per_node() -> None:
    """With one number of nodes there is no slope, so the default one is proposed."""
    assert fit.fit(fit.History({8: [100.0]}, 0, (), "x", 3600), 2) == StartupTimeout(200, 3.5, 3600)


def test_it_is_written_into_the_users_file(hpcinit: Run, runs: Path, own: Path) -> None:
    """--write replaces its own part of the file; the user's lines stay, and jobs get the new timeout."""
    assert "wrote " in hpcinit("timeouts", "fit", "--write", "--factor=9").stderr
    first = own.read_text()
    assert first.startswith(OWN) and yaml.safe_load(first)["timeout_base_s"] == 108
    assert "12 starts on 1, 2, 4 nodes until " in first and ": 9 x the longest" in first
    hpcinit("timeouts", "fit", "--write", "--factor=10")
    second = own.read_text()
    assert second.startswith(OWN) and second.count("timeout_per_node_s:") == 1
    assert yaml.safe_load(second) == {**yaml.safe_load(OWN), "timeout_base_s": 120.0, "timeout_per_node_s": 15.0}
    assert "min(3600, 120 + 15 x 4 nodes) = 180 s" in hpcinit("timeouts", "cluster=x", "nodes=4").stdout


def test_a_value_of_the_user_is_kept(hpcinit: Run, runs: Path, own: Path) -> None:
    """A coefficient of the user is kept; a comment in the file contains the proposed value."""
    own.write_text(OWN + "timeout_base_s: 500\n")
    done = hpcinit("timeouts", "fit", "--write")
    assert "conf/cluster/x.yaml; kept your own timeout_base_s" in done.stderr
    assert "# timeout_base_s: your value is used; the runs give 60.0\n" in own.read_text()
    assert yaml.safe_load(own.read_text())["timeout_base_s"] == 500


def test_unusable_histories_are_refused(hpcinit: Run, tmp_path: Path) -> None:
    """Two clusters, a factor below 1, no complete start and no timeline: each is refused with what to do."""
    runs = tmp_path / "runs"
    run_of(runs, "few-0001", 1, 10.0)
    done = hpcinit("timeouts", "fit", "--factor=0.5")
    assert done.returncode == 2 and "--factor is 0.5, expected 1 or more" in done.stderr
    other = run_of(runs, "other-0001", 1, 10.0, cluster="y")
    assert "these runs are of several clusters: x (few-0001), y" in hpcinit("timeouts", "fit").stderr
    for file in other.glob("timeline/*/*"):
        file.unlink()
    assert "no timeline in other-0001: runs write one" in hpcinit("timeouts", "fit", "other-0001").stderr
    run_of(runs, "failed-0001", 1, 10.0, whole=False)
    done = hpcinit("timeouts", "fit", "failed-0001")
    assert done.returncode == 2 and "no start that completed" in done.stderr


def test_a_cluster_that_is_not_the_users(hpcinit: Run, tmp_path: Path) -> None:
    """Cluster files that ship with hpcinit are not changed, and missing ones are not created; the error has advice."""
    for cluster, text in (("mini", "ships with hpcinit"), ("nowhere", "create one with `hpcinit discover`")):
        runs = tmp_path / cluster
        for nodes in (1, 2):
            run_of(runs, f"train-{nodes:04}", nodes, *[10.0 * nodes] * 5, cluster=cluster)
        done = hpcinit("timeouts", "fit", "--write", "--runs-dir", str(runs))
        assert done.returncode == 2 and text in done.stderr
