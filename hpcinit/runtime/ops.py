"""DeepSpeed's ops: compiled before the ranks need them, once for each cache; locks of builds that were killed.

`hpcinit build-ops` fills a folder that outlives jobs; a job copies from it into its own cache, so that no rank that is
killed can leave a lock where later jobs would wait for it.
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

from hpcinit.base import console, versions
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.base.text import home
from hpcinit.base.versions import installed
from hpcinit.deepspeed import deepspeed_ops
from hpcinit.deepspeed.deepspeed_ops import needed as ops_needed
from hpcinit.records import safeguards

# Locks on a cache of compiled ops: torch's, which a killed compile leaves behind, and ours, which the kernel drops.
#
# torch up to 2.13 (utils/file_baton.py) makes a file `lock` in the op's folder, keeps it open while it compiles, and
# waits for as long as one is there: https://github.com/deepspeedai/DeepSpeed/issues/5205. From 2.14 on it locks that
# file with flock(2): the kernel releases the lock of a process that ended, and the file stays after every build.

TORCH_LOCK = "lock"
KERNEL_LOCKS = "2.14"  # torch/utils/cpp_extension.py of 2.14.1 uses FileLock, that of 2.13.0 FileBaton; 2.14.0 not seen
OUR_LOCK = ".hpcinit-build"  # its content says who builds what; empty when nobody does
WAIT_S = 1800.0
# Disks that one node alone writes to: whoever holds a lock there is a process of this node.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True)
class Judgement:
    """Of one lock of torch's. state: 'held', 'stale' (nobody will release it) or 'unknown'. age_s: since anything last
    changed in its folder.
    """

    path: Path
    state: str
    why: str
    age_s: float

    def __str__(self) -> str:
        return f"{self.path} ({self.age_s:.0f} s old): {self.why}"


def files_are_locks() -> bool:
    """Return whether the installed torch waits for as long as a lock's file is there."""
    return versions.key(versions.installed("torch") or "0") < versions.key(KERNEL_LOCKS)


def find_locks(root: Path) -> list[Judgement]:
    """Every lock of torch's below a cache, judged; none where the file of a lock does not make torch wait."""
    found: list[Judgement] = []
    if not files_are_locks():
        return found
    for path in sorted(root.glob(f"*/{TORCH_LOCK}")):
        with contextlib.suppress(FileNotFoundError):  # released meanwhile
            found.append(judge_lock(path))
    return found


def judge_lock(path: Path) -> Judgement:
    """Whether somebody will release this lock. Raises FileNotFoundError if that has happened."""
    owner = path.stat().st_uid
    newest = max(each.stat(follow_symlinks=False).st_mtime for each in (path, *path.parent.iterdir()))
    age = max(0.0, time.time() - newest)
    pid = holder(path)
    if pid:
        return Judgement(path, "held", f"process {pid} compiles", age)
    host = os.uname().nodename
    builder = read_builder(path.parent.parent)
    if builder and builder.op == path.parent.name and builder.host == host and not builder.alive():
        return Judgement(path, "stale", f"left by {builder}, which has ended", age)
    if owner != os.geteuid():
        return Judgement(path, "unknown", f"of user {owner}, whose processes cannot be looked into", age)
    kind = file_system(path)
    if kind in LOCAL:
        return Judgement(path, "stale", f"no process on {host} has it open, and no other node can ({kind})", age)
    return Judgement(path, "unknown", f"no process on {host} has it open; another node may ({kind or 'unknown'})", age)


def holder(path: Path) -> int:
    """The process of this user on this node that has the file open, 0 if none has. Raises FileNotFoundError."""
    while True:
        before = path.stat()
        found = _has_open(before)
        after = path.stat()
        # Another file of the same name is another holder's, who may have come after we looked at him.
        if found or (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns):
            return found


def _has_open(wanted: os.stat_result) -> int:
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # ended, or somebody else's
            for entry in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.path.samestat(entry.stat(), wanted):
                        return int(folder.parent.name)
    return 0


def file_system(path: Path) -> str:
    """'ext4', 'nfs4', 'lustre'...: of the mount that a path is on, '' if that cannot be told."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            # "36 35 98:0 /root /mount\040point rw,noatime master:1 - ext3 /dev/root rw"
            mount, _, rest = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            if path.resolve().is_relative_to(point) and len(point) >= best:
                best, kind = len(point), rest.split()[0]
    return kind


@dataclass(frozen=True)
class Builder:
    """Who builds an op. started: the process's start, in clock ticks since boot, which tells it from a later one."""

    host: str
    pid: int
    started: str
    op: str

    def alive(self) -> bool:
        """Asked on its own host."""
        return self.started == start_of(self.pid) != ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, building {self.op}"


