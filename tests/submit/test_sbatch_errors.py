"""sbatch's refusals, provoked on a real cluster: its message, and the lines of the script that cause it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hpcinit.base.errors import SubmitError
from hpcinit.checks.validate import key_for
from hpcinit.config.compose import compose
from hpcinit.slurm import sbatch_errors
from hpcinit.slurm.sbatch import sbatch
from hpcinit.submit import script
from tests.minislurm import MiniSlurm

ANY_SIZE = "cluster.partitions={}"

# The request, a part of sbatch's message, and the options of the lines that are shown.
REFUSED = [
    (["partition=zzz"], "invalid partition specified: zzz", ["partition"]),
    (["mem_gb=99"], "Memory specification can not be satisfied", ["mem"]),
    (["+cluster.sbatch.mem-per-cpu=99G"], "Memory specification can not be satisfied", ["mem-per-cpu"]),
    (["cluster.gpu_type=h999"], "node configuration is not available",
     ["gpus-per-node", "nodes", "ntasks-per-node", "cpus-per-task"]),
    (["cluster.gpus_per_node=99", "gpus_per_node=99", "ranks_per_node=1"], "node configuration is not available",
     ["gpus-per-node", "nodes", "ntasks-per-node", "cpus-per-task"]),
    (["+cluster.sbatch.mincpus=99"], "CPU count per node can not be satisfied",
     ["cpus-per-task", "ntasks-per-node", "mincpus"]),
    (["+cluster.sbatch.tmp=99G"], "Temporary disk specification", ["tmp"]),
    (["+cluster.sbatch.constraint=zzz"], "Invalid feature specification", ["constraint"]),
    (["+cluster.sbatch.reservation=zzz"], "Requested reservation is invalid", ["reservation"]),
    (["+cluster.sbatch.dependency='afterok:xx'"], "Job dependency problem", ["dependency"]),
    (["+cluster.sbatch.begin=zzz"], "Invalid --begin specification", ["begin"]),
    (["+cluster.sbatch.deadline=zzz"], "Invalid --deadline specification", ["deadline"]),
    (["+cluster.sbatch.exclude=zzz"], "Invalid node name specified", ["exclude"]),
    (["+cluster.sbatch.nodelist=n9", "+cluster.sbatch.exclude=n1"], "Invalid node name", ["nodelist", "exclude"]),
    (["+cluster.sbatch.licenses=zzz"], "Invalid license specification", ["licenses"]),
    (["+cluster.sbatch.frob=1"], "unrecognized option '--frob=1'", ["frob"]),
    (["+cluster.sbatch.contiguous='x'"], "option '--contiguous' doesn't allow an argument", ["contiguous"]),
]  # fmt: skip


def render(words: list[str], folder: Path) -> str:
    return script.render(compose(["cluster=mini", "job=smoke", ANY_SIZE, *words]), folder, folder)


def explain(message: str, text: str) -> str:
    return sbatch_errors.explain(message, text, key_for)


def shown(said: str) -> list[str]:
    """Return the options of the quoted lines."""
    lines = [line for line in said.splitlines() if line.startswith("  #SBATCH --")]
    assert all("  set by " in line for line in lines)
    return [line.split()[1].removeprefix("--").partition("=")[0] for line in lines]


@pytest.mark.slurm
def test_each_refusal_shows_its_lines(slurm: MiniSlurm, tmp_path: Path) -> None:
    """A refusal shows sbatch's message and the script's lines at fault with their keys."""
    for words, part, options in REFUSED:
        path = tmp_path / "job.sh"
        path.write_text(render(words, tmp_path))
        with pytest.raises(SubmitError) as caught:
            sbatch(path, {**os.environ, **slurm.env})
        assert part in str(caught.value), words
        assert shown(explain(str(caught.value), path.read_text())) == options, words


@pytest.mark.slurm
def test_more_nodes_named_than_requested(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Slurm 22.05 refuses a nodelist that is longer than --nodes, and both lines are shown. 24.11 accepts it."""
    path = tmp_path / "job.sh"
    path.write_text(render(["nodes=1", "+cluster.sbatch.nodelist='n1,n2'"], tmp_path))
    env = {**os.environ, **idle_slurm.env}
    if tuple(map(int, idle_slurm.version().split(".")[:2])) >= (24, 11):
        job, _ = sbatch(path, env)
        deadline = time.monotonic() + 30
        while not re.search(r"^ +NodeList=n[12]$", shows := idle_slurm.run("scontrol", "show", "job", job), re.M):
            assert time.monotonic() < deadline, shows
            time.sleep(0.2)
        return
    with pytest.raises(SubmitError) as caught:
        sbatch(path, env)
    assert "invalid number of nodes" in str(caught.value)
    assert shown(explain(str(caught.value), path.read_text())) == ["nodes", "nodelist"]


# From a cluster with slurmdbd, AccountingStorageEnforce=associations,limits,qos and EnforcePartLimits=ALL (22.05.8).
RECORDED = [
    ("Invalid account or account/partition combination specified", ["account", "partition"]),
    ("Invalid qos specification", ["qos"]),
    ("Node count specification invalid", ["nodes"]),
    ("Requested time limit is invalid (missing or exceeds some limit)", ["time"]),
    ("More processors requested than permitted", ["cpus-per-task", "ntasks-per-node", "nodes"]),
    ("sbatch: error: QOSMaxWallDurationPerJobLimit\nJob violates accounting/QOS policy", ["time", "qos", "account"]),
    ("sbatch: error: QOSMaxNodePerJobLimit\nJob violates accounting/QOS policy", ["nodes", "qos", "account"]),
    ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
     ["qos", "account", "nodes", "ntasks-per-node", "cpus-per-task", "time"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "options"), RECORDED)
def test_refusals_of_a_cluster_with_limits(words: str, options: list[str], tmp_path: Path) -> None:
    """Messages of a cluster with accounting and enforced limits lead to these lines."""
    text = render(["account=a", "qos=q"], tmp_path)
    assert shown(explain(f"sbatch: error: Batch job submission failed: {words}", text)) == options


def test_an_option_that_is_missing(tmp_path: Path) -> None:
    """If sbatch requires an account and there is none, the message shows the key."""
    said = explain("sbatch: error: Batch job submission failed: Invalid qos specification", render([], tmp_path))
    assert said == "no #SBATCH line sets --qos: set it with qos=...\n"


def test_unknown_messages() -> None:
    """A message without a known cause leads to no guess."""
    assert explain("sbatch: error: the moon is in the wrong house", "#SBATCH --nodes=1\n") == ""
