"""shutdown: with peers that are dead or frozen, with a torch that hangs, and before another init."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.runtime.spawned import DEEPSPEED, ranks, without_gloos_line
from tests.submitting import folder_of, printed


@pytest.mark.parametrize(("how", "victim"), [("SIGKILL", 0), ("SIGSTOP", 0), ("SIGSTOP", 2)])
def test_a_dead_or_frozen_peer_does_not_block_the_others(tmp_path: Path, how: str, victim: int) -> None:
    """When any rank is killed or frozen, also the one with the store, the others shut down and succeed."""
    code = f"""
        import os, signal, time, torch, torch.distributed as dist, hpcinit
        run = hpcinit.init()
        dist.all_reduce(torch.ones(1))
        if run.rank == {victim}:
            os.kill(os.getpid(), signal.{how})
        time.sleep(1)
        hpcinit.shutdown()
        print("down", dist.is_initialized())
    """
    with ranks(code, 3, tmp_path) as started:
        ended = [started[rank].end() for rank in range(3) if rank != victim]
    assert [(status, log.splitlines()[-1]) for status, log in ended] == [(0, "down False")] * 2


def test_a_group_that_cannot_be_destroyed() -> None:
    """When torch hangs in destroying the group, the process prints a warning, continues, refuses another init, and exits
    with 1.

    torch's function is replaced by one that hangs, because gloo's never did.
    """
    code = """
        import atexit, time, datetime, torch.distributed as dist, hpcinit
        hpcinit.init()
        atexit.register(print, "the program's own exit handler")
        dist.destroy_process_group = lambda: time.sleep(600)
        hpcinit.shutdown(datetime.timedelta(seconds=0.5))
        print("on it goes")
        try:
            hpcinit.init()
        except hpcinit.HpcinitError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100, check=False
    )
    said = "the process group was not destroyed within 0.5 s: another rank died or ha"
    assert done.returncode == 1
    assert without_gloos_line(done.stdout).startswith(
        f"on it goes\ncannot create another process group in this process, because {said}"
    )
    assert done.stdout.endswith("the program's own exit handler\n")
    assert f"hpcinit: warning: {said}" in done.stderr and f"hpcinit: error: {said}" in done.stderr


def test_init_again_with_another_world(tmp_path: Path) -> None:
    """After a shutdown two of three ranks initialize as a world of two, and compute together."""
    code = """
        import os, torch, torch.distributed as dist, hpcinit
        with hpcinit.session() as run:
            dist.barrier()
        if run.rank < 2:
            os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
            with hpcinit.session() as run:
                value = torch.ones(1)
                dist.all_reduce(value)
                print(run.world_size, run.mesh.shape, value.item())
    """
    with ranks(code, 3, tmp_path) as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0, 0, 0]
    assert [log.splitlines()[-1] for _, log in ended[:2]] == ["2 (1, 2, 1, 1, 1) 2.0"] * 2


@pytest.mark.deepspeed
def test_deepspeed_forgets_its_groups(tmp_path: Path) -> None:
    """After shutdown DeepSpeed's references to the group are cleared, and it works with the next group."""
    code = """
        import torch, hpcinit, torch.distributed as dist
        for again in range(2):
            with hpcinit.session(deepspeed=True) as run:
                import deepspeed
                from deepspeed.utils import groups
                value = torch.ones(1)
                deepspeed.comm.all_reduce(value, group=groups._clone_world_group())
            assert groups._WORLD_GROUP is None and deepspeed.comm.comm.cdb is None and not dist.is_initialized()
        print(value.item())
    """
    with ranks(DEEPSPEED + textwrap.dedent(code), 2, tmp_path) as started:
        ended = [rank.end() for rank in started]
    assert [(status, log.splitlines()[-1]) for status, log in ended] == [(0, "2.0")] * 2


def test_an_error_is_recorded_before_the_group_is_destroyed(hpcinit: Run, tmp_path: Path) -> None:
    """A session that raises writes its record before its peers can report a closed connection; the record of a rank that
    catches the error and succeeds is removed."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
        import os, pathlib, hpcinit
        from hpcinit.runtime import bringup
        real, record = bringup.destroy_process_groups, pathlib.Path(os.environ["HPCINIT_RUN"], "errors/rank-0.json")
        def destroy(*texts):
            print("recorded", "bad sample 17" in record.read_text())
            real(*texts)
        bringup.destroy_process_groups = destroy
        try:
            with hpcinit.session(): raise ValueError("bad sample 17")
        except ValueError:
            print("caught", record.exists(), flush=True)
    """)
    )
    folder = folder_of(hpcinit("submit", "ranks_per_node=1", "wait=true", "--", "train.py"))
    assert without_gloos_line(printed(folder, 0)) == "recorded True\ncaught True\n"
    assert not list((folder / "errors").glob("*"))