def start_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        # "4242 (name with ) and blanks) S ...": the 22nd word, the 20th after the last bracket
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def read_builder(root: Path) -> Builder | None:
    """Who last began to build in a cache, and did not say that it had finished; None if nobody."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Builder(**json.loads((root / OUR_LOCK).read_text()))
    return None


@contextlib.contextmanager
def one_builder(root: Path, say: Callable[[str], None], wait_s: float = WAIT_S) -> Iterator[Callable[[str], None]]:
    """Be the only builder in a cache: all others wait here, until this one leaves or dies. Yields `building(op)`.

    Raises BringUpError after `wait_s` seconds, and OSError where the folder cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root / OUR_LOCK, os.O_RDWR | os.O_CREAT, 0o600)

    def building(op: str) -> None:
        me = Builder(os.uname().nodename, os.getpid(), start_of(os.getpid()), op)
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
            return say(f"{root} is on a disk without locks ({error.strerror}): going on without")
        now = time.monotonic()
        who = read_builder(root) or "a process that has not said what it builds"
        if now - start > wait_s:
            raise BringUpError(
                f"waited {wait_s:.0f} s for {who}, which holds {root / OUR_LOCK}: see whether it still compiles, "
                "end it, or set TORCH_EXTENSIONS_DIR to another folder"
            )
        if now - said > 10:
            said = now
            say(f"waiting for {who} in {root} ({now - start:.0f} s)")
        time.sleep(0.2)


