"""launch=fork: the fork server of a node, in real processes."""

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

from hpcinit.base import processes, versions
from hpcinit.base.errors import RequestError
from hpcinit.base.supervisor import Supervisor
from hpcinit.launch import fork_server, preload, rank_binding
from hpcinit.records.spec import Launch
from hpcinit.world.launchers import slurm_step
from hpcinit.world.launchers.slurm_step import ForkNode, fork_environment, fork_node
from tests import waiting
from tests.forking import Node
from tests.skip_or_fail import skip_or_fail

wait_for = partial(waiting.until, timeout_s=60, pause_s=0.05)

RANK = "import json, os, random, signal, sys, time\nrank = int(os.environ['RANK'])\n"


def test_ranks_are_processes_of_their_own(tmp_path: Path) -> None:
    """Each rank has its own session, log, variables, title and random numbers, and the fork server's imports."""
    code = RANK + (
        "there = 'numpy' in sys.modules\nimport numpy\n"
        "names = {n: v for n, v in os.environ.items() if n.startswith(('SLURM_', 'LOCAL_', 'RANK', 'WORLD'))}\n"
        "print(json.dumps([there, os.getpid() == os.getsid(0), random.random(), numpy.random.rand(), sys.stdin.read(), names,\n"
        "                  open('/proc/self/cmdline').read().strip(chr(0)), open('/proc/self/comm').read().strip()]))"
    )
    started = Node(tmp_path, code, 3, preload=["numpy"], env={"PMI_RANK": "0"})
    assert started.end() == (0, "")
    assert (
        f"\nimported before the fork: numpy {versions.installed('numpy')}\n" in (tmp_path / "startup.txt").read_text()
    )
    told = [started.printed(rank) for rank in range(3)]
    assert all(one[:2] == [True, True] and one[4] == "" for one in told)
    assert len({one[2] for one in told}) == len({one[3] for one in told}) == 3
    for rank, one in enumerate(told):
        names = one[5]
        assert (names["RANK"], names["LOCAL_RANK"], names["SLURM_PROCID"], names["SLURM_LOCALID"]) == (str(rank),) * 4
        assert (names["SLURM_GTIDS"], names["WORLD_SIZE"], names["SLURM_STEP_TASKS_PER_NODE"]) == ("0,1,2", "3", "3")
        assert one[6:] == [f"rank {rank}/3 script.py", f"rank-{rank}/3-script"]


def test_what_every_rank_needs_is_looked_up_before_the_fork(tmp_path: Path) -> None:
    """Bring-up imports nothing that the fork server has not imported; a rank's garbage collections skip its objects."""
    code = RANK + (
        "import gc, torch, hpcinit\nfrom hpcinit.base import versions\n"
        "found = [gc.isenabled(), gc.get_freeze_count() > 100_000, versions._installed.cache_info().currsize > 1]\n"
        "before = set(sys.modules)\nwith hpcinit.session():\n    print(json.dumps([found, sorted(set(sys.modules) - before)]))\n"
    )
    started = Node(tmp_path, code, 2, preload=["torch"])
    assert started.end()[0] == 0
    found, more = started.printed(1)
    assert found == [True, True, True] and more == []


@pytest.mark.parametrize(
    ("end", "status", "how"),
    [("raise ValueError('lost it')", 1, "Exited with exit code 1"), ("os.kill(os.getpid(), 9)", -9, "Killed")],
)
def test_one_that_dies_takes_the_others_with_it(tmp_path: Path, end: str, status: int, how: str) -> None:
    """The others end within a second, even if they ignore SIGTERM; the error is quoted, and the server ends as the rank did."""
    code = RANK + (
        "if rank == 1:\n    print('last line', flush=True)\n    time.sleep(1)\n    open('died', 'w').write(str(time.time()))\n"
        f"    {end}\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"
    )
    started = Node(tmp_path, code, 3)
    ended, said = started.end()
    assert ended == status and f"rank 1: {how}" in said
    # The claim is one second; on a loaded machine it may take longer, and without SIGKILL it takes 60.
    assert fork_server.GRACE_S < 1
    assert time.time() - float((tmp_path / "died").read_text()) < 30


def test_what_is_said_of_a_death(tmp_path: Path) -> None:
    """The failure is printed in srun's format, and which ranks end too."""
    died = RANK + "if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('lost it')\ntime.sleep(60)\n"
    _, said = Node(tmp_path / "a", died).end()
    assert said.splitlines() == [
        "hpcinit: error: 127.0.0.1: rank 1: Exited with exit code 1",
        "hpcinit: stopping rank 0 on 127.0.0.1 too, because of that failure",
    ]  # fmt: skip


