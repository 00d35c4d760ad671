"""OpenRLHF's set-up and its DeepSpeed environment, done with hpcinit on the real Slurm: CPUs and gloo.

The programs in this folder are written for these tests, in the style of the projects that they are named after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcinit.base import versions
from hpcinit.deepspeed import deepspeed_config, deepspeed_ops, deepspeed_versions
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Precision
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.systems.jobs import (
    TOLERANCE,
    alike,
    off,
    submitted,
)


@pytest.mark.slurm
@pytest.mark.more
@pytest.mark.timeout(300)
def test_openrlhf_set_up(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Seeds are equal, DeepSpeed has the requested timeout, (dp, sp, tp) are in rank order, the step is correct."""
    words = (
        "parallel=fsdp",
        "parallel.cp=2",
        "parallel.tp=2",
        "comm.deepspeed=true",
        "batch.micro=1",
        "batch.global=8",
    )
    found = submitted(hpcinit, slurm, "rlhf_setup.py", 8, tmp_path, "seed=5", *words)
    alike(found, "draws", "before", "timeouts", "batch", "floored", "alone")
    first = found[0]
    for rank, each in enumerate(found):
        dp, sp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert each["around"] == {
            "dp": sorted(4 * other + 2 * sp + tp for other in range(2)),
            "cp": sorted(4 * dp + 2 * other + tp for other in range(2)),
            "tp": sorted(4 * dp + 2 * sp + other for other in range(2)),
        }
        assert each["deepspeed"]
        for way, accumulation in (("fsdp", 4), ("zero", 2)):
            assert each[way]["complete"] == [False] * (accumulation - 1) + [True], way
            assert off(each[way]["weights"], each["alone"]) < TOLERANCE, way
    assert off(first["before"], first["alone"]) > 1000 * TOLERANCE, "the step moved the weights"
    assert first["timeouts"] == [240.0, 77.0] and first["batch"] == [1, 4, 2]
    indivisible, none = first["floored"]
    assert (
        "batch.global 16 is not a multiple of micro 3 x data parallel 2 = 6; nearest values that work: batch.global=12 or 18"
        in indivisible
    )
    assert "batch.global 8 is not a multiple of micro 16 x data parallel 2 = 32" in none


@pytest.mark.deepspeed
@pytest.mark.slurm
@pytest.mark.more
@pytest.mark.timeout(300)
def test_openrlhf_deepspeed_environment(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """ZeRO 0 to 3, with offload and a named optimizer, have equal losses; AutoTP halves a model; a reference model is unchanged."""
    stages = ("1", "3") if versions.key(versions.installed("deepspeed")) >= versions.key("0.19.4") else ("1",)
    found = submitted(hpcinit, slurm, "zero_ways.py", 4, tmp_path, args=stages)
    for each in found:
        assert {
            name: distance
            for name, weights in each["ways"].items()
            if not (distance := off(weights, each["alone"]["by name" in name])) < TOLERANCE
        } == {}
        assert each["stages"] == {name: int(name[5]) for name in each["ways"]} and len(each["stages"]) == 9
        assert each["evaluation"] == {
            "2": {"same": [True, True], "read": [0, 1], "optimizer": False},
            "3": {"same": [True, True], "read": [3, 1], "optimizer": False},
        }
        assert tuple(each["divided"]) == stages
        for stage, divided in each["divided"].items():
            assert list(divided["shapes"].values()) == [[32], [16, 32], [32, 32]], stage
            assert divided["output"] < 0.02, "bf16 has 8 bits"
            assert {name: update for name, update in divided["updates"].items() if not abs(update - 1) < 0.1} == {}, (
                stage
            )
        assert each["compiled"] == []


@pytest.mark.deepspeed
def test_openrlhf_version_guards() -> None:
    """Versions are compared as versions; errors name what this DeepSpeed lacks, and each optimizer's ops are listed."""
    layout, bf16 = Layout(dp_replicate=2, tp=2), Precision("bf16", "bf16")

    def config(precision: Precision = bf16, layout: Layout = layout, **options: Any) -> dict[str, Any]:
        return deepspeed_config.build(
            deepspeed_config.Options(**options), Batch(1, 1, layout.data_parallel), layout, precision
        )[0]

    def against(deepspeed: str, **options: Any) -> str:
        return "\n".join(deepspeed_versions.check(config(**options), deepspeed))

    compiles = {"zero_stage": 3, "deepcompile": True}
    assert against("0.18.5") == against("0.18.10", zero_stage=3) == against("0.19.4", **compiles) == ""
    assert "DeepSpeed 0.18.10 is installed, expected 0.19.0" in against("0.18.10", **compiles)
    assert "bf16.enabled is not true, but AutoTP needs it" in against("0.19.8", precision=Precision())
    alone = Layout(dp_replicate=4)
    assert deepspeed_versions.check(config(layout=alone, zero_stage=3), versions.installed("deepspeed")) == []
    ops = {(name, offload): deepspeed_ops.needed(config(layout=alone, zero_stage=2, optimizer=name, offload_optimizer=offload), "cuda")
           for name in ("none", "torch_adamw", "adamw") for offload in ("none", "cpu")}  # fmt: skip
    assert {asked: op for asked, op in ops.items() if op} == {
        ("adamw", "none"): ("fused_adam",),
        ("adamw", "cpu"): ("cpu_adam",),
    }
