"""Exits like the Python interpreter, but skips the last step of its shutdown, in which gloo can abort the process.

In that step, a gloo thread that releases a tensor (ProcessGroupGloo::runLoop, decref_pyobject) waits for the lock of an
interpreter that no longer exists. Then the process aborts with 'terminate called without an active exception', even in
a rank that has destroyed its group: https://github.com/pytorch/pytorch/issues/190489 and pull request 179291 there.

When the oldest supported torch (the lower bound in pyproject.toml) contains the fix, delete this module and call
sys.exit() instead. tests/runtime/test_program.py must then pass with `end` as an empty function.
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
    """Exit with `status` if torch was imported. Without torch, just return.

    Like the interpreter's shutdown, this function waits for threads, runs atexit handlers, deletes the program's
    variables and flushes open files, including the C library's. Unlike it, this function calls no C++ destructors.
    """
    if "torch" not in sys.modules:
        return
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for the program's threads, as Python does
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    gc.unfreeze()  # get_objects() omits the objects that the program excluded from collections with gc.freeze()
    _write_files()
    status = status & 0xFF if _flushed(sys.stdout) and _flushed(sys.stderr) else 120  # as Python does
    os._exit(status)


def _write_files() -> None:
    """Flush the C library's streams and the files that modules or objects still have open."""
    objects = gc.get_objects()  # 165,000 in a program with torch, of some thousand types
    types = {id(type(thing)): type(thing) for thing in objects}
    is_file = {number: issubclass(kind, io.IOBase) for number, kind in types.items()}
    for file in [thing for thing in objects if is_file[id(type(thing))]]:
        if file not in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                file.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def _flushed(stream: TextIO | None) -> bool:
    """Flush the stream. Return False if the output cannot be written, as to a full disk or a closed pipe."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:
        return False
    return True