def test_the_others_may_go_on(tmp_path: Path) -> None:
    """With kill_on_bad_exit=false each rank continues to its end, and the highest status is the step's, as with srun."""
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
    """launch.wait_s counts from the end of the first rank, with any status, like srun's --wait."""
    started = Node(tmp_path, RANK + f"time.sleep(60 * rank)\nos._exit({first})", wait_s=1, kill_on_bad_exit=first == 0)
    begin = time.monotonic()
    status, said = started.end()
    assert status == -9 and time.monotonic() - begin < 50 and "rank 1: Killed" in said


COUNTS = RANK + (
    "received = []\nsignal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))\n"
    "print('ready', flush=True)\n"
    "while not os.path.exists('go'):\n    time.sleep(0.02)\n"
    "print(len(received))\n"
)


@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_reaches_each_rank_once(tmp_path: Path, to_all: bool) -> None:
    """A rank gets a signal once, whether only the fork server receives it or Slurm sends it to all processes of the task."""
    started = Node(tmp_path, COUNTS)
    wait_for(lambda: all("ready" in started.log(rank) for rank in range(2)))
    pid = started.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 3  # the ranks and the signal monitor
    for one in [pid, *(map(int, children) if to_all else ())]:
        os.kill(one, signal.SIGUSR1)
    time.sleep(2)  # a second copy would arrive within 0.3 s
    (tmp_path / "go").touch()
    status, said = started.end()
    assert (status, said) == (0, "") and [started.printed(rank) for rank in range(2)] == [1, 1]


def test_the_stop_signal_does_not_end_what_is_not_ready_for_it(tmp_path: Path) -> None:
    """stop.signal during the fork server's imports is kept for the ranks, and ends neither."""
    (tmp_path / "slow.py").write_text("import time\nopen('slow', 'w').close()\ntime.sleep(2)\n")
    started = Node(tmp_path, RANK + "print('through')", preload=["slow"], signal="USR1")
    wait_for((tmp_path / "slow").exists)
    os.kill(started.process.pid, signal.SIGUSR1)
    assert started.end()[0] == 0 and "through" in started.log(0) + started.log(1)


def test_the_stop_signal_does_not_end_what_is_complete(tmp_path: Path) -> None:
    """stop.signal arrives while Python exits, after it has removed its signal handlers."""
    code = (
        "\nimport os, time\nclass Slow:\n    def __del__(self, mark=os.mkdir, sleep=time.sleep, name=f'at-end-{rank}'):\n"
        "        mark(name)\n        sleep(2)\nsys.slow = Slow()\n"
    )
    started = Node(tmp_path, RANK + code, signal="USR1")
    wait_for(lambda: len([*tmp_path.glob("at-end-*")]) == 2)
    os.kill(started.process.pid, signal.SIGUSR1)
    assert started.end()[0] == 0


def test_who_was_told_to_end_may_save(tmp_path: Path) -> None:
    """After SIGTERM one rank ends immediately, another one saves first and is not killed; the fork server prints nothing."""
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
    """A rank's child processes end with it, also after success, and the rank is reaped while the other one continues."""
    code = RANK + (
        "import subprocess\nfrom pathlib import Path\nfrom hpcinit.base import processes\n"
        "if rank == 0:\n    while not os.path.exists('here'):\n        time.sleep(0.02)\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    Path('new').write_text(f'{os.getpid()} {child.pid}')\n    os.rename('new', 'both')\n    os._exit(0)\n"
        "open('here', 'w').close()\nwhile not os.path.exists('both'):\n    time.sleep(0.02)\n"
        "other_rank, child = map(int, Path('both').read_text().split())\nend = time.monotonic() + 60\n"
        "while processes.state(other_rank) or processes.state(child) not in ('', 'Z'):\n"  # Z: if init does not reap it
        "    assert time.monotonic() < end, [processes.state(other_rank), processes.state(child)]\n    time.sleep(0.02)\n"
    )
    started = Node(tmp_path, code)
    assert started.end() == (0, ""), started.log(1)


