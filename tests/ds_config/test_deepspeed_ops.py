"""needed() returns the ops that a ds_config compiles."""

from __future__ import annotations

from typing import Any

import pytest

from hpcinit.deepspeed.deepspeed_ops import BUILDERS, needed


def config(optimizer: str = "", offload: str = "none", param: str = "none", **more: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_optimizer": {"device": offload}, "offload_param": {"device": param}}
    return {"zero_optimization": zero, **({"optimizer": {"type": optimizer}} if optimizer else {}), **more}


CASES = [
    (config(), "cuda", ()),
    (config("AdamW"), "cuda", ("fused_adam",)),
    (config("AdamW", offload="cpu"), "cuda", ("cpu_adam",)),
    (config("Muon", offload="cpu"), "cuda", ("cpu_adam",)),
    (config("Lion"), "cuda", ("fused_lion",)),
    (config("SGD", offload="cpu"), "cuda", ()),
    (config(offload="cpu"), "cuda", ()),
    (config("AdamW", offload="nvme"), "cuda", ("async_io", "cpu_adam")),
    (config(param="nvme", aio={"use_gds": True}), "cuda", ("gds",)),
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "cuda", ()),
    ({"compile": {"deepcompile": True}}, "cuda", ("dc",)),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "cuda", ("quantizer",)),
    ({}, "cpu", ()),
    (config("AdamW"), "cpu", ("fused_adam",)),
    ({"compile": {"deepcompile": True}}, "cpu", ()),
]


@pytest.mark.parametrize(("ds_config", "device", "expected"), CASES)
def test_needed(ds_config: dict[str, Any], device: str, expected: tuple[str, ...]) -> None:
    """The optimizer on its device, NVMe, DeepCompile and quantized ZeRO++ each need an op."""
    assert needed(ds_config, device) == expected


@pytest.mark.deepspeed
def test_the_names_of_ops_are_deepspeeds() -> None:
    """Each op in our table is built by the builder in the table, in a folder of that name."""
    from deepspeed.ops.op_builder import all_ops
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder

    here = (AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder)
    builders = {builder.NAME: builder.__name__ for builder in here}
    assert builders.items() <= BUILDERS.items()
    assert all_ops.__op_builders__  # the others need a GPU: read their names from the source
    for name, builder in BUILDERS.items():
        assert builders.get(name) or _named_in_source(all_ops.__file__, name, builder), name


def _named_in_source(beside: str, name: str, builder: str) -> bool:
    from pathlib import Path

    texts = [path.read_text() for path in Path(beside).parent.rglob("*.py")]
    return any(f"class {builder}(" in text and f'NAME = "{name}"' in text for text in texts)
