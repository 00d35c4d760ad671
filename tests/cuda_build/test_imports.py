"""The imports of the fork server do not start CUDA, with torch's CUDA build on a machine without a GPU.

Also without a driver, torch marks CUDA as lost in a forked child if the parent called anything that starts it. libcuda.so is no
sign: the import of torch 2.14 looks for it. GPUs are faked where NVML must report some (faked_gpus).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpcinit.base.versions import installed
from tests.forking import Node
from tests.skip_or_fail import skip_or_fail

HERE = str(Path(__file__).parent)
OLD_DEEPSPEED = next(Path(os.environ["HPCINIT_CUDA_BUILD"]).absolute().glob("lib/python*/site-packages"))
STATE = """
import json, os, sys
import torch
def in_a_fork():
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()) + 2 * (len(os.listdir("/proc/self/task")) - 1))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def links():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass
opened = [link for link in links() if link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]
print(json.dumps([opened, torch.cuda.is_initialized(), in_a_fork()]))
"""
DEVICE = re.compile("/dev/(nvidia|kfd|dri)")
CLEAN = "[[], false, 0]"


def run(code: str, *before: str, path: str = HERE) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    words = [*before, sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=300)


IMPORTS = {
    "torch": "import torch",
    "torch._dynamo": "import torch._dynamo",
    "transformers": "import transformers; from transformers import AutoModelForCausalLM",
    "deepspeed": "import faked_gpus, deepspeed",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_an_import_leaves_cuda_alone(name: str) -> None:
    """The import opens no device, does not start CUDA, and leaves no thread that a fork would lose (8 GPUs are faked for
    DeepSpeed)."""
    done = run(IMPORTS[name] + STATE)
    assert done.stdout.splitlines()[-1] == CLEAN, done.stdout + done.stderr


@pytest.mark.parametrize("name", IMPORTS)
def test_an_import_opens_no_device(name: str, tmp_path: Path) -> None:
    """The import does not even try to open a device, as strace sees it; a planted attempt is seen."""
    if not (strace := shutil.which("strace")):
        skip_or_fail("strace is not installed: apt-get install strace")
    log = tmp_path / "opened"
    before = [strace, "-f", "-e", "trace=open,openat", "-o", str(log)]
    assert run(IMPORTS[name], *before).returncode == 0
    assert [line for line in log.read_text().splitlines() if DEVICE.search(line)] == []
    run("open('/dev/nvidiactl')", *before)
    assert DEVICE.search(log.read_text())


@pytest.mark.parametrize(
    ("planted", "state"),
    [
        ("del os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']; torch.cuda.is_available()", "[[], false, 1]"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", CLEAN),
    ],
)
def test_the_check_can_fail(planted: str, state: str) -> None:
    """CUDA that is_available() starts is seen, although torch.cuda.is_initialized() is False; a thread is lost in a fork."""
    done = run("import os, torch\n" + planted + STATE)
    assert done.stdout.splitlines()[-1] == state, done.stdout + done.stderr


def test_the_import_of_an_old_deepspeed_starts_cuda() -> None:
    """DeepSpeed 0.18.5 reads the device's properties when imported, if there are GPUs (8 are faked). Here that fails
    because there is no driver; on a real node it starts CUDA."""
    done = run("import faked_gpus, deepspeed", path=f"{OLD_DEEPSPEED}:{HERE}")
    assert done.returncode == 1 and "in _lazy_init" in done.stderr and "no NVIDIA driver" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("old", "said"),
    [
        (False, f"imported before the fork: faked_gpus, torch {installed('torch')}, deepspeed {installed('deepspeed')}, transformers"),
        (True, f"imported before the fork: faked_gpus, torch {installed('torch')}, transformers"),
    ],
    ids=["newest", "0.18.5"],
)  # fmt: skip
def test_forked_ranks_can_use_cuda(tmp_path: Path, old: bool, said: str) -> None:
    """After torch, DeepSpeed and transformers were imported in the fork server, CUDA is not lost in its ranks. DeepSpeed
    0.18.5 is not imported there, and the log states that."""
    path = f"{OLD_DEEPSPEED}:{HERE}" if old else HERE
    code = "import json, sys, torch\nprint(json.dumps([torch.cuda._is_in_bad_fork(), 'deepspeed' in sys.modules]))"
    preload = ["faked_gpus", "torch", "deepspeed", "transformers"]
    started = Node(tmp_path, code, preload=preload, env={"PYTHONPATH": path})
    status, log = started.end(300)
    assert status == 0, log
    settings = (tmp_path / "startup.txt").read_text()
    assert f"\n{said}" in settings, settings
    assert ("not imported before the fork: deepspeed 0.18.5, whose import" in settings) == old
    assert [started.printed(rank) for rank in range(2)] == [[False, not old]] * 2


@pytest.mark.parametrize(
    ("planted", "refused"),
    [
        ("import os, torch\nos.environ.pop('PYTORCH_NVML_BASED_CUDA_CHECK')\ntorch.cuda.is_available()",
         "initialized CUDA (a trial fork cannot use it)"),
        ("import torch\nkept = open('{folder}/nvidia-uvm', 'w')", "initialized CUDA ({folder}/nvidia-uvm is open)"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "started 1 thread"),
    ],
    ids=["starts CUDA", "opens a device", "starts a thread"],
)  # fmt: skip
def test_a_planted_violation_is_refused(tmp_path: Path, planted: str, refused: str) -> None:
    """The fork server refuses a module that starts CUDA, opens a device or starts a thread. The folder that replaces /dev
    and its files are faked; what torch's CUDA build answers is real."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "planted.py").write_text(planted.format(folder=tmp_path))
    code = (
        "from pathlib import Path\nfrom hpcinit.launch import preload\n"
        f"preload.load(['torch', 'planted'], devices=Path({str(tmp_path)!r}))"
    )
    done = run(code, path=str(tmp_path))
    assert f"importing planted {refused.format(folder=tmp_path)}" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("ranks", "env", "launch", "expected"),
    [
        (4, {}, {}, [[0, 8], [1, 8], [2, 8], [3, 8]]),
        (2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, [[0, 4], [1, 4]]),
        (2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"gpu_bind": "single:1"}, [[0, 1], [0, 1]]),
        (2, {"CUDA_VISIBLE_DEVICES": "6,7"}, {}, [[0, 2], [1, 2]]),
    ],
    ids=["all visible", "a list", "one each", "as many as ranks"],
)
def test_devices_of_forked_ranks(
    tmp_path: Path, ranks: int, env: dict[str, str], launch: dict[str, str], expected: list[list[int]]
) -> None:
    """Each forked rank chooses its device from what it sees, as torch parses the variable; 8 GPUs are faked."""
    code = (
        "import json, os, faked_gpus, torch\nfrom hpcinit.world import launchers\nfrom hpcinit.runtime import devices\n"
        "device = devices.choose(launchers.read(os.environ), os.environ)\n"
        "assert faked_gpus.current == [device.index]\n"
        "print(json.dumps([device.index, torch.accelerator.device_count()]))"
    )
    started = Node(tmp_path, code, ranks, preload=["faked_gpus"], env={"PYTHONPATH": HERE, **env}, **launch)
    status, log = started.end()
    assert status == 0, log + started.log(0)
    assert [started.printed(rank) for rank in range(ranks)] == expected


def test_too_few_devices_of_forked_ranks(tmp_path: Path) -> None:
    """Three forked ranks that see two GPUs (faked) end with an error that states both numbers."""
    code = (
        "import os\nfrom hpcinit.world import launchers\nfrom hpcinit.runtime import devices\n"
        "devices.choose(launchers.read(os.environ), os.environ)"
    )
    env = {"PYTHONPATH": HERE, "CUDA_VISIBLE_DEVICES": "3,5,-1"}
    started = Node(tmp_path, code, 3, preload=["faked_gpus"], env=env)
    status, log = started.end()
    assert status != 0 and "3 ranks are on the node" in log and "only 2 devices are visible" in log, log
