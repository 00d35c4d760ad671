"""`hpcinit plan`: table, verdict and exit status."""

from __future__ import annotations

import json
import re

import pytest

from hpcinit.cli.main import guarded

SEVEN = ["cluster=example", "nodes=8", "model.params=7e9", "precision.param=bf16"]
GPU80 = "cluster.gpu_mem_gb=80"


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = guarded("hpcinit.submit.plan_command", words)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table_shows_the_memory_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Two equations are first, then a line for each part with its formula, the sum, and the verdict."""
    status, out, _ = plan(capsys, *SEVEN, "parallel=zero1", GPU80, "batch.micro=2")
    lines = out.splitlines()
    assert lines[0] == "nodes 8 x ranks per node 4 = 32 ranks = dp_shard 32"
    assert lines[1] == "micro 2 x accumulation 1 x data parallel 32 = 64 samples per step"
    cells = [re.split(r"\s{2,}", line) for line in lines if line.startswith("GPU, per rank  ")]
    rows = {cell[1]: cell[-1] for cell in cells}
    assert rows["parameters"] == "14.00" and rows["optimizer states"] == "1.75" and rows["gradients"] == "14.00"
    assert status == 0 and "fits (counted parts only): GPU, per rank needs 31.6 GB of 74.0 GB (80 GB - 6.0" in out
    assert "not counted: activations: set model.layers, model.hidden, model.sequence" in out


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """7e9 parameters with DDP do not fit in 80 GB, and the exit status is 1."""
    status, out, _ = plan(capsys, *SEVEN, "parallel=ddp", GPU80)
    assert status == 1 and "does not fit: GPU, per rank needs 140.0 GB of 74.0 GB" in out


def test_offload_moves_to_the_nodes_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Offloaded memory counts for all ranks of a node and is compared with the node's memory."""
    words = [*SEVEN, "nodes=1", "parallel=zero3_offload", GPU80, "mem_gb=100", "--json"]
    status, out, _ = plan(capsys, *words)
    found = json.loads(out)
    assert found["bytes"]["cpu"] == 20 * 7 * 10**9 and found["limits"]["cpu"] == 100e9
    assert status == 1 and found["verdict"] == "does not fit"
    words[words.index("mem_gb=100")] = "mem_gb=null"
    status, out, _ = plan(capsys, *words)
    assert status == 0 and "the memory of a node: set mem_gb to compare with it" in json.loads(out)["unknown"]


def test_checkpointing_and_flash_attention(capsys: pytest.CaptureFixture[str]) -> None:
    """With the model's shape activations are counted, and full checkpointing reduces them."""
    shape = ["model.layers=32", "model.hidden=4096", "model.sequence=4096", "batch.micro=1", "parallel=fsdp", "--json"]
    sizes = []
    for how in ("none", "full"):
        out = json.loads(plan(capsys, *SEVEN, *shape, GPU80, f"activation_checkpointing={how}")[1])
        assert out["unknown"] == []
        sizes += [part["bytes"] for part in out["parts"] if part["name"] == "activations"]
    assert sizes == [34 * 32 * 4096 * 4096, (2 * 32 + 34) * 4096 * 4096]


def test_a_cluster_of_unknown_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the GPUs' memory there is a table but no verdict, and the exit status is 2."""
    status, out, _ = plan(capsys, *SEVEN, "cluster.gpu_mem_gb=null")
    assert status == 2 and "unknown: cluster.gpu_mem_gb is not set" in out and "28.00" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=example"], "model.params is not set, expected the number of parameters, as in model.params=7e9"),
        ([*SEVEN, "parallel.tp=3"], "tp 3"),
        ([*SEVEN, "batch.global=33"], "batch.global"),
        ([*SEVEN, "--", "train.py"], "runs no program: remove --"),
    ],
)
def test_wrong_requests(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Requests that submit refuses are refused here too, with exit status 2 and nothing on stdout."""
    status, out, err = plan(capsys, *words)
    assert (status, out) == (2, "") and said in err


def test_keys_that_only_a_job_needs_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    """plan works for a site that requires an account, a module or an image before the user has them."""
    site = ["cluster=juwels_booster", "nodes=8", "parallel=zero3", "model.params=7e9", "job.script=not_written_yet.py"]
    status, out, err = plan(capsys, *site)
    assert (status, err) == (0, "") and "GPU, per rank needs 10.6 GB of 36.0 GB" in out


def test_a_sweep_is_a_table_each(capsys: pytest.CaptureFixture[str]) -> None:
    """With --multirun there is a table for each combination, and the exit status is the worst one."""
    status, out, _ = plan(capsys, "-m", *SEVEN, GPU80, "parallel=ddp,fsdp", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["combination"] for one in found] == ["parallel=ddp", "parallel=fsdp"]
    assert [one["verdict"] for one in found] == ["does not fit", "fits"] and status == 1
