"""init, shutdown and session with real processes and a real process group."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from hpcinit.records.layout import DIMENSIONS
from hpcinit.records.startup_timeout import COLLECTIVE_NCCL_S, COLLECTIVE_OTHER_S
from tests.conftest import Run
from tests.runtime.spawned import without_gloos_line
from tests.runtime.test_seeds import python


def ranks(hpcinit: Run, tmp_path: Path, code: str, *words: str, nodes: int = 2) -> list[str]:
    """Run `code` on that many ranks of cluster=local, without failures; return each rank's last line."""
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    done = hpcinit("submit", f"nodes={nodes}", "wait=true", *words, "--", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.partition("run folder: ")[2].partition("\n")[0])
    return [(folder / f"logs/rank-{rank}.log").read_text().splitlines()[-1] for rank in range(nodes)]


# Tests that share a start: the ranks report a value for each test, and the tests check it.

REPORT = """
import json, os, random, sys, time
from datetime import timedelta
import numpy, torch, torch.distributed as dist, hpcinit

def report(name, value):
    print("report", json.dumps([name, value]), flush=True)

def summed(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor)
    return tensor.item()

def drawn():
    return [random.random(), numpy.random.rand(), torch.rand(1).item()]

def times_out(group, within_s):
    start = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError:
        return time.monotonic() - start < within_s
"""
Reports = list[dict[str, Any]]


