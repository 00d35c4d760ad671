"""Whether device_id is passed to torch. No GPU is needed, because the decision depends on names and versions."""

from __future__ import annotations

import pytest
import torch

from hpcinit.base.errors import BringUpError
from hpcinit.runtime.init_request import Binding, decide_device_id

CUDA, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "ranks", "torch_version", "deepspeed_version", "against"),
    [
        (CUDA, 8, "2.13.0+cu130", None, ""),
        (CUDA, 8, "2.7.1", "0.17.6", ""),
        (CUDA, 8, "2.7.0+cu128", None, "with torch 2.7.0+cu128 collectives can deadlock (pytorch issue 153960)"),
        (CUDA, 8, "2.13.0", "0.17.5", "DeepSpeed 0.17.5 is older than 0.17.6"),
        (CUDA, 1, "2.13.0", None, "a single rank has no peer"),
        (torch.device("xpu", 0), 8, "2.13.0", None, "not tested on xpu"),
        (CPU, 8, "2.13.0", None, "gloo on a CPU has no device to bind to"),
    ],
)
def test_auto(
    device: torch.device, ranks: int, torch_version: str, deepspeed_version: str | None, against: str
) -> None:
    """auto binds unless there is a known reason against it, which it reports."""
    found = decide_device_id("auto", device, ranks, torch_version, deepspeed_version)
    assert found.device == (None if against else device)
    assert found.why.startswith(f"no device_id: {against}" if against else f"device_id {device}")


def test_never_and_always() -> None:
    """never does not bind; always binds in spite of known reasons, and is an error on a CPU."""
    assert decide_device_id("never", CUDA, 8, "2.13.0", None) == Binding(None)
    assert decide_device_id("always", CUDA, 8, "2.13.0", None) == Binding(CUDA, "device_id cuda:1")
    assert decide_device_id("always", CUDA, 8, "2.7.0", None).why.startswith(
        "device_id cuda:1, although with torch 2.7.0 coll"
    )
    with pytest.raises(BringUpError, match="is not possible: gloo on a CPU has no device"):
        decide_device_id("always", CPU, 8, "2.13.0", None)
