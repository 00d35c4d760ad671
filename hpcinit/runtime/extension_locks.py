"""Warns about lock files that killed builds left in torch's folder of C++ extensions.

A program with torch up to 2.13 (utils/file_baton.py) waits forever for such a lock:
https://github.com/deepspeedai/DeepSpeed/issues/5205. hpcinit never removes a lock, because the process that builds may
run in another container or on another node.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hpcinit.base import versions
from hpcinit.base.text import home
from hpcinit.runtime.ops import VARIABLE

TORCH_LOCK = "lock"
KERNEL_LOCKS = "2.14"  # torch 2.14.1 uses FileLock, and 2.13.0 uses FileBaton (cpp_extension.py); 2.14.0 is unchecked
QUIET_S = 1800.0  # if a folder has not changed for this long, no build is running there


def report_abandoned(env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Print a warning for each lock file in an extension folder that has not changed for QUIET_S seconds.

    Call this on one rank per node.
    """
    if versions.key(versions.installed("torch") or "0") >= versions.key(KERNEL_LOCKS):
        return
    for path in (path for root in _roots(env) for path in sorted(root.glob(f"*/{TORCH_LOCK}"))):
        with contextlib.suppress(FileNotFoundError):  # torch removes the file within microseconds
            newest = max(each.stat(follow_symlinks=False).st_mtime for each in (path, *path.parent.iterdir()))
            if (age_s := time.time() - newest) > QUIET_S:
                say(
                    f"warning: {path.parent} contains a lock and has not changed for {age_s / 60:.0f} min. If its "
                    "compilation was killed, every program that loads this extension will wait forever. If nothing is "
                    f"being compiled there now, remove the lock: rm {path}"
                )


def _roots(env: Mapping[str, str]) -> Iterable[Path]:
    """Return the folders of compiled extensions: the folder that the user set, or else torch's default folders.

    A default folder is, for example, ~/.cache/torch_extensions/py311_cu128.
    """
    if env.get(VARIABLE):
        return [Path(env[VARIABLE])]
    return (Path(env.get("XDG_CACHE_HOME") or home() / ".cache") / "torch_extensions").glob("py*")
