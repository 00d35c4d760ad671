"""Import what the ranks share, one module at a time, and refuse what a fork cannot take along.

A fork copies memory, and of the threads only the one that forks: a lock that another thread holds stays locked for
ever, and a pool (libgomp's) waits for workers that are not there. A device's context is of no use in the child
(CUDA: 'Cannot re-initialize CUDA in forked subprocess').
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
from hpcinit.base.versions import installed, key
from hpcinit.deepspeed.deepspeed_versions import IMPORT_LEAVES_CUDA_SINCE
from hpcinit.rendezvous import fingerprint

TASKS = Path("/proc/self/task")
FILES = Path("/proc/self/fd")
DEVICES = Path("/dev")
# Opened with the first context, and not by what only counts devices (NVML opens nvidiactl).
OF_A_CONTEXT = {"nvidia-uvm": "CUDA", "kfd": "ROCm", "dri/renderD": "a GPU"}
# There where a CUDA or ROCm device is. Without one, torch's CUDA build cannot start CUDA in any process.
OF_A_DRIVER = ("nvidiactl", "kfd")
# torch.cuda.is_available() then asks NVML, and does not start CUDA: torch's documentation of that function.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def load(names: Sequence[str], *, devices: Path = DEVICES) -> str:
    """Import `names`, and hpcinit's own bring-up behind torch. Return a line for the log, '' without names.

    A DeepSpeed whose import starts CUDA is not imported: each rank then imports it itself.

    Raises RequestError for a module that is not there, that leaves a thread which a fork would lose, or that has
    touched a device; BringUpError for one whose import fails.
    """
    gc.disable()  # to look for garbage again and again, where there is next to none, is a tenth of torch's import
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
            _warm()
    finally:
        # What is there now, a collection passes over: in a rank it would write to pages that it shares. No gc.collect()
        # before: 70 ms, and what it frees are holes in these pages.
        gc.freeze()
        gc.enable()
    imported = ", ".join(_with_version(name) for name in names if name not in skipped)
    found = [f"imported before the fork: {imported}"] if imported else []
    return "; ".join([*found, *(f"not imported before the fork: {reason}" for reason in skipped.values())])


@contextmanager
def _devices_counted_by_nvml() -> Iterator[None]:
    """For the imports only: a rank looks for its devices as it would under srun. A user's own value stays."""
    if NVML_CHECK in os.environ:
        yield
        return
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        os.environ.pop(NVML_CHECK, None)


def _reason_to_skip(name: str) -> str:
    version = installed("deepspeed") if name.partition(".")[0] == "deepspeed" else ""
    if not version or key(version) >= key(IMPORT_LEAVES_CUDA_SINCE):
        return ""
    return (
        f"{_with_version(name)}, whose import initialises CUDA, which forked ranks could then not use; each rank "
        f"imports it (DeepSpeed {IMPORT_LEAVES_CUDA_SINCE} and later can be shared)"
    )


def _with_version(name: str) -> str:
    return f"{name} {installed(name.partition('.')[0])}".rstrip()


def _warm() -> None:
    """What bring-up makes each rank import or look up later than at its own import, with the same result for all."""
    if "torch" in sys.modules:
        importlib.import_module("hpcinit.runtime.bringup")
        importlib.import_module("torch.utils._device")  # the mesh
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # the seeds
    importlib.import_module("encodings.idna")  # the first name that a socket is given
    fingerprint.fingerprint()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error  # it is there, and what it imports is not
        raise RequestError(
            f"launch.preload has {name!r}, and there is no module {error.name} on {os.uname().nodename}: looked in "
            f"{sys.path[0]} and in {sys.prefix}; take it out of launch.preload, or install it"
        ) from None
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> BringUpError:
    return BringUpError(f"importing {name}, which launch.preload has, failed: {type(error).__name__}: {error}")


def _refuse_threads(name: str, before: Collection[int]) -> None:
    started = set(_threads()) - set(before)
    if started:
        # OpenBLAS ends its pool before a fork and makes it anew behind (pthread_atfork): a trial tells who does so.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    found = _threads()
    if left := started & set(found):
        titles = ", ".join(sorted(found[thread] for thread in left))
        raise RequestError(
            f"importing {name} has started {len(left)} thread{'s' * (len(left) > 1)} ({titles}), which forked ranks "
            f"would be without: take {name} out of launch.preload, and each rank imports it by itself; or launch=srun"
        )


def _threads() -> dict[int, str]:
    """Every thread of this process but the main one, and what it is called: by Python, or by the kernel."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[int, str] = {}
    for path in TASKS.iterdir():
        thread = int(path.name)
        if thread != os.getpid():
            found[thread] = known.get(thread) or _read(path / "comm") or str(thread)
    return found


def _refuse_device(name: str, devices: Path) -> None:
    said = ""
    for file in FILES.iterdir():
        try:
            target = str(file.readlink())
        except OSError:  # the folder's own descriptor
            continue
        for device, what in OF_A_CONTEXT.items():
            if target.startswith(f"{devices}/{device}"):
                said = f"{what} ({target} is open)"
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            said = f"torch.{kind}"
    if not said and torch is not None and any((devices / node).exists() for node in OF_A_DRIVER) and _lost_in_a_fork():
        said = "CUDA (a trial fork cannot use it)"
    if said:
        # DeepSpeed is added to launch.preload where a run uses it: it cannot be taken out there.
        out = (
            "" if name == "deepspeed" else f"take {name} out of launch.preload, and each rank imports it by itself; or "
        )
        raise RequestError(
            f"importing {name} has initialised {said}, which cannot be used in forked ranks: {out}launch=srun"
        )


def _lost_in_a_fork() -> bool:
    """Return whether a child that is forked now would find CUDA lost. torch.cuda.is_initialized() does not see it all:
    is_available() starts CUDA too."""
    child = os.fork()
    if child == 0:
        os._exit(int(sys.modules["torch"].cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
