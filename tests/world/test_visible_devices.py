"""Which devices a process sees and which one it uses: the variables of Slurm, of the vendors, and of real Slurm jobs.

No GPU is needed or used.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.base.errors import BringUpError
from hpcinit.world import World, visible_devices
from hpcinit.world.launchers import slurm_step as slurm_launcher
from tests.minislurm import MiniSlurm
from tests.records.recordings import Shape, shapes

# --- the device of a rank


def world(local_rank: int, local_world_size: int, launcher: str = "slurm") -> World:
    return World(launcher, local_rank, local_world_size, local_rank, local_world_size, 0, ("n1",), "n1", (1,))


GTIDS = {"SLURM_GTIDS": "0,1,2,3"}


@pytest.mark.parametrize(
    ("env", "launcher", "count", "indices"),
    [
        ({}, "slurm", 4, [0, 1, 2, 3]),
        ({}, "slurm", 8, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "slurm", 4, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, "torchrun", 4, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a"}, "slurm", 1, [0, 0, 0, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "openmpi", 1, [0, 0, 0, 0]),  # a wrapper script around each rank
        # With --gpus-per-task=2 each rank sees its two devices; also if only a control group hides the others.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_TRES_BIND": "gres/gpu:per_task:2"}, "slurm", 2, [0, 0, 0, 0]),
        ({"SLURMD_TRES_BIND": "gpu:per_task:2"}, "slurm", 2, [0, 0, 0, 0]),
        ({"SLURM_GPUS_ON_NODE": "4"}, "slurm", 1, [0, 0, 0, 0]),
        # One task with all devices, in which torchrun starts the ranks: they share the task's devices.
        (
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURMD_TRES_BIND": "gres/gpu:per_task:4", "SLURM_GPUS_ON_NODE": "4"},
            "torchrun", 4, [0, 1, 2, 3],
        ),
        # The list was set after Slurm bound the task, so the binding does not describe it.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURMD_TRES_BIND": "gpu:per_task:1"}, "slurm", 4, [0, 1, 2, 3]),
        # Two ranks share a device on purpose.
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_GPU": "2"}, "slurm", 1, [0] * 4),
    ],
)  # fmt: skip
def test_index(env: dict[str, str], launcher: str, count: int, indices: list[int]) -> None:
    """A shared list is indexed by local rank, a private one by 0."""
    assert [
        visible_devices.index_of(GTIDS | env, "cuda", count, world(rank, 4, launcher)) for rank in range(4)
    ] == indices


@pytest.mark.parametrize(
    ("env", "launcher", "count", "words"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "4,5"}, "slurm", 2,
            "local rank 1 on n1 has no device for itself: 4 ranks are on the node, but torch sees only 2 "
            "devices (CUDA_VISIBLE_DEVICES=4,5); start at most 2 per node, or give each rank its own (srun "
            "--gpus-per-task=1)",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}, "slurm", 1,
            "4 ranks are on the node, but torch sees only 1 device (CUDA_VISIBLE_DEVICES=0, "
            "SLURM_GPUS_ON_NODE=1)",
        ),
        (
            {"LOCAL_WORLD_SIZE": "4"}, "torchrun", 1,
            "4 ranks are on the node, but torch sees only 1 device (no variable restricts them); "
            "start at most 1 per node, or give each rank its own (srun --gpus-per-task=1); to let the ranks share it, set "
            "CUDA_VISIBLE_DEVICES=0",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c,MIG-d"}, "slurm", 1,
            "CUDA shows only one MIG instance to a process, so give each rank its own (srun --gpus-per-task=1)",
        ),
        # Ranks see lists that only some of them share: no rank can determine its index.
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_TRES_BIND": "gpu:closest", "SLURM_GPUS_ON_NODE": "4"}, "slurm", 2,
            "(CUDA_VISIBLE_DEVICES=0,1, SLURMD_TRES_BIND=gpu:closest, SLURM_GPUS_ON_NODE=4)",
        ),
        ({}, "mpich", 3, "4 ranks are on the node, but torch sees only 3 devices"),
    ],
)  # fmt: skip
def test_more_ranks_than_devices(env: dict[str, str], launcher: str, count: int, words: str) -> None:
    """Every rank of the node gets an error with both numbers, the variables that set them, and the fix."""
    for rank in range(4):
        with pytest.raises(BringUpError) as caught:
            visible_devices.index_of(GTIDS | env, "cuda", count, world(rank, 4, launcher))
        assert words in str(caught.value).replace(f"local rank {rank} ", "local rank 1 ")


# --- real Slurm environments


GPU_SHAPES = [s for s in shapes() if "gpu" in s.name and any("SLURM_JOB_GPUS" in t.env for t in s.tasks)]


@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_ranks_of_a_node_never_share(shape: Shape) -> None:
    """In every recorded launch with GPUs, the ranks of a node get different devices of the job."""
    taken: dict[tuple[str, str], list[str]] = defaultdict(list)
    for task in shape.tasks:
        found = slurm_launcher.read(task.env)
        names = task.env.get("CUDA_VISIBLE_DEVICES", task.env["SLURM_JOB_GPUS"]).split(",")
        taken[task.host, task.env["SLURM_JOB_ID"]].append(
            names[visible_devices.index_of(task.env, "cuda", len(names), found)]
        )
        assert set(names) <= set(task.env["SLURM_JOB_GPUS"].split(","))
    assert all(len(devices) == len(set(devices)) for devices in taken.values())


def test_the_recordings_with_gpus_are_there() -> None:
    """The recordings include both kinds of binding, no binding, and a job without device 0."""
    names = {"gpus_per_task", "gpus_per_node", "gpu_bind_none", "gpus_second_job_on_the_node", "ntasks_per_gpu"}
    assert {shape.name for shape in GPU_SHAPES} >= names


PROBE = """
import json, os
from hpcinit.world import launchers, visible_devices
world = launchers.read(os.environ)
names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
private = visible_devices.is_private(os.environ, "cuda", len(names), world)
index = visible_devices.index_of(os.environ, "cuda", len(names), world)
print(json.dumps([world.local_rank, names, private, index]))
"""


@pytest.mark.slurm
def test_several_gpus_per_task(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Under a real `srun -n4 --gpus-per-task=2` each rank has two private devices and uses the first.

    The cluster's GPUs are fakes: Slurm allocates them, but there is no driver.
    """
    (tmp_path / "probe.py").write_text(PROBE)
    words = ("srun", "-N1", "-n4", "--gpus-per-task=2", sys.executable, str(tmp_path / "probe.py"))
    found = sorted(json.loads(line) for line in slurm.run(*words).splitlines())
    assert [(rank, private, index) for rank, _, private, index in found] == [(rank, True, 0) for rank in range(4)]
    assert all(len(names) == 2 for _, names, _, _ in found)
    assert len({name for _, names, _, _ in found for name in names}) == 8


# --- allocated devices


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, ()),
        ({"SLURM_JOB_GPUS": "0,1"}, ("SLURM_JOB_GPUS=0,1",)),
        (
            {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"},
            ("SLURM_STEP_GPUS=1", "SLURM_JOB_GPUS=0,1", "CUDA_VISIBLE_DEVICES=0"),
        ),
        ({"ZE_AFFINITY_MASK": "0.1", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}, ("ZE_AFFINITY_MASK=0.1",)),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": ""}, ()),  # hidden on purpose
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
    ],
)
def test_given(env: dict[str, str], found: tuple[str, ...]) -> None:
    """Devices count as given by Slurm's or the vendors' variables, unless one of these gives none."""
    assert visible_devices.given(env) == found


def test_an_unknown_kind_of_device() -> None:
    """For a kind of device without a variable, nothing is restricted: the local rank is the index."""
    assert visible_devices.index_of({}, "mtia", 4, replace(world(2, 4), launcher="torchrun")) == 2