def test_no_rank_outlives_its_parent(tmp_path: Path) -> None:
    """kill -9 of the fork server ends its ranks too."""
    started = Node(tmp_path, RANK + "print(os.getpid(), flush=True)\ntime.sleep(60)")
    wait_for(lambda: all(started.log(rank) for rank in range(2)))
    started.process.kill()
    started.process.wait()
    for rank in range(2):
        wait_for(lambda rank=rank: not Path(f"/proc/{started.printed(rank)}").exists())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='worker', daemon=True).start()",
         "importing heavy started 1 thread (worker), and threads do not survive a fork: remove heavy from launch.preload"),
        ("import flash_attn_99", "cannot import heavy, which launch.preload lists: ModuleNotFoundError: No module named 'flash_attn_99'"),
        ("raise OSError('no libcudart')", "cannot import heavy, which launch.preload lists: OSError: no libcudart"),
        (None, "launch.preload lists 'heavy', but there is no module heavy on "),
    ],
)  # fmt: skip
def test_an_import_that_cannot_be_shared(tmp_path: Path, module: str | None, message: str) -> None:
    """The error names the module and the fix; no rank starts, and rank 0 has the error in its log and record."""
    if module is not None:
        (tmp_path / "heavy.py").write_text(module)
    started = Node(tmp_path, "print('started')", preload=["heavy"])
    status, said = started.end()
    assert status in (1, 2) and f"hpcinit: error: {message}" in said and "Traceback" not in said
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-0.log"]
    assert f"hpcinit: error: {message}" in started.log(0)
    assert message in json.loads((tmp_path / "errors/rank-0.json").read_text())["error"]


def test_a_device_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that has opened a device is refused. A file replaces the device."""
    (tmp_path / "heavy_device.py").write_text(f"kept = open({str(tmp_path / 'nvidia-uvm')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match=r"importing heavy_device initialized CUDA \(.*nvidia-uvm is open\)"):
        preload.load(["heavy_device"], devices=tmp_path)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("heavy_cuda", "remove heavy_cuda from launch.preload, so that each rank imports it, or set launch=srun"), ("deepspeed", "set launch=srun")],
)  # fmt: skip
def test_a_started_cuda_that_torch_does_not_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    """A trial fork detects a started CUDA that torch.cuda.is_initialized() misses. The advice for DeepSpeed, which
    hpcinit itself adds to launch.preload, can be followed. A file replaces the driver, and torch's answer in the
    child is faked."""
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
        f"importing {name} initialized CUDA (a trial fork cannot use it), which does not work after a fork: {advice}"
    )


@pytest.fixture
def no_nvml_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a variable that DeepSpeed sets when another test of this process imports it."""
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)


@pytest.mark.parametrize(("version", "imported"), [("0.18.5", False), ("0.19.2", False), ("0.19.3", True), ("0.20.0", True)])  # fmt: skip
@pytest.mark.usefixtures("no_nvml_check")
def test_a_deepspeed_that_starts_cuda_is_not_imported(tmp_path: Path, version: str, imported: bool) -> None:
    """The fork server imports only a DeepSpeed whose import does not start CUDA, and logs what it imported and the reason for
    what it did not. DeepSpeed is a fake here: a module with only a version."""
    (tmp_path / "deepspeed.py").write_text("")
    (tmp_path / f"deepspeed-{version}.dist-info").mkdir()
    code = RANK + "print(json.dumps(['deepspeed' in sys.modules, os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')]))"
    started = Node(tmp_path, code, preload=["json", "deepspeed"])
    status, said = started.end()
    assert (status, started.printed(1)) == (0, [imported, None]), said
    assert (
        (tmp_path / "startup.txt")
        .read_text()
        .endswith(
            f"\nimported before the fork: json, deepspeed {version}\n"
            if imported
            else f"\nimported before the fork: json; not imported before the fork: deepspeed {version}. Each rank imports "
            "it, because this import initializes CUDA, and forked ranks could then not use CUDA. DeepSpeed 0.19.3 and later "
            "can be imported before the fork\n"
        )
    )


