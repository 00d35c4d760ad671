"""The description of a mixed site, from output recorded on real Slurms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcinit.base.errors import Failure
from hpcinit.discover import cluster_file, live_site
from tests.discover.recorded import ANN, VERSIONS, answers, edited

each_version = pytest.mark.parametrize("version", VERSIONS)


def test_both_versions_were_recorded() -> None:
    """There is recorded output of Slurm 22.05 and of 24.11."""
    assert [version.rpartition(".")[0] for version in VERSIONS] == ["22.05", "24.11"]


@each_version
def test_limits_of_partitions(version: str) -> None:
    """Nodes, time, GPUs, CPUs and memory of each partition are the largest of any of its nodes."""
    found = cluster_file.partitions(live_site.read_site(answers(version), ANN))
    assert found["gpu"] == {
        "nodes": 3,  # of 6: MaxNodes
        "time_min": 2880,
        "gpus_per_node": 4,
        "cpus_per_node": 96,
        "mem_gb": 1002.83,  # (1031000 - 4096) / 1024
    }
    # No time limit; MaxCPUsPerNode and MaxMemPerNode are less than the nodes have.
    assert found["cpu"] == {"nodes": 12, "gpus_per_node": 0, "cpus_per_node": 64, "mem_gb": 195.31}
    assert found["main"] == {"nodes": 20, "time_min": 60, "gpus_per_node": 8, "cpus_per_node": 128, "mem_gb": 1002.83}


@each_version
def test_partitions_that_are_not_for_this_user(version: str) -> None:
    """Another account's, another group's, an inactive and an empty partition are skipped, each with the reason."""
    found = {each.name: each.refused for each in live_site.read_site(answers(version), ANN).partitions if each.refused}
    assert found == {
        "chem": "AllowAccounts=chem",
        "staff": "AllowGroups=slurm",
        "off": "State=INACTIVE",
        "empty": "it has no nodes",
    }
    member = replace(ANN, groups=frozenset({"slurm"}))
    for allowed in (member, replace(ANN, uid=0)):
        assert "staff" in {each.name for each in live_site.read_site(answers(version), allowed).usable}


@each_version
@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [
        ("AllowAccounts=chem", "AllowAccounts=chem,phys", ""),
        ("AllowAccounts=chem", "DenyAccounts=phys,root", "DenyAccounts=phys,root"),
        ("AllowAccounts=chem", "DenyAccounts=phys", ""),  # root is one of hers too
        ("AllowAccounts=chem AllowQos=ALL", "AllowAccounts=ALL AllowQos=long", "AllowQos=long"),
        ("AllowAccounts=chem AllowQos=ALL", "AllowAccounts=ALL DenyQos=normal", "DenyQos=normal"),
        ("AllowAccounts=chem", "RootOnly=YES AllowAccounts=ALL", "RootOnly=YES"),
    ],
)
def test_who_may_use_a_partition(version: str, old: str, new: str, refused: str) -> None:
    """A partition is refused if it allows no account or QOS of the user."""
    found = live_site.read_site(edited(version, "PARTITIONS", old, new), ANN)
    assert {each.name: each.refused for each in found.partitions}["chem"] == refused


@each_version
def test_without_sacctmgr_no_account_is_refused(version: str) -> None:
    """If sacctmgr fails, the user's accounts are unknown, and AllowAccounts refuses no partition."""
    whole = answers(version)
    texts = {question: text for question, text in whole.texts.items() if "sacctmgr" not in question}
    found = live_site.read_site(live_site.SiteAnswers(texts, "sacctmgr is not on PATH"), ANN)
    assert "chem" in {each.name for each in found.usable}
    account = next(entry for entry in cluster_file.site_choices(found, "x") if entry.key == "account")
    assert account.text == "account: null  # unknown: sacctmgr is not on PATH\n"


@each_version
def test_a_hidden_partition_is_there_and_marked(version: str) -> None:
    """The description contains a hidden and a draining partition, both marked."""
    text = cluster_file.site_facts(live_site.read_site(answers(version), ANN), None)[0].text
    assert "  secret:  # hidden, " in text and "  cpu:  # State=DRAIN, " in text


@each_version
def test_kinds_of_nodes_are_counted(version: str) -> None:
    """Each kind of node is counted, with GPU types and shared features; nodes that are down are counted too."""
    facts = cluster_file.site_facts(live_site.read_site(answers(version), ANN), "gpu")
    part = facts[0].text.partition("\n  cpu:")[0]
    assert "# 2 kinds of nodes:" in part
    assert "# 4 x (4 GPUs of type a100, 96 CPUs, 1002.83 GB; per GPU 24 CPUs and 250.7 GB; 2 threads per core" in part
    assert "; features a100,ib\n" in part  # 'noisy' is big4's alone
    assert "# 2 x (3 GPUs of type t4 and v100, 32 CPUs, 187.5 GB" in part
    values = {entry.key: entry.value for entry in facts}
    assert (values["gpus_per_node"], values["cpus_per_node"]) == (4, 96)  # the most common


