"""Checkpoints on a slow file system: no rank times out while another one writes, reads or removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.test_checkpoint import two_ranks

CLOCK = """
        import time
        from datetime import timedelta
        from hpcinit.runtime import process_group
        def timeouts():
            groups = list(torch.distributed.distributed_c10d._world.pg_map)
            return sorted({round(process_group.timeout_of(run.device, group).total_seconds(), 1) for group in groups})
"""
# A fake of a slow file system: on rank 0 one file of each part of a save, and of a load, takes 4 s.
SLOW = """
        run.set_collective_timeout(timedelta(seconds=3))
        parts = ["rank-00000.pt", "__0_0.distcp", "mp_rank_00_model_states.pt", "checkpoint.json"]
        real_fsync, real_load, slept = os.fsync, torch.load, []
        def wait(path, wanted):
            name = Path(path).name
            if run.rank == 0 and name in wanted and name not in slept:
                slept.append(name)
                time.sleep(4)
        def slow_fsync(descriptor):
            wait(os.readlink(f"/proc/self/fd/{descriptor}"), parts)
            real_fsync(descriptor)
        def slow_load(file, *args, **more):
            wait(file if isinstance(file, (str, Path)) else getattr(file, "name", "tensor"), [*parts, "tensor", "extra.pt"])
            return real_load(file, *args, **more)
        training = {"ddp": ddp, "fsdp": Training("fsdp"), "zero 1": zero(1)}[os.environ["KIND"]]
        layout = Layout(dp_replicate=1, dp_shard=-1) if os.environ["KIND"] == "fsdp" else plain
"""


@pytest.mark.parametrize(
    "kind", [pytest.param("ddp", marks=pytest.mark.more), "fsdp", pytest.param("zero 1", marks=pytest.mark.deepspeed)]
)
def test_a_save_and_a_load_slower_than_the_collective_timeout(tmp_path: Path, kind: str) -> None:
    """With a collective timeout of 3 s a save of 12 s and a load of 8 s succeed; before and after them, training's
    collectives have their 3 s."""
    code = """
        folder = Path(os.environ["FOLDER"])
        program = Program(run, layout, training)
        program.steps(1)
        os.fsync = slow_fsync
        start_s = time.monotonic()
        found["saved"] = error(lambda: program.save(folder, 1))
        found["save took"] = time.monotonic() - start_s
        os.fsync = real_fsync
        found["timeout after save"] = process_group.timeout_of(run.device).total_seconds()
        losses = program.steps(2)
        slept.clear()
        torch.load = slow_load
        other = Program(run, layout, training)
        start_s = time.monotonic()
        found["loaded"] = other.load(folder).step
        found["load took"] = time.monotonic() - start_s
        torch.load = real_load
        found["timeout after load"] = process_group.timeout_of(run.device).total_seconds()
        found["same"] = other.steps(2) == losses
    """
    folder = tmp_path / "checkpoints"
    for found, output in two_ranks(CLOCK + SLOW + code, tmp_path, FOLDER=str(folder), KIND=kind):
        assert "step-00000001" in found["saved"] and "Error" not in found["saved"], output
        assert found["save took"] > 12 and found["load took"] > 8, found
        assert (found["timeout after save"], found["timeout after load"]) == (3, 3)
        assert found["loaded"] == 1 and found["same"]


def test_no_rank_waits_for_a_removal(tmp_path: Path) -> None:
    """A save returns while the remains of a dead job and the step removed by keep=1 are still being removed; the next
    save waits for the removal at most half its timeout."""
    code = """
        import dataclasses, threading, time
        from hpcinit.train.checkpoint import owner as owners
        run.set_collective_timeout(timedelta(seconds=5))
        folder, saved, real_rmtree = Path(os.environ["FOLDER"]), threading.Event(), shutil.rmtree
        def slow_rmtree(*args, **more):
            saved.wait(60)
            real_rmtree(*args, **more)
        program = Program(run, plain, ddp)
        left = folder / ".step-00000001.old.0123.tmp"
        if run.rank == 0:
            shutil.rmtree = slow_rmtree
            left.mkdir(parents=True)
            dead = dataclasses.replace(owners.of_this_process(""), pid=2**22 + 1, token="0")
            owners.write(left / "owner.json", dead)
        torch.distributed.barrier()
        for step in (1, 2):
            found[f"save {step}"] = error(lambda: program.save(folder, step, keep=1, timeout=timedelta(seconds=20)))
        found["still there"] = (folder / "step-00000001").is_dir() or any(folder.glob(".step-00000001*.gone"))
        saved.set()
        found["at last"] = names(folder)
        for step in (3, 4):
            program.save(folder, step, keep=1)
        found["later"] = names(folder)
    """
    (zero, output), (one, _) = two_ranks(CLOCK + code, tmp_path, FOLDER=str(tmp_path / "checkpoints"))
    for found in (zero, one):
        assert "PosixPath" in found["save 1"] and "PosixPath" in found["save 2"], output
        assert found["still there"]
        assert found["at last"] == ["step-00000002"] and found["later"] == ["step-00000004"]
    assert "takes more than 5 s; saving anyway" in output  # the disk has enough space


def test_the_timeouts_are_restored_after_a_failure(tmp_path: Path) -> None:
    """During a save or load each group has at least the timeout of saves, and after an error its previous one."""
    code = """
        program = Program(run, plain, ddp)
        run.set_collective_timeout(timedelta(seconds=50))
        other = torch.distributed.new_group(timeout=timedelta(seconds=9000))
        within = []
        class Bad:
            def state_dict(self):
                within.append(timeouts())
                raise OSError("no state")
            def load_state_dict(self, state):
                within.append(timeouts())
                raise OSError("no place")
        folder = Path(os.environ["FOLDER"])
        found["save"] = error(lambda: program.save(folder, 1, loader=Bad(), timeout=timedelta(seconds=70)))
        found["after save"] = timeouts()
        program.save(folder, 2)
        program.loader = Bad()
        found["load"] = error(lambda: program.load(folder))
        found["after load"] = timeouts()
        run.set_collective_timeout(timedelta(seconds=5000))
        error(lambda: program.load(folder))
        found["within"] = within
    """
    for found, output in two_ranks(CLOCK + code, tmp_path, FOLDER=str(tmp_path / "checkpoints")):
        assert "no state" in found["save"] and "no place" in found["load"], output
        # The last one: where ranks agree about a load, checkpoint_timeout is the limit, not a longer collective_timeout.
        assert found["within"] == [[70, 9000], [3600, 9000], [3600, 5000]]
        assert found["after save"] == [50, 70, 9000]  # 70: only the group of checkpoints
        assert found["after load"] == [50, 70, 9000]
