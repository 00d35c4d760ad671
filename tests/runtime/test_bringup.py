"""init, shutdown and session with real processes and a real process group."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.runtime.spawned import without_gloos_line


def ranks(hpcinit: Run, tmp_path: Path, code: str, *words: str, nodes: int = 2) -> list[str]:
    """Run `code` on that many ranks of cluster=local; each rank's last line, and no rank may fail."""
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    done = hpcinit("submit", f"nodes={nodes}", "wait=true", *words, "--", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.partition("run folder: ")[2].partition("\n")[0])
    return [(folder / f"logs/rank-{rank}.log").read_text().splitlines()[-1] for rank in range(nodes)]


def test_runtime_tells_everything(hpcinit: Run, tmp_path: Path) -> None:
    """The object that init returns knows rank, sizes, hosts, device, backend, timeouts and mesh, and agrees with torch."""
    code = """
        import json, hpcinit, torch.distributed as dist
        run = hpcinit.init()
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (run.rank, run.world_size, run.backend)
        print(json.dumps([run.rank, run.world_size, run.local_rank, run.local_world_size, run.node_rank, run.hosts,
            str(run.device), run.backend, run.timeout.total_seconds(), run.collective_timeout.total_seconds(),
            run.checkpoint_timeout.total_seconds(), run.mesh.mesh_dim_names, list(run.mesh.shape), run.seed, run.folder.name]))
    """
    words = ["comm.timeout_base_s=60", "comm.timeout_per_node_s=10", "comm.collective_timeout_s=33", "seed=5"]
    words += ["comm.checkpoint_timeout_s=99"]
    expected = ["127.0.0.1", "127.0.0.2"], "cpu", "gloo", 80.0, 33.0, 99.0, ["dp_replicate"], [2], 5, "script-0001"
    found = [json.loads(line) for line in ranks(hpcinit, tmp_path, code, *words)]
    assert found == [[rank, 2, 0, 1, rank, *expected] for rank in range(2)]


def test_timeouts_are_torchs(hpcinit: Run, tmp_path: Path) -> None:
    """After init torch's group has the timeout for collectives: a peer that never comes fails it after that long."""
    code = """
        import time, torch, torch.distributed as dist, hpcinit
        run = hpcinit.init()
        begin = time.monotonic()
        if run.rank == 0:
            try:
                dist.all_reduce(torch.zeros(1))
            except RuntimeError:
                print(round(time.monotonic() - begin) in (2, 3, 4))
        else:
            time.sleep(6)
            print(True)
    """
    assert ranks(hpcinit, tmp_path, code, "comm.collective_timeout_s=2") == ["True", "True"]


def test_once_per_process(hpcinit: Run, tmp_path: Path) -> None:
    """The same request gives the same object, another one is an error, and after shutdown init works again."""
    code = """
        import hpcinit, torch, torch.distributed as dist
        first = hpcinit.init(seed=1)
        assert hpcinit.init(seed=1) is first
        try:
            hpcinit.init(seed=2)
        except hpcinit.HpcinitError as error:
            assert str(error).startswith("init was called before with another request: seed was 1 and is 2 now; call")
        hpcinit.shutdown()
        hpcinit.shutdown()
        assert not dist.is_initialized()
        with hpcinit.session() as run:
            value = torch.ones(1)
            dist.all_reduce(value)
        assert not dist.is_initialized()
        print(value.item())
    """
    assert ranks(hpcinit, tmp_path, code) == ["2.0", "2.0"]


def test_timeout_of_collectives_can_change(hpcinit: Run, tmp_path: Path) -> None:
    """set_collective_timeout holds from then on for the default group, a mesh's groups and those made before."""
    code = """
        import time, torch, torch.distributed as dist, hpcinit
        from datetime import timedelta
        run = hpcinit.init(layout=hpcinit.Layout(dp_replicate=1, dp_shard=1, tp=2, tp_across_nodes=True))
        groups = [run.mesh["tp"].get_group(), dist.new_group([0, 1]), dist.group.WORLD]
        run.set_collective_timeout(timedelta(seconds=1))
        dist.barrier()
        found = []
        for group in groups if run.rank == 0 else ():
            begin = time.monotonic()
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except RuntimeError:
                found.append(time.monotonic() - begin < 20)
        if run.rank:
            time.sleep(6)
        print(found, run.collective_timeout)
    """
    assert ranks(hpcinit, tmp_path, code) == ["[True, True, True] 0:00:01", "[] 0:00:01"]


