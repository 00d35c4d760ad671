"""launch=fork: the parent of a node's ranks, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hpcinit.base import versions
from hpcinit.base.errors import RequestError
from hpcinit.launch import fork_server, preload, process_title, rank_binding
from hpcinit.records.spec import Launch
from hpcinit.world.forked import Node as Place
from hpcinit.world.forked import environment, node
from tests import waiting
from tests.forking import Node
from tests.leaving_out import leave_out

wait_for = partial(waiting.until, timeout_s=60, pause_s=0.05)

RANK = "import json, os, random, signal, sys, time\nrank = int(os.environ['RANK'])\n"


def test_ranks_are_processes_of_their_own(tmp_path: Path) -> None:
    """Session, log, variables, title and random numbers are each rank's own; what was imported is there already."""
    code = RANK + (
        "there = 'numpy' in sys.modules\nimport numpy\n"
        "names = {n: v for n, v in os.environ.items() if n.startswith(('SLURM_', 'LOCAL_', 'RANK', 'WORLD'))}\n"
        "print(json.dumps([there, os.getpid() == os.getsid(0), random.random(), numpy.random.rand(), sys.stdin.read(), names,\n"
        "                  open('/proc/self/cmdline').read().strip(chr(0)), open('/proc/self/comm').read().strip()]))"
    )
    started = Node(tmp_path, code, 3, preload=["numpy"], env={"PMI_RANK": "0"})
    assert started.end() == (0, f"hpcinit: imported before the fork: numpy {versions.installed('numpy')}\n")
    told = [started.told(rank) for rank in range(3)]
    assert all(one[:2] == [True, True] and one[4] == "" for one in told)
    assert len({one[2] for one in told}) == len({one[3] for one in told}) == 3
    for rank, one in enumerate(told):
        names = one[5]
        assert (names["RANK"], names["LOCAL_RANK"], names["SLURM_PROCID"], names["SLURM_LOCALID"]) == (str(rank),) * 4
        assert (names["SLURM_GTIDS"], names["WORLD_SIZE"], names["SLURM_STEP_TASKS_PER_NODE"]) == ("0,1,2", "3", "3")
        assert one[6:] == [f"rank {rank}/3 forked", f"rank-{rank}/3-forked"]


def test_what_every_rank_needs_is_looked_up_before_the_fork(tmp_path: Path) -> None:
    """Bring-up imports nothing more than its parent has; what came from there is no matter for a rank's collections."""
    code = RANK + (
        "import gc, torch, hpcinit\nfrom hpcinit.base import versions\n"
        "found = [gc.isenabled(), gc.get_freeze_count() > 100_000, versions._installed.cache_info().currsize > 1]\n"
        "before = set(sys.modules)\nwith hpcinit.session():\n    print(json.dumps([found, sorted(set(sys.modules) - before)]))\n"
    )
    started = Node(tmp_path, code, 2, preload=["torch"])
    assert started.end()[0] == 0
    found, more = started.told(1)
    assert found == [True, True, True] and more == []


@pytest.mark.parametrize(
    ("end", "status", "how"),
    [("raise ValueError('lost it')", 1, "Exited with exit code 1"), ("os.kill(os.getpid(), 9)", -9, "Killed")],
)
def test_one_that_dies_takes_the_others_with_it(tmp_path: Path, end: str, status: int, how: str) -> None:
    """The others are gone within a second, however deaf; the first error is quoted, and the parent ends as the rank did."""
    code = RANK + (
        "if rank == 1:\n    print('last words', flush=True)\n    time.sleep(1)\n    open('died', 'w').write(str(time.time()))\n"
        f"    {end}\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"
    )
    started = Node(tmp_path, code, 3)
    ended, said = started.end()
    assert ended == status and f"rank 1: {how}" in said
    # The claim is a second; on a loaded machine it may be more, and without SIGKILL it is 60.
    assert fork_server.GRACE_S < 1
    assert time.time() - float((tmp_path / "died").read_text()) < 30


def test_what_is_said_of_a_death(tmp_path: Path) -> None:
    """In srun's words, then the rank's own error, or the last line of its log."""
    died = RANK + "if rank == 1:\n    time.sleep(0.5)\n    {}\ntime.sleep(60)\n"
    _, said = Node(tmp_path / "a", died.format("raise ValueError('lost it')")).end()
    lines = said.splitlines()
    assert lines[0] == "hpcinit: error: 127.0.0.1: rank 1: Exited with exit code 1"
    assert lines[1:] == [
        "hpcinit: rank 1 on 127.0.0.1 said: ValueError: lost it", "hpcinit: rank 0 on 127.0.0.1 ends with it"
    ]  # fmt: skip
    _, said = Node(tmp_path / "b", died.format("print('last words', flush=True); os.kill(os.getpid(), 11)")).end()
    assert said.splitlines()[:2] == [
        "hpcinit: error: 127.0.0.1: rank 1: Segmentation fault",
        "hpcinit: the last line of rank 1 on 127.0.0.1: last words",
    ]


