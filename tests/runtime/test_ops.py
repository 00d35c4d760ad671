"""Building ops once, and the locks that a killed build leaves.

The op is a C++ function of one line, built by torch's cpp_extension like DeepSpeed's ops: cpu_adam takes minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcinit import build_ops
from hpcinit.base import safe_files
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.records import safeguards
from hpcinit.runtime import extension_locks, ops
from tests.skip_or_fail import needs_torchs_compiler, skip_or_fail
from tests.small_disks import fill, small_disk

ADAMW = {"optimizer": {"type": "AdamW"}}
SOURCE = 'extern "C" int one() { return 1; }\n'
LOAD = """
import sys
from pathlib import Path
from torch.utils.cpp_extension import load
from hpcinit.runtime import ops

folder = Path(sys.argv[1])
def tiny():
    load("tiny", [str(folder / "tiny.cpp")], is_python_module=False, keep_intermediates=True)
"""
BUILD = LOAD + "ops.build(['tiny'], folder / 'cache', print, {'tiny': tiny})\n"


def run(code: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """A process with its own session, so that its children end with it."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, str(folder)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def until(path: Path, process: subprocess.Popen[str], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, f"{path} was not created"
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.cpp").write_text(SOURCE)
    compiler = tmp_path / "slow"
    # torch queries its compiler's version before it takes the lock. ninja gives a compiler its own process group, so it
    # outlives a killed build, as in practice; here until `compiling` ends.
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *version*|*-v*) exec c++ "$@";; esac\n'
        'touch "$0.began"; while [ -e "$0.began" ]; do sleep 0.1; done\n'
    )
    compiler.chmod(0o755)
    return tmp_path


@contextlib.contextmanager
def compiling(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a real build whose compiler never finishes."""
    process = run(BUILD, folder, CXX=str(folder / "slow"))
    try:
        until(folder / "slow.began", process)
        yield process
    finally:
        kill(process)
        (folder / "slow.began").unlink(missing_ok=True)


Test = Callable[[Path], None]


def with_files(test: Test) -> Test | None:
    """Collect a test with a torch that waits for the file of a lock (2.13) only."""
    return test if ops.files_are_locks() else None


def with_flock(test: Test) -> Test | None:
    """Collect a test with a torch that locks with flock(2) (2.14) only."""
    return None if ops.files_are_locks() else test


@with_flock
def test_a_killed_build_does_not_block_later_ones(folder: Path) -> None:
    """From torch 2.14 on a lock file remains after every build, and no job is refused because of it."""
    with compiling(folder):
        lock = folder / "cache" / "tiny" / ops.TORCH_LOCK
    assert lock.exists()
    env = {"TORCH_EXTENSIONS_DIR": str(folder / "cache")}
    ops.check(ADAMW, "cuda", env)
    said, _ = run(BUILD, folder).communicate(timeout=120)
    assert "tiny: built in" in said and "lock" not in said and lock.exists()
    ops.check(ADAMW, "cuda", env)


@with_files
@needs_torchs_compiler
def test_a_killed_build_leaves_a_lock_that_the_next_one_names_and_removes(folder: Path) -> None:
    """SIGKILL in a real compile leaves torch's lock; the next build names its owner, removes it and builds."""
    with compiling(folder) as process:
        lock = folder / "cache" / "tiny" / ops.TORCH_LOCK
        assert ops.judge_lock(lock).state == "held"
        assert ops.holder(lock) == process.pid
    assert lock.exists()
    found = ops.judge_lock(lock)
    assert found.state == "stale" and f"process {process.pid} on {os.uname().nodename}, building tiny" in found.why
    env = {"TORCH_EXTENSIONS_DIR": str(folder / "cache")}
    with pytest.raises(BringUpError, match=rf"torch would wait forever for the lock {lock}.*rm {lock}"):
        ops.check(ADAMW, "cuda", env)
    said, _ = run(BUILD, folder).communicate(timeout=120)
    assert f"removed the stale lock {lock}" in said and "tiny: built in" in said
    assert not lock.exists() and (lock.parent / "tiny.so").exists() and ops.read_builder(folder / "cache") is None
    said, _ = run(BUILD, folder).communicate(timeout=120)
    assert "tiny: already built" in said


@with_files
def test_torch_waits_for_a_stale_lock(folder: Path) -> None:
    """With a stale lock torch's load never returns, which is the reason for the check."""
    lock = folder / "cache" / "tiny" / ops.TORCH_LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    process = run(LOAD + "print('loading', flush=True)\ntiny()\n", folder, TORCH_EXTENSIONS_DIR=str(folder / "cache"))
    try:
        assert process.stdout is not None
        while "loading" not in process.stdout.readline():
            assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)
    finally:
        kill(process)
    assert lock.exists() and not (lock.parent / "tiny.so").exists()


