"""DeepSpeed's ops: built once, loaded without a lock of torch; and locks of killed builds of other extensions.

The op is a C++ module of one function, built by torch's cpp_extension like DeepSpeed's ops: cpu_adam takes minutes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hpcinit import build_ops
from hpcinit.base import versions
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.runtime import extension_locks, ops
from tests.skip_or_fail import needs_torchs_compiler
from tests.small_disks import fill, small_disk

ADAMW = {"optimizer": {"type": "AdamW"}}
SOURCE = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny"};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&module); }
"""
LOAD = """
import logging, sys
from pathlib import Path
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a CUDA build warns about the missing GPU
from torch.utils.cpp_extension import load
from hpcinit.deepspeed import deepspeed_ops
from hpcinit.runtime import ops

folder = Path(sys.argv[1])
def tiny():
    return load("tiny", [str(folder / "tiny.cpp")])
ops.loader = lambda name: tiny
deepspeed_ops.needed = lambda *_: ["tiny"]
"""
BUILD = LOAD + "ops.build(['tiny'], folder / 'cache', print)\n"
PREPARE = (
    LOAD
    + """
import os
ops.prepare({}, "cpu", say=print)
from deepspeed.ops.op_builder.builder import OpBuilder
print("loaded", OpBuilder._loaded_ops["tiny"].__name__, os.environ["TORCH_EXTENSIONS_DIR"])
"""
)


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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def quick(name: str) -> Callable[[], None]:
    """Return a fake compile, because a real one takes minutes."""
    return lambda: Path(os.environ[ops.VARIABLE], name).mkdir()


@needs_torchs_compiler
def test_a_killed_build_does_not_block_later_ones(folder: Path) -> None:
    """SIGKILL in a real compile leaves an unfinished op, which the next builder removes; it then builds the op."""
    with compiling(folder) as process:
        pass
    (part,) = (folder / "cache").glob(f"{ops.PART}*")
    assert part.name.endswith(f"-{process.pid}") and (part / "tiny").exists()
    said, _ = run(BUILD, folder).communicate(timeout=120)
    assert "tiny: built in" in said, said
    assert names(folder / "cache") == [ops.LOCK, "tiny"]
    said, _ = run(BUILD, folder).communicate(timeout=120)
    assert f"tiny: already built in {folder / 'cache'}\n" in said


@needs_torchs_compiler
def test_a_second_builder_waits_and_then_finds_it_built(folder: Path) -> None:
    """Of two builders of a cache one compiles; the other names it, waits, and compiles nothing."""
    first = run(BUILD, folder, CXX=str(folder / "slow"))
    until(folder / "slow.began", first)
    second = run(BUILD, folder)
    assert second.stdout is not None
    line = second.stdout.readline()
    assert line.startswith(f"waiting for {os.uname().nodename}-{first.pid}, which is compiling"), line
    kill(first)  # the kernel releases its lock
    (folder / "slow.began").unlink()
    said, _ = second.communicate(timeout=120)
    assert "tiny: built in" in said and second.returncode == 0, said


@needs_torchs_compiler
def test_a_built_op_is_loaded_without_compiler_and_lock(folder: Path) -> None:
    """A job compiles a missing op. Later jobs load it without a compiler, and without torch's lock, which a killed
    process may have left. Neither changes TORCH_EXTENSIONS_DIR."""
    place = folder / "cache"
    said, _ = run(PREPARE, folder, TORCH_EXTENSIONS_DIR=str(place)).communicate(timeout=150)
    assert "tiny: built in" in said and said.endswith(f"loaded tiny {place}\n"), said
    (place / "tiny" / extension_locks.TORCH_LOCK).touch()
    said, _ = run(PREPARE, folder, TORCH_EXTENSIONS_DIR=str(place), CXX="false").communicate(timeout=150)
    assert said.splitlines()[-1] == f"loaded tiny {place}" and "tiny: " not in said, said
    (place / "tiny/tiny.so").write_bytes(b"damaged")
    said, _ = run(PREPARE, folder, TORCH_EXTENSIONS_DIR=str(place)).communicate(timeout=150)
    assert f"Remove {place / 'tiny'} and run: hpcinit build-ops --ops tiny" in said, said


def test_an_op_that_deepspeed_has_compiled_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's TORCH_EXTENSIONS_DIR may contain DeepSpeed's own builds, which are neither loaded nor replaced."""
    monkeypatch.setattr(ops, "loader", pytest.fail)
    (tmp_path / "fused_adam").mkdir()
    ops.prepare(ADAMW, "cuda", {ops.VARIABLE: str(tmp_path)}, pytest.fail)
    said: list[str] = []
    ops.build(["fused_adam"], tmp_path, said.append)
    assert said == [
        f"fused_adam: already built in {tmp_path}, not by hpcinit; to build it again, remove it"
    ] and not ops.is_built("fused_adam", {ops.VARIABLE: str(tmp_path)})


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks two nodes may compile the same op; the first one counts. (Fakes: the locks and the compile.)"""

    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def load() -> None:
        for place in (Path(os.environ[ops.VARIABLE]), tmp_path):  # the other node is ready at the same moment
            (place / "tiny").mkdir()
        (tmp_path / "tiny" / ops.BUILT).touch()

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(ops, "loader", lambda name: load)
    other = tmp_path / f"{ops.PART}elsewhere-7"
    other.mkdir()
    said: list[str] = []
    ops.build(["tiny"], tmp_path, said.append)
    assert "supports no locks (No locks available); building without" in said[0]
    assert names(tmp_path) == [ops.LOCK, other.name, "tiny"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "loader", quick)
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        with pytest.raises(BringUpError, match=r"cannot store DeepSpeed's ops in .*No space left.*Free disk space, or"):
            ops.build(["fused_adam"], disk / "x", print)