def test_the_others_may_go_on(tmp_path: Path) -> None:
    """kill_on_bad_exit=false: each rank comes to its own end, and the highest status is the step's, as with srun."""
    code = RANK + (
        "open(f'here-{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'here-{one}') for one in range(3)):\n    time.sleep(0.02)\n"
        "time.sleep(rank)\nprint('done', flush=True)\nos._exit((3, 5, 0)[rank])"
    )
    started = Node(tmp_path, code, 3, kill_on_bad_exit=False)
    status, said = started.end()
    assert status == 5 and all("done" in started.log(rank) for rank in range(3))
    assert [line for line in said.splitlines() if ": error: " in line] == [
        f"hpcinit: error: 127.0.0.1: rank {rank}: Exited with exit code {code}" for rank, code in ((0, 3), (1, 5))
    ]


@pytest.mark.parametrize("first", [0, 3])
def test_ranks_that_outlive_the_first_too_long(tmp_path: Path, first: int) -> None:
    """launch.wait_s counts from the first that has ended, however it did, as srun's --wait."""
    started = Node(tmp_path, RANK + f"time.sleep(60 * rank)\nos._exit({first})", wait_s=1, kill_on_bad_exit=first == 0)
    begin = time.monotonic()
    status, said = started.end()
    assert status == -9 and time.monotonic() - begin < 50 and "rank 1: Killed" in said


COUNTS = RANK + (
    "came = []\nsignal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))\n"
    "print('ready', flush=True)\n"
    "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    "print(len(came))\n"
)


@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_reaches_each_rank_once(tmp_path: Path, to_all: bool) -> None:
    """Whether only the parent gets it, or Slurm sends it to all that the task has started."""
    started = Node(tmp_path, COUNTS)
    wait_for(lambda: all("ready" in started.log(rank) for rank in range(2)))
    pid = started.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 3  # the ranks, and the one that hears signals
    for one in [pid, *(map(int, children) if to_all else ())]:
        os.kill(one, signal.SIGUSR1)
    time.sleep(2)  # what would come twice comes within 0.3 s
    (tmp_path / "go").touch()
    status, said = started.end()
    assert (status, said) == (0, "") and [started.told(rank) for rank in range(2)] == [1, 1]


@pytest.mark.unmeasured(
    "its ranks are through in milliseconds; measured, one was still ending, and the signal ended it"
)
def test_the_stop_signal_does_not_end_what_is_not_ready_for_it(tmp_path: Path) -> None:
    """stop.signal that comes while the parent imports waits for the ranks, and ends neither."""
    (tmp_path / "slow.py").write_text("import time\nopen('slow', 'w').close()\ntime.sleep(2)\n")
    started = Node(tmp_path, RANK + "print('through')", preload=["slow"], signal="USR1")
    wait_for((tmp_path / "slow").exists)
    os.kill(started.process.pid, signal.SIGUSR1)
    assert started.end()[0] == 0 and "through" in started.log(0) + started.log(1)