@needs_torchs_compiler
def test_a_second_builder_waits_and_then_finds_it_built(folder: Path) -> None:
    """Of two builders of a cache one compiles, the other waits for it and compiles nothing."""
    first, second = run(BUILD, folder), run(BUILD, folder)
    said = [process.communicate(timeout=180)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert sorted("tiny: built in" in each for each in said) == [False, True]
    assert sorted("tiny: already built" in each for each in said) == [False, True]


def test_the_wait_for_a_builder_ends_with_a_message(tmp_path: Path) -> None:
    """After the timeout the error names the builder and what to do."""
    code = (
        "import sys, time; from pathlib import Path; from hpcinit.runtime import ops\n"
        "with ops.one_builder(Path(sys.argv[1]), print) as building:\n building('cpu_adam'); time.sleep(600)\n"
    )
    process = run(code, tmp_path)
    try:
        while ops.read_builder(tmp_path) is None:
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(BringUpError) as raised, ops.one_builder(tmp_path, print, wait_s=0.3):
            pass
        assert f"timed out after 0 s: process {process.pid} on {os.uname().nodename}, building cpu_adam" in str(
            raised.value
        )
        assert "set TORCH_EXTENSIONS_DIR to another folder" in str(raised.value)
    finally:
        kill(process)
    with ops.one_builder(tmp_path, print, wait_s=10):  # the kernel has released the dead builder's lock
        left = ops.read_builder(tmp_path)
        assert left is not None and left.has_ended()


def test_a_lock_without_a_visible_process_is_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that no process on this node has open is not removed; after 30 minutes it is an error."""
    monkeypatch.setattr(ops, "files_are_locks", lambda: True)  # as with torch 2.13
    lock = tmp_path / "cpu_adam" / ops.TORCH_LOCK
    lock.parent.mkdir()
    lock.touch()
    said: list[str] = []
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    ops.check(ADAMW, "cuda", env, said.append)
    assert said[0].startswith(f"waiting for the lock {lock}") and "one on another node or in a container may" in said[0]
    with pytest.raises(BringUpError, match="If nothing compiles there, remove it"):
        ops.build(["cpu_adam"], tmp_path, said.append)
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - ops.QUIET_S - 60,) * 2)
    with pytest.raises(BringUpError, match=r"18\d\d s old"):
        ops.check(ADAMW, "cuda", env, said.append)
    assert lock.exists()


def test_a_builder_on_another_node_does_not_count_as_dead(tmp_path: Path) -> None:
    """A record of another host is not checked against the processes of this host."""
    record = {"host": "elsewhere", "pid": os.getpid(), "started": "1", "op": "cpu_adam"}
    (tmp_path / ops.OUR_LOCK).write_text(json.dumps(record))
    lock = tmp_path / "cpu_adam" / ops.TORCH_LOCK
    lock.parent.mkdir()
    lock.touch()
    assert "elsewhere" not in ops.judge_lock(lock).why


def job(folder: Path, number: int) -> dict[str, str]:
    """Return the environment of a job: TMPDIR is the node's disk."""
    (folder / "disk").mkdir(exist_ok=True)
    return {
        "XDG_CACHE_HOME": str(folder / "xdg"), "TMPDIR": str(folder / "disk"), safeguards.ENV_SET: f"{number}.0.0 X"
    }  # fmt: skip


def test_a_job_keeps_what_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job compiles an op in its own folder and keeps it for others. The second one copies it, without the lock
    of a killed process, and compiles nothing. Neither changes TORCH_EXTENSIONS_DIR. (The compile is a fake.)"""
    compiled: list[str] = []

    def load() -> None:
        place = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "fused_adam"
        if not (place / "fused_adam.so").exists():
            compiled.append(str(place))
            place.mkdir()
            (place / "fused_adam.so").touch()
        (place / ops.TORCH_LOCK).touch()

    monkeypatch.setattr(ops, "loader", lambda name: load)
    monkeypatch.setattr(ops, "files_are_locks", lambda: False)
    for number in (1, 2):
        for name, value in job(tmp_path, number).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        ops.prepare(ADAMW, "cuda", os.environ)
        assert "TORCH_EXTENSIONS_DIR" not in os.environ
        kept = ops.shared_cache(os.environ) / "fused_adam"
        assert sorted(path.name for path in kept.iterdir()) == [ops.BUILT, "fused_adam.so"]
        assert kept.is_relative_to(tmp_path / "xdg") and [*kept.parent.iterdir()] == [kept]
    own = tmp_path / "disk" / f"hpcinit-{os.geteuid()}" / f"1.0.0-{os.uname().nodename}"
    assert compiled == [str(own / "torch_extensions/fused_adam")]


JOB = (
    LOAD
    + """
import os
from hpcinit.records import safeguards
from hpcinit.runtime import extension_locks
safeguards.apply(os.environ, None, sys.argv[2])
extension_locks.report_abandoned(os.environ, print)
tiny()
"""
)


def as_job(folder: Path, number: int, **env: str) -> subprocess.Popen[str]:
    """Start a job that loads an extension from torch's own folder."""
    env |= {name: value for name, value in job(folder, number).items() if name != safeguards.ENV_SET}
    return run(JOB.replace("sys.argv[2]", f"'{number}.0.0'"), folder, **env)


@needs_torchs_compiler
def test_a_second_job_does_not_compile_an_extension_again(folder: Path) -> None:
    """An extension that one job has compiled is used by the next one, as without hpcinit."""
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) echo >> "$0.used";; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    for number in (1, 2):
        process = as_job(folder, number, CXX=str(compiler))
        assert (process.communicate(timeout=150)[0], process.returncode) == ("", 0)
    assert (folder / "compiler.used").read_text() == "\n"


