"""Runs Slurm's commands. Only this module starts them, always with the same environment, timeouts and decoding.

    slurm_client.run(["scontrol", "show", "config"]).stdout
    call = slurm_client.start(["squeue", "--me"])  # runs while the caller does other work
    call.output().stdout

The error `Unreachable` means that Slurm did not reply. If a command ran and failed, its Output has the exit status.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

from hpcinit.base import console, signals

# Users' preferences that would hide jobs (SQUEUE_PARTITION), change the output format (SCONTROL_ONELINER,
# SLURM_TIME_FORMAT) or ask for confirmation (SCANCEL_INTERACTIVE). SLURM_CLUSTERS sends the query to another cluster,
# and sbatch passes it on to the job: docs/decisions/0101-several-slurm-clusters.md.
PREFERENCES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
# Commands that on_cluster() sends to another cluster. sbatch reads it from the script, and job_step.srun() sets it.
SENT = ("squeue", "sinfo", "sacct", "scancel", "scontrol")
# How long each command may take. If several entries match a command, the longest entry applies. A client
# ends after two MessageTimeouts (2 x 10 s by default) if the controller is down. The limits end a hanging client.
TIMEOUTS: dict[str, timedelta] = {
    "squeue": timedelta(seconds=30),
    "sinfo": timedelta(seconds=30),
    "sacct": timedelta(seconds=30),
    "srun --help": timedelta(seconds=30),
    "srun --overlap": timedelta(seconds=30),  # starts a step in a running job
    "scontrol": timedelta(seconds=30),
    "scontrol show node": timedelta(seconds=60),  # 10,000 nodes are some 10 MB of text
    "scontrol show partition": timedelta(seconds=60),
    "sacctmgr": timedelta(seconds=60),  # slurmdbd reads a database
    "scancel": timedelta(seconds=60),  # one request to the controller for each job
    "sbatch --test-only": timedelta(seconds=30),
    # sbatch itself retries a full queue 15 times with growing sleeps, 120 s in all (sbatch.c: MAX_RETRIES).
    "sbatch": timedelta(seconds=180),
}
CHECK = "is SLURM_CONF right, is the controller up?"  # what the user can check after a timeout
OF_THE_END = re.compile(rb"error: \S+: task 0: |Force Terminated StepId")  # srun's messages about a task's exit status
SLOW_S = 1.0  # in a terminal, a note names a command that takes longer
REAP_S = 1.0  # the wait for a killed client, which may hang in the kernel on a dead file server


class Unreachable(Exception):
    """Slurm did not reply."""


class NotStarted(Unreachable):
    """A Slurm command could not be started.

    missing: whether the command is not on PATH.
    """

    def __init__(self, message: str, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing


class TimedOut(Unreachable):
    """The command did not end before its timeout and was killed."""


@dataclass(frozen=True)
class Output:
    """The result of a command that has ended.

    status: its exit status, or a negative signal number.
    """

    command: Sequence[str]
    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """Return what the command printed about its failure. If it printed nothing, return its exit status as text."""
        return self.stderr.strip() or self.stdout.strip() or f"exit status {self.status}, and no output"


_clusters: ContextVar[str] = ContextVar("clusters", default="")  # set by on_cluster(), separately in each thread


@contextlib.contextmanager
def on_cluster(name: str | None) -> Iterator[None]:
    """Send the commands that start in this block to the Slurm cluster `name`. With None, use SLURM_CONF's cluster."""
    before = _clusters.set(name or "")
    try:
        yield
    finally:
        _clusters.reset(before)