def test_who_was_told_to_end_may_save(tmp_path: Path) -> None:
    """After SIGTERM one rank ends at once, and another that saves first is left to it; the parent says nothing."""
    code = RANK + (
        "def save(number, frame):\n    time.sleep(3)\n    print('saved', flush=True)\n    sys.exit(0)\n"
        "if rank == 1:\n    signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    started = Node(tmp_path, code)
    wait_for(lambda: all("ready" in started.log(rank) for rank in range(2)))
    started.process.terminate()
    assert started.end() == (-signal.SIGTERM, "") and "saved" in started.log(1)


def test_a_rank_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    """What it has started ends with it, also where it ended well, and it is no zombie while its neighbour goes on."""
    code = (
        RANK
        + (
            "import subprocess\nfrom pathlib import Path\nfrom hpcinit.launch import process_title\n"
            "if rank == 0:\n    while not os.path.exists('here'):\n        time.sleep(0.02)\n"
            "    child = subprocess.Popen(['sleep', '1000'])\n"
            "    Path('new').write_text(f'{os.getpid()} {child.pid}')\n    os.rename('new', 'both')\n    os._exit(0)\n"
            "open('here', 'w').close()\nwhile not os.path.exists('both'):\n    time.sleep(0.02)\n"
            "neighbour, child = map(int, Path('both').read_text().split())\nend = time.monotonic() + 60\n"
            "while process_title.state(neighbour) or process_title.state(child) not in ('', 'Z'):\n"  # Z: whose init does not reap
            "    assert time.monotonic() < end, [process_title.state(neighbour), process_title.state(child)]\n    time.sleep(0.02)\n"
        )
    )
    started = Node(tmp_path, code)
    assert started.end() == (0, ""), started.log(1)


def test_no_rank_outlives_its_parent(tmp_path: Path) -> None:
    """kill -9 of the parent ends its ranks too."""
    started = Node(tmp_path, RANK + "print(os.getpid(), flush=True)\ntime.sleep(60)")
    wait_for(lambda: all(started.log(rank) for rank in range(2)))
    started.process.kill()
    started.process.wait()
    for rank in range(2):
        wait_for(lambda rank=rank: not Path(f"/proc/{started.told(rank)}").exists())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='worker', daemon=True).start()",
         "importing heavy has started 1 thread (worker), which forked ranks would be without: take heavy out of launch.preload"),
        ("import flash_attn_99", "importing heavy, which launch.preload has, failed: ModuleNotFoundError: No module named 'flash_attn_99'"),
        ("raise OSError('no libcudart')", "importing heavy, which launch.preload has, failed: OSError: no libcudart"),
        (None, "launch.preload has 'heavy', and there is no module heavy on "),
    ],
)  # fmt: skip
def test_an_import_that_cannot_be_shared(tmp_path: Path, module: str | None, message: str) -> None:
    """The module is named, and what to do; no rank is started, and the first has the error in its log and record."""
    if module is not None:
        (tmp_path / "heavy.py").write_text(module)
    started = Node(tmp_path, "print('started')", preload=["heavy"])
    status, said = started.end()
    assert status in (1, 2) and f"hpcinit: error: {message}" in said and "Traceback" not in said
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-0.log"]
    assert f"hpcinit: error: {message}" in started.log(0)
    assert message in json.loads((tmp_path / "errors/rank-0.json").read_text())["error"]


def test_a_device_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that has opened a device is refused. A file stands for the device, which no machine of the tests has."""
    (tmp_path / "heavy_device.py").write_text(f"kept = open({str(tmp_path / 'nvidia-uvm')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match=r"importing heavy_device has initialised CUDA \(.*nvidia-uvm is open\)"):
        preload.load(["heavy_device"], devices=tmp_path)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("heavy_cuda", "take heavy_cuda out of launch.preload, and each rank imports it by itself; or launch=srun"), ("deepspeed", "launch=srun")],
)  # fmt: skip
def test_a_started_cuda_that_torch_does_not_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    """A trial fork finds a CUDA that torch.cuda.is_initialized() misses. The advice for DeepSpeed, which hpcinit itself
    adds to launch.preload, can be followed. A file stands for the driver, and torch's answer in the child is faked."""
    import torch

    (tmp_path / "nvidiactl").touch()
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RequestError) as refused:
        preload.load([name], devices=tmp_path)
    sys.modules.pop(name)  # monkeypatch puts the real one back, if it was imported
    assert str(refused.value) == (
        f"importing {name} has initialised CUDA (a trial fork cannot use it), which cannot be used in forked ranks: {advice}"
    )


@pytest.fixture
def no_nvml_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed sets this variable when another test of this process imports it."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)


@pytest.mark.parametrize(("version", "imported"), [("0.18.5", False), ("0.19.2", False), ("0.19.3", True), ("0.20.0", True)])  # fmt: skip
@pytest.mark.usefixtures("no_nvml_check")
def test_a_deepspeed_that_starts_cuda_is_not_imported(tmp_path: Path, version: str, imported: bool) -> None:
    """The fork server imports only a DeepSpeed whose import leaves CUDA alone, and its log states what it imported and why not
    the rest. DeepSpeed is a fake here: a module with only a version."""
    (tmp_path / "deepspeed.py").write_text("")
    (tmp_path / f"deepspeed-{version}.dist-info").mkdir()
    code = RANK + "print(json.dumps(['deepspeed' in sys.modules, os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')]))"
    started = Node(tmp_path, code, preload=["json", "deepspeed"])
    status, said = started.end()
    assert (status, started.told(1)) == (0, [imported, None]), said
    assert said == (
        f"hpcinit: imported before the fork: json, deepspeed {version}\n"
        if imported
        else f"hpcinit: imported before the fork: json; not imported before the fork: deepspeed {version}, whose import "
        "initialises CUDA, which forked ranks could then not use; each rank imports it (DeepSpeed 0.19.3 and later can be "
        "shared)\n"
    )