@with_files
@needs_torchs_compiler
def test_a_job_reports_the_lock_of_a_killed_one(folder: Path) -> None:
    """The next job on the node prints how to remove the lock of a killed build. Without the lock, the job after it compiles.

    A live build is not reported.
    """
    process = as_job(folder, 1, CXX=str(folder / "slow"))
    until(folder / "slow.began", process)
    (lock,) = (folder / "xdg/torch_extensions").glob("*/tiny/lock")
    said: list[str] = []
    env = {"XDG_CACHE_HOME": str(folder / "xdg")}
    extension_locks.report_abandoned(env, said.append)
    assert lock.exists() and said == []
    kill(process)
    (folder / "slow.began").unlink()
    process = as_job(folder, 2)
    assert process.stdout and f"If nothing compiles there, remove it: rm {lock}" in process.stdout.readline()
    assert lock.exists()
    kill(process)  # torch would fail if the lock went while it waits: it expects that another process has built
    lock.unlink()
    process = as_job(folder, 3)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and (lock.parent / "tiny.so").exists(), output


@with_files
@pytest.mark.parametrize(
    "check", ["extension_locks.report_abandoned(os.environ, print)", "ops.clear(root.parent, print)"]
)
def test_the_lock_of_a_build_in_another_container_stays(folder: Path, check: str) -> None:
    """A builder in another process namespace, as in a container that shares the folder, is not visible; its lock stays."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        skip_or_fail("this user may not create a process namespace")
    process = as_job(folder, 1, CXX=str(folder / "slow"))
    try:
        until(folder / "slow.began", process)
        (lock,) = (folder / "xdg/torch_extensions").glob("*/tiny/lock")
        code = f"import os, sys; from pathlib import Path; from hpcinit.runtime import extension_locks, ops\nroot = Path(sys.argv[1])\n{check}"
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(lock.parent)],
            env={**os.environ, "XDG_CACHE_HOME": str(folder / "xdg")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert lock.exists(), done.stdout
        assert f"remove it: rm {lock}" in done.stdout + done.stderr, done
    finally:
        kill(process)
        (folder / "slow.began").unlink(missing_ok=True)


def test_a_lock_that_another_node_may_hold_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk of several nodes a lock stays, and after 30 minutes a warning has the command that removes it.

    The disk type is a fake: there is no NFS here.
    """
    monkeypatch.setattr(safe_files, "file_system", lambda path: "nfs4")
    monkeypatch.setattr(ops, "files_are_locks", lambda: True)  # as with torch 2.13
    lock = tmp_path / "torch_extensions/py311_cpu/mine" / ops.TORCH_LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    said: list[str] = []
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    extension_locks.report_abandoned(env, said.append)
    assert said == []
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - ops.QUIET_S - 60,) * 2)
    extension_locks.report_abandoned(env, said.append)
    assert len(said) == 1 and f"remove it: rm {lock}" in said[0] and lock.exists()


