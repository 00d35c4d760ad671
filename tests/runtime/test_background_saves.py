"""run.save(wait=False): a process beside each rank writes the checkpoint, and every failure leaves a complete one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base import free_memory
from hpcinit.train.checkpoint import checkpoint_folder as of_steps
from hpcinit.train.checkpoint import owner as owners
from hpcinit.train.checkpoint import staged_files, writer_process
from hpcinit.train.checkpoint.background_save import BackgroundSaves
from tests.runtime.spawned import ranks
from tests.runtime.test_checkpoint import BEGIN, begin, left_in, whole
from tests.skip_or_fail import installed
from tests.small_disks import small_disk
from tests.waiting import until

MINUTE = timedelta(minutes=1)
WRITERS = """
        import signal, time
        from hpcinit.runtime.process_state import state
        barrier = torch.distributed.barrier
        def writer():
            return state.background_saves._process.pid
"""


def trained(code: str, number: int, folder: Path, **env: str) -> list[tuple[Any, str]]:
    """Run `code` on this many ranks; return the content of `found` and the output of each."""
    text = BEGIN.replace("deepspeed=True", "") + WRITERS + code + "\n        print(json.dumps(found))\n"
    with ranks(text, number, folder, OMP_NUM_THREADS="1", **{"FOLDER": str(folder / "checkpoints"), **env}) as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0] * number, "\n".join(output for _, output in ended)
    return [(json.loads(output.splitlines()[-1]), output) for _, output in ended]


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.more) for number in (1, 3, 4))])
def test_losses(tmp_path: Path, number: int) -> None:
    """Training has the same losses with and without saves in the background, and continues with them after a load."""
    code = """
        sharded = Layout(dp_replicate=1, dp_shard=-1)
        kinds = {"ddp": (plain, ddp), "fsdp": (sharded, Training("fsdp"))}
        for name, (layout, training) in kinds.items():
            if name == "fsdp" and run.world_size == 1:
                continue
            folder = Path(os.environ["FOLDER"], name)
            one, other = Program(run, layout, training), Program(run, layout, training)
            alone, losses = one.steps(6), []
            for step in range(1, 5):
                losses += other.steps(1)
                path = other.save(folder, step, extra=step, wait=False, keep=2)
            losses += other.steps(2)
            again = Program(run, layout, training, lr=0.07)
            loaded = again.load(folder)
            found[name] = [losses == alone, again.steps(2) == alone[4:]]
            found[name] += [loaded.step, loaded.extra, loaded.loader, loaded.random, names(folder)]
            waited = other.save(folder, 6)
            barrier()
            files = [sorted(checkpoint_folder.describe(each).files) for each in (path, waited)]
            found[name].append(files[0] == files[1] and len(files[0]) > 2 * run.world_size)
    """
    kinds = ["ddp", "fsdp"] if number > 1 else ["ddp"]
    expected = [True, True, 4, 4, True, True, ["step-00000003", "step-00000004"], True]
    for found, output in trained(code, number, tmp_path):
        assert found == dict.fromkeys(kinds, expected), output


def test_a_second_save_waits(tmp_path: Path) -> None:
    """A save during a running one waits for it; a load waits, too. Training continues meanwhile."""
    code = """
        import threading
        program, folder = Program(run, plain, ddp), Path(os.environ["FOLDER"])
        program.steps(1)
        first = program.save(folder, 1, wait=False)
        if run.rank == 1:
            while not first.is_dir():
                time.sleep(0.05)
        barrier()
        if run.rank == 1:
            os.kill(writer(), signal.SIGSTOP)
        barrier()
        second = program.save(folder, 2, wait=False)
        found["returned"] = not second.exists()
        program.steps(1)
        found["trained"] = not second.exists()
        barrier()
        if run.rank == 1:
            threading.Timer(1, lambda: os.kill(writer(), signal.SIGCONT)).start()
        program.save(folder, 3, wait=False)
        found["waited"] = second.is_dir()
        found["loaded"] = program.load(folder).step
    """
    for found, output in trained(code, 2, tmp_path):
        assert found == {"returned": True, "trained": True, "waited": True, "loaded": 3}, output


def test_a_writer_is_killed(tmp_path: Path) -> None:
    """If the writer of a rank is killed, its rank prints a warning, the step is not saved, and the next one is."""
    code = """
        program, folder = Program(run, plain, ddp), Path(os.environ["FOLDER"])
        for step in (1, 2):
            program.steps(1)
            program.save(folder, step, wait=False)
            while step == 1 and not (folder / "step-00000001").is_dir():
                time.sleep(0.05)
            if step == 1 and run.rank == 1:
                time.sleep(1)
                os.kill(writer(), signal.SIGSTOP)
            barrier()
        if run.rank == 1:
            os.kill(writer(), signal.SIGKILL)
        found["ended"] = state.background_saves.poll(60)
        found["names"] = names(folder)
        program.save(folder, 3, wait=False)
        found["loaded"] = program.load(folder).step
        found["at last"] = names(folder)
    """
    (zero, first), (one, second) = trained(code, 2, tmp_path)
    expected = {"ended": True, "names": ["step-00000001"], "loaded": 3, "at last": ["step-00000001", "step-00000003"]}
    assert zero == one == expected, first + second
    assert (
        "warning: step 2 was not saved: the process that wrote it for rank 1" in second
        and "ended with status -9" in second
    )
    assert "step-00000001 is the newest checkpoint; training continues" in second
    assert "warning: cannot save step 2 in" in first and "another rank failed to write its part" in first


@pytest.mark.slurm  # it needs root and permission to mount
@pytest.mark.parametrize("left", [0, 100_000])
def test_a_full_disk(tmp_path: Path, left: int) -> None:
    """On a full disk a warning has the free space and the newest checkpoint. Training continues, and saves later."""
    code = """
        program, folder = Program(run, plain, ddp), Path(os.environ["FOLDER"])
        program.save(folder, 1, wait=False)
        program.load(folder)
        ballast = folder.parent / "ballast"
        if run.rank == 0:
            for size in (4096, 1):
                try:
                    with ballast.open("ab", buffering=0) as stream:
                        while True:
                            stream.write(bytes(size))
                except OSError:
                    pass
            if left := int(os.environ["LEFT"]):
                os.truncate(ballast, ballast.stat().st_size - left)
        barrier()
        program.steps(1)
        program.save(folder, 2, wait=False, keep=1)
        found["full"] = [program.load(folder).step, names(folder)]
        barrier()
        if run.rank == 0:
            ballast.unlink()
        barrier()
        program.save(folder, 3, wait=False, keep=1)
        found["later"] = [program.load(folder).step, names(folder)]
    """
    with small_disk(tmp_path / "small", "size=6m") as small:
        (zero, output), (one, second) = trained(code, 2, tmp_path, LEFT=str(left), FOLDER=str(small / "steps"))
    assert zero == one == {"full": [1, ["step-00000001"]], "later": [3, ["step-00000003"]]}, output + second
    warning = next(line for line in output.splitlines() if "warning: cannot save step 2" in line)
    assert warning.endswith("GB are free on this disk; step-00000001 is the newest checkpoint; training continues")
    assert "No space left on device" in output + second


def test_a_copy_that_does_not_fit(tmp_path: Path) -> None:
    """If the copy of one rank does not fit into memory, all ranks save as with wait=True, and a line reports it."""
    code = """
        from hpcinit.base import free_memory
        program, folder = Program(run, plain, ddp), Path(os.environ["FOLDER"])
        if run.rank == 1:
            free_memory.free_bytes = lambda: 20_000
        found["there"] = [program.save(folder, step, wait=False).is_dir() for step in (1, 2)]
        found["loaded"] = program.load(folder).step
    """
    (zero, output), (one, _) = trained(code, 2, tmp_path)
    assert zero == one == {"there": [True, True], "loaded": 2}, output
    assert (
        "saving step 2 takes as long as with wait=True, because a copy of more than 0.0 GB per rank does not fit into"
        in output
    )


@pytest.mark.deepspeed
def test_deepspeed_waits(tmp_path: Path) -> None:
    """With DeepSpeed, save(wait=False) returns when the step is complete."""
    code = """
        program = Program(run, plain, zero(1))
        found["there"] = program.save(Path(os.environ["FOLDER"]), 1, wait=False).is_dir()
        found["writers"] = state.background_saves is not None
        print(json.dumps(found))
    """
    with ranks(BEGIN + WRITERS + code, 2, tmp_path, OMP_NUM_THREADS="1", FOLDER=str(tmp_path / "steps")) as started:
        ended = [rank.end() for rank in started]
    assert [json.loads(output.splitlines()[-1]) for _, output in ended] == [{"there": True, "writers": False}] * 2


OWN = """
        import os, signal, time
        from pathlib import Path
        import hpcinit, torch
        from hpcinit.runtime.process_state import state
        with hpcinit.session() as run:
            wrapped = run.wrap(torch.nn.Linear(3, 1), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
            path = run.save(wrapped, os.environ["FOLDER"], 1, wait=False)
            while not path.is_dir() or not state.background_saves.poll():
                time.sleep(0.05)
            run.should_stop()
            pid = state.background_saves._process.pid
            os.kill(pid, signal.SIGSTOP)
            run.save(wrapped, os.environ["FOLDER"], 2, wait=False)
            Path(os.environ["FOLDER"], "writer").write_text(str(pid))
            while not (stop := run.should_stop()):
                time.sleep(0.1)
            time.sleep(1)
            run.should_stop()
            print(stop.reason, run._session.longest_save.total_seconds() > 1)
"""


@contextmanager
def saving(folder: Path) -> Iterator[tuple[Any, int]]:
    """Yield a rank whose writer is suspended while it saves step 2, and the writer's process id."""
    found = folder / "checkpoints/writer"
    with ranks(OWN, 1, folder, FOLDER=str(found.parent)) as (rank,):
        until(lambda: found.exists() and found.read_text())
        yield rank, int(found.read_text())


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_stop_during_a_save(tmp_path: Path) -> None:
    """After a SIGTERM to all processes the running save is finished, before the rank exits. Its duration counts for the
    time that should_stop() keeps before a time limit. No process is left."""
    with saving(tmp_path) as (rank, writer):
        for pid in (rank.process.pid, writer):
            os.kill(pid, signal.SIGTERM)
        until(lambda: "terminated by SIGTERM" in (tmp_path / "rank-0.log").read_text())
        assert rank.process.poll() is None and is_alive(writer)
        os.kill(writer, signal.SIGCONT)
        status, output = rank.end()
    assert status == 0 and "terminated by SIGTERM True" in output, output
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000001",
        "step-00000002",
    ]
    assert not is_alive(writer)


