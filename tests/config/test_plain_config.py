"""The composition without Hydra makes the same requests as Hydra, or leaves the request to Hydra."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from hpcinit.base.errors import ConfigError
from hpcinit.config import hydra_compose, plain_config, spellings
from hpcinit.config import overrides as command_line
from hpcinit.config.folders import folder
from hpcinit.config.request import NAME, Request

# A key of each type.
KEYS = (
    *("nodes", "ranks_per_node", "gradient_clip", "mem_gb", "compile", "cluster.whole_nodes", "snapshot", "account"),
    *("cluster.partitions.main.whole_nodes", "after", "job.args", "job.env", "cluster.sbatch", "stop", "batch.global"),
    *("cluster.time_min", "launch.cpu_bind", "secret_names", "deepspeed.ds_config", "cluster.partitions", "job.name"),
)
WORDS = (
    *("", "1", "0", "-1", "+2", "007", "1_000", "1e3", "1.5", "1.", "-0", ".5", "1E5", "0x10", "true", "FALSE", "yes"),
    *("null", "NULL", "None", "nan", "inf", "Infinity", "abc", "/x/y", "./x", "a-1", "a1e3", "//", "x@y", "a:b"),
    *("12:30", "???", "a b", "[1]", "{a: 1}", "'q'", "1,2", "a=b", "${nodes}", "\\", "True1", "4242_7", "3.0"),
)
TEXTS = (
    *WORDS,
    *("~", "'1'", ".nan", ".inf", "2001-01-01", "2001-01-01 10:00:00", "12:30:45", "190:20:30.15", "0o7", "1e-3"),
    *("[1, a]", "[a, '${oc.env:USER}/b']", "[]", "{}", "{1: 2}", "{a: b}", "{a: {b: 1}}", "{a: [1, '2', null]}"),
    *("{a: {gpus_per_node: 4}, main: {time_min: 5}}", "{a: null}", "{a: 1, a: 2}", "{A: '${oc.env:USER}'}"),
    *("${cluster.name}", "${oc.env:USER}", "/a/${oc.env:USER}/b", "a${nodes}", "${oc.env:NOPE}", "${oc.env:NOPE,x}"),
    *("${.name}", "${name}", "${job.name}", "${stop}", "${hydra:job.num}", "'???'", "!!binary aGk=", "0.0.0.0:80"),
)
ORDINARY = ("cluster=mini", "job.name=x")


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USER", "me")
    for name in ("HPCINIT_CONF", "HPCINIT_CLUSTER", "NOPE"):
        monkeypatch.delenv(name, raising=False)


def by_hydra(line: Sequence[str]) -> Request:
    words = command_line.with_quoted_lists(spellings.translate(line, hydra_compose.flags()))
    hydra_compose._register(None)
    return hydra_compose._request(hydra_compose._compose(words, NAME), words)


def compare(line: Sequence[str]) -> None:
    """Assert that both make the same request: values, types and the order of the keys."""
    plain = plain_config.request(line)
    assert plain is not None, line
    hydras = by_hydra(line)
    assert json.dumps(plain.document) == json.dumps(hydras.document), line
    assert repr(plain) == repr(hydras), line


@pytest.mark.parametrize("group", ["cluster", "job", "parallel", "launch"])
def test_the_shipped_files(group: str) -> None:
    """Each is composed without Hydra, to the same request."""
    for path in sorted((folder() / group).glob("*.yaml")):
        compare([f"{group}={path.stem}"])


def test_overrides() -> None:
    """An override of any type is taken as Hydra takes it, or left to Hydra."""
    taken = {key: [word for word in WORDS if plain_config.request([*ORDINARY, f"{key}={word}"])] for key in KEYS}
    assert sum(map(len, taken.values())) > 100
    assert not taken["job.args"] and not taken["stop"]
    for words in zip_longest(*taken.values()):
        line = [f"{key}={word}" for key, word in zip(taken, words, strict=True) if word is not None]
        compare(["cluster=mini", *([] if any("job.name=" in word for word in line) else ["job.name=x"]), *line])


def test_yaml(tmp_path: Path) -> None:
    """A value of a file is read as Hydra reads it, or the file is left to Hydra."""
    (tmp_path / "conf/job").mkdir(parents=True)
    line = ["cluster=mini", "job=mine"]

    def write(values: dict[str, str]) -> None:
        tree: dict[str, object] = {}
        for key, text in {"job.name": "x", **values}.items():
            *tables, name = key.split(".")
            table = tree
            for each in tables:
                table = table.setdefault(each, {})  # type: ignore[assignment]
            table[name] = text
        text = json.dumps(tree)
        for value in {*values.values(), "x"}:
            text = text.replace(f": {json.dumps(value)}", f": {value}")
        (tmp_path / "conf/job/mine.yaml").write_text(f"# @package _global_\n{text}\n")

    def taken(key: str, text: str) -> bool:
        write({key: text})
        return plain_config.request(line) is not None

    texts = {key: [text for text in TEXTS if taken(key, text)] for key in KEYS if key != "cluster.partitions.main"}
    assert sum(map(len, texts.values())) > 200
    for chosen in zip_longest(*texts.values()):
        values = {key: text for key, text in zip(texts, chosen, strict=True) if text is not None}
        if not {"cluster.partitions", "cluster.partitions.main.whole_nodes"} <= values.keys():
            write(values)
            if plain_config.request(line) is not None:  # None: one refers to another of a different type
                compare(line)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["+x=1"]),
        ({}, ["nodes=1,2"]),
        ({}, ["cluster=mini", "cluster=local"]),
        ({}, ["cluster=nope"]),
        ({}, ["nope=1"]),
        ({}, ["hydra.run.dir=x"]),
        ({}, ["job.env.X=1"]),
        ({}, ["--cfg", "job"]),
        ({"cluster/a.yaml": "defaults: [mini, _self_]\ntime_min: 5"}, ["cluster=a"]),
        ({"cluster/a.yaml": "# @package _group_\nname: a"}, ["cluster=a"]),
        ({"cluster/a.yaml": "name: a\nnope: 1"}, ["cluster=a"]),
        ({"cluster/a.yaml": "name: ???"}, ["cluster=a"]),
        ({"cluster/a.yaml": "[a]"}, ["cluster=a"]),
        ({"cluster/a.yaml": "name: a\nname: b"}, ["cluster=a"]),
        ({"nodes/a.yaml": "nodes: 3"}, ["nodes=a"]),
        ({"hydra/launcher/x.yaml": "n: 1"}, []),
        ({"hpcinit_schema.yaml": "nodes: 3"}, []),
        ({"hpcinit.yaml": "defaults: [hpcinit_schema, {cluster: local}, {optional job: smoke}, _self_]"}, []),
        ({"hpcinit.yaml": "defaults: [hpcinit_schema, {cluster: local}, {job: smoke}]"}, []),
        ({"hpcinit.yaml": "defaults: [hpcinit_schema, {cluster: local}, _self_]\nhydra: {mode: MULTIRUN}"}, []),
        ({"hpcinit.yaml": "defaults: 3"}, []),
        ({"hpcinit.yaml": "nodes: 3"}, []),
    ],
)
def test_what_is_left_to_hydra(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    """Sweeps, additions, mistakes, and files that use more of Hydra."""
    for name, text in files.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    assert plain_config.request(words) is None


def test_a_user_has_a_primary_config_and_a_cluster(tmp_path: Path) -> None:
    """They replace the shipped ones; a repeated key is a warning in both ways."""
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/mini.yaml").write_text("name: own\nengine: local\ntime_min: 7\ngpu_flag: null")
    (tmp_path / "conf/hpcinit.yaml").write_text(
        "defaults: [hpcinit_schema, _self_, {cluster: mini}, {job: smoke}]\nnodes: 2\njob: {name: own}"
    )
    compare(["nodes=1", "nodes=3", "time=1:30:00", "dependency=afterany:4242_7"])
    assert plain_config.request([]).config.cluster.time_min == 7  # type: ignore[union-attr]


def test_another_plugin_is_left_to_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin of Hydra may add folders with configs."""
    (tmp_path / "site/hydra_plugins").mkdir(parents=True)
    (tmp_path / "site/hydra_plugins/site_configs.py").write_text("")
    code = "from hpcinit.config import plain_config; print(plain_config.request([]) is None)"
    for path, expected in (("", "False"), (str(tmp_path / "site"), "True")):
        monkeypatch.setenv("PYTHONPATH", path)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_a_submission_does_not_import_hydra() -> None:
    """Importing Hydra would take longer than all of an ordinary submission."""
    code = (
        "import sys; from hpcinit.cli.main import main; "
        "main('submit cluster=mini nodes=2 time=1:00:00 dry_run=true -- true'.split()); "
        "print(sorted({'hydra', 'omegaconf', 'antlr4'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#!/bin/bash") and done.stderr.splitlines()[-1] == "[]"


def test_a_mistake_has_hydras_message() -> None:
    """The request is left to Hydra, which reports it."""
    assert plain_config.request(["nodes=two"]) is None
    with pytest.raises(ConfigError, match="nodes=two: expected a whole number"):
        by_hydra(["nodes=two"])
