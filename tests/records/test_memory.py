"""Memory per rank: the formulas compared with the tensors of real ranks and with DeepSpeed's estimates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.records import memory, wrappers
from hpcinit.records.layout import Layout
from hpcinit.records.memory import Demand, Part, Zero
from hpcinit.submit import plan_command

WIDTH, LAYERS, RANKS = 128, 8, 4  # of tests.records.holdings
P = WIDTH * WIDTH * LAYERS


def parts_of(wanted: Demand) -> tuple[Part, ...]:
    """Return what one rank needs memory for."""
    return wrappers.get(wanted.wrap).memory(wanted)


def small(stage: int, **more: object) -> Zero:
    return Zero(
        stage, reduce_bucket_size=WIDTH * WIDTH, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=0, **more
    )  # type: ignore[arg-type]


def demand(wrap: str, param: str, zero: Zero | None = None, layout: Layout | None = None) -> Demand:
    layout = layout or (Layout(dp_replicate=1, dp_shard=RANKS) if wrap != "ddp" else Layout(dp_replicate=RANKS))
    return Demand(P, layout, wrap, param, fused=True, layers=LAYERS, zero=zero or Zero())


CPU = {"offload_optimizer": "cpu"}
# Tolerance in bytes per parameter. ZeRO 2 with offload: two staging buffers of the largest parameter (here an eighth of
# all), and its gradient. HSDP: fully_shard may still keep the last block's all-reduce when we measure.
SPARE = {"zero2 bf16 offload": 0.8, "hsdp bf16": 0.3}
DEMANDS = {
    "ddp": demand("ddp", "fp32"),
    "fsdp fp32": demand("fsdp", "fp32"),
    "fsdp bf16": demand("fsdp", "bf16"),
    "hsdp bf16": demand("fsdp", "bf16", layout=Layout(dp_replicate=2, dp_shard=2)),
    "zero0 fp32": demand("deepspeed", "fp32"),
    "zero0 bf16": demand("deepspeed", "bf16"),
    "zero1 fp32": demand("deepspeed", "fp32", small(1)),
    "zero1 bf16": demand("deepspeed", "bf16", small(1)),
    "zero2 bf16": demand("deepspeed", "bf16", small(2)),
    "zero3 fp32": demand("deepspeed", "fp32", small(3)),
    "zero3 bf16": demand("deepspeed", "bf16", small(3)),
    "zero2 bf16 offload": demand("deepspeed", "bf16", small(2, **CPU)),
    "zero3 bf16 offload": demand("deepspeed", "bf16", small(3, **CPU, offload_param="cpu")),
    "zero3 bf16 hpz": demand("deepspeed", "bf16", small(3, hpz=2)),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Bytes per parameter. The result is the last line because DeepSpeed prints to stdout too."""
    rendezvous = tmp_path_factory.mktemp("holdings") / "rendezvous"
    command = [sys.executable, "-m", "tests.records.holdings", str(rendezvous)]
    root = Path(__file__).parents[2]
    # A new session, so that a timeout can kill all ranks, which would otherwise spin forever.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, start_new_session=True
    ) as ranks:
        try:
            out, err = ranks.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            raise
    assert ranks.returncode == 0, out + err
    found = json.loads(out.splitlines()[-1])
    return {name: {when: size / P for when, size in sizes.items()} for name, sizes in found.items()}


def predicted(wanted: Demand, *during: str) -> float:
    """Return the bytes per parameter in all places, which are the same memory on a CPU."""
    parts = [part for part in parts_of(wanted) if part.during in during]
    return sum(part.bytes for part in parts) / P


def temporary_gradients(wanted: Demand) -> float:
    """Return the bytes of gradients outside DDP's buckets and of hpZ's second shards: freed between steps, although the
    plan counts them as permanent.
    """
    fleeting = {"hpZ's second shard"}
    if wanted.wrap == "fsdp" or (wanted.wrap == "deepspeed" and wanted.zero.stage == 0):
        fleeting.add("gradients")
    return sum(part.bytes for part in parts_of(wanted) if part.name in fleeting) / P


@pytest.mark.more
@pytest.mark.ranks
def test_the_formulas_match_real_ranks(measured: dict[str, dict[str, int]]) -> None:
    """Between steps and at the optimizer's step, four ranks use the memory of the formulas within SPARE."""
    assert set(measured) == set(DEMANDS)
    for name, wanted in DEMANDS.items():
        spare = SPARE.get(name, 0.1)
        always = predicted(wanted, memory.ALWAYS)
        assert measured[name]["always"] == pytest.approx(always - temporary_gradients(wanted), abs=spare), name
        assert measured[name]["step"] == pytest.approx(always + predicted(wanted, memory.STEP), abs=spare), name


@pytest.mark.more
@pytest.mark.ranks
def test_the_backward_pass_stays_below_the_estimate(measured: dict[str, dict[str, int]]) -> None:
    """In the backward pass a rank uses at most the memory of the formulas, and at least that without short-lived parts."""
    for name, wanted in DEMANDS.items():
        spare = SPARE.get(name, 0.1)
        most = predicted(wanted, memory.ALWAYS, memory.PASS)
        block = 2 * 4 / LAYERS + 4 / LAYERS  # the last block's gradients follow the last measurement
        used = measured[name]["pass"]
        event = sum(p.bytes for p in parts_of(wanted) if p.name in {"gathered parameters", "all-reduce bucket"}) / P
        partly = 0.5 if wanted.zero.stage == 2 else 0  # rank 0 owns the first layers, whose gradients are last
        assert most - event - partly - block <= used <= most + spare, name


