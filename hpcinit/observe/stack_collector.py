"""Samples the ranks of one run on one node: their Python stacks, process states and CPU time.

`hpcinit stacks` and `hpcinit exec` send this file to the nodes as text. It needs only Python and /proc, because hpcinit
and the run's environment may exist only inside a container.

A thread in each rank (runtime/lifecycle/stack_signal.py) writes the rank's stacks on request. If C code holds the GIL,
this thread can't run. This program then sends the thread a signal, and a handler in C writes the stacks. It sends no
signal to a process without the handler, because the signal would end the process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")
RUN, MARK = (
    "HPCINIT_RUN",
    "HPCINIT_EXEC",
)  # environment variables: RUN is the run folder; MARK is set in processes that are not ranks
# Name of the file in memory to which a rank's handler writes, as in runtime/lifecycle/stack_signal.py.
LABEL = re.compile(r"/memfd:hpcinit-stacks (\d+) (\d+) (\d+) (0x[0-9a-f]+) (\d+) (\d+)\b")
# Variables that give a process its place in a process group or in a Slurm step.
OF_A_RANK = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|WORLD_SIZE|NAME)$|MASTER_(ADDR|PORT)$|(TORCHELASTIC|HPCINIT|SLURM|PMI|PMIX)_"
)
CHUNK = 800  # characters; Slurm mixes the output of tasks only between lines below 1 KiB
PREFIX = "hpcinit-stacks"
SETTLED_S, HANDLER_S = 0.03, 1.0  # stacks are complete after SETTLED_S without new text; time limit of the handler
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)')
TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250}
GIL_S = 3.0  # Python code gives the GIL to another thread within 5 ms, but on a loaded machine that thread may wait
TORCHRUN = "TORCHELASTIC_RUN_ID"


class Label(NamedTuple):
    """How to read a stack that faulthandler wrote in a rank.

    main: the id of the main thread, as faulthandler writes it.
    thread: the thread to which the signal is sent.
    pipe: the pipe through which other processes request the rank's stacks.
    path: the file with the stacks, /proc/PID/fd/N.
    """

    rank: int
    signal: int
    main: str
    thread: int
    pipe: str
    path: Path


class Process(NamedTuple):
    """A process on this node that may be a rank.

    level: how likely the process is the rank itself: 0 to 2. A process that only starts ranks has a lower level.
    label: a Label if the process installed hpcinit's stack handler, otherwise None.
    """

    pid: int
    parent: int
    rank: int
    level: int
    label: Any  # a Label or None
    title: str
    python: bool


def main(argv: list[str]) -> int:
    """Print samples of the stacks of this node's ranks, or run a command in the environment of one of these ranks.

    argv: one JSON object with the request.
    """
    asked = json.loads(argv[0])
    if "command" in asked:
        return beside(asked)
    found = ranks(asked)
    if asked["ranks"]:
        found = [one for one in found if one.rank in asked["ranks"]]
    results: list[Any] = [None] * len(found)

    def sample(at: int) -> None:
        results[at] = _sampled(found[at], asked["samples"], asked["apart_s"])

    threads = [threading.Thread(target=sample, args=(at,)) for at in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host = os.environ.get("SLURMD_NODENAME", "") if asked["slurm"] else ""
    document = {"host": host or os.uname().nodename, "ranks": [one for one in results if one]}
    for line in encoded(document):
        print(line)
    return 0


def beside(asked: dict[str, Any]) -> int:
    """Replace this process with a command in the environment and folder of a rank. Return only if that fails.

    The variables that describe the rank's place in its process group are removed, because a program that joins this
    group would disturb the run.
    """
    found = [one for one in ranks(asked) if asked["rank"] in (None, one.rank)]
    own = os.environ
    env, folder = dict(own), asked["workdir"]
    host = own.get("SLURMD_NODENAME") or os.uname().nodename
    if found:
        rank = found[0]
        with contextlib.suppress(OSError):
            folder = str((PROC / str(rank.pid) / "cwd").readlink())
        with contextlib.suppress(OSError):
            env = {name: value for name, value in _environ(rank.pid).items() if not OF_A_RANK.match(name)}
            env.update({name: own[name] for name in own if name == "TERM" or name.startswith("SLURM")})
        env["HPCINIT_RANK_PID"] = str(rank.pid)
        note = f"on {host}, beside rank {rank.rank} (process {rank.pid}, the value of $HPCINIT_RANK_PID)"
    else:
        which = "no rank" if asked["rank"] is None else f"no process of rank {asked['rank']}"
        note = f"{which} on {host}: the command runs with this shell's environment, not the run's"
    env[MARK] = asked["run"]
    if asked["started"]:  # exec_command.py removes this line; errors below it are those of the command
        print(asked["started"], file=sys.stderr)
    if not found or asked["verbose"]:
        print(f"hpcinit: {note}", file=sys.stderr)
    sys.stderr.flush()
    command = asked["container"] + asked["command"]
    path = own.get("PATH") if asked["container"] else env.get("PATH")
    try:
        os.chdir(folder)
        os.execve(shutil.which(command[0], path=path) or command[0], command, env)
    except OSError as error:
        what = folder if error.filename == folder else command[0]
        print(f"hpcinit: error: cannot run {what!r} on {host}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def encoded(document: dict[str, Any]) -> list[str]:
    """Return the document as short lines. Each line starts with a prefix.

    stacks.decoded() finds these lines, even among the output of other nodes, and joins them.
    """
    data = base64.b64encode(zlib.compress(json.dumps(document).encode())).decode(errors="replace")
    parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return [f"{PREFIX} {document['host']} {at} {len(parts)} {part}" for at, part in enumerate(parts)]


def ranks(asked: dict[str, Any], proc: Path = PROC) -> list[Process]:
    """Return the processes on this node that are ranks of the run, sorted by rank."""
    found = {one.pid: one for one in _processes(asked, proc)}
    for one in list(found.values()):  # a process with descendants that are more likely ranks only starts ranks
        above = one.parent
        while above in found:
            if found[above].level < one.level:
                found[above] = found[above]._replace(rank=-1)
            above = found[above].parent
    own = {pid: one for pid, one in found.items() if one.rank >= 0}
    # The children of a rank have its environment too: DataLoader workers, and the Python that a shell script starts.
    top = [one for one in own.values() if not _same_rank_above(one, own)]
    return sorted((_python_below(one, own) for one in top), key=lambda one: (one.rank, one.pid))


def _same_rank_above(one: Process, own: dict[int, Process]) -> bool:
    return one.parent in own and own[one.parent].rank == one.rank


def _python_below(one: Process, own: dict[int, Process]) -> Process:
    while not one.python:
        below = [child for child in own.values() if child.parent == one.pid and child.rank == one.rank]
        if not below:
            break
        one = next((child for child in below if child.python), below[0])
    return one


def _processes(asked: dict[str, Any], proc: Path) -> list[Process]:
    wanted = os.path.realpath(asked["run"])
    own = os.environ if asked["slurm"] else {}
    same = {name: own[name] for name in ("SLURM_JOB_ID", "SLURMD_NODENAME") if name in own}
    found = []
    for place in proc.iterdir():
        if not place.name.isdecimal():
            continue
        try:
            raw = (place / "environ").read_bytes()
            if RUN.encode() not in raw:
                continue
            env = _environ(int(place.name), raw)
            if MARK in env or os.path.realpath(env.get(RUN, "/")) != wanted:
                continue
            if any(env.get(name) != value for name, value in same.items()):
                continue
            title = (place / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
            if title.startswith("hpcinit: "):  # the fork server, the monitor of the world size
                continue
            parent = int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            python = (place / "exe").readlink().name.startswith("python")
            label = _label(place)
        except (OSError, ValueError, IndexError):  # it has ended, or belongs to another user
            continue
        rank, level = _rank(env, label, bool(asked["tasks"]))
        found.append(Process(int(place.name), parent, rank, level, label, title, python))
    return found


def _environ(pid: int, raw: bytes = b"") -> dict[str, str]:
    raw = raw or (PROC / str(pid) / "environ").read_bytes()
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in raw.split(b"\0") if b"=" in entry)


def _rank(env: dict[str, str], label: Any, tasks: bool) -> tuple[int, int]:
    """Return the rank and the level of a process (see Process.level), or (-1, 0) if it is not a rank.

    label: the process's Label, or None.
    tasks: whether each Slurm task of the job is a rank.
    """
    given = env.get("RANK", "")
    if label:
        return label.rank, 2 if TORCHRUN in env else 1
    if given.isdecimal():
        return int(given), 2 if TORCHRUN in env else 1
    task = env.get("SLURM_PROCID", "")
    if tasks and task.isdecimal() and env.get("SLURM_STEP_ID", "").isdecimal():  # the batch script has no step id
        return int(task), 0
    return -1, 0


def _label(place: Path) -> Any:
    """Return the Label of a process, or None if the process did not install hpcinit's stack handler.

    A forked child of a rank has no Label: it inherits the handler's open file, but not the handler.
    """
    for file in (place / "fd").iterdir():
        with contextlib.suppress(OSError):
            match = LABEL.match(str(file.readlink()))
            if match and int(match[2]) == _own_pid(place):
                return Label(int(match[1]), int(match[3]), match[4], int(match[5]), f"pipe:[{match[6]}]", file)
    return None


def _own_pid(place: Path) -> int:
    """Return the id of a process or thread inside its container, which may differ from its id on the node."""
    for line in (place / "status").read_text(errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return int(place.name)


def _sampled(one: Process, samples: int, apart_s: float) -> dict[str, Any]:
    start, first, own = time.monotonic(), _cpu_s(one.pid), OwnStacks(one)
    found: list[dict[str, Any]] = []
    for at in range(samples):
        time.sleep(max(0.0, start + at * apart_s - time.monotonic()))
        state = _state(one.pid)
        sample: dict[str, Any] = {"state": state, "wchan": _read(one.pid, "wchan").strip("0\n")}
        if state in ("", "Z", "X"):
            break
        if state not in ("T", "t"):
            sample["frames"] = own.frames()
        found.append(sample)
    last = _cpu_s(one.pid)
    own.close()
    return {
        "rank": one.rank,
        "pid": one.pid,
        "title": one.title[:200],
        "python": one.python,
        "state": _state(one.pid),
        "gil_kept": own.gil_is_kept,
        "cpu_s": None if first is None or last is None else last - first,
        "samples": found,
    }


class OwnStacks:
    """The stacks that a rank writes itself.

    gil_is_kept: whether C code holds the GIL, or None if it is unknown.
    """

    def __init__(self, one: Process) -> None:
        self._one, self._pipe = one, -1
        self.gil_is_kept: bool | None = None
        with contextlib.suppress(OSError):
            for file in (PROC / str(one.pid) / "fd").iterdir() if one.label else ():
                if self._pipe < 0 and _link(file) == one.label.pipe:
                    self._pipe = os.open(file, os.O_WRONLY | os.O_NONBLOCK)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)

    def frames(self) -> list[list[Any]]:
        """Return the frames of the main thread, or [] if the rank cannot write them."""
        if self._pipe < 0:
            return []
        with contextlib.suppress(OSError):
            os.truncate(self._one.label.path, 0)
            limit_s = SETTLED_S
            if not self.gil_is_kept:  # otherwise the thread has not answered the last request yet
                os.write(self._pipe, b".")
                limit_s = GIL_S
            self.gil_is_kept = not self._written(limit_s)
            if self.gil_is_kept and _catches(self._one.pid, self._one.label.signal) and _signal_thread(self._one):
                self._written(HANDLER_S)
            return main_frames(self._one.label.path.read_text(errors="replace"), self._one.label.main)
        return []

    def _written(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for the rank's stacks. Return whether the rank has written them."""
        end, size, since = time.monotonic() + limit_s, 0, time.monotonic()
        while time.monotonic() < end and (size == 0 or time.monotonic() - since < SETTLED_S):
            time.sleep(0.005)
            now = self._one.label.path.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
        return size > 0


