"""Ranks as child processes of the test: no launcher ends the others when one fails or hangs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.unmeasured import VARIABLE
from tests.warm import DEEPSPEED_RANKS, RANKS, Files

# Code to run first in ranks that use DeepSpeed: its shared memory kernel takes a minute to compile.
DEEPSPEED = "import deepspeed\ndeepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False\n"
PATIENCE_S = 300  # for the import of torch, and for torch.compile, on a busy machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def without_gloos_line(text: str) -> str:
    """Return what a program printed without the line that torch 2.10's gloo prints to stdout for each group."""
    return re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", text, flags=re.MULTILINE)


class Rank:
    """A process that runs `code`, its stdout and stderr together in a file."""

    def __init__(self, code: str, log: Path, env: Mapping[str, str], fresh: bool = False) -> None:
        self._log = log
        code, env = textwrap.dedent(code), {**os.environ, **env}
        with log.open("wb") as stream:
            if not fresh and VARIABLE not in env:  # coverage.py only counts a process whose start it has seen
                kind = DEEPSPEED_RANKS if code.startswith(DEEPSPEED) or "deepspeed=True" in code else RANKS
                with Path(os.devnull).open() as nothing:
                    self.process: subprocess.Popen[bytes] = kind.start(code, env, Files(nothing, stream, stream))
                return
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> tuple[int, str]:
        """Wait for the process; return its exit status and output."""
        status = self.process.wait(PATIENCE_S)
        # triton, in torch's CUDA builds, prints a list of leaks when the process exits.
        return status, self._log.read_text().partition("nanobind: leaked ")[0]


@contextmanager
def ranks(code: str, number: int, folder: Path, *, fresh: bool = False, **env: str) -> Iterator[list[Rank]]:
    """Start `number` ranks of one job on this machine, and kill the remaining ones at the end.

    They are forked from a process that has imported torch (tests/warm.py). `fresh=True` starts a new Python for each.
    """
    where = {"HPCINIT_STARTED_BY": "env", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found: list[Rank] = []
    try:
        for rank in range(number):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
            found.append(Rank(code, folder / f"rank-{rank}.log", {**where, **place, **env}, fresh))
        yield found
    finally:
        for rank_ in found:
            rank_.process.kill()
            rank_.process.wait()