def test_kill_9_of_a_rank(tmp_path: Path) -> None:
    """The writer of a rank that is killed ends at once, and publishes nothing."""
    with saving(tmp_path) as (rank, writer):
        rank.process.kill()
        until(lambda: not is_alive(writer), timeout_s=20)
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-00000001"]
    whole(folder, 3)
    assert left_in(folder) == [".owner.json", "step-00000001", "step-00000003", "writer"]


# Saves without torch, in this process: two ranks, each with a writer.


DESCRIBED = {"samples": 8, "wrap": "torch", "world_size": 2, "layout": {"tp": 1}, "data_parallel": 2, "seed": 0}


def content(step: int, rank: int) -> bytes:
    return f"step {step} of rank {rank}\n".encode() * 1000


def hand_over(saves: BackgroundSaves, unfinished: of_steps.Unfinished, step: int, rank: int) -> None:
    assert saves.start() == ""
    names = [f"dcp/__{rank}_0.distcp", f"random/rank-{rank:05d}.pt"]
    for name in names:
        saves.staged.write(name, content(step, rank))
    saves.hand_over(unfinished, {**DESCRIBED, "step": step}, names, rank, keep=None)


def unfinished_step(folder: Path, step: int) -> of_steps.Unfinished:
    return begin(folder, step)


