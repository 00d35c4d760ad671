"""Remove the locks that killed builds left in torch's folder of extensions, where later builds would wait forever."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from hpcinit.base.text import home
from hpcinit.runtime import ops

AGAIN_S = 0.5  # torch closes a lock and removes its file within microseconds


def clear_abandoned(env: Mapping[str, str], say: ops.Say) -> None:
    """Remove each lock that no process has open any more; print a warning for an old one whose builder is unknown.

    A build has its lock open until it ends (torch up to 2.13, utils/file_baton.py). On a disk of several nodes the
    builder may be on another one, so a lock there is never removed. One rank of each node calls this.
    """
    for root in _roots(env):
        for found in ops.find_locks(root):
            with contextlib.suppress(OSError):  # released meanwhile, or not writable
                if found.state == "stale" and _is_still_stale(found):
                    found.path.unlink()
                    say(f"removed the stale lock {found}")
                elif found.state == "unknown" and found.age_s > ops.QUIET_S:
                    say(
                        f"warning: the lock {found}. A program that loads this extension waits for it forever if its "
                        f"builder was killed. If nothing compiles there, remove it: rm {found.path}"
                    )


def _roots(env: Mapping[str, str]) -> list[Path]:
    """Return the folders of extensions: the user's, or torch's, ~/.cache/torch_extensions/py311_cu128."""
    if env.get(ops.VARIABLE):
        return [Path(env[ops.VARIABLE])]
    return [*(Path(env.get("XDG_CACHE_HOME") or home() / ".cache") / "torch_extensions").glob("py*")]


def _is_still_stale(found: ops.Judgement) -> bool:
    before = found.path.stat()
    time.sleep(AGAIN_S)
    again, after = ops.judge_lock(found.path), found.path.stat()
    return again.state == "stale" and (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns)
