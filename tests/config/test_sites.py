"""The public clusters in conf/cluster/: each value has a source, required keys are checked, and their advice works."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpcinit.base.errors import ConfigError
from hpcinit.checks import all_checks, partition
from hpcinit.config.compose import compose
from hpcinit.config.schema import Config
from tests import sites

PAGE = Path(__file__).parent.parent.parent / "docs/reference/public-clusters.md"
GUESS = """
name: x

# source: https://example.org/nodes
# 4 of them.
gpus_per_node: 4

# Probably 64.
cpus_per_node: 64
"""


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set USER, which is part of some sites' folders."""
    monkeypatch.setenv("USER", "me")


@pytest.mark.parametrize("path", sites.FILES, ids=sites.NAMES)
def test_every_fact_has_a_source(path: Path) -> None:
    """Each block of keys starts with its source, or 'unverified', and the file has the date of the sources."""
    text = path.read_text()
    assert sites.SOURCES.search(text)
    assert sites.unsourced(text) == []


def test_a_guess_is_found() -> None:
    """The test above finds a block without a source."""
    (found,) = sites.unsourced(GUESS)
    assert "cpus_per_node" in found


@pytest.mark.parametrize("name", sites.NAMES)
def test_a_plain_request_has_no_problem(name: str) -> None:
    """A request for two nodes with an account and a QOS has no problem at any site, and one line about the file."""
    config = compose(sites.asked(name))
    assert all_checks.problems(config) == []
    [line] = all_checks.warnings(config)
    assert line.startswith(f"the file of cluster {name} was made from the site's documentation and never tested there")
    assert all_checks.warnings(compose([*sites.asked(name), "cluster.untested=false"])) == []
    assert config.cluster.gpus_per_node and config.cluster.gpu_mem_gb and config.cluster.cpus_per_node


@pytest.mark.parametrize("path", sites.FILES, ids=sites.NAMES)
def test_advice_in_comments_can_be_typed(path: Path) -> None:
    """The overrides in comments are valid on the command line."""
    words = sites.asked(path.stem)
    for word in sites.advice(path.read_text()):
        assert all_checks.problems(compose([*words, word])) == [], word


def test_advice_is_found() -> None:
    """advice() returns the overrides in a comment, without those that have a placeholder."""
    text = "# unverified: account=... or cluster.scratch=/p/PROJECT, qos=fast\n# 'cluster.sbatch.constraint=\"a&b\"'.\n"
    assert sites.advice(text) == ["qos=fast", 'cluster.sbatch.constraint="a&b"']
    assert sum(len(sites.advice(path.read_text())) for path in sites.FILES) >= 10


@pytest.mark.parametrize("name", sites.NAMES)
def test_required_keys_are_checked(name: str) -> None:
    """A request without the keys that a site requires gives one message per missing key."""
    config = compose([f"cluster={name}"])
    found = all_checks.problems(config)
    keys = [need for need in config.cluster.needs if need != "nccl_plugin"]  # a warning
    for key, message in zip(keys, found, strict=True):
        if key == "modules":
            assert message.startswith("cluster.modules is not set, but NCCL on ") and "modules=[...]" in message
        else:
            assert message.startswith(f"{key} is not set, but cluster {name} requires ") and f"{key}=..." in message


@pytest.mark.parametrize(
    "way", ["cluster.modules=[nccl]", "cluster.setup=['. plugin.sh']", "container.image=a.sif", "~cluster.env.NCCL_NET"]
)
def test_where_the_plugin_comes_from(way: str) -> None:
    """A site whose NCCL needs a plugin accepts a module, a setup line, an image, and TCP if the user asks for it."""
    words = ["cluster=perlmutter", "validate=false", "check_paths=false"]
    assert any("plugin" in one for one in all_checks.problems(compose(words)))
    assert not any("plugin" in one for one in all_checks.problems(compose([*words, way])))


@pytest.mark.parametrize(
    "way",
    [
        "+cluster.srun.environment=plugin.toml",
        "+cluster.sbatch.uenv=pytorch",
        "container.image=a.sif",
        "cluster.setup=['. plugin.sh']",
        "cluster.modules=[plugin]",
        "+job.env.LD_LIBRARY_PATH=/plugin",
        "~cluster.env.NCCL_NET",
        "cluster.needs=[]",
        "cluster.gpus_per_node=0",
        "LD_LIBRARY_PATH",
    ],
)
def test_a_plugin_that_nothing_adds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a warning only if the request and the shell contain nothing that may add NCCL's plugin."""
    for name in partition.PLUGIN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    words = ["cluster=clariden", "check_paths=false"]
    assert [one for one in all_checks.warnings(compose(words)) if "has no setting that adds NCCL's plugin" in one]
    if way.isupper():
        monkeypatch.setenv(way, "/plugin")
    else:
        words.append(way)
    assert not [one for one in all_checks.warnings(compose(words)) if "plugin" in one]