def test_the_cache(tmp_path: Path) -> None:
    """Ops are in the user's TORCH_EXTENSIONS_DIR, else in a folder for this environment. An empty config needs none."""
    env = {ops.VARIABLE: str(tmp_path)}
    assert ops.shared_cache(env) == tmp_path
    assert ops.shared_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/hpcinit/ops") / ops.environment()
    ops.prepare({}, "cuda", env, pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_build_names_op_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's error is reported with the op and the folder, and nothing remains of the build."""

    def broken() -> None:
        raise RuntimeError("Error building extension 'tiny'")

    monkeypatch.setattr(ops, "loader", lambda name: broken)
    with pytest.raises(
        BringUpError, match=rf"cannot build DeepSpeed's op tiny in {tmp_path}: Error building extension"
    ):
        ops.build(["tiny"], tmp_path, print)
    assert names(tmp_path) == [ops.LOCK]


JOB = (
    LOAD
    + """
import os
from hpcinit.records import safeguards
from hpcinit.runtime import extension_locks
safeguards.apply(os.environ, None, "NUMBER.0.0")
extension_locks.report_abandoned(os.environ, print)
tiny()
"""
)


def as_job(folder: Path, number: int, **env: str) -> subprocess.Popen[str]:
    """Start a job that loads an extension from torch's own folder. TMPDIR is the node's disk."""
    (folder / "disk").mkdir(exist_ok=True)
    env |= {"XDG_CACHE_HOME": str(folder / "xdg"), "TMPDIR": str(folder / "disk")}
    return run(JOB.replace("NUMBER", str(number)), folder, **env)


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


@pytest.mark.parametrize(("torch_version", "reports"), [("2.13.0", True), ("2.14.1", False)])
def test_a_lock_of_a_killed_build_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_version: str, reports: bool
) -> None:
    """After 30 minutes without a change a job prints how to remove a lock, and keeps it. torch 2.14 does not wait."""
    monkeypatch.setattr(versions, "installed", lambda name: torch_version)
    lock = tmp_path / "torch_extensions/py311_cpu/mine" / extension_locks.TORCH_LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    said: list[str] = []
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    extension_locks.report_abandoned(env, said.append)
    assert said == []
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - extension_locks.QUIET_S - 60,) * 2)
    extension_locks.report_abandoned(env, said.append)
    assert [f"remove the lock: rm {lock}" in line for line in said] == [True] * reports and lock.exists()


WRONG = [
    ([], "no ops to build: name them with --ops"),
    (["--ops", "cpu_adm"], "unknown op 'cpu_adm', expected one of: async_io"),
    (["--ds-config", "broken.json"], "broken.json is not JSON"),
    (["--ds-config", "list.json"], "list.json contains a list, expected a ds_config, which is a JSON object"),
]


@pytest.mark.parametrize(("argv", "words"), WRONG)
def test_build_ops_refuses(argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for an invalid request has the given and the expected value."""
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[]")
    monkeypatch.setenv(ops.VARIABLE, str(tmp_path / "cache"))
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ops, "loader", quick)
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    assert build_ops.main(["--ds-config", str(path), "--into", str(tmp_path / "into")]) == 0
    out, err = capfd.readouterr()
    assert out == f"built cpu_adam in {tmp_path / 'into'}\n"
    assert (
        f"hpcinit: cpu_adam: compiling in {tmp_path / 'into'} (" in err and "hpcinit: cpu_adam: built in 0 s\n" in err
    )
    assert [path.name for path in (tmp_path / "into/cpu_adam").iterdir()] == [ops.BUILT]
    assert os.environ.get("TORCH_EXTENSIONS_DIR") == before


def test_build_ops_takes_the_overrides_of_submit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With submit's overrides it builds the ops of that run, and nothing for a run without DeepSpeed's optimizers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: list[object] = []
    monkeypatch.setattr(ops, "build", lambda names, root: asked.extend([names] if names else []))
    assert build_ops.main(["parallel=zero3_offload", "deepspeed.optimizer=adamw", "--into", "x"]) == 0
    assert asked == [("cpu_adam",)]
    assert (
        build_ops.main(["parallel=zero3_offload"]) == build_ops.main(["parallel=ddp", "deepspeed.optimizer=adamw"]) == 0
    )
    assert asked == [("cpu_adam",)] and capfd.readouterr().out.count("nothing to build: this config needs no op") == 2


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
