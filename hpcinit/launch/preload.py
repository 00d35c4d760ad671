"""Imports the modules that the ranks share, one at a time, and refuses modules that do not survive a fork.

A forked child has a copy of the memory, but only of the thread that called fork(). A lock of another thread stays
locked forever, and a thread pool (such as libgomp's) waits for workers that do not exist. The child cannot use the
parent's device context (CUDA: 'Cannot re-initialize CUDA in forked subprocess').
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.base.safe_files import read_or_empty
from hpcinit.base.versions import installed, key
from hpcinit.deepspeed.deepspeed_versions import IMPORT_LEAVES_CUDA_SINCE
from hpcinit.world import fingerprint

TASKS = Path("/proc/self/task")
FILES = Path("/proc/self/fd")
DEVICES = Path("/dev")
# Device files that a process opens for its first context, but not to count devices (NVML opens nvidiactl).
CONTEXT_DEVICES = {"nvidia-uvm": "CUDA", "kfd": "ROCm", "dri/renderD": "a GPU"}
# These exist if there is a CUDA or ROCm device. Without a device, no process can start CUDA.
DRIVER_DEVICES = ("nvidiactl", "kfd")
# With this variable, torch.cuda.is_available() queries NVML instead of initializing CUDA; see torch's documentation.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def load(names: Sequence[str], *, devices: Path = DEVICES) -> str:
    """Import the modules `names`. Return a line about them for the log, or '' if there are none.

    With torch, also import what hpcinit.init() needs. Skip DeepSpeed if its import would initialize CUDA. Each rank
    then imports DeepSpeed itself. Raise RequestError for a module that does not exist, starts a thread or uses a
    device. Raise BringUpError if an import fails.

    devices: the folder with the device files.
    """
    gc.disable()  # garbage collection takes a tenth of torch's import time and finds almost nothing
    skipped = {name: reason for name in names if (reason := _reason_to_skip(name))}
    try:
        with _devices_counted_by_nvml():
            for name in names:
                if name in skipped:
                    continue
                before = _threads()
                _import(name)
                _refuse_threads(name, before)
                _refuse_device(name, devices)
            _prepare_bring_up()
    finally:
        # Exclude the present objects from garbage collection, which would write to shared pages in a rank. Do not
        # call gc.collect() first: it takes 70 ms, and what it frees only leaves holes in these pages.
        gc.freeze()
        gc.enable()
    imported = ", ".join(_with_version(name) for name in names if name not in skipped)
    found = [f"imported before the fork: {imported}"] if imported else []
    return "; ".join([*found, *(f"not imported before the fork: {reason}" for reason in skipped.values())])


@contextmanager
def _devices_counted_by_nvml() -> Iterator[None]:
    """Make torch count devices with NVML during the `with` block, so that the imports do not initialize CUDA."""
    if NVML_CHECK in os.environ:
        yield
        return
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        os.environ.pop(NVML_CHECK, None)


def _reason_to_skip(name: str) -> str:
    """Return why the module must not be imported before the fork, or '' if there is no reason."""
    version = installed("deepspeed") if name.partition(".")[0] == "deepspeed" else ""
    if not version or key(version) >= key(IMPORT_LEAVES_CUDA_SINCE):
        return ""
    return (
        f"{_with_version(name)}. Each rank imports it, because this import initializes CUDA, and forked ranks could "
        f"then not use CUDA. DeepSpeed {IMPORT_LEAVES_CUDA_SINCE} and later can be imported before the fork"
    )


def _with_version(name: str) -> str:
    return f"{name} {installed(name.partition('.')[0])}".rstrip()


def _prepare_bring_up() -> None:
    """Do the part of hpcinit.init() that is the same in each rank: imports and look-ups."""
    if "torch" in sys.modules:
        importlib.import_module("hpcinit.runtime.bringup")
        importlib.import_module("torch.utils._device")  # for the mesh
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # for the seeds
    importlib.import_module("encodings.idna")  # for the first host name in a socket call
    fingerprint.fingerprint()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_error(name, error) from error  # the module exists, but a module that it imports does not
        raise RequestError(
            f"launch.preload lists {name!r}, but there is no module {error.name} on {os.uname().nodename} (searched "
            f"{sys.path[0]} and {sys.prefix}): install it, or remove it from launch.preload"
        ) from None
    except Exception as error:
        raise _import_error(name, error) from error


def _import_error(name: str, error: Exception) -> BringUpError:
    return BringUpError(f"cannot import {name}, which launch.preload lists: {type(error).__name__}: {error}")


def _refuse_threads(name: str, before: Collection[int]) -> None:
    """Raise RequestError if importing `name` has started a thread that a fork would lose.

    before: the threads before the import.
    """
    started = set(_threads()) - set(before)
    if started:
        # A trial fork shows which threads a fork would lose. OpenBLAS, for example, ends its pool before a fork and
        # creates a new pool afterwards (pthread_atfork).
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    found = _threads()
    if left := started & set(found):
        titles = ", ".join(sorted(found[thread] for thread in left))
        raise RequestError(
            f"importing {name} started {len(left)} thread{'s' * (len(left) > 1)} ({titles}), and threads do not "
            f"survive a fork: remove {name} from launch.preload, so that each rank imports it, or set launch=srun"
        )


def _threads() -> dict[int, str]:
    """Return the id of every thread of this process except the main thread, with its name in Python or the kernel."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[int, str] = {}
    for path in TASKS.iterdir():
        thread = int(path.name)
        if thread != os.getpid():
            found[thread] = known.get(thread) or read_or_empty(path / "comm") or str(thread)
    return found


def _refuse_device(name: str, devices: Path) -> None:
    """Raise RequestError if the import of `name` has initialized a device."""
    started = ""
    for file in FILES.iterdir():
        try:
            target = str(file.readlink())
        except OSError:  # the descriptor of the folder itself, which is closed by now
            continue
        for device, what in CONTEXT_DEVICES.items():
            if target.startswith(f"{devices}/{device}"):
                started = f"{what} ({target} is open)"
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            started = f"torch.{kind}"
    if (
        not started
        and torch is not None
        and any((devices / node).exists() for node in DRIVER_DEVICES)
        and _is_cuda_lost_in_fork()
    ):
        started = "CUDA (a trial fork cannot use it)"
    if started:
        # hpcinit adds DeepSpeed to launch.preload if a run uses it, so the user cannot remove it there.
        out = "" if name == "deepspeed" else f"remove {name} from launch.preload, so that each rank imports it, or "
        raise RequestError(
            f"importing {name} initialized {started}, which does not work after a fork: {out}set launch=srun"
        )


def _is_cuda_lost_in_fork() -> bool:
    """Return whether CUDA would be unusable in a child that is forked now.

    torch.cuda.is_initialized() does not show this, because torch.cuda.is_available() may have started CUDA, too.
    """
    child = os.fork()
    if child == 0:
        os._exit(int(sys.modules["torch"].cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
