"""Exits like the Python interpreter, but skips the last step of its shutdown, in which gloo can abort the process.

In that step, a gloo thread (ProcessGroupGloo::runLoop) may need an interpreter that no longer exists. The process then
aborts with 'terminate called without an active exception', even after the rank has destroyed its group:
https://github.com/pytorch/pytorch/issues/190489 and pull request 179291 there.

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
    """Exit with `status` if torch was imported. Without torch, return, so that the interpreter exits normally.

    Like a normal exit, this waits for threads, runs atexit handlers, deletes the program's variables and flushes open
    files, including those of C code. Unlike a normal exit, it calls no C++ destructors.
    """
    if "torch" not in sys.modules:
        return
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for the program's threads, as Python does
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    gc.unfreeze()  # otherwise get_objects() omits the objects that were excluded with gc.freeze()
    _write_files()
    status = status & 0xFF if _flushed(sys.stdout) and _flushed(sys.stderr) else 120  # as Python does
    os._exit(status)


def _write_files() -> None:
    """Flush the C library's streams and the files that modules or objects still have open."""
    objects = gc.get_objects()  # with torch, about 165,000 objects of some thousand types
    types = {id(type(thing)): type(thing) for thing in objects}
    is_file = {number: issubclass(kind, io.IOBase) for number, kind in types.items()}
    for file in [thing for thing in objects if is_file[id(type(thing))]]:
        if file not in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                file.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def _flushed(stream: TextIO | None) -> bool:
    """Flush the stream. Return False if the output cannot be written, for example to a full disk or a closed pipe."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:
        return False
    return True