@needs_torchs_compiler
def test_loading_a_built_op_compiles_nothing(folder: Path) -> None:
    """A rank gets the compiler's variables of the build: with another compiler, torch would compile the op again."""
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) echo >> "$0.used";; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    process = run(BUILD, folder, CXX=str(compiler))
    assert process.wait(150) == 0
    load = LOAD + "ops.ops_needed = lambda *_: ['tiny']\nops.prepare({}, 'cpu', say=print)\ntiny()\n"
    objects = [path.stat().st_mtime_ns for path in (folder / "cache/tiny").glob("*.o")]
    for environment, expected in (
        ({}, [f"set CXX={compiler}: DeepSpeed's op tiny was built with it"]),
        ({"CXX": str(compiler)}, []),
    ):
        process = run(load, folder, TORCH_EXTENSIONS_DIR=str(folder / "cache"), **environment)
        lines = [line for line in process.communicate(timeout=150)[0].splitlines() if "CXX" in line]
        assert (lines, process.returncode) == (expected, 0)
    assert (folder / "compiler.used").read_text() == "\n"
    assert [path.stat().st_mtime_ns for path in (folder / "cache/tiny").glob("*.o")] == objects
    process = run(load, folder, TORCH_EXTENSIONS_DIR=str(folder / "cache"), CXX="c++")
    assert (
        f"warning: CXX is c++, but was {compiler} when DeepSpeed's op tiny was built"
        in process.communicate(timeout=150)[0]
    )
    assert [path.stat().st_mtime_ns for path in (folder / "cache/tiny").glob("*.o")] != objects, "torch does compile it"


def test_a_job_s_cache_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the job's folder is full, built ops are used in place, with a warning; without any space there is an error."""
    with small_disk(tmp_path / "disk") as disk:
        env = job(tmp_path, 1)
        monkeypatch.setattr(safeguards, "CACHE_ROOM", 0)  # the disk becomes full later
        built = ops.shared_cache(env) / "fused_adam"
        built.mkdir(parents=True)
        (built / ops.BUILT).touch()
        (built / "fused_adam.so").write_bytes(bytes(1 << 16))
        loaded: list[str] = []
        monkeypatch.setattr(ops, "loader", lambda name: lambda: loaded.append(env[ops.VARIABLE]))
        own = safeguards.own_folder(env)
        assert own and own.is_relative_to(disk)
        fill(disk)
        said: list[str] = []
        ops.prepare(ADAMW, "cuda", env, said.append)
        assert loaded == [str(built.parent)]
        assert f"warning: cannot store DeepSpeed's ops in {own}/torch_extensions: " in said[0]
        env = {ops.VARIABLE: str(disk / "x"), safeguards.ENV_SET: ""}
        with pytest.raises(
            BringUpError, match=r"cannot store DeepSpeed's ops: .*No space left on device.*Free disk space, or"
        ):
            ops.prepare(ADAMW, "cuda", env, said.append)