def save(pair: list[BackgroundSaves], folder: Path, step: int) -> None:
    unfinished = begin(folder, step)
    for rank, saves in enumerate(pair):
        hand_over(saves, unfinished, step, rank)
    for rank in (1, 0):
        assert pair[rank].poll(60)


def newest(folder: Path) -> int:
    """Return the newest step, after a check that its content is that of the step."""
    found = of_steps.newest(folder, print)
    assert found is not None and of_steps.damage(*found, 0, 1) is None
    path, saved = found
    assert len(saved.files) == 4
    for name, file in saved.files.items():
        assert (path / name).read_bytes() == content(saved.step, file.rank)
    return saved.step


@pytest.fixture
def pair() -> Iterator[list[BackgroundSaves]]:
    """The writers of two ranks."""
    made = [BackgroundSaves(2), BackgroundSaves(2)]
    yield made
    for saves in made:
        saves.close(MINUTE)


@contextmanager
def traced(pid: int, output: Path | str, *more: str) -> Iterator[None]:
    """Have strace write the system calls of the process's main thread into `output`."""
    command = [installed("strace"), "-p", str(pid), "-o", str(output), *(more or ("-e", "trace=%file,%desc"))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr and "attached" in (line := tracer.stderr.readline()), line
        try:
            yield
        finally:
            tracer.terminate()
            tracer.wait()


def calls_in(output: Path, every: int) -> list[tuple[str, str, str]]:
    """Return strace's options that kill a process at each `every`-th of the traced system calls."""
    names = re.findall(r"^(\w+)\(", output.read_text(), re.MULTILINE)
    numbers = [names[: at + 1].count(name) for at, name in enumerate(names)]  # strace counts each kind of call
    print(len(names), "system calls:", *names)
    found = [
        ("-e", f"trace={name}", f"--inject={name}:signal=SIGKILL:when={number}")
        for name, number in zip(names, numbers, strict=True)
    ]
    assert len(found) > 30
    return found[::-every]  # so that the calls after the rename are among them


@pytest.fixture
def every(pytestconfig: pytest.Config) -> int:
    """Every how many-th system call a process is killed: each with --all."""
    return 1 if pytestconfig.getoption("--all") else 9


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_of_a_writer_at_each_call(tmp_path: Path, pair: list[BackgroundSaves], rank: int, every: int) -> None:
    """After kill -9 of a writer at any system call of a save, the newest checkpoint is complete and has the right
    content. The next save succeeds, and nothing remains of the killed one."""
    folder = tmp_path / "steps"
    save(pair, folder, 1)
    process = pair[rank]._process
    assert process is not None
    with traced(process.pid, tmp_path / "calls"):
        save(pair, folder, 2)
    saved, lost, killed = [1, 2], 0, 0
    for options in calls_in(tmp_path / "calls", every):
        process, step = pair[rank]._process, saved[-1]
        assert process is not None
        with traced(process.pid, os.devnull, *options):
            save(pair, folder, step + 1)
        killed += process.poll() == -signal.SIGKILL
        assert newest(folder) in (step, step + 1)
        if newest(folder) == step:
            assert process.poll() == -signal.SIGKILL, "it was not killed, and has not saved"
            lost += 1
        else:
            saved.append(step + 1)
        save(pair, folder, step + 2)
        saved.append(step + 2)
        assert newest(folder) == step + 2
        assert left_in(folder) == [".owner.json", *(of_steps.name(each) for each in saved)]
    print(f"rank {rank}: killed {killed} times, {lost} steps were not saved")
    assert lost >= 3


PROGRAM = """
import sys
from pathlib import Path
from tests.runtime.test_background_saves import BackgroundSaves, hand_over, unfinished_step
folder, pair = Path(sys.argv[1]), [BackgroundSaves(2), BackgroundSaves(2)]
for saves in pair:
    saves.start()
print(*(saves._process.pid for saves in pair), flush=True)
step = int(sys.stdin.readline())
unfinished = unfinished_step(folder, step)
for rank, saves in enumerate(pair):
    hand_over(saves, unfinished, step, rank)
for saves in pair:
    saves.poll(60)
print("saved", flush=True)
"""


def test_kill_9_of_a_rank_at_each_call(tmp_path: Path, pair: list[BackgroundSaves], every: int) -> None:
    """A rank is killed at any system call, from the start of a save to its end: its writers end, the newest checkpoint
    is complete, and the next save removes the remains."""
    folder = tmp_path / "steps"
    save(pair, folder, 1)

    def rank(step: int, *where: Any) -> bool:
        """Run the program with strace; return whether it has ended without a signal."""
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin and process.stdout
            writers = [int(word) for word in process.stdout.readline().split()]
            with traced(process.pid, *where):
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
                process.wait(60)
        until(lambda: not any(map(is_alive, writers)), timeout_s=20)
        return process.returncode == 0

    assert rank(2, tmp_path / "calls") and newest(folder) == 2
    last, killed = 2, 0
    for options in calls_in(tmp_path / "calls", every * (1 if every == 1 else 12)):  # it has 500
        killed += not rank(last + 1, os.devnull, *options)
        assert newest(folder) in (last, last + 1)
        last = newest(folder) + 1
        for saves in pair:
            saves.start()
        owners.write(folder / owners.CLAIM, owners.of_this_process(""))  # this process is the next attempt
        save(pair, folder, last)
        assert newest(folder) == last
        # A folder whose owner.json was not yet written, right after mkdir, is never removed.
        remains = [path for name in left_in(folder) if name.startswith(".step") for path in (folder / name).iterdir()]
        assert [path for path in remains if not path.name.startswith(".owner-")] == []
    print(f"killed {killed} times")
    assert killed >= 3


def test_another_attempt_owns_the_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A writer publishes nothing after another job or attempt has taken the folder over, and does not take it back."""
    for number, job in enumerate(("43.0.0", "42.0.1")):
        folder = tmp_path / str(number)
        unfinished = begin(folder, 1, "42.0.0")
        asked = {"path": str(unfinished.path), "save": unfinished.save, "owner": dataclasses.asdict(unfinished.owner)}
        asked |= {
            "described": {**DESCRIBED, "step": 1, "world_size": 1},
            "files": [],
            "rank": 0,
            "keep": None,
            "damaged": [],
        }
        other = dataclasses.replace(unfinished.owner, job=job, token="other")
        owners.write(folder / owners.CLAIM, other)
        assert not writer_process.save(asked, [])
        assert left_in(folder) == [".owner.json"] and owners.read(folder / owners.CLAIM) == other
        assert "warning: cannot save step 1 in" in (printed := capfd.readouterr().err)
        assert f"{other} has taken over" in printed and "training continues" in printed


def test_the_writer_imports_no_torch() -> None:
    """A writer starts in a fraction of a second, because it imports neither torch nor DeepSpeed."""
    code = (
        "import sys, hpcinit.train.checkpoint.writer_process; print({'torch', 'deepspeed', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_memory_is_used_again(tmp_path: Path) -> None:
    """A file that is staged again uses the same memory, and contains only the new bytes."""
    staged = staged_files.StagedFiles(1)
    staged.write("a", b"x" * 100_000)
    first = staged["a"]
    staged.write("a", b"y" * 10)
    assert staged["a"] is first and first.size == 10
    assert os.pread(first.descriptor, first.size, 0) == b"y" * 10
    staged.free()


def test_memory_is_mapped_once() -> None:
    """A second save of a file that grew part by part finds every page: none of them causes a page fault again."""
    part, parts = b"x" * (1 << 20), 96  # it grows several times
    staged = staged_files.StagedFiles(1)

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        file = staged.open("a")
        for _ in range(parts):
            file.write(part)
        assert not file.problem
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first, second = page_faults(), page_faults()
    assert second < 0.05 * first
    assert os.pread(staged["a"].descriptor, 1, (parts << 20) - 1) == b"x"
    staged.free()


def test_free_memory(tmp_path: Path) -> None:
    """The free memory is that of the node, or of the job's memory cgroup or one above it, without old file pages."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert free_memory.free_bytes(tmp_path, tmp_path / "proc") == 8_192_000
    for line, top, limit, used, old in (
        ("0::/job_1/step_0", "job_1", "memory.max", "memory.current", "inactive_file"),
        ("4:cpu,memory:/slurm/job_1", "memory/slurm", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):  # fmt: skip
        (tmp_path / "proc/self/cgroup").write_text(f"9:pids:/x\n{line}\n")
        group = tmp_path / top
        group.mkdir(parents=True)
        (group / limit).write_text("5000000\n")
        (group / used).write_text("4000000\n")
        (group / "memory.stat").write_text(f"anon 1\n{old} 300000\n")
        assert free_memory.free_bytes(tmp_path, tmp_path / "proc") == 1_300_000
        (group / limit).write_text("max\n")
        assert free_memory.free_bytes(tmp_path, tmp_path / "proc") == 8_192_000
    assert free_memory.free_bytes() > 0
