"""Whether device_id is passed to torch. No GPU is needed, because the decision depends on the device's type."""

from __future__ import annotations

import pytest
import torch

from hpcinit.base.errors import BringUpError
from hpcinit.runtime.init_request import Binding, decide_device_id

CUDA, CPU = torch.device("cuda", 1), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "ranks", "against"),
    [
        (CUDA, 8, ""),
        (CUDA, 1, "a single rank has no peer"),
        (torch.device("xpu", 0), 8, "not tested on xpu"),
        (CPU, 8, "gloo on a CPU has no device to bind to"),
    ],
)
def test_auto(device: torch.device, ranks: int, against: str) -> None:
    """auto binds unless there is a known reason against it, which it reports."""
    found = decide_device_id("auto", device, ranks)
    assert found.device == (None if against else device)
    assert found.why.startswith(f"no device_id: {against}" if against else f"device_id {device}")


def test_never_and_always() -> None:
    """never does not bind; always binds in spite of known reasons, and is an error on a CPU."""
    assert decide_device_id("never", CUDA, 8) == Binding(None)
    assert decide_device_id("always", CUDA, 8) == Binding(CUDA, "device_id cuda:1")
    assert decide_device_id("always", CUDA, 1).why.startswith("device_id cuda:1, although a single rank has no peer")
    with pytest.raises(BringUpError, match="does not work here: gloo on a CPU has no dev"):
        decide_device_id("always", CPU, 8)