def test_needs_must_be_known_keys() -> None:
    """An unknown key in cluster.needs gives a message with the known ones."""
    (message,) = all_checks.problems(compose(["cluster.needs=[budget]"]))
    assert message == "cluster.needs has 'budget', expected keys from: account, qos, partition, modules, nccl_plugin"
    assert len(all_checks.problems(compose(["cluster.needs=[account,qos,partition,account]"]))) == 3


def test_the_users_file_extends_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`defaults: [lumi_g]` in the user's own file includes the shipped file; the account and other keys are added or replaced."""
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/ours.yaml").write_text(
        "defaults: [lumi_g]\nname: ours\naccount: project_465000000\npartition: dev-g\nmodules: [aws-ofi-rccl]\n"
    )
    monkeypatch.chdir(tmp_path)
    config = compose(["cluster=ours", "nodes=2"])
    assert all_checks.problems(config) == []
    assert (config.cluster.name, config.account, config.partition) == ("ours", "project_465000000", "dev-g")
    assert (config.cluster.gpus_per_node, config.launch.cpu_bind) == (8, compose(["cluster=lumi_g"]).cluster.cpu_bind)


def test_a_clusters_cpu_binding_can_be_disabled() -> None:
    """launch.cpu_bind defaults to the cluster's; null is the site's default."""
    assert str(compose(["cluster=frontier"]).launch.cpu_bind).startswith("mask_cpu:fe")
    assert compose(["cluster=frontier", "launch.cpu_bind=null"]).launch.cpu_bind is None
    assert compose(["cluster=leonardo"]).launch.cpu_bind is None


@pytest.mark.parametrize("name", ["frontier", "lumi_g"])
def test_masks_are_the_cores_beside_each_gpu(name: str) -> None:
    """The eight masks have seven distinct cores each, no system core, in the order of the GPUs' NUMA nodes."""
    masks = [int(mask, 16) for mask in str(compose([f"cluster={name}"]).cluster.cpu_bind).split(":")[1].split(",")]
    cores = [[core for core in range(64) if mask >> core & 1] for mask in masks]
    assert len(cores) == 8 and all(len(mine) == 7 and mine[0] % 8 == 1 for mine in cores)
    # https://docs.olcf.ornl.gov/systems/frontier_user_guide.html: GPUs 4 5, 2 3, 6 7 and 0 1 in NUMA nodes 0 to 3
    assert [mine[0] // 16 for mine in cores] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert len({core for mine in cores for core in mine}) == 56


def test_a_folder_with_the_users_name_without_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder contains the user's name and USER is not set, the message names the key and the variable."""
    monkeypatch.delenv("USER", raising=False)
    with pytest.raises(ConfigError, match=r"cluster\.scratch=.*Environment variable 'USER' not found"):
        compose(["cluster=clariden"])


def _row(path: Path, config: Config) -> str:
    cluster, text = config.cluster, path.read_text()
    limits = [f"{name}: {limit(each.nodes, each.time_min)}" for name, each in cluster.partitions.items()]
    gpus = f"{cluster.gpus_per_node} x {cluster.gpu_mem_gb:g} GB"
    flag = cluster.gpu_flag or "whole nodes"
    parts = sites.blocks(text)
    known = " / ".join(str(sum(part.startswith(f"# {kind}: ") for part in parts)) for kind in sites.KINDS)
    source = re.search(r"^# (?:source|quoted): (\S+)", text, re.MULTILINE)
    dates = sites.SOURCES.search(text)
    assert source and dates
    cells = [
        *(f"[{path.stem}](../../conf/cluster/{path.name})", gpus, flag, "<br>".join(limits) or "not in the file"),
        *(
            ", ".join(cluster.needs).replace("nccl_plugin", "a plugin of NCCL") or "-",
            cluster.container.runtime or "-",
            f"[page]({source[1]})",
        ),
        *(known, dates[1] or f"unknown (read {dates[2]})"),
    ]
    return f"| {' | '.join(cells)} |"


def limit(nodes: int | None, time_min: int | None) -> str:
    hours = "?" if time_min is None else f"{time_min / 60:g} h"
    return f"{'?' if nodes is None else nodes} nodes, {hours}"


def test_the_page_has_every_cluster() -> None:
    """docs/reference/public-clusters.md has a row for each file, with its values. HPCINIT_WRITE_GOLDEN=1 updates the table."""
    rows = [_row(path, compose([f"cluster={path.stem}"])) for path in sites.FILES]
    text = PAGE.read_text()
    table = re.search(r"(?<=\|\n)\| \[.*\|\n(?=\n)", text, re.DOTALL)
    assert table
    if os.environ.get("HPCINIT_WRITE_GOLDEN") == "1":
        text = text.replace(table[0], "\n".join(rows) + "\n")
        PAGE.write_text(text)
    assert re.findall(r"^\| \[.*", text, re.MULTILINE) == rows
