"""Compiles DeepSpeed's ops once into a folder that all jobs use, and loads them from there.

Each build uses a private folder, and renames it when the op is complete. A lock prevents two processes from compiling
at the same time. If a build is killed, the kernel releases its lock, so later builds do not wait forever.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.base.text import home
from hpcinit.base.versions import installed
from hpcinit.deepspeed import deepspeed_ops

BUILT = ".hpcinit-built"  # marks an op's folder: hpcinit has built this op
LOCK = ".hpcinit-build"  # contains the host and pid of the last process that compiled ops
PART = ".hpcinit-part-"
SHARED_MEMORY = "deepspeed_shm_comm"
VARIABLE = "TORCH_EXTENSIONS_DIR"

Say = Callable[[str], None]


def environment() -> str:
    """Return a folder name that identifies everything on which a compiled op depends.

    An example is 'py311-torch2.13.0-cpu-deepspeed0.19.8-x86_64-1f2e3d'. The last part is a hash of the processor's
    features. DeepSpeed compiles with -march=native, so an op that was built on a newer processor can fail on an older
    one with "Illegal instruction".
    """
    import torch  # noqa: PLC0415 - takes seconds to import

    on = f"cu{torch.version.cuda}" if torch.version.cuda else f"rocm{torch.version.hip}" if torch.version.hip else "cpu"
    if torch.version.cuda and torch.cuda.is_available():
        on += "-sm" + "".join(map(str, torch.cuda.get_device_capability()))
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    release = torch.__version__.partition("+")[0]
    words = [python, f"torch{release}", on, f"deepspeed{installed('deepspeed')}", platform.machine(), _processor()]
    return re.sub(r"[^\w.+-]", "_", "-".join(words))


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return hashlib.sha256(" ".join(sorted(found[1].split())).encode()).hexdigest()[:6]
    return "unknown"


def shared_cache(env: Mapping[str, str]) -> Path:
    """Return the folder for compiled ops: the user's TORCH_EXTENSIONS_DIR, or a folder for this environment()."""
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    return Path(env.get("XDG_CACHE_HOME") or home() / ".cache") / "hpcinit" / "ops" / environment()