@pytest.mark.usefixtures("no_nvml_check")
def test_devices_are_counted_without_starting_cuda(tmp_path: Path) -> None:
    """During the imports torch counts devices with NVML; ranks do not inherit that setting, but they do inherit a user's."""
    (tmp_path / "looks.py").write_text("import os\nseen = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')")
    code = RANK + "import looks\nprint(json.dumps([looks.seen, os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')]))"
    started = Node(tmp_path, code, preload=["looks"])
    assert started.end()[0] == 0 and started.printed(0) == ["1", None]
    started = Node(tmp_path, code, preload=["looks"], env={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"})
    assert started.end()[0] == 0 and started.printed(0) == ["0", "0"]


def test_a_pool_that_comes_back_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """OpenBLAS starts threads at import, ends them before a fork, and restarts as many in each rank."""
    code = (
        RANK
        + "import numpy\na = numpy.ones((400, 400))\nprint(json.dumps([(a @ a)[0, 0], len(os.listdir('/proc/self/task'))]))"
    )
    env = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    started = Node(tmp_path, code, preload=["numpy"], env=env)
    assert started.end()[0] == 0
    for rank in range(2):
        product, threads = started.printed(rank)
        assert product == 400 and threads >= 2


def test_torch_is_imported_once_and_touches_no_device(tmp_path: Path) -> None:
    """torch and hpcinit's own bring-up pass every check, and an all-reduce of forked ranks works."""
    code = RANK + (
        "there = [name in sys.modules for name in ('torch', 'hpcinit.runtime.bringup')]\n"
        "import hpcinit, torch\n"
        "with hpcinit.session() as run:\n    t = torch.ones(1)\n    torch.distributed.all_reduce(t)\n"
        "print(json.dumps([*there, t.item(), torch.cuda.is_initialized(), torch.get_num_threads()]))"
    )
    started = Node(tmp_path, code, preload=["torch"], cpu_bind="map_cpu:0,0", env={"OMP_NUM_THREADS": ""})
    status, said = started.end()
    assert status == 0, said
    assert [started.printed(rank)[:4] for rank in range(2)] == [[True, True, 2.0, False]] * 2


def test_a_stopped_parent_is_woken_when_a_rank_ends(tmp_path: Path) -> None:
    """If the fork server is stopped with SIGSTOP, the other ranks do not wait forever for a failed rank."""
    code = RANK + (
        "print('ready', flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n"
        "if rank == 1:\n    raise ValueError('lost it')\ntime.sleep(300)\n"
    )
    started = Node(tmp_path, code)
    wait_for(lambda: all("ready" in started.log(rank) for rank in range(2)))
    os.kill(started.process.pid, signal.SIGSTOP)
    wait_for(lambda: processes.state(started.process.pid) == "T")
    (tmp_path / "go").touch()
    status, said = started.end()
    assert status == 1 and "error: 127.0.0.1: rank 1: Exited with exit code 1" in said


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system on which a write waits in the kernel, even after SIGKILL, until the test is over."""
    image, place = tmp_path / "image", tmp_path / "frozen"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        skip_or_fail(f"a rank that is stuck in the kernel needs root and a loop device: {error}")
    try:
        if subprocess.run(["fsfreeze", "--freeze", place], check=False).returncode:
            skip_or_fail("a rank that is stuck in the kernel needs the permission to freeze a file system")
        yield place
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=False, capture_output=True)  # again, if the test failed
        subprocess.run(["umount", "--lazy", place], check=True)


# A separate process: pytest's has threads, and a process forked from it may wait forever for one of their locks.
STUCK = """
import os, signal, sys, time
from pathlib import Path
from hpcinit.world.launchers import slurm_step
from hpcinit.world.launchers.slurm_step import ForkNode
from hpcinit.records.spec import Launch
from hpcinit.base import processes
from hpcinit.launch import fork_server

class NoMonitor:
    def end(self): ...
    def forget(self): ...
    def saw(self, number): return True

fork_server.GRACE_S, fork_server.STUCK_S = 0.1, 0.3
ranks = fork_server.ForkSupervisor(ForkNode(0, 1, 2, "n1"), Launch("fork"), Path(), NoMonitor())
rank = ranks.fork(lambda local, parent: None)
if rank == 1:
    Path(sys.argv[1], "file").write_text("never")
elif rank == 0:
    end = time.monotonic() + 60
    while len(processes.children(os.getppid())) < 2 and time.monotonic() < end:  # rank 1 is forked after this one
        time.sleep(0.02)
    other = processes.children(os.getppid())[1]
    while processes.state(other) != "D" and time.monotonic() < end:
        time.sleep(0.02)
if rank is not None:
    os._exit(7)
print(ranks.children[1].pid, flush=True)
sys.exit(ranks.wait())
"""


def test_a_rank_that_sigkill_does_not_end(tmp_path: Path, frozen: Path) -> None:
    """A rank that is stuck in the kernel is waited for a while, then reported with its kernel function."""
    with (
        (tmp_path / "out").open("w") as out,
        (tmp_path / "err").open("w") as err,
    ):  # no pipes: the stuck rank keeps them open
        words = [sys.executable, "-c", STUCK, str(frozen)]
        parent = subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=err)
        assert parent.wait(120) == 7, (tmp_path / "err").read_text()
    stuck = int((tmp_path / "out").read_text())
    said = f"rank 1 on n1 (pid {stuck}) is still running 0.3 s after SIGKILL, in state D"
    assert said in (tmp_path / "err").read_text() and processes.state(stuck) == "D"
    subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)
    wait_for(lambda: processes.state(stuck) in ("", "Z"))


def test_stop_leaves_a_child_that_sigkill_does_not_end(frozen: Path) -> None:
    """stop() reaps the children that have exited, and leaves one that is stuck in the kernel."""
    them = Supervisor()
    them.stuck_s = 0.3
    stuck = them.start(0, ["bash", "-c", f"echo never > {frozen}/file"], os.environ)
    other = them.start(1, ["sleep", "300"], os.environ)
    wait_for(lambda: processes.state(stuck.pid) == "D")
    them.stop(0.1)
    assert (stuck.code, other.code) == (None, -signal.SIGTERM) and them.running() == [stuck]
    subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)
    wait_for(lambda: them.ended().get(0) == -signal.SIGTERM)
    stuck.reap()


def test_a_step_of_another_shape() -> None:
    """The fork server must be the only task of its node; anything else is refused, with the correct srun option."""
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    with pytest.raises(
        RequestError, match=r"the step has 4 tasks .* but the run has 2 nodes x 2 ranks: start one task"
    ):
        fork_node(env, 2, 2)


def test_an_environment_names_the_rank_only() -> None:
    """A rank's environment has no rank, binding or process manager of its parent, and no additional variables."""
    here = ForkNode(1, 2, 2, "n2")
    env = {"SLURM_PROCID": "1", "SLURM_CPU_BIND_LIST": "0x3", "PMI_RANK": "1", "HOME": "/root", "SLURM_TASK_PID": "7"}
    found = fork_environment(env, here, 1, 99, 4)
    assert found["SLURM_PROCID"] == "3" and found["SLURM_TASK_PID"] == "99" and found["HOME"] == "/root"
    assert found["SLURM_TASKS_PER_NODE"] == "2(x2)" and "SLURM_CPUS_PER_TASK" not in found
    assert not found.keys() & {"SLURM_CPU_BIND_LIST", "PMI_RANK", "SLURM_NTASKS_PER_NODE"}


def test_a_spare_node_has_the_place_of_another_one() -> None:
    """A step may have tasks on spare nodes, which have no ranks. The ranks of a start have only their own hosts."""
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_STEP_NODELIST": "n[1-4]"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-4]", "SLURMD_NODENAME": "n4"}
    spare = fork_node(env, 3, 2, spares=1)
    assert spare.ranks_per_node == 0 and spare.hosts == ("n1", "n2", "n3")
    here = ForkNode(1, 3, 2, "n4", ("n1", "n4", "n3"))
    found = slurm_step.read(fork_environment(env | {"SLURM_PROCID": "3"}, here, 1, 99, None))
    assert (found.rank, found.node_rank, found.world_size) == (3, 1, 6)
    assert (found.hosts, found.master_addr, found.host) == (("n1", "n4", "n3"), "n1", "n4")
    with pytest.raises(RequestError, match="the step has 4 tasks"):
        fork_node(env, 2, 2, spares=1)


GRANTED = {"SLURM_CPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("cpu_bind", "cpus", "env", "expected"),
    [
        (None, 4, GRANTED, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (None, None, GRANTED, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (None, 4, {"SLURM_CPUS_ON_NODE": "4"}, None),  # the task is not confined
        (None, 4, {}, None),  # unknown: cluster=local
        (None, 5, GRANTED, None),  # too few
        ("none", 4, GRANTED, None),
        ("cores", 4, {}, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ("verbose,map_cpu:3,0x5", 4, {}, [{3}, {5}]),
        ("mask_cpu:f0,0x3", 4, {}, [{4, 5, 6, 7}, {0, 1}]),
        ("mask_cpu:f00", 4, {}, [set(range(8))] * 2),  # none of them is available
    ],
)  # fmt: skip
def test_cpus_of_each_rank(
    tmp_path: Path, cpu_bind: str | None, cpus: int | None, env: dict[str, str], expected: object
) -> None:
    """CPUs are assigned as srun's options would for a task per rank, within the fork server's CPUs."""
    asked = Launch("fork", cpus=cpus, cpu_bind=cpu_bind)
    assert rank_binding.cpus(asked, 2, set(range(8)), env, sysfs=tmp_path) == expected


def test_a_whole_node_with_devices_is_left_to_the_ranks(tmp_path: Path) -> None:
    """With a whole node each rank binds itself to the CPUs near its device."""
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
    """A rank's devices are taken from the step's devices on this node, in Slurm's order."""
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [rank_binding.devices(Launch("fork", gpu_bind=gpu_bind), rank, env) for rank in range(2)] == expected


def test_where_a_process_is() -> None:
    assert processes.stuck(os.getpid()).startswith("R") and processes.stuck(2**22 + 1) == "gone"
