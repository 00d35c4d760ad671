"""DeepSpeed's ops: compile them once per cache before the ranks need them, and handle the locks of killed builds.

`hpcinit build-ops` fills a folder that outlives jobs, and so does a job that had to compile. Each job copies from it
into its own cache, so that a killed rank cannot leave a lock that blocks later jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.base import console, processes, versions
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.base.text import home
from hpcinit.base.versions import installed
from hpcinit.deepspeed import deepspeed_ops
from hpcinit.deepspeed.deepspeed_ops import needed as ops_needed
from hpcinit.records import safeguards

# Locks on a cache of compiled ops: torch's, which a killed build leaves behind, and hpcinit's, which the kernel
# releases.
#
# torch up to 2.13 (utils/file_baton.py) creates a file `lock` in the op's folder while it compiles, and waits as long
# as that file exists: https://github.com/deepspeedai/DeepSpeed/issues/5205. torch 2.14 locks the file with flock(2):
# the kernel releases the lock of a process that ended, and the file remains after every build.

TORCH_LOCK = "lock"
KERNEL_LOCKS = "2.14"  # cpp_extension.py of torch 2.14.1 uses FileLock, of 2.13.0 FileBaton; 2.14.0 unchecked
OUR_LOCK = ".hpcinit-build"  # contains a Builder as JSON; empty if no build is running
WAIT_S = 1800.0


@dataclass(frozen=True)
class Judgement:
    """The state of one of torch's locks.

    state: 'held', 'stale' (hpcinit's own builder recorded it and has ended) or 'unknown'. why: the reason. age_s:
    seconds since the last change in its folder.
    """

    path: Path
    state: str
    why: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.path} ({self.age_s:.0f} s old): {self.why}"


def files_are_locks() -> bool:
    """Return whether the installed torch waits as long as the lock file exists."""
    return versions.key(versions.installed("torch") or "0") < versions.key(KERNEL_LOCKS)


def find_locks(root: Path) -> list[Judgement]:
    """Return the state of every torch lock in a cache; empty if this torch does not wait for lock files."""
    found: list[Judgement] = []
    if not files_are_locks():
        return found
    for path in sorted(root.glob(f"*/{TORCH_LOCK}")):
        with contextlib.suppress(FileNotFoundError):  # released in the meantime
            found.append(judge_lock(path))
    return found


def judge_lock(path: Path) -> Judgement:
    """Return the state of this lock. Raise FileNotFoundError if it was released."""
    owner = path.stat().st_uid
    newest = max(each.stat(follow_symlinks=False).st_mtime for each in (path, *path.parent.iterdir()))
    age = max(0.0, time.time() - newest)
    pid = holder(path)
    if pid:
        return Judgement(path, "held", f"process {pid} is compiling", age)
    host = os.uname().nodename
    builder = read_builder(path.parent.parent)
    if builder and builder.op == path.parent.name and builder.has_ended():
        return Judgement(path, "stale", f"left by {builder}, which has ended", age)
    if owner != os.geteuid():
        return Judgement(path, "unknown", f"owned by user {owner}, whose processes are not visible", age)
    why = f"no visible process on {host} has it open, but one on another node or in a container may"
    return Judgement(path, "unknown", why, age)


def holder(path: Path) -> int:
    """Return the process of this user on this node that has the file open, or 0. Raise FileNotFoundError."""
    while True:
        before = path.stat()
        found = _has_open(before)
        after = path.stat()
        # If the file was replaced meanwhile, its new owner may be a process that was already checked.
        if found or (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            return found


def _has_open(wanted: os.stat_result) -> int:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # the process ended, or belongs to another user
            for entry in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(entry.stat(), wanted):
                        return int(folder.parent.name)
    return 0


@dataclass(frozen=True, kw_only=True)
class Builder(processes.Process):
    """The process that builds `op`."""

    op: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, building {self.op}"


def read_builder(root: Path) -> Builder | None:
    """Return the process that is recorded as building in a cache, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Builder(**json.loads((root / OUR_LOCK).read_text()))
    return None


@contextlib.contextmanager
def one_builder(root: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> Iterator[Callable[[str], None]]:
    """Become the only builder in a cache. Others wait here until this process leaves or dies. Yield `building(op)`.

    Raise BringUpError after `wait_s` seconds, and OSError if the folder is not writable.
    """
    root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root / OUR_LOCK, os.O_RDWR | os.O_CREAT, 0o600)

    def building(op: str) -> None:
        me = Builder(**processes.identity(), op=op)
        _write(fd, json.dumps(vars(me)))

    try:
        _wait(fd, root, say, wait_s)
        try:
            yield building
        finally:
            _write(fd, "")
    finally:
        os.close(fd)


def _wait(fd: int, root: Path, say: Callable[[str], None], wait_s: float) -> None:
    start = said = time.monotonic()
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            return say(f"warning: the file system of {root} has no locks ({error.strerror}); building without one")
        now = time.monotonic()
        who = read_builder(root) or "an unknown process"
        if now - start > wait_s:
            raise BringUpError(
                f"timed out after {wait_s:.0f} s: {who} holds the lock {root / OUR_LOCK} to compile DeepSpeed's ops. "
                "If it no longer compiles, kill it, or set TORCH_EXTENSIONS_DIR to another folder"
            )
        if now - said > 10:
            said = now
            say(f"waiting for {who} in {root} ({now - start:.0f} s)")
        time.sleep(0.2)


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


__all__ = ["build", "check", "environment", "is_built", "ops_needed", "prepare", "shared_cache", "start_uncompiled"]

# This file in an op's folder marks it as compiled and loaded. It has COMPILER's variables of the build, as JSON.
BUILT = ".hpcinit-built"
# Variables that torch and DeepSpeed put into the commands of a build. ninja compiles an op again if they change.
COMPILER = (
    *("CC", "CXX", "CFLAGS", "LDFLAGS", "CUDA_HOME", "PYTORCH_NVCC"),
    *("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH"),
)
SHARED_MEMORY = "deepspeed_shm_comm"
VARIABLE = "TORCH_EXTENSIONS_DIR"
QUIET_S = 1800.0  # no build is running in a folder without changes for this long
PROGRESS_S = 10.0

Say = Callable[[str], None]


def environment() -> str:
    """Return a folder name with everything that a compiled op depends on.

    Example: 'py311-torch2.13.0-cpu-deepspeed0.19.8-x86_64-1f2e3d'. The last part is a hash of the processor's features.
    DeepSpeed compiles with -march=native, and an op built on a newer login node fails with "Illegal instruction" on an
    older compute node.
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
    """Return where `hpcinit build-ops` builds: the user's TORCH_EXTENSIONS_DIR, or a folder per environment()."""
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    base = Path(env.get("XDG_CACHE_HOME") or home() / ".cache")
    return base / "hpcinit" / "ops" / environment()


def is_built(name: str, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether prepare() would find the op compiled: in the cache of build-ops, or in DeepSpeed."""
    return (shared_cache(env) / name / BUILT).exists() or _comes_compiled(name)


def prepare(
    config: Mapping[str, Any], device: str, env: MutableMapping[str, str] = os.environ, say: Say = console.say
) -> None:
    """Load the ops that this ds_config needs. Every rank calls it before DeepSpeed.

    One of the ranks that share a cache copies the ops that were built before, compiles the missing ones, and removes
    stale locks; the others wait for it. With the user's TORCH_EXTENSIONS_DIR, DeepSpeed loads the ops itself. Otherwise
    they are loaded from the job's folder here, and the variable stays unset for the user's own extensions. Raise
    BringUpError if an op cannot be built or stored.
    """
    names = [name for name in ops_needed(config, device) if not _comes_compiled(name)]
    if not names:
        return
    built = shared_cache(env)
    own = None if env.get(VARIABLE) else safeguards.own_folder(env)
    for place in (own / "torch_extensions", built) if own else (built,):  # the disk of the job's folder may be full
        try:
            return _prepare(names, place, built, env, say)
        except OSError as error:
            problem = error
            say(f"warning: cannot store DeepSpeed's ops in {place}: {error}")
    raise BringUpError(
        f"cannot store DeepSpeed's ops: {problem}. Free disk space, or set {VARIABLE} to another folder",
        quoted=str(problem),
    )


def _prepare(names: Sequence[str], root: Path, built: Path, env: MutableMapping[str, str], say: Say) -> None:
    """Prepare the cache `root`, from the ops in `built` if any. Raise BringUpError, and OSError for a full disk."""
    with one_builder(root, say) as building:
        clear(root, say, QUIET_S)
        for name in names:
            if built != root and (built / name / BUILT).exists() and not (root / name).exists():
                _copy(built / name, root / name)
        missing = [name for name in names if not (root / name / BUILT).exists()]
        if missing:
            say(f"compiling {', '.join(missing)} (takes minutes); later jobs on such a node use the result")
        _build(missing, root, building, say, None, env)
        for name in missing if built != root else ():
            _publish(name, root, built, say)
        for name in names:
            _as_when_built(name, root, env, say)
    if not env.get(VARIABLE):
        with _extensions_in(root, env):
            for name in names:
                _compile(name, loader(name), root)  # compiles nothing; DeepSpeed keeps what it has loaded


def _publish(name: str, root: Path, built: Path, say: Say) -> None:
    """Keep an op that this job has compiled for later jobs. The first of several nodes is enough."""
    try:
        built.mkdir(parents=True, exist_ok=True)
        _copy(root / name, built / name)
    except OSError as error:
        if not (built / name / BUILT).exists():
            say(f"warning: cannot keep DeepSpeed's op {name} for later jobs in {built}: {error}")


@contextlib.contextmanager
def _extensions_in(root: Path, env: MutableMapping[str, str]) -> Iterator[None]:
    """Set TORCH_EXTENSIONS_DIR meanwhile."""
    before = env.get(VARIABLE)
    env[VARIABLE] = str(root)
    try:
        yield
    finally:
        if before is None:
            env.pop(VARIABLE, None)
        else:
            env[VARIABLE] = before


def _as_when_built(name: str, root: Path, env: MutableMapping[str, str], say: Say) -> None:
    """Set the compiler's variables of the build, so that loading the op compiles nothing. Keep the user's values."""
    recorded: dict[str, str | None] = {}
    with contextlib.suppress(OSError, ValueError):  # an older version of hpcinit built it
        recorded = json.loads((root / name / BUILT).read_text())
    for variable, value in recorded.items():
        if value is not None and variable not in env:
            env[variable] = value
            say(f"set {variable}={value}: DeepSpeed's op {name} was built with it")
        elif env.get(variable) != value:
            say(
                f"warning: {variable} is {env[variable]}, but was {value or 'not set'} when DeepSpeed's op {name} was "
                f"built, so torch may compile it again in every job (minutes). Set {variable} as before, or remove "
                f"{root / name} and type hpcinit build-ops"
            )


def _copy(source: Path, target: Path) -> None:
    """Copy atomically. Keep the modification times, by which ninja sees that nothing needs compiling."""
    part = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.part")  # nodes may publish at once
    try:
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(TORCH_LOCK))
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check(config: Mapping[str, Any], device: str, env: Mapping[str, str] = os.environ, say: Say = console.say) -> None:
    """Raise BringUpError for a lock at which DeepSpeed would wait forever; print a line for one in use."""
    if not ops_needed(config, device) or not env.get(VARIABLE):
        return
    for found in find_locks(Path(env[VARIABLE])):
        if found.state == "stale" or (found.state == "unknown" and found.age_s > QUIET_S):
            raise BringUpError(_remove_it(found))
        say(f"waiting for the lock {found}")


def start_uncompiled(deepspeed: Any, env: Mapping[str, str] = os.environ) -> None:
    """Prevent DeepSpeed from compiling an op at its start on a CPU, which takes over a minute.

    Call it before init_distributed. Only inference_all_reduce uses the op, and works without it. An op that is already
    built in this cache is used.
    """
    built = env.get(VARIABLE) and (Path(env[VARIABLE]) / SHARED_MEMORY / BUILT).exists()
    if not built and not _comes_compiled(SHARED_MEMORY):
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False  # read by build_shm_op in comm/torch.py


def build(
    names: Sequence[str], root: Path, say: Say = console.say, loaders: Mapping[str, Callable[[], Any]] | None = None
) -> None:
    """Compile ops into a cache, one after the other, as its only builder.

    loaders: maps an op's name to the function that compiles and loads it; None: DeepSpeed's builders. Raise
    BringUpError if an op cannot be built, RequestError if it is unknown.
    """
    with one_builder(root, say) as building:
        clear(root, say)
        _build(names, root, building, say, loaders, os.environ)


def _build(
    names: Sequence[str],
    root: Path,
    building: Callable[[str], None],
    say: Say,
    loaders: Mapping[str, Callable[[], Any]] | None,
    env: MutableMapping[str, str],
) -> None:
    with _extensions_in(root, env):
        for name in names:
            if (root / name / BUILT).exists():
                say(f"{name}: already built in {root}")
                continue
            load = loaders[name] if loaders else loader(name)
            building(name)
            with _progress(name, say):
                _compile(name, load, root)
            (root / name / BUILT).write_text(json.dumps({each: env.get(each) for each in COMPILER}))


def _compile(name: str, load: Callable[[], Any], root: Path) -> None:
    try:
        load()
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise BringUpError(f"cannot build DeepSpeed's op {name} in {root}: {error}", quoted=str(error)) from error


def clear(root: Path, say: Say, patience_s: float = 0.0) -> None:
    """Remove stale locks.

    Raise BringUpError for a lock whose state is unknown and that is older than `patience_s` seconds.
    """
    for found in find_locks(root):
        if found.state == "stale":
            found.path.unlink(missing_ok=True)
            say(f"removed the stale lock {found}")
        elif found.state == "unknown" and found.age_s >= patience_s:
            raise BringUpError(_remove_it(found))
        else:
            say(f"waiting for the lock {found}")


def loader(name: str) -> Callable[[], Any]:
    """Return the function that compiles and loads an op for this machine's accelerator. Raise RequestError."""
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - takes seconds to import

    if name not in deepspeed_ops.BUILDERS:
        raise RequestError(f"unknown op {name!r}, expected one of: {', '.join(sorted(deepspeed_ops.BUILDERS))}")
    builder = get_accelerator().create_op_builder(deepspeed_ops.BUILDERS[name])
    if builder is None or builder.name != name:
        on = get_accelerator().device_name()
        raise RequestError(
            f"op {name} does not exist for {on}, which DeepSpeed detects here: build it on a node where it runs"
        )
    return lambda: builder.load(verbose=False)


def _comes_compiled(name: str) -> bool:
    """Return whether the op was compiled when DeepSpeed was installed (DS_BUILD_OPS)."""
    from deepspeed.git_version_info import installed_ops  # noqa: PLC0415 - takes seconds to import

    return bool(installed_ops.get(name, False))


def _remove_it(found: Judgement) -> str:
    return (
        f"torch would wait forever for the lock {found}. "
        f"If nothing compiles there, remove it: rm {found.path}, or set {VARIABLE} to another folder"
    )


@contextlib.contextmanager
def _progress(name: str, say: Say) -> Iterator[None]:
    start = time.monotonic()
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            say(f"{name}: compiling, {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=tell, daemon=True)
    say(f"{name}: compiling")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    say(f"{name}: built in {time.monotonic() - start:.0f} s")
