"""The device of a rank. There is no GPU here: tests that need GPUs use a fake of torch.accelerator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpcinit.base.errors import BringUpError
from hpcinit.runtime import devices
from tests.records.recordings import shapes
from tests.skip_or_fail import skip_or_fail
from tests.world.test_visible_devices import world


class Gpus:
    """A fake of torch.accelerator, which records the current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, kind: str) -> None:
        self.current: list[int] = []
        device = torch.device(kind) if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", self.current.append)


@pytest.mark.parametrize(
    ("kind", "hip", "env", "count", "index"),
    [
        ("cuda", None, {}, 4, 3),
        ("cuda", None, {"CUDA_VISIBLE_DEVICES": "5"}, 1, 0),
        ("cuda", "6.4", {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "2"}, 1, 0),
        ("xpu", None, {"ZE_AFFINITY_MASK": "0.1"}, 1, 0),
        ("xpu", None, {"ZE_AFFINITY_MASK": "0,1,2,3"}, 4, 3),
    ],
)
def test_the_device_is_made_current(
    monkeypatch: pytest.MonkeyPatch, kind: str, hip: str | None, env: dict[str, str], count: int, index: int
) -> None:
    """Local rank 3 gets the index that its variables imply, on CUDA, ROCm and XPU, and makes it current (fakes)."""
    gpus = Gpus(monkeypatch, count, kind)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert devices.choose(world(3, 4), env) == torch.device(kind, index)
    assert gpus.current == [index]


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices (fakes) for four ranks are an error before a device is made current."""
    gpus = Gpus(monkeypatch, 2, "cuda")
    with pytest.raises(BringUpError, match=r"4 ranks are on the node, but torch sees only 2 devices"):
        devices.choose(world(0, 4), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert gpus.current == []


def test_no_device_is_the_cpu() -> None:
    """If torch finds no accelerator, as here, every local rank uses the CPU."""
    assert devices.choose(world(3, 4), {}) == torch.device("cpu")


# Devices that were given to the rank, but that torch does not see.


def test_given_and_unseen() -> None:
    """With the variables of a real Slurm job with GPUs, a rank on the CPU gets a warning with them and torch's build."""
    env = next(s for s in shapes() if str(s) == "22.05.8-gpus_per_task").tasks[1].env
    assert devices.unseen(torch.device("cpu"), env) == (
        "warning: this rank runs on the CPU, although SLURM_STEP_GPUS=1, SLURM_JOB_GPUS=0,1, CUDA_VISIBLE_DEVICES=1, "
        f"ROCR_VISIBLE_DEVICES=1: torch {torch.__version__} (built for {built()}) finds no accelerator. Install a "
        "torch build for this cluster's devices, or request no devices"
    )


def built() -> str:
    return "CPUs only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def test_no_warning() -> None:
    """There is no warning for a rank without devices, with hidden devices, or that uses one."""
    assert devices.unseen(torch.device("cpu"), {}) == ""
    assert devices.unseen(torch.device("cpu"), {"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}) == ""
    assert devices.unseen(torch.device("cuda", 0), {"SLURM_JOB_GPUS": "0"}) == ""


# The device's description.


def with_properties(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def test_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is described by name, uuid and PCI address as sysfs writes it (fake properties)."""
    with_properties(monkeypatch, name="H100", uuid="8932f937", pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    found = {"device": "cuda:0", "name": "H100", "uuid": "8932f937", "pci": "0000:dc:00.0"}
    assert devices.describe(torch.device("cuda", 0)) == found


def test_describe_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties that torch does not report, such as the PCI address of XPUs, are omitted."""
    with_properties(monkeypatch, name="Max 1550")
    assert devices.describe(torch.device("xpu", 1)) == {"device": "xpu:1", "name": "Max 1550"}
    assert devices.describe(torch.device("cpu")) == {"device": "cpu"}


# DeepSpeed.

DEEPSPEED = """
import json, os, sys
import deepspeed, torch, torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from hpcinit.runtime import devices

device_calls = []

class Recording(CPU_Accelerator):
    def set_device(self, device_index):
        device_calls.append(str(device_index))

    def device_name(self, device_index=None):
        device_calls.extend([] if device_index is None else [str(device_index)])
        return "cpu"

set_accelerator(Recording())
for index in map(int, sys.argv[1:]):
    devices.for_deepspeed(torch.device("cuda", index))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for half a minute
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
with deepspeed.zero.Init():
    torch.nn.Linear(4, 4)
optimizer = {"type": "Adam", "params": {"torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
local_ranks = [engine.local_rank, deepspeed.comm.get_local_rank(), int(os.environ["LOCAL_RANK"])]
print(json.dumps([sorted(set(device_calls) - {"cpu"}), local_ranks]))
"""


@pytest.mark.parametrize(
    ("words", "indices"),
    [((), ["3"]), (("0",), ["0"]), pytest.param(("1", "0"), ["0"], marks=pytest.mark.more)],
    ids=["alone", "with ours", "with another first"],
)
def test_deepspeed_takes_our_index(tmp_path: Path, words: tuple[str, ...], indices: list[str]) -> None:
    """On local rank 3 DeepSpeed requests device 3, and after for_deepspeed() hpcinit's device; the local rank stays 3.

    Real DeepSpeed: zero.Init, engine, a step. Its accelerator is a fake of a GPU: it records the requested index and
    computes on the CPU.
    """
    if not importlib.util.find_spec("deepspeed"):
        skip_or_fail("DeepSpeed is not installed: pip install 'hpcinit[deepspeed]'")
    (tmp_path / "script.py").write_text(DEEPSPEED)
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *words], env=env, cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [indices, [3, 3, 3]]


def test_a_cpu_needs_no_deepspeed() -> None:
    """For a rank on the CPU nothing changes, and DeepSpeed is not imported."""
    code = "import sys, torch; from hpcinit.runtime import devices; devices.for_deepspeed(torch.device('cpu')); print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