def addressed(command: Sequence[str]) -> tuple[str, ...]:
    """Return `command` with the option --clusters, if the call is inside on_cluster().

    The variable SLURM_CLUSTERS would not be enough, because sacct of Slurm 22.05 ignores it.
    """
    name = _clusters.get()
    option = (f"--clusters={name}",) if name and command[0] in SENT else ()
    return (command[0], *option, *command[1:])


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `env` without the variables that change what Slurm's commands print.

    Without `env`, use this process's environment.
    """
    given = os.environ if env is None else env
    return {key: value for key, value in given.items() if not key.startswith(PREFERENCES)}


def timeout(command: Sequence[str]) -> timedelta:
    """Return the timeout of `command`. Raise KeyError if it is not in TIMEOUTS."""
    keys = [key for key in TIMEOUTS if key.split()[0] == command[0] and set(key.split()) <= set(command)]
    if not keys:
        raise KeyError(f"slurm_client.TIMEOUTS has no entry for {command[0]}")
    return TIMEOUTS[max(keys, key=len)]


def run(command: Sequence[str], env: Mapping[str, str] | None = None, *, at_most: timedelta | None = None) -> Output:
    """Run `command` and return its output. Raise Unreachable if Slurm does not reply.

    at_most: a shorter timeout than the one in TIMEOUTS.
    """
    return start(command, env).output(at_most)


def attached(command: Sequence[str], env: Mapping[str, str], started: str = "") -> tuple[int, list[str]]:
    """Run `command` with the stdin and stdout of this process. Return its exit status and the errors of srun itself.

    Raise NotStarted if the command cannot be started.

    started: a line that the command prints to stderr first. It is not shown. srun's messages about the task's exit
        status are not shown either.
    """
    began = console.started(command)
    try:
        process = subprocess.Popen(command, env=environment(env), stderr=subprocess.PIPE)
    except OSError as error:
        raise NotStarted(f"cannot run {command[0]}: {error.strerror}", missing=True) from None
    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the command too, and the command decides whether to exit
    errors: list[str] = []
    runs = False
    try:
        assert process.stderr is not None  # PIPE
        for line in process.stderr:
            ended = line.startswith(b"srun: ") and OF_THE_END.search(line)
            if ended or (started and line.strip() == started.encode()):
                runs, errors = True, []
            elif line.startswith(b"srun: error: ") and not runs:
                errors.append(line.decode(errors="replace").strip().removeprefix("srun: error: "))
            elif runs or not line.startswith(b"srun: "):
                os.write(2, line)
    finally:
        status = process.wait()
        signal.signal(signal.SIGINT, before)
    console.ended(command, time.monotonic() - began, status)
    return status if status >= 0 else 128 - status, errors


def start(command: Sequence[str], env: Mapping[str, str] | None = None) -> Call:
    """Start `command` with `env`, or this process's environment. Raise NotStarted if the command cannot be started."""
    return Call(command, env)


class Call:
    """A running command. It has its own session, so Ctrl-C in the terminal reaches hpcinit but not the command."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        self.command = addressed(command)
        self._timeout = timeout(self.command)
        # sbatch passes its environment on to the job, so its locale stays the user's.
        locale = {} if command[0] == "sbatch" else {"LC_ALL": "C.UTF-8"}
        self.printed = ""  # stdout up to the time when ends_within() returned False
        self._started = console.started(self.command)
        # After a Ctrl-C inside Popen, the command would keep running, and hpcinit could not end it.
        with signals.deferred_interrupts() as received:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    env=environment(env) | locale,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="replace",  # a site's job_submit.lua may print in any encoding
                    start_new_session=True,
                )
            except OSError as error:  # ENOENT also if a script's interpreter is missing
                missing = shutil.which(command[0], path=(os.environ if env is None else env).get("PATH")) is None
                message = f"{command[0]} is not on PATH" if missing else f"cannot run {command[0]}: {error.strerror}"
                raise NotStarted(message, missing) from None
        try:
            for number in received:
                signal.raise_signal(number)
        except BaseException:
            self.drop()
            raise

    def output(self, at_most: timedelta | None = None) -> Output:
        """Wait for the command to end and return its output. On a timeout, kill it and raise TimedOut."""
        limit = self._timeout if at_most is None else min(at_most, self._timeout)
        try:
            if console.in_terminal() and not self.ends_within(min(SLOW_S, limit.total_seconds())):
                console.note_slow(self.command[0])
            stdout, stderr = self._process.communicate(timeout=limit.total_seconds())
        except subprocess.TimeoutExpired:
            self.drop()
            raise TimedOut(f"`{short(self.command)}` did not answer in {round(limit.total_seconds(), 1):g} s") from None
        except BaseException:
            self.drop()
            raise
        console.ended(self.command, time.monotonic() - self._started, self._process.returncode)
        return Output(self.command, self._process.returncode, stdout, stderr)

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the command to end. Return whether it has ended."""
        try:
            self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as running:
            self.printed = running.stdout.decode(errors="replace") if isinstance(running.stdout, bytes) else ""
            return False
        return True

    def drop(self) -> None:
        """Kill the command if it is still running, because its output is not needed."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def short(command: Sequence[str]) -> str:
    """Return a short form of the command for messages: at most three parts and no options.

    An example is 'scontrol show config'.
    """
    return " ".join([part for part in command if not part.startswith("-")][:3])