def _link(file: Path) -> str:
    with contextlib.suppress(OSError):
        return str(file.readlink())
    return ""


def _signal_thread(one: Process) -> bool:
    """Send the rank's stack thread a signal whose handler writes the stacks. Return whether it was sent.

    In another thread, the signal could interrupt a system call of the program.
    """
    import ctypes  # noqa: PLC0415 - some builds of Python lack it

    libc = ctypes.CDLL(None, use_errno=True)
    for place in (PROC / str(one.pid) / "task").iterdir():
        if _own_pid(place) == one.label.thread:
            words = (one.pid, int(place.name), one.label.signal)
            if hasattr(libc, "tgkill"):
                return bool(libc.tgkill(*words) == 0)
            number = TGKILL.get(os.uname().machine)  # glibc before 2.30
            return number is not None and libc.syscall(number, *words) == 0
    return False


def main_frames(text: str, thread: str) -> list[list[Any]]:
    """Return the frames of one thread in faulthandler's output."""
    frames, inside = [], False
    for line in text.splitlines():
        match = FRAME.match(line)
        if match and inside:
            frames.append([match["file"], int(match["line"]) if match["line"].isdecimal() else 0, match["name"]])
        elif not match:
            words = line.replace("Current thread", "Thread").split()
            inside = words[:1] == ["Thread"] and words[1:2] == [thread]
    return frames


def _catches(pid: int, number: int) -> bool:
    for line in _read(pid, "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _state(pid: int) -> str:
    words = _read(pid, "stat").rpartition(")")[2].split()
    return words[0] if words else ""


def _cpu_s(pid: int) -> Any:
    """Return the CPU time of all threads of a process in seconds, or None if the process is gone."""
    words = _read(pid, "stat").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if len(words) > 12 else None


def _read(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