def reports_of(folder: Path, code: str, *options: str, nodes: int) -> Reports:
    """Run `code` on that many ranks of cluster=local in `folder`. Return the reports of each rank by name."""
    (folder / "script.py").write_text(REPORT + code)
    command = [sys.executable, "-m", "hpcinit", "submit", f"nodes={nodes}", "wait=true", *options, "--", "script.py"]
    env = {**os.environ, "HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(folder / f"runs/script-0001/logs/rank-{rank}.log").read_text() for rank in range(nodes)]
    return [dict(map(json.loads, re.findall(r"^report (.*)$", log, re.MULTILINE))) for log in found]


TWO_RANKS = """
child = os.fork()
if child == 0:
    sys.exit(0)
report("forked child", os.waitpid(child, 0)[1])

# A group of another size, then a script that knows nothing of hpcinit.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    hpcinit.init()
except hpcinit.HpcinitError as error:
    report("another group", [str(error), dist.is_initialized()])
dist.destroy_process_group()
dist.init_process_group("gloo")
report("env://", summed(dist.get_rank() + 1))
dist.destroy_process_group()

run = hpcinit.init()
report("torch", [dist.get_rank(), dist.get_world_size(), dist.get_backend()])
report("properties", [run.rank, run.world_size, run.local_rank, run.local_world_size, run.node_rank, run.hosts,
    str(run.device), run.backend, run.timeout.total_seconds(), run.collective_timeout.total_seconds(),
    run.checkpoint_timeout.total_seconds(), run.mesh.mesh_dim_names, list(run.mesh.shape), run.seed, run.folder.name])
report("drawn", drawn())
for step in range(1, 41):
    run.progress(step, 40, loss=1 / step)
run.result(0.5 + run.rank)
run.result({1, 2})
hpcinit.shutdown()

first = hpcinit.init(seed=9)
report("drawn with seed 9", drawn())
report("same object", hpcinit.init(seed=9) is first)
try:
    hpcinit.init(seed=2)
except hpcinit.HpcinitError as error:
    report("other arguments", str(error))
hpcinit.shutdown()
hpcinit.shutdown()
report("after shutdown", dist.is_initialized())
with hpcinit.session():
    report("again", summed(1))
report("after session", dist.is_initialized())

# Last, because the group cannot be used afterwards.
run = hpcinit.init(collective_timeout=timedelta(seconds=2))
if run.rank == 0:
    start = time.monotonic()
    times_out(dist.group.WORLD, 60)
    report("timeout", time.monotonic() - start)
else:
    time.sleep(6)
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reports]:
    """The folder and the reports of TWO_RANKS."""
    folder = tmp_path_factory.mktemp("two")
    options = ["comm.timeout_base_s=60", "comm.timeout_per_node_s=10", "comm.collective_timeout_s=33", "seed=5"]
    return folder, reports_of(folder, TWO_RANKS, *options, "comm.checkpoint_timeout_s=99", nodes=2)


def test_runtime_properties(two_ranks: tuple[Path, Reports]) -> None:
    """The Runtime has rank, sizes, hosts, device, backend, timeouts and mesh, and they agree with torch's."""
    expected = [
        ["127.0.0.1", "127.0.0.2"],
        "cpu",
        "gloo",
        80.0,
        33.0,
        99.0,
        list(DIMENSIONS),
        [1, 2, 1, 1, 1],
        5,
        "script-0001",
    ]
    for rank, found in enumerate(two_ranks[1]):
        assert found["properties"] == [rank, 2, 0, 1, rank, *expected] and found["torch"] == [rank, 2, "gloo"]


def test_forked_children_do_not_disturb_the_rendezvous(two_ranks: tuple[Path, Reports]) -> None:
    """A child that the program forks before init, and that exits, neither leaves the rendezvous nor waits in it."""
    assert [(found["forked child"], found["properties"][1]) for found in two_ranks[1]] == [(0, 2)] * 2


def test_collective_timeout_is_set_in_torch(two_ranks: tuple[Path, Reports]) -> None:
    """After init a collective with a missing peer fails after the collective timeout."""
    assert round(two_ranks[1][0]["timeout"]) in (2, 3, 4)


def test_once_per_process(two_ranks: tuple[Path, Reports]) -> None:
    """The same arguments return the same object, others are an error, and after shutdown init works again."""
    for found in two_ranks[1]:
        assert (found["same object"], found["after shutdown"], found["again"]) == (True, False, 2.0)
        assert found["other arguments"].startswith(
            "init was called twice with different arguments: seed was 9 and is 2 now; call"
        )
        assert found["after session"] is False


def test_another_group_is_refused(two_ranks: tuple[Path, Reports]) -> None:
    """For a group whose rank and size differ from the launcher's, the error names each difference."""
    (first, kept), (second, _) = (found["another group"] for found in two_ranks[1])
    said = "the program has created a process group that does not match its call of hpcinit.init(): its "
    assert first.startswith(f"{said}world size is 1, but slurm reports 2. Let hpcinit.init() create the group")
    world = "its world size is 1, but slurm reports 2. Let"
    assert second.startswith(f"{said}rank is 0, but slurm reports 1; {world}") and kept


def test_scripts_for_torchrun_run_unchanged(two_ranks: tuple[Path, Reports]) -> None:
    """A script that only calls init_process_group() with env:// works under hpcinit."""
    assert [found["env://"] for found in two_ranks[1]] == [3.0, 3.0]


def test_seeds_are_the_same_on_every_rank(two_ranks: tuple[Path, Reports]) -> None:
    """Python, NumPy and torch draw the same numbers on every rank, and others with another seed."""
    one, two = two_ranks[1]
    assert one["drawn"] == two["drawn"] and one["drawn with seed 9"] == two["drawn with seed 9"]
    assert all(number != other for number, other in zip(one["drawn"], one["drawn with seed 9"], strict=True))


def test_status_shows_progress(hpcinit: Run, two_ranks: tuple[Path, Reports]) -> None:
    """`hpcinit status` shows the progress that rank 0 reported."""
    assert "step 40/40  loss 0.025" in hpcinit("status", str(two_ranks[0] / "runs/script-0001")).stdout


def test_result_of_rank_0_counts(two_ranks: tuple[Path, Reports]) -> None:
    """run.result() writes rank 0's number into the run folder; a value that JSON cannot contain is a warning of rank 0."""
    folder = two_ranks[0] / "runs/script-0001"
    assert json.loads((folder / "result.json").read_text()) == {"value": 0.5}
    said = "warning: run.result() was ignored: the result is '{1, 2}' (set), expected numbers, text"
    assert [path.read_text().count(said) for path in sorted(folder.glob("logs/*"))].count(1) == 1


FOUR_RANKS = """
dist.init_process_group("gloo", timeout=timedelta(seconds=77))
theirs = dist.group.WORLD
for again in range(2):
    with hpcinit.session(layout=hpcinit.Layout(tp=2, tp_across_nodes=True)) as run:
        seen = [run.rank, run.world_size, run.collective_timeout.total_seconds(), run.mesh.mesh_dim_names]
report("adopted", [*seen, dist.group.WORLD is theirs, summed(1)])
dist.destroy_process_group()

with hpcinit.session() as run:
    of_tp = dist.get_process_group_ranks(run.mesh["tp"].get_group())
    report("mesh", [run.mesh.mesh_dim_names, run.mesh.mesh.tolist(), of_tp])
    report("by data", [torch.rand(1).item(), torch.rand(1, **run.loader_options()).item(), run.data_rank])
with hpcinit.session(seed_by="rank"):
    report("by rank", torch.rand(1).item())

# Last, because the groups cannot be used afterwards.
run = hpcinit.init()
groups = [run.mesh["tp"].get_group(), dist.new_group(range(4)), dist.group.WORLD]
run.set_collective_timeout(timedelta(seconds=1))
dist.barrier()
found = [times_out(group, 20) for group in groups] if run.rank == 0 else time.sleep(6)
report("changed timeout", [found, run.collective_timeout.total_seconds()])
"""


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The reports of FOUR_RANKS."""
    options = ["parallel.tp=2", "parallel.tp_across_nodes=true", "seed_by=data"]
    return reports_of(tmp_path_factory.mktemp("four"), FOUR_RANKS, *options, nodes=4)


def test_timeout_of_collectives_can_change(four_ranks: Reports) -> None:
    """set_collective_timeout applies to the default group, a mesh's groups and groups created before."""
    assert [found["changed timeout"] for found in four_ranks] == [[[True, True, True], 1.0], *[[None, 1.0]] * 3]


def test_an_existing_group_is_adopted(four_ranks: Reports) -> None:
    """A process group that the program created is used if it matches, and shutdown does not destroy it."""
    expected = [[rank, 4, 77.0, list(DIMENSIONS), True, 4.0] for rank in range(4)]
    assert [found["adopted"] for found in four_ranks] == expected


def test_seeds_by_rank_and_by_data(four_ranks: Reports) -> None:
    """seed_by=rank gives every rank different numbers; seed_by=data gives a tensor parallel group equal numbers."""
    by_data = [found["by data"] for found in four_ranks]
    assert by_data[0] == by_data[1] and by_data[2] == by_data[3] and [line[2] for line in by_data] == [0, 0, 1, 1]
    assert by_data[0][0] != by_data[2][0] and by_data[0][1] != by_data[2][1]
    assert len({found["by rank"] for found in four_ranks}) == 4


def test_mesh_of_a_layout(four_ranks: Reports) -> None:
    """With tp 2 the mesh has all dimensions, and adjacent ranks are in one tensor parallel group."""
    names, mesh = list(DIMENSIONS), [[0, 1], [2, 3]]
    expected = [[names, [[[[each]] for each in mesh]], mesh[rank // 2]] for rank in range(4)]
    assert [found["mesh"] for found in four_ranks] == expected


WITH_DEEPSPEED = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its kernel for shared memory takes a minute to compile

def summed_by_deepspeed():
    tensor = torch.ones(1)
    deepspeed.comm.all_reduce(tensor)
    return tensor.item()

run = hpcinit.init()
value = summed_by_deepspeed()
hpcinit.shutdown()
report("torch's group", [value, dist.is_initialized(), deepspeed.comm.is_initialized()])

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
with hpcinit.session() as run:
    pass
report("DeepSpeed's group", [run.world_size, deepspeed.comm.is_initialized(), summed_by_deepspeed()])
"""


@pytest.fixture(scope="module")
def with_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """The reports of WITH_DEEPSPEED."""
    return reports_of(tmp_path_factory.mktemp("deepspeed"), WITH_DEEPSPEED, "comm.deepspeed=true", nodes=2)


@pytest.mark.deepspeed
def test_deepspeed_uses_torchs_group(with_deepspeed: Reports) -> None:
    """With comm.deepspeed DeepSpeed's collectives run on the group that torch created, and shutdown resets both."""
    assert [found["torch's group"] for found in with_deepspeed] == [[2.0, False, False]] * 2


@pytest.mark.deepspeed
def test_deepspeeds_own_group_is_adopted(with_deepspeed: Reports) -> None:
    """A program that initialized DeepSpeed can call init; after shutdown the group and DeepSpeed still work."""
    assert [found["DeepSpeed's group"] for found in with_deepspeed] == [[2, True, 2.0]] * 2


def test_a_deepspeed_that_is_too_old(tmp_path: Path) -> None:
    """If the job's DeepSpeed is below 0.18.5, init() names both versions before it starts anything.

    The old DeepSpeed is a fake: its metadata only.
    """
    (tmp_path / "old/deepspeed-0.17.6.dist-info").mkdir(parents=True)
    (tmp_path / "old/deepspeed-0.17.6.dist-info/METADATA").write_text("Name: deepspeed\nVersion: 0.17.6\n")
    found = python(
        """
        import json
        import hpcinit, torch
        try:
            hpcinit.init(deepspeed=True)
        except hpcinit.HpcinitError as error:
            print(json.dumps([str(error), torch.distributed.is_initialized()]))
        """,
        tmp_path,
        PYTHONPATH=str(tmp_path / "old"),
    )
    assert found[0].startswith("DeepSpeed 0.17.6 is installed, expected 0.18.5 or newer") and not found[1]


def test_settings_are_verified(hpcinit: Run, tmp_path: Path) -> None:
    """For a setting that differs from the request, the error has both values.

    Fakes: torch is prevented from changing the timeout, and reports another backend.
    """
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import hpcinit, torch.distributed as dist
        from hpcinit.runtime import process_group
        process_group.set_timeout = lambda timeout: True
        process_group.backend_on = lambda device_type: "nccl"
        try:
            hpcinit.init()
        except hpcinit.HpcinitError as error:
            print(error)
        print(dist.is_initialized())
        """)
    )
    said = "backend is nccl, expected gloo; the collective timeout is 0:05:04, expected 0:30:00"
    printed = without_gloos_line(hpcinit("run", "script.py").stdout)
    assert printed == f"the process group does not have the requested settings: {said}\nFalse\n"


def test_the_log_line(hpcinit: Run, tmp_path: Path) -> None:
    """Without a run folder, but with HPCINIT_VERBOSE=1, rank 0 logs the start-up timeout with its terms, such as the remaining
    time of the job, and its settings."""
    torchs = "from torch.distributed.constants import default_pg_timeout, default_pg_nccl_timeout as nccl\n"
    printed = "print(default_pg_timeout.total_seconds(), nccl and nccl.total_seconds())\n"
    init = "import hpcinit\nhpcinit.init(device_id='auto', deterministic=True)\n"
    (tmp_path / "script.py").write_text(torchs + printed + init)
    end = str(int(time.time()) + 200)
    done = hpcinit("run", "script.py", env={"SLURM_JOB_END_TIME": end, "HPCINIT_VERBOSE": "1"})
    said = done.stderr
    other, nccl = done.stdout.splitlines()[0].split()  # the constant for NCCL exists only in builds with NCCL
    assert float(other) == COLLECTIVE_OTHER_S and nccl in ("None", str(COLLECTIVE_NCCL_S))
    assert re.search(
        r"start-up timeout min\(3600, 300 \+ 3.5 x 1 node, 1\d\d left of the job - 30\) = 1[0-6]\d s, collective", said
    )
    assert (
        "collective timeout 1800 s\nhpcinit: CPU affinity " in said
        and "\nhpcinit: no device_id: gloo on a CPU has no device to bind to" in said
    )
    assert "\nhpcinit: deterministic algorithms" in said
    too_late = hpcinit("run", "script.py", env={"SLURM_JOB_END_TIME": str(int(time.time()) + 20)})
    assert too_late.returncode == 2 and "the job ends in " in too_late.stderr


def test_init_under_torchrun(hpcinit: Run, tmp_path: Path) -> None:
    """Under torchrun, without a submission by hpcinit, init uses torchrun's variables."""
    (tmp_path / "script.py").write_text(
        "import hpcinit, torch.distributed as dist\n"
        "with hpcinit.session() as run:\n"
        "    print(f'{run.world.launcher} {run.rank} {dist.get_world_size()}\\n', end='')\n"  # one write: the ranks share a pipe
    )
    done = hpcinit("run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py")
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("torchrun")) == [
        "torchrun 0 2",
        "torchrun 1 2",
    ]


def test_init_without_a_launcher(hpcinit: Run, tmp_path: Path) -> None:
    """With a plain `python train.py` init creates a world of one rank, and collectives work."""
    (tmp_path / "script.py").write_text(
        "import hpcinit, torch, torch.distributed as dist\nwith hpcinit.session() as run:\n    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n    print(run.world.launcher, run.world_size, x.item())\n"
    )
    assert without_gloos_line(hpcinit("run", "script.py").stdout) == "single 1 1.0\n"


def test_a_call_that_never_returns_is_ended(hpcinit: Run, tmp_path: Path) -> None:
    """When torch hangs, the watchdog ends every rank at the deadline, with stacks and exit status 1."""
    (tmp_path / "script.py").write_text(
        "import time, torch.distributed as dist, hpcinit\nfrom hpcinit.runtime import process_group\n"
        "process_group.LATE_S = 1\ndist.barrier = lambda **_: time.sleep(600)\nhpcinit.init()\n"
    )
    words = ["comm.timeout_base_s=12", "comm.timeout_per_node_s=0", "launch.kill_on_bad_exit=false"]
    done = hpcinit("submit", "nodes=2", "wait=true", *words, "--", "script.py")
    assert done.returncode == 1
    logs = [(tmp_path / f"runs/script-0001/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    # The first rank to exit names the missing ranks; the other may only report that it died.
    assert "is not initialized after 13 s. 2 of 2 ranks are missing: rank 0 on 127.0.0.1" in logs[0] + logs[1]
    assert 'script.py", line 5 in <module>' in logs[0] + logs[1]


def test_a_missing_backend_is_refused(hpcinit: Run, tmp_path: Path) -> None:
    """A backend that this machine or this torch does not have is refused with the reason."""
    (tmp_path / "script.py").write_text(
        "import hpcinit\ntry:\n    hpcinit.init(backend='nccl')\nexcept hpcinit.HpcinitError as error:\n    print(error)\n"
        "hpcinit.init(backend='mpi')\n"
    )
    done = hpcinit("run", "script.py")
    assert done.returncode == 1 and "is not in this build of torch" in done.stderr, done.stderr
    assert ", expected auto or one of: gloo" in done.stderr
    assert "backend nccl needs a GPU" in done.stdout


def test_backends_by_device_type(hpcinit: Run, tmp_path: Path) -> None:
    """cpu:gloo,cuda:nccl in the config and in init is gloo on a machine without a GPU, also beside an existing group."""
    code = """
        import json, hpcinit, torch, torch.distributed as dist
        from hpcinit.runtime import devices
        with hpcinit.session() as run:
            found = [[run.backend, dict(run.plan.backends), dist.get_backend_config()]]
        dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=dist.HashStore())
        hpcinit.init(backend="cpu:gloo,cuda:nccl")
        hpcinit.shutdown()
        dist.destroy_process_group()
        for wrong in ("cuda:nccl,xpu:xccl", "cpu:gloo,cuda", "cpu:mpi,cuda:nccl"):
            try:
                hpcinit.init(backend=wrong)
            except hpcinit.HpcinitError as error:
                found.append(str(error))
        devices.backend = lambda device, backend: backend  # a fake: this torch has no NCCL
        found += [devices.backends(torch.device("cuda", 3), given) for given in ("cpu:gloo,cuda:nccl", "nccl")]
        print(json.dumps(found))
        """
    (line,) = ranks(hpcinit, tmp_path, code, "comm.backend=cpu:gloo,cuda:nccl", nodes=1)
    in_job, *wrong, on_gpu, one = json.loads(line)
    assert in_job[:2] == ["gloo", {"cpu": "gloo"}] and "cpu:gloo" in in_job[2]
    assert [text.partition(" this build of torch ")[0] for text in wrong] == [
        "backend is 'cuda:nccl,xpu:xccl', which has no backend for this rank's device cpu: add cpu:gloo",
        "backend is 'cpu:gloo,cuda', expected one name, or pairs such as cpu:gloo,cuda:nccl",
        "backend 'mpi' is not in",
    ]
    assert (on_gpu, one) == ({"cpu": "gloo", "cuda": "nccl"}, {"cuda": "nccl"})


def test_init_can_be_repeated_after_a_wrong_layout(hpcinit: Run, tmp_path: Path) -> None:
    """After a wrong layout init can be called again with a valid one, even if rank 1 starts only then."""
    late = tmp_path / "python"
    late.write_text(
        '#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || while [ ! -e refused ]; do sleep 0.1; done\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    late.chmod(0o755)
    code = """
        import pathlib
        import hpcinit
        from hpcinit.records.layout import Layout
        try:
            hpcinit.init(layout=Layout(tp=3))
        except hpcinit.HpcinitError as error:
            print("tp 3 = 3 ranks" in str(error))
        pathlib.Path("refused").touch()
        with hpcinit.session() as run:
            print(run.mesh.mesh_dim_names)
    """
    assert ranks(hpcinit, tmp_path, code, f"cluster.python={late}") == [str(DIMENSIONS)] * 2


def test_a_wrong_node_clock(hpcinit: Run, tmp_path: Path) -> None:
    """If this node's clock is two hours ahead, the rank warns once, starts, and uses the job's whole time limit.

    The clock is a fake: the job's end is moved instead.
    """
    (tmp_path / "clocked.py").write_text(
        "import hpcinit\nprint(round(hpcinit.init().time_left().total_seconds() / 60), 'min left')\n"
    )
    env = {"HPCINIT_JOB_END_TIME": str(int(time.time()) - 7200), "HPCINIT_JOB_LIMIT_S": "3600"}
    done = hpcinit("run", "clocked.py", env=env)
    assert (done.returncode, without_gloos_line(done.stdout)) == (0, "60 min left\n"), done.stderr
    assert done.stderr.count("s ago by this node's clock, but the job's time limit is 3600 s") == 1


@pytest.mark.parametrize("verbose", ["", "1"])
def test_without_a_submission_init_prints_one_line(tmp_path: Path, verbose: str) -> None:
    """A program that the user started prints one line, and with HPCINIT_VERBOSE=1 also what hpcinit set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HPCINIT", "SLURM", "OMPI"))}
    env |= {"HPCINIT_VERBOSE": verbose, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = "import hpcinit; hpcinit.init()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[W")]
    assert lines[0].startswith("hpcinit: 1 rank on 1 node (single), gloo on cpu, up in ")
    assert lines[0].endswith("; more with HPCINIT_VERBOSE=1")
    assert (len(lines) == 1) == (not verbose), lines
    assert ("TORCH_FR_BUFFER_SIZE=2000" in done.stderr) == bool(verbose)
