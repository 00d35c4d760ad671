"""Start ranks by fork from a process that has imported torch: an import takes 2 s of processor time, a fork 0.05 s.

`fork()` requests a rank from that process, which starts at the first call of a session. The rank gets its code, environment,
working folder and log as `python -u -c CODE` would, and has the same exit status. It is a child of the caller: the process
in between exits at once while the caller is a subreaper (PR_SET_CHILD_SUBREAPER), so `wait`, `poll` and `kill` are
subprocess's own.

Differences from a fresh process: torch is in `sys.modules` before the code runs, and /proc/PID/cmdline and
/proc/PID/environ are those of the process that was forked. A test of imports or of those files uses a fresh process.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

PR_SET_CHILD_SUBREAPER = 36
MODULES = (
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
)
_server: socket.socket | None = None


class Forked(subprocess.Popen[bytes]):
    """A child that was not started by subprocess, with all that Popen can do with a process."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.args, self.pid, self.returncode = args, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._communication_started, self._input = True, False, None
        self._waitpid_lock, self._sigint_wait_secs = threading.Lock(), 0.25


def fork(code: str, env: Mapping[str, str], log: BinaryIO) -> Forked:
    """Start a rank that runs `code`, with stdout and stderr in `log`. The caller must wait for it."""
    global _server  # noqa: PLW0603
    if _server is None:
        _server = _start()
    request = json.dumps({"code": code, "env": dict(env), "folder": str(Path.cwd())}).encode()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        socket.send_fds(_server, [struct.pack("!Q", len(request))], [log.fileno()])
        _server.sendall(request)
        answer = _server.recv(8, socket.MSG_WAITALL)
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if len(answer) != 8:
        raise RuntimeError("tests.runtime.warm: the process that forks ranks has exited")
    return Forked(struct.unpack("!Q", answer)[0], [sys.executable, "-u", "-c", code])


def _start() -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.runtime.warm", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    return ours


def serve(caller: socket.socket) -> str | None:
    """Fork a rank for each request. Return the code to run in a rank, None in the server once the caller has exited."""
    while True:
        header, files, *_ = socket.recv_fds(caller, 8, 1)
        if len(header) != 8:
            return None
        content = b""
        while len(content) < struct.unpack("!Q", header)[0]:
            content += caller.recv(1 << 20)
        request = json.loads(content)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(read)
                os.close(write)
                caller.close()
                _become(request, files[0])
                return str(request["code"])
            os.write(write, struct.pack("!Q", pid))
            os._exit(0)
        os.waitpid(between, 0)  # its child has the caller as its parent from now on
        caller.sendall(os.read(read, 8))
        for descriptor in (read, write, files[0]):
            os.close(descriptor)


def _become(request: dict[str, object], log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[arg-type]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *given, *sys.path[1:]]


def main() -> None:
    for module in MODULES:
        __import__(module)
    code = serve(socket.socket(fileno=int(sys.argv[1])))
    if code is not None:
        sys.argv = ["-c"]
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(code, "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    main()