def test_the_users_cache_is_used(tmp_path: Path) -> None:
    """Ops are built and searched in the user's TORCH_EXTENSIONS_DIR; an empty config needs no ops."""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path), safeguards.ENV_SET: "1 TRITON_CACHE_DIR"}
    assert ops.shared_cache(env) == tmp_path
    ops.prepare({}, "cuda", env, pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_build_names_op_and_folder(tmp_path: Path) -> None:
    """A compiler's error is reported with the op and the folder, and no builder remains recorded."""

    def broken() -> None:
        raise RuntimeError("Error building extension 'tiny'")

    with pytest.raises(
        BringUpError, match=rf"cannot build DeepSpeed's op tiny in {tmp_path}: Error building extension"
    ):
        ops.build(["tiny"], tmp_path, print, {"tiny": broken})
    assert ops.read_builder(tmp_path) is None and not (tmp_path / "tiny" / ops.BUILT).exists()


WRONG = [
    ([], "nothing to build: give the overrides of the run"),
    (["--ops", "cpu_adm"], "unknown op 'cpu_adm', expected one of: async_io"),
    (["--ops", "cpu_adam", "--device", "cuda"], "--device cuda, but this node has cpu"),
    (["--ds-config", "broken.json"], "broken.json is not JSON"),
    (["--ds-config", "list.json"], "list.json contains a list, expected a JSON object: a ds_config"),
]


@pytest.mark.parametrize(("argv", "words"), WRONG)
def test_build_ops_refuses(argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for an invalid request has the given and the expected value. (Fake: a node without GPU.)"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ops, "loader", pytest.fail)
    monkeypatch.setattr(build_ops, "_device", lambda: "cpu")
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[]")
    with pytest.raises(RequestError) as raised:
        build_ops.main(argv)
    assert words in str(raised.value)


def test_build_ops_builds_what_a_config_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`build-ops --ds-config` builds its ops into --into. (The compile is a fake, because it takes minutes.)"""
    path = tmp_path / "ds.json"
    monkeypatch.chdir(tmp_path)
    path.write_text('{"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}')
    monkeypatch.setattr(build_ops, "_device", lambda: "cpu")
    where: list[str] = []

    def loader(name: str) -> object:
        (tmp_path / "into" / name).mkdir()
        return lambda: where.append(os.environ["TORCH_EXTENSIONS_DIR"])

    monkeypatch.setattr(ops, "loader", loader)
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    assert build_ops.main(["--ds-config", str(path), "--into", str(tmp_path / "into")]) == 0
    out, err = capfd.readouterr()
    assert out == f"built cpu_adam in {tmp_path / 'into'}\n"
    assert "hpcinit: cpu_adam: compiling\n" in err and "hpcinit: cpu_adam: built in 0 s\n" in err
    assert where == [str(tmp_path / "into")] and os.environ.get("TORCH_EXTENSIONS_DIR") == before


def test_build_ops_takes_the_overrides_of_submit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With submit's overrides it builds the ops of that run, and nothing for a run without DeepSpeed's optimizers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build_ops, "_device", lambda: "cpu")
    asked: list[object] = []
    monkeypatch.setattr(ops, "build", lambda names, root: asked.append(names))
    assert build_ops.main(["parallel=zero3_offload", "deepspeed.optimizer=adamw", "--into", "x"]) == 0
    assert asked == [("cpu_adam",)]
    assert (
        build_ops.main(["parallel=zero3_offload"]) == build_ops.main(["parallel=ddp", "deepspeed.optimizer=adamw"]) == 0
    )
    assert (
        asked == [("cpu_adam",)] and capfd.readouterr().out.count("nothing to build: this config compiles no op") == 2
    )


@pytest.mark.deepspeed
def test_deepspeed_starts_on_a_cpu_without_compiling(tmp_path: Path) -> None:
    """After start_uncompiled() DeepSpeed's start on a CPU compiles nothing, and its all_reduce for inference works."""
    code = """
import sys, deepspeed, torch, torch.distributed as dist
from hpcinit.runtime import ops
ops.start_uncompiled(deepspeed)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
ones = torch.ones(2)
deepspeed.comm.inference_all_reduce(ones)
print("sum", ones.tolist())
"""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"), "DS_ACCELERATOR": "cpu"}
    env |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    said, _ = run(code, tmp_path, **env).communicate(timeout=120)
    assert "sum [1.0, 1.0]" in said, said
    assert not (tmp_path / "cache").exists()