@pytest.mark.usefixtures("no_nvml_check")
def test_devices_are_counted_without_starting_cuda(tmp_path: Path) -> None:
    """While modules are imported torch is told to ask NVML for devices; ranks do not inherit that, but a user's value."""
    (tmp_path / "looks.py").write_text("import os\nseen = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')")
    code = RANK + "import looks\nprint(json.dumps([looks.seen, os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')]))"
    started = Node(tmp_path, code, preload=["looks"])
    assert started.end()[0] == 0 and started.told(0) == ["1", None]
    started = Node(tmp_path, code, preload=["looks"], env={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"})
    assert started.end()[0] == 0 and started.told(0) == ["0", "0"]


def test_a_pool_that_comes_back_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """OpenBLAS starts threads at import, ends them before a fork, and has as many in each rank."""
    code = (
        RANK
        + "import numpy\na = numpy.ones((400, 400))\nprint(json.dumps([(a @ a)[0, 0], len(os.listdir('/proc/self/task'))]))"
    )
    env = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    started = Node(tmp_path, code, preload=["numpy"], env=env)
    assert started.end()[0] == 0
    for rank in range(2):
        product, threads = started.told(rank)
        assert product == 400 and threads >= 2


def test_torch_is_imported_once_and_touches_no_device(tmp_path: Path) -> None:
    """torch and hpcinit's own bring-up pass every check, and a group of forked ranks sums."""
    code = RANK + (
        "there = [name in sys.modules for name in ('torch', 'hpcinit.runtime.bringup')]\n"
        "import hpcinit, torch\n"
        "with hpcinit.session() as run:\n    t = torch.ones(1)\n    torch.distributed.all_reduce(t)\n"
        "print(json.dumps([*there, t.item(), torch.cuda.is_initialized(), torch.get_num_threads()]))"
    )
    started = Node(tmp_path, code, preload=["torch"], cpu_bind="map_cpu:0,0", env={"OMP_NUM_THREADS": ""})
    status, said = started.end()
    assert status == 0, said
    assert [started.told(rank)[:4] for rank in range(2)] == [[True, True, 2.0, False]] * 2


def test_a_stopped_parent_is_woken_when_a_rank_ends(tmp_path: Path) -> None:
    """SIGSTOP of the parent: the others do not wait for ever for a rank that has failed unseen."""
    code = RANK + (
        "print('ready', flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n"
        "if rank == 1:\n    raise ValueError('lost it')\ntime.sleep(300)\n"
    )
    started = Node(tmp_path, code)
    wait_for(lambda: all("ready" in started.log(rank) for rank in range(2)))
    os.kill(started.process.pid, signal.SIGSTOP)
    wait_for(lambda: process_title.state(started.process.pid) == "T")
    (tmp_path / "go").touch()
    status, said = started.end()
    assert status == 1 and "rank 1 on 127.0.0.1 said: ValueError: lost it" in said


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file system on which who writes waits in the kernel, deaf to SIGKILL, until the test is over."""
    image, place = tmp_path / "image", tmp_path / "frozen"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        leave_out(f"a rank that is stuck in the kernel needs root and a loop device: {error}")
    try:
        if subprocess.run(["fsfreeze", "--freeze", place], check=False).returncode:
            leave_out("a rank that is stuck in the kernel needs the right to freeze a file system")
        yield place
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=False, capture_output=True)  # once more
        subprocess.run(["umount", "--lazy", place], check=True)


# A process of its own: pytest's has threads, and what forks from it may wait for ever for a lock of theirs.
STUCK = """
import os, signal, sys, time
from pathlib import Path
from hpcinit.world.forked import Node
from hpcinit.records.spec import Launch
from hpcinit.launch import fork_server, process_title

class Nobody:
    def end(self): ...
    def forget(self): ...
    def saw(self, number): return True

fork_server.GRACE_S, fork_server.STUCK_S = 0.1, 0.3
ranks = fork_server.ForkSupervisor(Node(0, 1, 2, "n1"), Launch("fork"), Path(), Nobody())
rank = ranks.fork(lambda local, parent: None)
if rank == 1:
    Path(sys.argv[1], "file").write_text("never")
elif rank == 0:
    other = process_title.children(os.getppid())[1]
    end = time.monotonic() + 60
    while process_title.state(other) != "D" and time.monotonic() < end:
        time.sleep(0.02)
if rank is not None:
    os._exit(7)
print(ranks.children[1].pid, flush=True)
sys.exit(ranks.wait())
"""


def test_a_rank_that_sigkill_does_not_end(tmp_path: Path, frozen: Path) -> None:
    """One that is stuck in the kernel is waited for a while, then named with what it is in."""
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:  # no pipes: the stuck one keeps them
        words = [sys.executable, "-c", STUCK, str(frozen)]
        parent = subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=err)
        assert parent.wait(120) == 7, (tmp_path / "err").read_text()
    stuck = int((tmp_path / "out").read_text())
    said = f"rank 1 on n1 (pid {stuck}) has not ended 0.3 s after SIGKILL, its state is D"
    assert said in (tmp_path / "err").read_text() and process_title.state(stuck) == "D"
    subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)
    wait_for(lambda: process_title.state(stuck) in ("", "Z"))


def test_a_step_of_another_shape() -> None:
    """The parent is the only task of its node; anything else is refused, with how to start it."""
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    with pytest.raises(
        RequestError, match=r"the step has 4 tasks .* but the run has 2 nodes x 2 ranks: start one task"
    ):
        node(env, 2, 2)


def test_an_environment_names_the_rank_only() -> None:
    """Its parent's rank, binding and process manager are gone; what was not set stays so."""
    here = Place(1, 2, 2, "n2")
    env = {"SLURM_PROCID": "1", "SLURM_CPU_BIND_LIST": "0x3", "PMI_RANK": "1", "HOME": "/root", "SLURM_TASK_PID": "7"}
    found = environment(env, here, 1, 99, 4)
    assert found["SLURM_PROCID"] == "3" and found["SLURM_TASK_PID"] == "99" and found["HOME"] == "/root"
    assert found["SLURM_TASKS_PER_NODE"] == "2(x2)" and "SLURM_CPUS_PER_TASK" not in found
    assert not found.keys() & {"SLURM_CPU_BIND_LIST", "PMI_RANK", "SLURM_NTASKS_PER_NODE"}


GRANTED = {"SLURM_CPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("cpu_bind", "cpus", "env", "expected"),
    [
        (None, 4, GRANTED, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (None, None, GRANTED, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (None, 4, {"SLURM_CPUS_ON_NODE": "4"}, None),  # nobody is confined
        (None, 4, {}, None),  # nobody says: cluster=local
        (None, 5, GRANTED, None),  # too few
        ("none", 4, GRANTED, None),
        ("cores", 4, {}, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("verbose,map_cpu:3,0x5", 4, {}, [{3}, {5}]),
        ("mask_cpu:f0,0x3", 4, {}, [{4, 5, 6, 7}, {0, 1}]),
        ("mask_cpu:f00", 4, {}, [set(range(8))] * 2),  # none of them is ours
    ],
)  # fmt: skip
def test_cpus_of_each_rank(
    tmp_path: Path, cpu_bind: str | None, cpus: int | None, env: dict[str, str], expected: object
) -> None:
    """As srun's options say of a task per rank, within what the parent has."""
    asked = Launch("fork", cpus=cpus, cpu_bind=cpu_bind)
    assert rank_binding.cpus(asked, 2, set(range(8)), env, sysfs=tmp_path) == expected


def test_a_whole_node_with_devices_is_left_to_the_ranks(tmp_path: Path) -> None:
    """Each rank then goes to the CPUs beside its device by itself."""
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-7\n")
    env = GRANTED | {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert rank_binding.cpus(Launch("fork", cpus=4), 2, set(range(8)), env, sysfs=tmp_path) is None
    (tmp_path / "devices/system/cpu/online").write_text("0-15\n")
    assert rank_binding.cpus(Launch("fork", cpus=4), 2, set(range(8)), env, sysfs=tmp_path) is not None


@pytest.mark.parametrize(
    ("gpu_bind", "expected"),
    [
        (None, [{}, {}]),
        ("none", [{}, {}]),
        ("single:1", [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}]),
        ("per_task:2", [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]),
        ("quiet,map_gpu:3,0", [{"CUDA_VISIBLE_DEVICES": "7"}, {"CUDA_VISIBLE_DEVICES": "4"}]),
    ],
)  # fmt: skip
def test_devices_of_each_rank(gpu_bind: str | None, expected: object) -> None:
    """Out of those that Slurm has given the step on this node, in its order."""
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [rank_binding.devices(Launch("fork", gpu_bind=gpu_bind), rank, env) for rank in range(2)] == expected


def test_where_a_process_is() -> None:
    assert process_title.stuck(os.getpid()).startswith("R") and process_title.stuck(2**22 + 1) == "gone"
