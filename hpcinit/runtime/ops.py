"""DeepSpeed's ops, compiled before the ranks need them, and once for each cache.

`hpcinit build-ops` fills a folder that outlives jobs; a job copies from it into its own cache, so that no rank that is
killed can leave a lock where later jobs would wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.facts import deepspeed_ops, safeguards, saying
from hpcinit.facts.deepspeed_ops import needed as ops_needed
from hpcinit.facts.errors import BringUpError, RequestError
from hpcinit.facts.user_paths import home
from hpcinit.facts.versions import installed
from hpcinit.runtime import op_locks

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
    config: Mapping[str, Any], device: str, env: MutableMapping[str, str] = os.environ, say: Say = saying.say
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
    with op_locks.one_builder(root, say) as building:
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
    shutil.copytree(source, part, ignore=shutil.ignore_patterns(op_locks.TORCH_LOCK))
    part.rename(target)


def check(config: Mapping[str, Any], device: str, env: Mapping[str, str] = os.environ, say: Say = saying.say) -> None:
    """Raises BringUpError for a lock at which DeepSpeed would wait for ever; a line for one that may be in use."""
    if not ops_needed(config, device) or not env.get(VARIABLE):
        return
    for found in op_locks.locks(Path(env[VARIABLE])):
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
    names: Sequence[str], root: Path, say: Say = saying.say, loaders: Mapping[str, Callable[[], Any]] | None = None
) -> None:
    """Compile ops into a cache, one after the other, as its only builder.

    loaders: name -> what compiles and loads it, instead of DeepSpeed's builders. Raises BringUpError, RequestError.
    """
    with op_locks.one_builder(root, say) as building:
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
    for found in op_locks.locks(root):
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


def _remove_it(found: op_locks.Judgement) -> str:
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
