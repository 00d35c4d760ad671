"""CPUs near the device. The devices and the machine's tree are stand-ins; what binds in the end is the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcinit.runtime import affinity, devices
from hpcinit.world import World
from tests.world.test_visible_devices import world

# A node as sysfs shows one with 2 sockets of 4 cores of 2 threads each, and 4 devices, 2 beside each socket.
NODES = {0: "0-3,8-11", 1: "4-7,12-15"}
ADDRESSES = {"0000:1b:00.0": 0, "0000:43:00.0": 0, "0000:9b:00.0": 1, "0000:dc:00.0": 1}
EVERYTHING = set(range(16))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    write(tmp_path / "devices/system/cpu/online", "0-15\n")
    for cpu in range(16):
        text = f"{cpu % 8},{cpu % 8 + 8}\n"
        write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    for address, node in ADDRESSES.items():
        write(tmp_path / "bus/pci/devices" / address / "numa_node", f"{node}\n")
        write(tmp_path / "bus/pci/devices" / address / "local_cpulist", NODES[node] + "\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Kernel:
    """Stands in for the affinity of this process, which allows `allowed`, and for torch's view of the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sysfs: Path, allowed: set[int] = EVERYTHING) -> None:
        self.sysfs, self.now, self.threads = sysfs, {0: set(allowed)}, 16
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: self.now.get(pid, set(allowed)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: self.now.update({pid: set(cpus)}))
        monkeypatch.setattr(devices, "pci_address", lambda device: list(ADDRESSES)[device.index])
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))

    def bind(self, of: World, device: torch.device, env: dict[str, str] | None = None) -> str:
        return affinity.bind(of, device, sysfs=self.sysfs, proc=self.sysfs / "proc", env=env or {})


@pytest.mark.parametrize(
    ("rank", "cpus", "said"),
    [
        (0, {0, 1, 8, 9}, "cpus 0-1,8-9 (NUMA node 0, beside cuda:0)"),
        (1, {2, 3, 10, 11}, "cpus 2-3,10-11 (NUMA node 0, beside cuda:1)"),
        (2, {4, 5, 12, 13}, "cpus 4-5,12-13 (NUMA node 1, beside cuda:2)"),
        (3, {6, 7, 14, 15}, "cpus 6-7,14-15 (NUMA node 1, beside cuda:3)"),
    ],
)
def test_whole_cores_near_the_device(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, rank: int, cpus: set[int], said: str
) -> None:
    """Ranks that share a NUMA node split its cores by order, both threads of each, and torch's threads follow."""
    kernel = Kernel(monkeypatch, sysfs)
    assert kernel.bind(world(rank, 4), torch.device("cuda", rank)) == said
    assert (kernel.now[0], kernel.threads) == (cpus, 4)


def test_fewer_ranks_than_devices(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """Only ranks share a NUMA node: of three, the third has its node alone."""
    kernel = Kernel(monkeypatch, sysfs)
    assert kernel.bind(world(2, 3), torch.device("cuda", 2)) == "cpus 4-7,12-15 (NUMA node 1, beside cuda:2)"


def test_devices_of_its_own(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """With --gpus-per-task nobody sees the others' devices: the rank gets its whole NUMA node, and it says so."""
    kernel = Kernel(monkeypatch, sysfs)
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_TRES_BIND": "gpu:per_task:2"}
    said = "cpus 0-3,8-11 (NUMA node 0, beside cuda:0, perhaps with other ranks)"
    assert kernel.bind(world(0, 2), torch.device("cuda", 0), env) == said


def test_the_second_rank_with_devices_of_its_own(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """Index 0 on local rank 1 says as much without any variable."""
    kernel = Kernel(monkeypatch, sysfs)
    assert kernel.bind(world(1, 2), torch.device("cuda", 0)).endswith("beside cuda:0, perhaps with other ranks)")


def test_threads_that_were_asked_for(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """OMP_NUM_THREADS is the user's: torch's threads stay."""
    kernel = Kernel(monkeypatch, sysfs)
    kernel.bind(world(0, 4), torch.device("cuda", 0), {"OMP_NUM_THREADS": "16"})
    assert kernel.threads == 16


@pytest.mark.parametrize(
    ("allowed", "ranks", "device", "env", "said"),
    [
        (EVERYTHING, 4, "cpu", {}, "cpus 0-15 as the launcher left them (there is no device to be near to)"),
        (EVERYTHING, 1, "cuda:0", {}, "cpus 0-15 as the launcher left them (one rank on the node)"),
        ({4, 5, 12, 13}, 4, "cuda:0", {}, "cpus 4-5,12-13 as the launcher left them (bound to 4 of 16)"),
        (
            EVERYTHING, 4, "cuda:0", {"SLURM_CPUS_ON_NODE": "8"},
            "cpus 0-15 as the launcher left them (Slurm gave 8 of 16 and confines nobody: the rest may be another job's)",
        ),
    ],
)  # fmt: skip
def test_left_alone(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, allowed: set[int], ranks: int, device: str, env: dict[str, str],
    said: str,
) -> None:  # fmt: skip
    """Without a device, alone on the node, bound already, or among other jobs, the affinity stays, and why is said."""
    kernel = Kernel(monkeypatch, sysfs, allowed)
    assert kernel.bind(world(0, ranks), torch.device(device), env) == said
    assert kernel.now == {0: allowed}


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job_7\n", "fs/cgroup/job_7/cpuset.cpus.effective"),
        ("0::/outside/of/the/container\n", "fs/cgroup/cpuset.cpus.effective"),
        ("4:cpu,cpuset:/slurm/job_7\n0::/\n", "fs/cgroup/cpuset/slurm/job_7/cpuset.effective_cpus"),
    ],
)
def test_a_control_group_is_no_binding(monkeypatch: pytest.MonkeyPatch, sysfs: Path, cgroup: str, file: str) -> None:
    """A job confined to 8 of 16 CPUs is unbound within them: its two ranks near them split those, cores kept whole."""
    write(sysfs / "proc/self/cgroup", cgroup)
    write(sysfs / file, "0-3,8-11\n")
    kernel = Kernel(monkeypatch, sysfs, set(affinity.cpus("0-3,8-11")))
    env = {"SLURM_CPUS_ON_NODE": "8"}
    assert kernel.bind(world(1, 2), torch.device("cuda", 1), env) == "cpus 2-3,10-11 (NUMA node 0, beside cuda:1)"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("numa_node", "-1\n", "the kernel names no NUMA node or no usable CPU for cuda:0 at 0000:1b:00.0"),
        ("local_cpulist", "\n", "the kernel names no NUMA node or no usable CPU for cuda:0 at 0000:1b:00.0"),
        ("local_cpulist", "some\n", "invalid literal for int() with base 10: 'some'"),
    ],
)
def test_a_kernel_that_does_not_say(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, file: str, text: str, reason: str
) -> None:
    """What the kernel does not tell, or tells in another form, leaves the affinity as it is."""
    (sysfs / "bus/pci/devices/0000:1b:00.0" / file).write_text(text)
    kernel = Kernel(monkeypatch, sysfs)
    said = f"cpus 0-15 as the launcher left them ({reason})"
    assert (kernel.bind(world(0, 4), torch.device("cuda", 0)), kernel.now) == (said, {0: EVERYTHING})