def _write(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


__all__ = ["build", "check", "environment", "ops_needed", "prepare", "shared_cache", "start_uncompiled"]

BUILT = ".hpcinit-built"  # in an op's folder, once it has been compiled and loaded
SHARED_MEMORY = "deepspeed_shm_comm"
VARIABLE = "TORCH_EXTENSIONS_DIR"
QUIET_S = 1800.0  # a folder in which nothing changed for so long is not being compiled in
PROGRESS_S = 10.0

Say = Callable[[str], None]


def environment() -> str:
    """'py311-torch2.13.0-cpu-deepspeed0.19.8-x86_64-1f2e3d': all that a compiled op depends on, as a folder's name.

    The last word is of the processor's features: DeepSpeed compiles with -march=native, and what was built on a newer
    login node ends with "Illegal instruction" on an older compute node.
    """
    import torch  # noqa: PLC0415 - seconds to import

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
    """Where `hpcinit build-ops` builds: TORCH_EXTENSIONS_DIR of the user's, or else a folder of this environment."""
    if env.get(VARIABLE) and not _is_ours(env):
        return Path(env[VARIABLE])
    base = Path(env.get("XDG_CACHE_HOME") or home() / ".cache")
    return base / "hpcinit" / "ops" / environment()


def prepare(
    config: Mapping[str, Any], device: str, env: MutableMapping[str, str] = os.environ, say: Say = console.say
) -> None:
    """Have what this ds_config needs in this process's cache: called by every rank, before DeepSpeed starts.

    One rank of those that share the cache copies what was built before, compiles what was not, and removes what a
    killed one has left; the others wait for it. Raises BringUpError.
    """
    names = [name for name in ops_needed(config, device) if not _comes_compiled(name)]
    if not names:
        return
    root = Path(env[VARIABLE]) if env.get(VARIABLE) else shared_cache(env)
    built = shared_cache(env) if _is_ours(env) else root
    for place in dict.fromkeys((root, built)):  # the job's own cache may be on a full disk
        try:
            return _prepare(names, place, built, env, say)
        except OSError as error:
            problem = error
            say(f"warning: DeepSpeed's ops cannot be kept in {place}: {error}")
    raise BringUpError(
        f"no disk for DeepSpeed's ops: {problem}; make room, or set {VARIABLE} to another folder", quoted=str(problem)
    )


def _prepare(names: Sequence[str], root: Path, built: Path, env: MutableMapping[str, str], say: Say) -> None:
    """In the cache `root`, with what was built in `built` before. Raises BringUpError, and OSError for a full disk."""
    env[VARIABLE] = str(root)
    with one_builder(root, say) as building:
        clear(root, say, QUIET_S)
        for name in names:
            if built != root and (built / name / BUILT).exists() and not (root / name).exists():
                _copy(built / name, root / name)
        missing = [name for name in names if not (root / name / BUILT).exists()]
        if missing:
            say(f"{', '.join(missing)} not built before: compiling, for minutes; `hpcinit build-ops` does so once")
        _build(missing, root, building, say, None, env)


def _copy(source: Path, target: Path) -> None:
    """All of it or nothing. Times are kept: by them ninja knows that there is nothing left to compile."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, ignore=shutil.ignore_patterns(TORCH_LOCK))
    part.rename(target)


def check(config: Mapping[str, Any], device: str, env: Mapping[str, str] = os.environ, say: Say = console.say) -> None:
    """Raises BringUpError for a lock at which DeepSpeed would wait for ever; a line for one that may be in use."""
    if not ops_needed(config, device) or not env.get(VARIABLE):
        return
    for found in find_locks(Path(env[VARIABLE])):
        if found.state == "stale" or (found.state == "unknown" and found.age_s > QUIET_S):
            raise BringUpError(_remove_it(found))
        say(f"waiting for the lock {found}")


def start_uncompiled(deepspeed: Any, env: Mapping[str, str] = os.environ) -> None:
    """Keep DeepSpeed's start on a CPU from compiling an op, a minute or more: call it before init_distributed.

    Only inference_all_reduce uses it, and does without. What has been built in this cache is left as it is.
    """
    built = env.get(VARIABLE) and (Path(env[VARIABLE]) / SHARED_MEMORY / BUILT).exists()
    if not built and not _comes_compiled(SHARED_MEMORY):
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False  # comm/torch.py: build_shm_op looks here


def build(
    names: Sequence[str], root: Path, say: Say = console.say, loaders: Mapping[str, Callable[[], Any]] | None = None
) -> None:
    """Compile ops into a cache, one after the other, as its only builder.

    loaders: name -> what compiles and loads it, instead of DeepSpeed's builders. Raises BringUpError, RequestError.
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
    before = env.get(VARIABLE)
    env[VARIABLE] = str(root)
    try:
        for name in names:
            if (root / name / BUILT).exists():
                say(f"{name}: built before, in {root}")
                continue
            load = loaders[name] if loaders else loader(name)
            building(name)
            with _progress(name, say):
                _compile(name, load, root)
            (root / name / BUILT).touch()
    finally:
        if before is None:
            env.pop(VARIABLE, None)
        else:
            env[VARIABLE] = before


def _compile(name: str, load: Callable[[], Any], root: Path) -> None:
    try:
        load()
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        raise BringUpError(f"DeepSpeed's op {name} could not be built in {root}: {error}", quoted=str(error)) from error


def clear(root: Path, say: Say, patience_s: float = 0.0) -> None:
    """Remove the locks that nobody will release.

    Raises BringUpError for one of which that cannot be known, and that is older than `patience_s` seconds.
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
    """What compiles and loads one of DeepSpeed's ops for this machine's accelerator. Raises RequestError."""
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - seconds to import

    if name not in deepspeed_ops.BUILDERS:
        raise RequestError(f"no op {name!r}, expected one of: {', '.join(sorted(deepspeed_ops.BUILDERS))}")
    builder = get_accelerator().create_op_builder(deepspeed_ops.BUILDERS[name])
    if builder is None or builder.name != name:
        on = get_accelerator().device_name()
        raise RequestError(f"op {name} does not exist for {on}, which is what DeepSpeed sees here: build where it runs")
    return lambda: builder.load(verbose=False)


def _comes_compiled(name: str) -> bool:
    """Installed with DS_BUILD_OPS: then nothing is compiled on use."""
    from deepspeed.git_version_info import installed_ops  # noqa: PLC0415 - seconds to import

    return bool(installed_ops.get(name, False))


def _is_ours(env: Mapping[str, str]) -> bool:
    """Whether the cache is the job's own, set by the safeguards and not by the user."""
    return VARIABLE in env.get(safeguards.ENV_SET, "").split(" ")[1:]


def _remove_it(found: Judgement) -> str:
    return (
        f"torch would wait for ever for the lock {found}; "
        f"if nothing compiles there, remove it: rm {found.path}, or set {VARIABLE} to another folder"
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
