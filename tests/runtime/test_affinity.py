"""Affinity to the CPUs near the device. Devices and the sysfs tree are fakes; some tests use the real kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcinit.runtime import devices
from hpcinit.world import World
from tests.world.test_visible_devices import world

# A fake sysfs: 2 sockets of 4 cores of 2 threads each, and 4 devices, 2 near each socket.
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
    """A fake of this process's affinity, which is `allowed`, and of torch's devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sysfs: Path, allowed: set[int] = EVERYTHING) -> None:
        self.sysfs, self.now, self.threads = sysfs, {0: set(allowed)}, 16
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: self.now.get(pid, set(allowed)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: self.now.update({pid: set(cpus)}))
        monkeypatch.setattr(devices, "pci_address", lambda device: list(ADDRESSES)[device.index])
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "threads", count))

    def bind(self, of: World, device: torch.device, env: dict[str, str] | None = None) -> str:
        return devices.bind_cpus(of, device, sysfs=self.sysfs, proc=self.sysfs / "proc", env=env or {})


@pytest.mark.parametrize(
    ("rank", "cpus", "said"),
    [
        (0, {0, 1, 8, 9}, "CPU affinity 0-1,8-9 (NUMA node 0, near cuda:0)"),
        (1, {2, 3, 10, 11}, "CPU affinity 2-3,10-11 (NUMA node 0, near cuda:1)"),
        (2, {4, 5, 12, 13}, "CPU affinity 4-5,12-13 (NUMA node 1, near cuda:2)"),
        (3, {6, 7, 14, 15}, "CPU affinity 6-7,14-15 (NUMA node 1, near cuda:3)"),
    ],
)
def test_whole_cores_near_the_device(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, rank: int, cpus: set[int], said: str
) -> None:
    """Ranks that share a NUMA node split its cores in order, with both threads of each, and set torch's threads."""
    kernel = Kernel(monkeypatch, sysfs)
    assert kernel.bind(world(rank, 4), torch.device("cuda", rank)) == said
    assert (kernel.now[0], kernel.threads) == (cpus, 4)


