"""compose() makes a Config from overrides, or reports every problem at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

from hpcinit.base.errors import ConfigError
from hpcinit.config.compose import compose, main
from hpcinit.config.folders import folder
from hpcinit.config.hydra_setup import VERSION_BASE
from hpcinit.config.request import Request
from hpcinit.config.schema import Cluster, Partition


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HPCINIT_CONF", raising=False)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert caught.value.exit_status == 2
    return list(caught.value.problems)


def test_defaults_are_the_local_machine_and_the_smoke_test() -> None:
    """Without overrides, the request is complete: the smoke test on one local rank."""
    config = compose([])
    assert (config.cluster.name, config.job.name, config.nodes, config.name) == ("local", "smoke", 1, "smoke")


@pytest.mark.parametrize("choice", sorted(f"{path.parent.name}={path.stem}" for path in folder().glob("*/*.yaml")))
def test_every_shipped_choice_composes(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of a group in conf/ fits the schema, and the name of a cluster is the file's name."""
    monkeypatch.setenv("USER", "me")  # part of some folders
    group, _, name = choice.partition("=")
    config = compose([choice, *(["job.name=x"] if group == "job" else [])])
    assert config.cluster.name == (name if group == "cluster" else "local")


def test_the_example_has_every_key_of_a_cluster() -> None:
    """conf/cluster/example.yaml, the template, has exactly the keys of a cluster and of a partition."""
    example = yaml.safe_load((folder() / "cluster/example.yaml").read_text())
    assert set(example) == {each.name for each in fields(Cluster)}
    shown = {key for partition in example["partitions"].values() for key in partition}
    assert shown == {each.name for each in fields(Partition)}


def test_partition_and_time_default_to_the_cluster() -> None:
    """Partition and time limit are the cluster's unless set on the command line."""
    assert (compose(["cluster=mini"]).partition, compose(["cluster=mini"]).time_min) == ("main", 10)
    given = compose(["cluster=mini", "partition=high", "time_min=5"])
    assert (given.partition, given.time_min) == ("high", 5)


def test_all_problems_are_reported_at_once() -> None:
    """Three wrong overrides give three messages in one pass, and a valid one gives none."""
    found = problems("cluster=nope", "nodes=abc", "seed=3", "nodez=1")
    assert len(found) == 3
    assert [any(part in message for message in found) for part in ("nope", "abc", "nodez")] == [True] * 3


def test_extra_keys_and_interpolation_work() -> None:
    """`+key=` adds the user's own key, and other keys can refer to it."""
    config = compose(["+lr=0.1", "job.args=[--lr,${lr}]", "+cluster.sbatch.reservation=x"])
    assert config.job.args == ["--lr", "0.1"]
    assert config.cluster.sbatch == {"reservation": "x"}


def test_an_invalid_sweep_submits_nothing() -> None:
    """With --multirun, every combination is composed and prepared before the task is called."""
    seen: list[int] = []

    def prepare(request: Request) -> None:
        if request.config.nodes == 3:
            raise ConfigError("three is too many")

    def task(requests: Sequence[Request]) -> int:
        seen.extend(request.config.nodes for request in requests)
        return 0

    with pytest.raises(ConfigError, match=r"^with nodes=3: three is too many$"):
        main(["-m", "nodes=1,2,3"], prepare, task)
    assert seen == []
    assert main(["nodes=1,2", "seed=range(0,2)", "-m", "name=x"], prepare, task) == 0 and seen == [1, 1, 2, 2]


def test_a_sweep_numbers_its_combinations(tmp_path: Path) -> None:
    """${hydra:job.num} is the number of the combination, and hydra.sweeper.params sets overrides."""
    write(
        tmp_path / "conf/mine.yaml",
        "defaults: [hpcinit, _self_]\nname: x-${hydra:job.num}\nhydra: {mode: MULTIRUN, sweeper: {params: {nodes: '1,2'}}}\n",
    )
    seen: list[tuple[str, str]] = []

    def task(requests: Sequence[Request]) -> int:
        seen.extend((request.config.name, request.combination) for request in requests)
        return 0

    assert main(["--config-name", "mine"], lambda request: None, task) == 0
    assert seen == [("x-0", "nodes=1"), ("x-1", "nodes=2")]