def test_deepspeeds_own_estimate() -> None:
    """DeepSpeed's estimators agree on the states except for 2 bytes in stage 3; they do not count buffers."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    params, gpus, nodes = 6_400_000_000, 4, 2
    layout = Layout(dp_replicate=1, dp_shard=gpus * nodes)

    def gpu(zero: Zero, *names: str) -> int:
        parts = parts_of(Demand(params, layout, "deepspeed", "bf16", zero=zero))
        return sum(part.bytes for part in parts if part.place == memory.GPU and part.name in names)

    states = ("parameters", "gradients", "master copy", "optimizer states", "gradients in fp32")
    theirs = estimate_zero2_model_states_mem_needs(params, gpus, nodes, cpu_offload=False)
    assert gpu(Zero(2), *states) == theirs[1] == 2 * params + 18 * params // 8
    theirs = estimate_zero2_model_states_mem_needs(params, gpus, nodes, cpu_offload=True)
    assert gpu(Zero(2, offload_optimizer="cpu"), *states) == theirs[1] == 2 * params
    cpu_mem, gpu_mem, layer = estimate_zero3_model_states_mem_needs(params, 0, gpus, nodes, cpu_offload=False)
    # DeepSpeed estimates 18 bytes for stage 3 too, without the sharded 16 bit parameters; the test above measures 20.
    assert (gpu_mem, layer) == (18 * params // 8, 0)
    assert gpu(Zero(3), *states) == 20 * params // 8
    cpu_mem, gpu_mem, _ = estimate_zero3_model_states_mem_needs(
        params, 0, gpus, nodes, cpu_offload=True, cpu_offload_params=True, additional_buffer_factor=1
    )
    offload = Demand(params, layout, "deepspeed", "bf16", zero=Zero(3, offload_param="cpu", offload_optimizer="cpu"))
    assert gpu(offload.zero, *states) == gpu_mem == 0
    # The 16 bit gradients are on the CPU too (stage3.py, grad_partitions_flat_buffer): 2 bytes that DeepSpeed omits.
    assert cpu_mem == 18 * params // nodes
    assert memory.total(parts_of(offload), memory.CPU) * gpus == 20 * params // nodes


def test_the_zero_papers_example() -> None:
    """Figure 1 of the ZeRO paper, 7.5e9 parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB for the states."""
    states = {"parameters", "gradients", "master copy", "optimizer states"}
    for stage, expected in enumerate((120, 31.4, 16.6, 1.9)):
        wanted = Demand(7_500_000_000, Layout(dp_replicate=64), "deepspeed", "bf16", zero=Zero(stage))
        found = sum(part.bytes for part in parts_of(wanted) if part.name in states)
        assert found / 1e9 == pytest.approx(expected, abs=0.05)


def test_the_activation_papers_example() -> None:
    """Korthikanti's GPT-3 (s 2048, h 12288, a 96, b 1, t 1): 34 + 5as/h = 114 bytes a token and hidden unit."""
    alone, halves = Layout(dp_replicate=1), Layout(dp_replicate=1, cp=2)
    gpt3 = (96, 12288, 2048, 1)
    assert plan_command.activation_memory(*gpt3, alone, "bf16", False, heads=96) == 96 * 2048 * 12288 * 114
    assert plan_command.activation_memory(*gpt3, alone, "bf16", False) == 96 * 2048 * 12288 * 34
    assert plan_command.activation_memory(*gpt3, alone, "bf16", True) == (2 * 96 + 34) * 2048 * 12288
    assert plan_command.activation_memory(*gpt3, halves, "bf16", False) == 96 * 1024 * 12288 * 34


def test_offload_to_nvme() -> None:
    """Parameters, master copy, states and fp32 gradients are on NVMe; its buffers and the 16 bit gradients on the CPU.

    The expected values are computed; no disk is measured.
    """
    zero = Zero(3, offload_param="nvme", offload_optimizer="nvme")
    parts = parts_of(Demand(8 * 10**9, Layout(dp_replicate=8), "deepspeed", "bf16", zero=zero))
    assert memory.total(parts, memory.NVME) == (2 + 4 + 8 + 4) * 10**9
    assert memory.total(parts, memory.CPU) == 2 * 10**9 + 16 * 10**9 + 10 * 10**8


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": 0}, "model.params is 0, expected 1 or more"),
        ({"parameters": 1, "layers": 0}, "model.layers is 0, expected 1 or more"),
        ({"parameters": 1, "optimizer": "lion"}, "the optimizer is 'lion', expected one of: adamw, muon"),
    ],
)
def test_an_impossible_demand(wrong: dict[str, object], message: str) -> None:
    """A demand without parameters or layers, or with an unknown optimizer, is refused."""
    with pytest.raises(RequestError, match=message):
        Demand(**wrong)  # type: ignore[arg-type]
