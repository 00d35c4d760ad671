"""What Linux has for a process and its children, and Python has not."""

from __future__ import annotations

import ctypes
from pathlib import Path

# prctl(2)
PR_SET_NAME = 15
SHORT = 15  # bytes of a process's short name, which top and `ps -o comm` show


def call_this(title: str) -> None:
    """Show this process as `title` in ps and top: by its short name, and in the place of its command line.

    The words of the command line lie in this process's own memory (proc(5), stat: arg_start, arg_end), where programs
    have written titles since sendmail; as much of the title as fits there is shown. Raises nothing.
    """
    text = title.encode()
    # No blank in the short name: Slurm 22.05 (proctrack/linuxproc) reads /proc/PID/stat word by word, and neither
    # signals nor kills what is called (rank 0).
    ctypes.CDLL(None).prctl(PR_SET_NAME, text.replace(b" ", b"-")[:SHORT])
    try:
        # "4242 (name with ) and blanks) S 4241 ...": the state is field 3, arg_start and arg_end are 48 and 49
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(words[48 - 3]), int(words[49 - 3])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:  # both 0 where the kernel keeps them from us
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def state(pid: int) -> str:
    """'R', 'S', 'D', 'T' (stopped, but not by a debugger), 'Z' ...: proc(5), stat; '' if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def children(pid: int) -> list[int]:
    """Of a process with one thread; [] where the kernel does not tell."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def stuck(pid: int) -> str:
    """'D (in nfs_wait_bit_killable)': the state of a process that SIGKILL has not ended, and what it is in."""
    is_in = state(pid)
    if not is_in:
        return "gone"
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        where = ""
    return f"{is_in} (in {where})" if where else is_in