def test_a_group_that_is_there_is_adopted(hpcinit: Run, tmp_path: Path) -> None:
    """A process group that the program made is taken as it is if it matches, and outlives shutdown."""
    code = """
        import hpcinit, torch, torch.distributed as dist
        from datetime import timedelta
        dist.init_process_group("gloo", timeout=timedelta(seconds=77))
        theirs = dist.group.WORLD
        for again in range(2):
            with hpcinit.session(layout=hpcinit.Layout(tp=2, tp_across_nodes=True)) as run:
                told = run.rank, run.world_size, run.collective_timeout.total_seconds(), run.mesh.mesh_dim_names
        value = torch.ones(1)
        dist.all_reduce(value)
        print(told, dist.group.WORLD is theirs, value.item())
        dist.destroy_process_group()
    """
    expected = [f"({rank}, 4, 77.0, ('dp_replicate', 'tp')) True 4.0" for rank in range(4)]
    assert ranks(hpcinit, tmp_path, code, nodes=4) == expected


@pytest.mark.deepspeed
def test_deepspeeds_own_group_is_adopted(hpcinit: Run, tmp_path: Path) -> None:
    """A program that has started DeepSpeed by itself can call init, and has both as before after shutdown."""
    code = """
        import deepspeed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its kernel for shared memory takes a minute to compile
        import hpcinit, torch
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        with hpcinit.session(deepspeed=True) as run:
            pass
        value = torch.ones(1)
        deepspeed.comm.all_reduce(value)
        print(run.world_size, deepspeed.comm.is_initialized(), value.item())
    """
    assert ranks(hpcinit, tmp_path, code) == ["2 True 2.0"] * 2


def test_another_group_is_refused(hpcinit: Run, tmp_path: Path) -> None:
    """A process group with other ranks and another size than the launcher's is an error that names each difference."""
    code = """
        import os, hpcinit, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            hpcinit.init()
        except hpcinit.HpcinitError as error:
            print(error)
        assert dist.is_initialized()
        dist.destroy_process_group()
    """
    first, second = ranks(hpcinit, tmp_path, code)
    said = "a process group is up that hpcinit did not make, and it is another than init is asked for: its "
    assert first.startswith(
        f"{said}world size is 1, and slurm says 2. Call hpcinit.init() in the place of what made it"
    )
    assert second.startswith(f"{said}rank is 0, and slurm says 1; its world size is 1, and slurm says 2. Call")