def test_the_users_own_primary_configs(tmp_path: Path) -> None:
    """--config-name selects the user's own file and --config-dir a folder, with and without --multirun."""
    write(tmp_path / "conf/mine.yaml", "defaults: [hpcinit, _self_]\nnodes: 7\n")
    write(tmp_path / "more/cluster/own.yaml", "name: own\n")
    seen: list[tuple[int, str]] = []

    def task(requests: Sequence[Request]) -> int:
        seen.extend((request.config.nodes, request.config.cluster.name) for request in requests)
        return 0

    for words in (
        ["--config-name", "mine"],
        ["--config-dir", "more", "cluster=own"],
        ["-cd", "more", "-m", "cluster=own,mini"],
    ):
        assert main(words, lambda request: None, task) == 0
    assert seen == [(7, "local"), (1, "own"), (1, "own"), (1, "mini")]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_users_folders_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """./conf has priority over $HPCINIT_CONF, then ~/.config/hpcinit, then the package's own folder."""
    places = [tmp_path / "conf", tmp_path / "named", tmp_path / "home/.config/hpcinit"]
    for number, place in reversed(list(enumerate(places))):
        write(place / "cluster/mini.yaml", f"name: from-{number}\n")
        if number == 1:
            monkeypatch.setenv("HPCINIT_CONF", str(place))
        assert compose(["cluster=mini"]).cluster.name == f"from-{number}"


def test_hydras_search_path(tmp_path: Path) -> None:
    """A folder of hydra.searchpath, in a primary config or on the command line, has choices after the user's own."""
    write(tmp_path / "site/cluster/ours.yaml", "name: ours\n")
    write(
        tmp_path / "conf/mine.yaml", f"defaults: [hpcinit, _self_]\nhydra: {{searchpath: [file://{tmp_path}/site]}}\n"
    )
    seen: list[str] = []

    def task(requests: Sequence[Request]) -> int:
        seen.extend(request.config.cluster.name for request in requests)
        return 0

    for words in (
        ["--config-name", "mine", "cluster=ours"],
        [f"hydra.searchpath=[file://{tmp_path}/site]", "cluster=ours"],
        ["--config-name", "mine", "-m", "cluster=ours,mini"],
    ):
        assert main(words, lambda request: None, task) == 0
    assert seen == ["ours", "ours", "ours", "mini"]


def test_a_programs_own_hydra_has_its_own_search_path(tmp_path: Path) -> None:
    """After a config of hpcinit is composed, Hydra finds the configs of the program in the program's folder only."""
    write(tmp_path / "conf/config.yaml", "x: of the folder for hpcinit\n")
    write(tmp_path / "own/config.yaml", "x: of the program\n")
    compose([])
    with hydra.initialize_config_dir(str(tmp_path / "own"), **VERSION_BASE):
        assert hydra.compose("config") == {"x": "of the program"}


def test_a_programs_own_hydra_keeps_its_state() -> None:
    """A program of Hydra that submits keeps its version_base, the config of ${hydra:...} and the name of its job."""
    base, own, job = VersionBase.instance(), HydraConfig.instance(), JobRuntime.instance()
    before = (base.version_base, own.cfg, job.get("name"))
    compose(["name=ours"])
    assert main(["-m", "seed=1,2", "name=ours"], lambda request: None, lambda requests: 0) == 0
    assert (base.version_base, own.cfg, job.get("name")) == before


def test_the_users_own_job(tmp_path: Path) -> None:
    """A YAML file in ./conf/job is a choice for job=."""
    write(tmp_path / "conf/job/mine.yaml", "name: mine\nscript: train.py\nargs: [--lr, '3e-4']\n")
    config = compose(["job=mine"])
    assert (config.job.script, config.job.args) == ("train.py", ["--lr", "3e-4"])


def test_an_error_in_the_users_yaml_names_file_and_key(tmp_path: Path) -> None:
    """The message for an unknown key contains the key and the file."""
    write(tmp_path / "conf/cluster/own.yaml", "name: own\ngpus_per_nod: 4\n")
    (message,) = problems("cluster=own")
    assert "cluster/own" in message and "gpus_per_nod" in message and "gpus_per_node" in message


def test_hpcinit_conf_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $HPCINIT_CONF that is not a folder is an error."""
    monkeypatch.setenv("HPCINIT_CONF", str(tmp_path / "nowhere"))
    (message,) = problems()
    assert "HPCINIT_CONF" in message and "nowhere" in message