def test_no_address(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """Where torch tells no PCI address, as of XPUs, that is said."""
    kernel = Kernel(monkeypatch, sysfs)
    monkeypatch.setattr(devices, "pci_address", lambda device: "")
    said = f"cpus 0-15 as the launcher left them (torch {torch.__version__} does not tell where xpu:0 is)"
    assert kernel.bind(world(0, 4), torch.device("xpu", 0)) == said


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [
        ([[0, 8], [1, 9], [2, 10]], 2, [{0, 1, 8, 9}, {2, 10}]),
        ([[0, 8], [1, 9]], 3, [{0, 8}, {1}, {9}]),
        ([[0], [1]], 3, [{0, 1}] * 3),
        ([[0]], 1, [{0}]),
    ],
)
def test_share(cores: list[list[int]], ranks: int, shares: list[set[int]]) -> None:
    """Whole cores as long as there are enough, then CPUs, and never fewer than one CPU for a rank."""
    assert [affinity.share(cores, ranks, place) for place in range(ranks)] == shares


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5", "", "0-1,3-4,127"])
def test_lists_of_cpus(text: str) -> None:
    """The kernel's lists come back as they were."""
    assert affinity.ranges(affinity.cpus(text + "\n")) == text


# --- for real

REAL = """
import json, os, sys, threading
from pathlib import Path
import torch
from hpcinit.runtime import affinity, devices
from tests.world.test_visible_devices import world

devices.pci_address = lambda device: "0000:1b:00.0"
asleep = threading.Event()
other = threading.Thread(target=asleep.wait)
other.start()
said = affinity.bind(world(int(sys.argv[1]), 2), torch.device("cuda", int(sys.argv[1])), sysfs=Path(sys.argv[2]))
print(json.dumps([said, sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(other.native_id))]))
asleep.set()
"""


def test_the_kernel_binds(tmp_path: Path) -> None:
    """Two processes that share this machine's CPUs are really bound, each to its half, with the threads they had.

    Their devices are stand-ins, both beside all CPUs that this test may use.
    """
    mine = os.sched_getaffinity(0)
    write(tmp_path / "devices/system/cpu/online", affinity.ranges(mine))
    write(tmp_path / "bus/pci/devices/0000:1b:00.0/numa_node", "0")
    write(tmp_path / "bus/pci/devices/0000:1b:00.0/local_cpulist", affinity.ranges(mine))
    found = []
    for rank in range(2):
        done = subprocess.run(
            [sys.executable, "-c", REAL, str(rank), str(tmp_path)], cwd=Path(__file__).parents[2], capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said, main, other = json.loads(done.stdout)
        assert main == other and said == f"cpus {affinity.ranges(main)} (NUMA node 0, beside cuda:{rank})"
        found.append(set(main))
    assert found[0] | found[1] == mine
    assert len(mine) == 1 or not found[0] & found[1]
