"""Start Pythons by fork from a process that has imported what they need: torch takes 2 s of processor time, a fork 0.05 s.

RANKS, DEEPSPEED_RANKS and COMMANDS are such processes. Each starts at its first request in a session. `start()` requests
a Python, which gets its code, arguments, environment, working folder, umask and files as `python -u -c CODE` would, and has
the same exit status. It is a child of the caller: the process in between exits at once while the caller is a subreaper
(PR_SET_CHILD_SUBREAPER), so `wait`, `poll` and `kill` are subprocess's own.

Differences from a fresh process: the modules are in `sys.modules` before the code runs, and /proc/PID/cmdline and
/proc/PID/environ are those of the process that was forked. A test of imports or of those files uses a fresh process. At
the end, destructors of modules that the server imported are not called: after a fork each of them copies a page of memory.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).parents[1]
TORCH = (
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch._dynamo",  # which the first optimizer of a process imports
)
DEEPSPEED = ("deepspeed", "torch._inductor.compile_fx")  # the second is imported by deepspeed.initialize()
LOGIN = (
    "base",
    "slurm",
    "records",
    "config",
    "engine",
    "observe",
    "why",
    "submit",
    "discover",
    "cli",
)  # packages of hpcinit
CLEARED = {"__main__", "builtins", "sys", "torch.distributed.distributed_c10d"}  # the last has the process groups
AT_START = ("PYTHON", "LC_", "LANG")  # variables that a Python reads when it starts
COMMAND = "import runpy; runpy.run_module('hpcinit', run_name='__main__', alter_sys=True)"


class Forked(subprocess.Popen[bytes]):
    """A child that was not started by subprocess, with all that Popen can do with a process."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self.text_mode = self.encoding = self.errors = None
        self._child_created, self._communication_started, self._input = True, False, None
        self._waitpid_lock, self._sigint_wait_secs = threading.Lock(), 0.25


class Files(NamedTuple):
    """stdin, stdout and stderr of the process, open files of the caller."""

    stdin: IO[Any]
    stdout: IO[Any]
    stderr: IO[Any]


class Warm:
    """A process with modules, and the processes forked from it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._server: socket.socket | None = None
        self._lock = threading.Lock()  # tests submit from several threads; their requests share one socket

    def start(self, code: str, env: Mapping[str, str], files: Files, arguments: Sequence[str] = ()) -> Forked:
        """Start a Python that runs `code`. The caller must wait for it."""
        with self._lock:
            os.umask(umask := os.umask(0o077))
            start = {
                "code": code,
                "env": dict(env),
                "arguments": list(arguments),
                "folder": str(Path.cwd()),
                "umask": umask,
            }
            pid = self._fork(json.dumps(start).encode(), files)
        return Forked(pid, [sys.executable, "-u", "-c", code, *arguments])

    def _fork(self, request: bytes, files: Files) -> int:
        """Return the pid of a new process. If the server has exited, only this request fails: the next starts another."""
        if self._server is None:
            self._start()
        assert self._server is not None
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._server, [struct.pack("!Q", len(request))], [file.fileno() for file in files])
            self._server.sendall(request)
            answer = self._server.recv(8, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) != 8:
            self._server.close()
            self._server = None
            raise RuntimeError(f"tests.warm: the process that forks {self.kind} has exited")
        return int(struct.unpack("!Q", answer)[0])

    def _start(self) -> None:
        self._server, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if not name.startswith((*AT_START, "COVERAGE"))}
        with theirs:
            subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.warm", self.kind, str(theirs.fileno())],
                env={**env, **OF_SESSION}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, cwd=ROOT,
            )  # fmt: skip


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START)}


def needs_a_new_python(env: Mapping[str, str]) -> bool:
    """Return whether `env` has other variables for the start of a Python than this session or measures coverage, or the
    current folder was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return at_start(env) != OF_SESSION or any(name.startswith("COVERAGE") for name in env)


OF_SESSION = at_start(os.environ)
RANKS, DEEPSPEED_RANKS, COMMANDS = Warm("ranks"), Warm("ranks with DeepSpeed"), Warm("commands")


def serve(caller: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Return the request in that process, None in the server once the caller has exited."""
    while True:
        header, files, *_ = socket.recv_fds(caller, 8, 3)
        if len(header) != 8:
            return None
        content = b""
        while len(content) < struct.unpack("!Q", header)[0]:
            content += caller.recv(1 << 20)
        request: dict[str, Any] = json.loads(content)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.close(write)
                caller.close()
                _become(request, files)
                return request
            os.write(write, struct.pack("!Q", pid))
            os._exit(0)
        os.waitpid(between, 0)  # its child has the caller as its parent from now on
        caller.sendall(os.read(read, 8))
        for descriptor in (read, write, *files):
            os.close(descriptor)


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
    for descriptor in files:
        os.close(descriptor)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *given, *sys.path[1:]]


def _import(kind: str) -> None:
    gc.disable()
    if kind != COMMANDS.kind:
        for name in (*TORCH, *(DEEPSPEED if kind == DEEPSPEED_RANKS.kind else ())):
            importlib.import_module(name)
    else:
        importlib.import_module("hydra._internal.hydra")
        for package in LOGIN:
            path = importlib.import_module(f"hpcinit.{package}").__path__
            for module in pkgutil.walk_packages(path, f"hpcinit.{package}."):
                importlib.import_module(module.name)
        _compose()
        assert "torch" not in sys.modules
    gc.enable()
    gc.freeze()  # a collection in a forked process would copy all pages


def _compose() -> None:
    """Compose a config in an empty folder: Hydra and its parser then have in memory what takes a third of the next one's time."""
    from hpcinit.config.compose import compose

    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("HPCINIT_CONF", None)
        os.environ["HOME"] = folder
        os.chdir(folder)
        compose(["cluster=local"])
        os.chdir(ROOT)


def _keep(modules: dict[str, types.ModuleType]) -> None:
    """Keep Python from clearing these modules at its end, which takes 0.1 s of processor time with torch."""
    kept = [sys.modules.pop(name, None) for name in modules if name not in CLEARED]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _skip_static_destructors() -> None:
    """End after Python and the buffers of C: libtorch would free its table of operators, which takes 0.1 s."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)  # called before the line above


def _end_before_gloo_aborts() -> None:
    """Exit with 0 without Python's last step, in which gloo sometimes aborts: hpcinit/runtime/interpreter_exit.py.

    That module would look at all objects, which copies the memory that they are in.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


def main() -> None:
    modules: dict[str, types.ModuleType] = {}
    atexit.register(_keep, modules)  # before all others, and so called after them
    _import(sys.argv[1])
    modules.update(sys.modules)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's would remove each operator that Python defined
    request = serve(socket.socket(fileno=int(sys.argv[2])))
    if request is not None:
        _skip_static_destructors()
        has_torch = sys.argv[1] != COMMANDS.kind
        sys.argv = ["-c", *request["arguments"]]
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(request["code"], "<string>", "exec"), program.__dict__)
        if has_torch:
            _end_before_gloo_aborts()


if __name__ == "__main__":
    main()
