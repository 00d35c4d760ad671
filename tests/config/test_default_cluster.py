"""Without cluster=..., a job runs on the default cluster, and never on a login node by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcinit.config import folders
from hpcinit.config.compose import compose
from tests.conftest import Run

JOB = ("dry_run=true", "--", "true")


@pytest.fixture(autouse=True)
def _no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without a default, in a folder without configs, with a fake sbatch on PATH, which no test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HPCINIT_CLUSTER", raising=False)
    monkeypatch.delenv("HPCINIT_CONF", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


def settings(text: str, folder: str = "home/.config/hpcinit") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "settings.yaml").write_text(text)


@pytest.mark.parametrize("words", [JOB, ("--", "true"), ("wait=true",), ("-m", "nodes=1,2", "--", "true")])
def test_nothing_runs_on_a_login_node(hpcinit: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    """With sbatch on PATH and no cluster, submit runs nothing and lists the known clusters."""
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/ours.yaml").write_text("name: ours\n")
    done = hpcinit("submit", *words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("hpcinit: error: no cluster is chosen, and sbatch is on PATH: add cluster=NAME, ")
    assert " mini, ours, " in done.stderr and "export HPCINIT_CLUSTER=NAME" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_this_machine_without_slurm_or_on_request(hpcinit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """cluster=local runs on this machine; without sbatch on PATH it is the default."""
    assert "hpcinit.engine" in hpcinit("submit", "cluster=local", *JOB).stdout
    monkeypatch.setenv("PATH", "/nowhere")
    assert "hpcinit.engine" in hpcinit("submit", *JOB).stdout


def test_the_variable_and_the_settings_file(hpcinit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line wins over a primary config, then HPCINIT_CLUSTER, ./conf/settings.yaml and the user's own."""
    settings("cluster: mini\n")
    assert "#SBATCH --partition=main\n" in hpcinit("submit", *JOB).stdout
    settings("cluster: example\n", "conf")
    assert compose([]).cluster.name == "example"
    monkeypatch.setenv("HPCINIT_CLUSTER", "mini")
    assert compose([]).cluster.name == "mini"
    Path("conf/mine.yaml").write_text("defaults: [hpcinit, override cluster: delta, _self_]\nnodes: 2\n")
    Path("conf/mine.yaml").write_text("defaults:\n  - hpcinit\n  - override cluster: delta\n  - _self_\naccount: a\n")
    assert "gpuA100x4" in hpcinit("submit", "--config-name", "mine", *JOB).stdout
    assert compose(["cluster=local"]).cluster.name == "local"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: nope\n", "settings.yaml sets the default cluster 'nope', expected one of: aws_p5_efa"),
        ("cluster: minni\n", "did you mean 'mini'?"),
        ("nodes: 3\n", "settings.yaml contains {'nodes': 3}, expected one line: cluster: NAME"),
        ("a: [\n", "settings.yaml cannot be read: "),
    ],
)
def test_a_wrong_settings_file(hpcinit: Run, text: str, message: str) -> None:
    """The message names the file and what is expected in it."""
    settings(text)
    done = hpcinit("submit", *JOB)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_wrong_default_does_not_matter_with_a_cluster(hpcinit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cluster=..., only the errors of the command line are reported."""
    monkeypatch.setenv("HPCINIT_CLUSTER", "nope")
    assert hpcinit("submit", "cluster=mini", *JOB).returncode == 0
    assert "no such key 'node'; did you mean 'nodes'?" in hpcinit("submit", "cluster=mini", "node=2", *JOB).stderr


def test_other_errors_are_reported_with_it(hpcinit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or wrong default and the errors of other keys are reported in one pass."""
    found = hpcinit("submit", "nodes=two", *JOB).stderr.splitlines()
    assert len(found) == 2 and "no cluster is chosen" in found[0] and "nodes=two: expected a whole" in found[1]
    monkeypatch.setenv("HPCINIT_CLUSTER", "nope")
    found = hpcinit("submit", "nodes=two", *JOB).stderr.splitlines()
    assert len(found) == 2 and "HPCINIT_CLUSTER sets the default cluster 'nope'" in found[0] and "nodes=two" in found[1]
    found = hpcinit("submit", "cluster=noper", "nodes=two", *JOB).stderr.splitlines()
    assert len(found) == 2 and "cluster=noper: no such cluster" in found[0] and "nodes=two" in found[1]


def test_a_primary_config_may_choose_this_machine(hpcinit: Run) -> None:
    """`override cluster: local` in a primary config is a choice, also with sbatch on PATH."""
    Path("conf").mkdir()
    Path("conf/mine.yaml").write_text("defaults:\n  - hpcinit\n  - override cluster: local\n  - _self_\n")
    assert "hpcinit.engine" in hpcinit("submit", "--config-name", "mine", *JOB).stdout


def test_settings_are_no_primary_config(hpcinit: Run) -> None:
    """settings.yaml is not offered for --config-name."""
    settings("cluster: mini\n")
    assert "expected one of: hpcinit\n" in hpcinit("submit", "--config-name", "x", *JOB).stderr


def test_write(tmp_path: Path) -> None:
    """write() creates the user's file, which is the default from then on."""
    path = folders.write_default_cluster("mini")
    assert path == tmp_path / "home/.config/hpcinit/settings.yaml"
    assert folders.default_cluster() == ("mini", str(path))