def is_built(name: str, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the op is already compiled, by hpcinit or when DeepSpeed was installed."""
    return (shared_cache(env) / name / BUILT).exists() or _comes_compiled(name)


def prepare(
    config: Mapping[str, Any], device: str, env: Mapping[str, str] = os.environ, say: Say = console.say
) -> None:
    """Load the ops that this ds_config needs, and compile those that are missing.

    Every rank calls this before DeepSpeed starts.

    An op that DeepSpeed itself has compiled in the user's TORCH_EXTENSIONS_DIR is skipped. Raise BringUpError if an op
    cannot be built or loaded.
    """
    names = [name for name in deepspeed_ops.needed(config, device) if not _comes_compiled(name)]
    if not names:
        return
    root = shared_cache(env)
    build([name for name in names if not (root / name).exists()], root, say)
    for name in names:
        if (root / name / BUILT).exists():
            _load(name, root)


def start_uncompiled(deepspeed: Any, env: Mapping[str, str] = os.environ) -> None:
    """Prevent DeepSpeed from compiling an op when it starts on a CPU, because that takes over a minute.

    Call this before init_distributed. DeepSpeed uses the op only in inference_all_reduce, which also works without it.
    """
    if (shared_cache(env) / SHARED_MEMORY / BUILT).exists():
        _load(SHARED_MEMORY, shared_cache(env))
    elif not _comes_compiled(SHARED_MEMORY):
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False  # read by build_shm_op in comm/torch.py


def build(names: Sequence[str], root: Path, say: Say = console.say) -> None:
    """Compile ops into the folder `root`, one after the other. Raise BringUpError if that fails.

    Raise RequestError if an op does not exist.
    """
    if not names:
        return
    try:
        with _one_builder(root, say) as part:
            for name in names:
                if (root / name).exists():
                    whose = "" if (root / name / BUILT).exists() else ", not by hpcinit; to build it again, remove it"
                    say(f"{name}: already built in {root}{whose}")
                else:
                    _build(name, root, part, say)
    except OSError as error:
        raise BringUpError(
            f"cannot store DeepSpeed's ops in {root}: {error}. Free disk space, or set {VARIABLE} to another folder",
            quoted=str(error),
        ) from error


@contextlib.contextmanager
def _one_builder(root: Path, say: Say) -> Iterator[Path]:
    """Wait until no other process builds in `root`. Yield a private folder there, which is removed at the end."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+") as file:
        me = f"{os.uname().nodename}-{os.getpid()}"
        if _lock(file.fileno(), root, say):
            for left in root.glob(f"{PART}*"):  # left by a killed build
                shutil.rmtree(left, ignore_errors=True)
        file.truncate(0)
        print(me, file=file, flush=True)
        part = root / f"{PART}{me}"
        part.mkdir()
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _lock(file: int, root: Path, say: Say) -> bool:
    """Wait for the lock and return True. Return False if this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = (root / LOCK).read_text().strip() or "another process"
        say(f"waiting for {owner}, which is compiling DeepSpeed's ops in {root}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        say(f"warning: the file system of {root} supports no locks ({error.strerror}); building without one")
        return False
    return True


def _build(name: str, root: Path, part: Path, say: Say) -> None:
    load, start = loader(name), time.monotonic()
    say(f"{name}: compiling in {root} (takes minutes); later jobs on the same kind of node reuse the result")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(part)
    try:
        load()
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise BringUpError(f"cannot build DeepSpeed's op {name} in {root}: {error}", quoted=str(error)) from error
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    (part / name / BUILT).touch()
    try:
        (part / name).rename(root / name)
    except OSError:  # without a lock, another node may have built the op first
        if not (root / name / BUILT).exists():
            raise
    say(f"{name}: built in {time.monotonic() - start:.0f} s")


def _load(name: str, root: Path) -> None:
    """Load the compiled op and register it with DeepSpeed.

    DeepSpeed's own load() would wait for torch's lock, which remains forever if a rank is killed.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder  # noqa: PLC0415 - takes seconds to import

    loaded: dict[str, Any] | None = getattr(OpBuilder, "_loaded_ops", None)
    if loaded is None or name in loaded:
        return
    path = root / name / f"{name}.so"
    file = ExtensionFileLoader(name, str(path))
    try:
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, file))  # type: ignore[arg-type]
        file.exec_module(module)
    except ImportError as error:
        raise BringUpError(
            f"cannot load DeepSpeed's op {name}: {error}. Remove {path.parent} and run: hpcinit build-ops --ops {name}",
            quoted=str(error),
        ) from error
    loaded[name] = module


def loader(name: str) -> Callable[[], Any]:
    """Return the function that compiles and loads an op for this machine's accelerator.

    Raise RequestError if the op does not exist, or does not support this accelerator.
    """
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - takes seconds to import

    if name not in deepspeed_ops.BUILDERS:
        raise RequestError(f"unknown op {name!r}, expected one of: {', '.join(sorted(deepspeed_ops.BUILDERS))}")
    builder = get_accelerator().create_op_builder(deepspeed_ops.BUILDERS[name])
    if builder is None or builder.name != name:
        on = get_accelerator().device_name()
        raise RequestError(
            f"DeepSpeed has no op {name} for the accelerator that it detects here ({on}): build this op on a node "
            "with the right accelerator"
        )
    return lambda: builder.load(verbose=False)


def _comes_compiled(name: str) -> bool:
    """Return whether the op was compiled when DeepSpeed was installed (DS_BUILD_OPS)."""
    from deepspeed.git_version_info import installed_ops  # noqa: PLC0415 - takes seconds to import

    return bool(installed_ops.get(name, False))
