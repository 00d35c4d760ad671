"""`python -m hpcinit.local_environment ARCHIVE PREFIX`

Inside a job with launch.env_to_local, one per node: keep the environment on this node's own disk while the job runs.

Says on stdout, a line each, `room HOST FOLDER` (ARCHIVE may be sent to FOLDER/environment.tar), then at the word
`unpack` on stdin `ready HOST SECONDS`; `no HOST WHY` in the place of either. Removes the folder at the end of stdin, or
at SIGTERM, when no rank uses it any more. What SIGKILL leaves is swept by the next job on the node (facts.scratch).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hpcinit.facts import scratch

HEADROOM_MB = 256  # left free on the disk
LARGEST_TEXT = 2**20  # bytes; a script in bin that is longer is a program
END_S = 10.0  # for ranks of a step that is over; what goes on behind Slurm's back is not waited for
# What is sent to all steps of a job before its end: the ranks' business.
NOT_OURS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Terminated(Exception):
    """SIGTERM has come."""


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print(__doc__)
        return 2
    for number in NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminated)
    taken, patience_s = None, END_S
    try:
        try:
            taken = _take(os.environ, Path(argv[0]).stat().st_size)
            _say("room", str(taken[0]))
            if sys.stdin.readline() == "unpack\n":
                begin = time.monotonic()
                unpack(taken[0], Path(argv[1]))
                _say("ready", f"{time.monotonic() - begin:.1f}")
        except OSError as error:
            _say("no", str(error))
        sys.stdin.read()
    except Terminated:
        patience_s = float("inf")  # the ranks save what they have, as long as Slurm lets them
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if taken:
        scratch.remove(*taken, patience_s)
    return 0


def _terminated(number: int, frame: object) -> NoReturn:
    raise Terminated


def _say(word: str, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(word, os.uname().nodename, text.replace("\n", "; "), flush=True)


def _take(env: Mapping[str, str], size: int) -> tuple[Path, int]:
    """A new folder, with room for `size` bytes twice, and its lock. Raises OSError with a whole message."""
    parent = scratch.base(env)
    if parent is None:
        raise OSError("no folder on this node's disk may hold programs: cluster.local_disk=FOLDER names one")
    scratch.sweep(parent)
    free, needed = shutil.disk_usage(parent).free, 2 * size + HEADROOM_MB * 2**20
    if free < needed:
        raise OSError(
            f"{free / 1e9:.1f} GB free in {parent}, expected {needed / 1e9:.1f} GB (the archive and what is in it): "
            "cluster.local_disk=FOLDER names another disk"
        )
    job = f"{env.get('SLURM_JOB_ID', 'job')}.{env.get('SLURM_RESTART_COUNT', '0')}"
    return scratch.make(parent, f"environment-{job}")


def unpack(folder: Path, prefix: Path) -> None:
    """The archive in `folder`, in its place, for what was in `prefix`. Raises OSError."""
    archive, place = folder / scratch.ARCHIVE, folder / scratch.ENVIRONMENT
    place.mkdir()
    try:
        subprocess.run(
            ["tar", "--extract", "--no-same-owner", "--file", archive, "--directory", place],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        raise OSError(f"tar cannot unpack {archive}: {error.stderr.strip()[-500:]}") from None
    archive.unlink()
    adapt(place, prefix)


def adapt(place: Path, prefix: Path) -> None:
    """Scripts in bin name the environment's folder in their first line; what activates it, in a variable.

    Python itself finds its environment from its own path (pyvenv.cfg, PEP 405). All else that has the old path in it
    goes on working, from the old place, which is still there.
    """
    old = b"|".join(re.escape(bytes(path)) for path in (prefix, prefix.resolve()))
    for file in (place / "bin").iterdir():
        if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGEST_TEXT:
            continue
        text = file.read_bytes()
        if b"\0" not in text and re.search(old, text):
            # As a function: a path may have a backslash in it, too. Not /home/me/venv2 for /home/me/venv.
            file.write_bytes(re.sub(rb"(?:%b)(?![\w.-])" % old, lambda found: bytes(place), text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
