"""Exit as the interpreter would, without the last step of its shutdown, in which gloo aborts the process.

In that step a thread of gloo's that releases a tensor (ProcessGroupGloo::runLoop, decref_pyobject) asks for the lock of
an interpreter that is gone: 'terminate called without an active exception', also in ranks that have destroyed their
group. https://github.com/pytorch/pytorch/issues/190489 and pull request 179291 there.

Delete this module, and call sys.exit() in its place, once the oldest torch that hpcinit supports (the lower bound in
pyproject.toml) has the fix: tests/runtime/test_program.py must then pass with `end` as an empty function.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from typing import TextIO


def end(status: int) -> None:
    """Exit with `status` if torch was imported; without torch, return.

    What the interpreter's shutdown does is done here: wait for threads, call what atexit has, delete the program's
    variables, write open files, also those of the C library. Destructors of C++ are not called.
    """
    if "torch" not in sys.modules:
        return
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads, as Python does
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    _write_files()
    status = status & 0xFF if _flushed(sys.stdout) and _flushed(sys.stderr) else 120  # Python's own 120
    os._exit(status)


def _write_files() -> None:
    """Write what is in buffers: of files that some module or object still has open, and of streams of C code."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase) and thing not in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                thing.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def _flushed(stream: TextIO | None) -> bool:
    """Return False if what was printed could not be written: a full disk, a closed pipe."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:
        return False
    return True
