"""Process titles, and process states from /proc, which Python does not offer."""

from __future__ import annotations

import ctypes
from pathlib import Path

# prctl(2)
PR_SET_NAME = 15
SHORT = 15  # bytes of a process's short name, which top and `ps -o comm` show


def set_title(title: str) -> None:
    """Show this process as `title` in ps and top: as its short name, and instead of its command line.

    The command line is in this process's own memory (proc(5), stat: arg_start, arg_end), where programs have written
    titles since sendmail. As much of the title as fits there is shown. Raise nothing.
    """
    text = title.encode()
    # No space in the short name: Slurm 22.05 (proctrack/linuxproc) splits /proc/PID/stat at spaces, and would neither
    # signal nor kill a process named "(rank 0)".
    ctypes.CDLL(None).prctl(PR_SET_NAME, text.replace(b" ", b"-")[:SHORT])
    try:
        # "4242 (name with ) and blanks) S 4241 ...": the state is field 3, arg_start and arg_end are 48 and 49.
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(words[48 - 3]), int(words[49 - 3])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:  # both are 0 if the kernel hides them
        ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def state(pid: int) -> str:
    """Return 'R', 'S', 'D', 'T' (stopped, but not by a debugger), 'Z' ... (proc(5), stat), or '' if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def children(pid: int) -> list[int]:
    """Return the children of a process with one thread, or [] if the kernel does not list them."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def stuck(pid: int) -> str:
    """Return 'D (in nfs_wait_bit_killable)': the state of a process that survives SIGKILL, and its kernel function."""
    is_in = state(pid)
    if not is_in:
        return "gone"
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        where = ""
    return f"{is_in} (in {where})" if where else is_in