def test_what_is_up_is_read_back(hpcinit: Run, tmp_path: Path) -> None:
    """What differs from what was asked for is an error with both values.

    torch is kept from changing the timeout, and told of another backend: none here drops either by itself.
    """
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import hpcinit, torch.distributed as dist
        from hpcinit.runtime import process_group
        process_group.set_timeout = lambda timeout: True
        process_group.backend_on = lambda device: "nccl"
        try:
            hpcinit.init()
        except hpcinit.HpcinitError as error:
            print(error)
        print(dist.is_initialized())
        """)
    )
    said = "asked for backend gloo, and it is nccl; asked for a collective timeout of 0:05:00, and it is 0:05:04"
    printed = without_gloos_line(hpcinit("run", "script.py").stdout)
    assert printed == f"the process group is up, and not as asked: {said}\nFalse\n"


def test_the_log_line(hpcinit: Run, tmp_path: Path) -> None:
    """Rank 0 says the start-up timeout with its terms, what is left of the job among them, and what it set."""
    (tmp_path / "script.py").write_text("import hpcinit\nhpcinit.init(device_id='auto', deterministic=True)\n")
    end = str(int(time.time()) + 200)
    said = hpcinit("run", "script.py", env={"SLURM_JOB_END_TIME": end}).stderr
    assert re.search(
        r"start-up timeout min\(3600, 300 \+ 3.5 x 1 node, 1\d\d left of the job - 30\) = 1[0-6]\d s, of", said
    )
    assert "of collectives 300 s; cpus " in said and "no device_id: gloo on a CPU has no device to bind to" in said
    assert "; deterministic algorithms; " in said
    too_late = hpcinit("run", "script.py", env={"SLURM_JOB_END_TIME": str(int(time.time()) + 20)})
    assert too_late.returncode == 2 and "the job ends in " in too_late.stderr


def test_scripts_for_torchrun_run_unchanged(hpcinit: Run, tmp_path: Path) -> None:
    """A script that calls init_process_group() with env:// alone works under hpcinit."""
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        print(value.item())
        dist.destroy_process_group()
    """
    assert ranks(hpcinit, tmp_path, code) == ["3.0", "3.0"]


def test_seeds_are_the_same_on_every_rank(hpcinit: Run, tmp_path: Path) -> None:
    """Python, NumPy and torch draw the same on every rank, and something else with another seed."""
    code = """
        import random, numpy, torch, hpcinit
        with hpcinit.session():
            print(random.random(), numpy.random.rand(), torch.rand(1).item())
    """
    one, two = ranks(hpcinit, tmp_path, code), ranks(hpcinit, tmp_path, code, "seed=9")
    assert one[0] == one[1] and two[0] == two[1] and one[0] != two[0]


def test_seeds_by_rank_and_by_data(hpcinit: Run, tmp_path: Path) -> None:
    """By rank no two ranks draw alike; by data those of a tensor parallel group do, and their loaders too."""
    code = """
        import torch, hpcinit
        with hpcinit.session() as run:
            print(torch.rand(1).item(), torch.rand(1, **run.loader_options()).item(), run.data_rank)
    """
    words = ["parallel.tp=2", "parallel.tp_across_nodes=true", "seed_by=data"]
    by_data = [line.split() for line in ranks(hpcinit, tmp_path, code, *words, nodes=4)]
    assert by_data[0] == by_data[1] and by_data[2] == by_data[3] and [line[2] for line in by_data] == list("0011")
    assert by_data[0][0] != by_data[2][0] and by_data[0][1] != by_data[2][1]
    by_rank = {line.split()[0] for line in ranks(hpcinit, tmp_path, code, *words[:2], "seed_by=rank", nodes=4)}
    assert len(by_rank) == 4


def test_mesh_of_a_layout(hpcinit: Run, tmp_path: Path) -> None:
    """With tp 2 the mesh has two dimensions, and neighbouring ranks are in one tensor parallel group."""
    code = """
        import hpcinit, torch.distributed as dist
        with hpcinit.session() as run:
            print(run.mesh.mesh_dim_names, run.mesh.mesh.tolist(), dist.get_process_group_ranks(run.mesh["tp"].get_group()))
    """
    lines = ranks(hpcinit, tmp_path, code, "parallel.tp=2", "parallel.tp_across_nodes=true", nodes=4)
    assert lines == [f"('dp_replicate', 'tp') [[0, 1], [2, 3]] {[0, 1] if r < 2 else [2, 3]}" for r in range(4)]


def test_progress_is_seen_outside(hpcinit: Run, tmp_path: Path) -> None:
    """What rank 0 tells of its progress is what status shows."""
    code = """
        import hpcinit
        with hpcinit.session() as run:
            for step in range(1, 41):
                run.progress(step, 40, loss=1 / step)
        print("done")
    """
    ranks(hpcinit, tmp_path, code)
    assert "step 40/40  loss 0.025" in hpcinit("status", "script-0001").stdout


def test_result_is_rank_0s(hpcinit: Run, tmp_path: Path) -> None:
    """run.result() leaves rank 0's number in the run folder, and refuses on every rank what is no number."""
    code = """
        import hpcinit
        from hpcinit.base.errors import RequestError
        with hpcinit.session() as run:
            run.result(0.5 + run.rank)
            try:
                run.result("low")
            except RequestError as error:
                print(error)
    """
    said = "the result is 'low' (str), expected a number or a sequence of numbers"
    assert ranks(hpcinit, tmp_path, code) == [said, said]
    assert json.loads((tmp_path / "runs/script-0001/result.json").read_text()) == {"value": 0.5}


@pytest.mark.deepspeed
def test_deepspeed_comes_after_torch(hpcinit: Run, tmp_path: Path) -> None:
    """With comm.deepspeed DeepSpeed's collectives run on the group that torch made, and shutdown clears both."""
    code = """
        import deepspeed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its kernel for shared memory takes a minute to compile
        import hpcinit, torch, torch.distributed as dist
        run = hpcinit.init()
        value = torch.ones(1)
        deepspeed.comm.all_reduce(value)
        hpcinit.shutdown()
        print(value.item(), dist.is_initialized(), deepspeed.comm.is_initialized())
    """
    assert ranks(hpcinit, tmp_path, code, "comm.deepspeed=true") == ["2.0 False False"] * 2


