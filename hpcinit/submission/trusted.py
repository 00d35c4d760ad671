"""Shell lines of the batch script that use a file only if no other user can have written it: facts/ownership.py.

The file is opened before it is checked, and the open file is used: nobody can exchange it in between.
"""

from __future__ import annotations

# hpcinit_fd: a descriptor that bash chooses, so that none of cluster.setup's is taken (bash 4.1).
# stat: '1000:600', the owner and the mode in octal; 2, 3, 6 and 7 of group or others are the right to write.
OURS = r"[[ $(stat -Lc %u:%a /dev/fd/$hpcinit_fd) =~ ^($EUID|0):[0-7]*[0145][0145]$ ]]"
WHOSE = "can be written by another user ($(stat -c 'owner %U, mode %a' {path})), expected yours alone"


def source(path: str) -> str:
    """Return the lines that source `path`, a word of the shell, or end the job."""
    whose = WHOSE.format(path=path)
    return (
        f"exec {{hpcinit_fd}}< {path} ||\n"
        f'  {{ echo hpcinit: error: {path} "cannot be read on $(hostname)" >&2; exit 1; }}\n'
        f"{OURS} ||\n"
        f'  {{ echo hpcinit: error: {path} "{whose}: submit again" >&2; exit 1; }}\n'
        ". /dev/fd/$hpcinit_fd; exec {hpcinit_fd}<&-"
    )