@each_version
def test_the_clusters_own_values_follow_the_chosen_partition(version: str) -> None:
    """gpus_per_node and cpus_per_node are those of the most common nodes of the default or the named partition."""
    seen = live_site.read_site(answers(version), ANN)
    for named, expected in ((None, (0, 128)), ("gpu", (4, 96)), ("no-such", (0, 128))):
        values = {entry.key: entry.value for entry in cluster_file.site_facts(seen, named)}
        assert (values["gpus_per_node"], values["cpus_per_node"]) == expected


@each_version
def test_choices(version: str) -> None:
    """Slurm's default partition, account, QOS and time limit for this user are proposed."""
    seen = live_site.read_site(answers(version), ANN)
    values = {entry.key: entry.value for entry in cluster_file.site_choices(seen, "x")}
    assert values == {
        **{"name": "x", "partition": "main", "account": "phys", "qos": "normal", "time_min": 60},
        **{"gpu_type": None, "gpu_flag": "gpus-per-node", "mem_gb": None, "exclusive": False},
    }


@each_version
def test_default_memory(version: str) -> None:
    """A partition's default overrides slurm.conf's, and a comment shows it where mem_gb is null."""
    seen = live_site.read_site(answers(version), ANN)
    memory = {each.name: each.default_memory for each in seen.partitions}
    assert (memory["main"], memory["cpu"]) == ("DefMemPerCPU=200 MB", "DefMemPerNode=9000 MB")
    (text,) = [entry.text for entry in cluster_file.site_choices(seen, "x") if entry.key == "mem_gb"]
    assert (
        text
        == "mem_gb: null  # scontrol --all show partition: null: a job gets DefMemPerCPU=200 MB on partition main\n"
    )
    none = answers(version, CONFIG=answers(version)[live_site.CONFIG].replace("DefMemPerCPU ", "x "))
    assert live_site.read_site(none, ANN).main(None).default_memory == ""


@each_version
def test_no_default_partition(version: str) -> None:
    """Without a default partition, the one with the most GPUs is proposed."""
    seen = live_site.read_site(edited(version, "PARTITIONS", "Default=YES", "Default=NO"), ANN)
    assert seen.main(None).name == "main"
    only_gpu = replace(seen, partitions=tuple(each for each in seen.partitions if each.name in ("cpu", "gpu")))
    values = {entry.key: entry.value for entry in cluster_file.site_choices(only_gpu, "x")}
    assert (values["partition"], values["time_min"], values["exclusive"]) == ("gpu", 30, True)


@each_version
def test_the_rest_of_the_facts(version: str) -> None:
    """Array size, accounting, preemption and version are those of `scontrol show config`."""
    values = {
        entry.key: entry.value for entry in cluster_file.site_facts(live_site.read_site(answers(version), ANN), None)
    }
    assert (values["max_array_size"], values["accounting"], values["preemption"]) == (501, True, "REQUEUE")
    assert (values["slurm"], values["pyxis"]) == (version, False)
    assert values["topology"] == {"22": "topology/none", "24": "topology/default"}[version[:2]]


@each_version
@pytest.mark.parametrize("none", ["accounting_storage/none", "(null)"])
def test_no_accounting(version: str, none: str) -> None:
    """The spellings of 'no accounting' of 22.05 and 24.11 are recognized."""
    seen = live_site.read_site(edited(version, "CONFIG", "accounting_storage/slurmdbd", none), ANN)
    assert seen.accounting is False
    assert "none, because Slurm has no accounting" in next(
        e.text for e in cluster_file.site_choices(seen, "x") if e.key == "qos"
    )


@each_version
def test_gpus_of_an_older_scheduler(version: str) -> None:
    """Only select/cons_tres accepts --gpus-per-node; older schedulers need --gres."""
    seen = live_site.read_site(edited(version, "CONFIG", "select/cons_tres", "select/cons_res"), ANN)
    assert seen.gpu_flag == "gres"


@each_version
@pytest.mark.parametrize(
    ("partitions", "why"),
    [
        ("PartitionName=a AllowGroups=wheel Nodes=n1\n", "a: AllowGroups=wheel"),
        ("No partitions in the system\n", "Slurm shows none"),
    ],
)
def test_a_site_without_a_partition_for_this_user(version: str, partitions: str, why: str) -> None:
    """If the user may use no partition, the error names each with the reason."""
    with pytest.raises(Failure) as error:
        live_site.read_site(answers(version, PARTITIONS=partitions), ANN)
    assert str(error.value) == f"Slurm of cluster 'mixed' has no partition that ann may submit to: {why}"