def test_torchrun_is_a_launcher_too(hpcinit: Run, tmp_path: Path) -> None:
    """Under torchrun, with no hpcinit on the submit side, init brings the group up from torchrun's variables."""
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


def test_no_launcher_at_all(hpcinit: Run, tmp_path: Path) -> None:
    """A plain `python train.py` is a world of one rank, and collectives work in it."""
    (tmp_path / "script.py").write_text(
        "import hpcinit, torch, torch.distributed as dist\nwith hpcinit.session() as run:\n    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n    print(run.world.launcher, run.world_size, x.item())\n"
    )
    assert without_gloos_line(hpcinit("run", "script.py").stdout) == "single 1 1.0\n"


def test_a_call_that_never_returns_is_ended(hpcinit: Run, tmp_path: Path) -> None:
    """When torch itself hangs, the watchdog ends every rank at the deadline, with the stacks and exit status 1."""
    (tmp_path / "script.py").write_text(
        "import time, torch.distributed as dist, hpcinit\nfrom hpcinit.runtime import process_group\n"
        "process_group.LATE_S = 1\ndist.barrier = lambda **_: time.sleep(600)\nhpcinit.init()\n"
    )
    words = ["comm.timeout_base_s=12", "comm.timeout_per_node_s=0", "launch.kill_on_bad_exit=false"]
    done = hpcinit("submit", "nodes=2", "wait=true", *words, "--", "script.py")
    assert done.returncode == 1
    logs = [(tmp_path / f"runs/script-0001/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    # The first to end says who was missing; the other may only see it die.
    assert "is not up after 13 s. 2 of 2 ranks are missing: rank 0 on 127.0.0.1" in logs[0] + logs[1]
    assert 'script.py", line 5 in <module>' in logs[0] + logs[1]


@pytest.mark.parametrize(
    ("asked", "said"), [("nccl", "backend nccl needs a GPU"), ("mpi", "is not in this build of torch")]
)
def test_backend_that_is_not_there(hpcinit: Run, tmp_path: Path, asked: str, said: str) -> None:
    """A backend that this machine or this torch lacks is refused with the reason."""
    (tmp_path / "script.py").write_text(f"import hpcinit\nhpcinit.init(backend={asked!r})\n")
    done = hpcinit("run", "script.py")
    assert done.returncode == 1 and said in done.stderr


def test_forked_children_disturb_nobody(hpcinit: Run, tmp_path: Path) -> None:
    """A child that a program forks before init and that ends by itself neither leaves the meeting nor waits in it."""
    code = """
        import os, sys, hpcinit
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with hpcinit.session() as run:
            print(run.world_size)
    """
    assert ranks(hpcinit, tmp_path, code) == ["2", "2"]


def test_a_layout_that_does_not_fit_leaves_nothing_behind(hpcinit: Run, tmp_path: Path) -> None:
    """An init that is refused can be tried again with a right request, also where rank 1 begins only then."""
    late = tmp_path / "python"
    late.write_text(
        '#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || while [ ! -e refused ]; do sleep 0.1; done\n'
        f'exec {sys.executable} "$@"\n'
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
    assert ranks(hpcinit, tmp_path, code, f"cluster.python={late}") == ["('dp_replicate',)"] * 2


def test_a_node_clock_that_is_hours_off(hpcinit: Run, tmp_path: Path) -> None:
    """The job's end is two hours ago by the clock of this node (a stand-in: the end is moved, not the clock): the rank
    warns once, starts, and has the job's whole limit left."""
    (tmp_path / "clocked.py").write_text(
        "import hpcinit\nprint(round(hpcinit.init().time_left().total_seconds() / 60), 'min left')\n"
    )
    env = {"HPCINIT_JOB_END_TIME": str(int(time.time()) - 7200), "HPCINIT_JOB_LIMIT_S": "3600"}
    done = hpcinit("run", "clocked.py", env=env)
    assert (done.returncode, without_gloos_line(done.stdout)) == (0, "60 min left\n"), done.stderr
    assert done.stderr.count("s ago by this node's clock, and the job's limit is 3600 s") == 1