def test_fewer_ranks_than_devices(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """CPUs are split among ranks, not devices: the third of three ranks gets its whole NUMA node."""
    kernel = Kernel(monkeypatch, sysfs)
    assert kernel.bind(world(2, 3), torch.device("cuda", 2)) == "CPU affinity 4-7,12-15 (NUMA node 1, near cuda:2)"


def test_private_devices(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """With --gpus-per-task a rank does not see the others' devices: it gets its whole NUMA node, with a note."""
    kernel = Kernel(monkeypatch, sysfs)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_TRES_BIND": "gpu:per_task:2"}
    said = "CPU affinity 0-3,8-11 (NUMA node 0, near cuda:0, possibly shared with other ranks)"
    assert kernel.bind(world(0, 2), torch.device("cuda", 0), env) == said


def test_private_devices_of_the_second_rank(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """Index 0 on local rank 1 means private devices, without any variable."""
    kernel = Kernel(monkeypatch, sysfs)
    assert kernel.bind(world(1, 2), torch.device("cuda", 0)).endswith("near cuda:0, possibly shared with other ranks)")


def test_omp_num_threads_is_kept(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """If the user sets OMP_NUM_THREADS, torch's threads are not changed."""
    kernel = Kernel(monkeypatch, sysfs)
    kernel.bind(world(0, 4), torch.device("cuda", 0), {"OMP_NUM_THREADS": "16"})
    assert kernel.threads == 16


@pytest.mark.parametrize(
    ("allowed", "ranks", "device", "env", "said"),
    [
        (EVERYTHING, 4, "cpu", {}, "CPU affinity left at 0-15 (no GPU)"),
        (EVERYTHING, 1, "cuda:0", {}, "CPU affinity left at 0-15 (only one rank on the node)"),
        ({4, 5, 12, 13}, 4, "cuda:0", {}, "CPU affinity left at 4-5,12-13 (already bound to 4 of 16 CPUs)"),
        (
            EVERYTHING, 4, "cuda:0", {"SLURM_CPUS_ON_NODE": "8"},
            "CPU affinity left at 0-15 (Slurm gave 8 of 16 CPUs without binding; other jobs may use the rest)",
        ),
    ],
)  # fmt: skip
def test_affinity_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, sysfs: Path, allowed: set[int], ranks: int, device: str, env: dict[str, str],
    said: str,
) -> None:  # fmt: skip
    """Without a GPU, alone on the node, already bound, or next to other jobs, the affinity is kept, with the reason."""
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
def test_a_cgroup_is_not_a_binding(monkeypatch: pytest.MonkeyPatch, sysfs: Path, cgroup: str, file: str) -> None:
    """In a job confined to 8 of 16 CPUs by a cgroup, two ranks still split those CPUs, in whole cores."""
    write(sysfs / "proc/self/cgroup", cgroup)
    write(sysfs / file, "0-3,8-11\n")
    kernel = Kernel(monkeypatch, sysfs, set(devices.numbers("0-3,8-11")))
    env = {"SLURM_CPUS_ON_NODE": "8"}
    assert kernel.bind(world(1, 2), torch.device("cuda", 1), env) == "CPU affinity 2-3,10-11 (NUMA node 0, near cuda:1)"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        (
            "numa_node",
            "-1\n",
            "the kernel reports no NUMA node for cuda:0 at 0000:1b:00.0, or this process may use none of its CPUs",
        ),
        (
            "local_cpulist",
            "\n",
            "the kernel reports no NUMA node for cuda:0 at 0000:1b:00.0, or this process may use none of its CPUs",
        ),
        ("local_cpulist", "some\n", "invalid literal for int() with base 10: 'some'"),
    ],
)
def test_unknown_location(monkeypatch: pytest.MonkeyPatch, sysfs: Path, file: str, text: str, reason: str) -> None:
    """If the kernel's information is missing or malformed, the affinity is unchanged."""
    (sysfs / "bus/pci/devices/0000:1b:00.0" / file).write_text(text)
    kernel = Kernel(monkeypatch, sysfs)
    said = f"CPU affinity left at 0-15 ({reason})"
    assert (kernel.bind(world(0, 4), torch.device("cuda", 0)), kernel.now) == (said, {0: EVERYTHING})


def test_no_pci_address(monkeypatch: pytest.MonkeyPatch, sysfs: Path) -> None:
    """If torch reports no PCI address (XPU), the note contains this reason."""
    kernel = Kernel(monkeypatch, sysfs)
    monkeypatch.setattr(devices, "pci_address", lambda device: "")
    said = f"CPU affinity left at 0-15 (torch {torch.__version__} does not report the PCI address of xpu:0)"
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
    """Ranks get whole cores if there are enough, else CPUs, and at least one CPU each."""
    assert [devices.share(cores, ranks, place) for place in range(ranks)] == shares


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5", "", "0-1,3-4,127"])
def test_lists_of_cpus(text: str) -> None:
    """CPU lists in the kernel's format are parsed and formatted without changes."""
    assert devices.ranges(devices.numbers(text + "\n")) == text


# With the real kernel.

REAL = """
import json, os, sys, threading
from pathlib import Path
import torch
from hpcinit.runtime import devices
from hpcinit.runtime import devices
from tests.world.test_visible_devices import world

devices.pci_address = lambda device: "0000:1b:00.0"
asleep = threading.Event()
other = threading.Thread(target=asleep.wait)
other.start()
note_text = devices.bind_cpus(world(int(sys.argv[1]), 2), torch.device("cuda", int(sys.argv[1])), sysfs=Path(sys.argv[2]))
print(json.dumps([note_text, sorted(os.sched_getaffinity(0)), sorted(os.sched_getaffinity(other.native_id))]))
asleep.set()
"""


def test_the_kernel_binds(tmp_path: Path) -> None:
    """Two processes that share this machine's CPUs are bound by the kernel, each to its half, including existing threads.

    Their devices are fakes, both near all CPUs that this test may use.
    """
    mine = os.sched_getaffinity(0)
    write(tmp_path / "devices/system/cpu/online", devices.ranges(mine))
    write(tmp_path / "bus/pci/devices/0000:1b:00.0/numa_node", "0")
    write(tmp_path / "bus/pci/devices/0000:1b:00.0/local_cpulist", devices.ranges(mine))
    found = []
    for rank in range(2):
        done = subprocess.run(
            [sys.executable, "-c", REAL, str(rank), str(tmp_path)], cwd=Path(__file__).parents[2], capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said, main, other = json.loads(done.stdout)
        assert main == other and said == f"CPU affinity {devices.ranges(main)} (NUMA node 0, near cuda:{rank})"
        found.append(set(main))
    assert found[0] | found[1] == mine
    assert len(mine) == 1 or not found[0] & found[1]
