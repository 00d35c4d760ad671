"""Report the locks that killed builds left in torch's folder of extensions, where later builds would wait forever.

Invariant: a lock there is never removed. A build that runs has its lock open (torch up to 2.13, utils/file_baton.py),
but its process may be invisible: in another container, or on another node, also if this node exports its disk over NFS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.text import home
from hpcinit.runtime import ops

# Disks that usually belong to one node: a lock that no visible process has open is reported at once.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


def report_abandoned(env: Mapping[str, str], say: ops.Say) -> None:
    """Print a warning for each lock whose builder may have ended. One rank of each node calls this."""
    for root in _roots(env):
        for found in ops.find_locks(root):
            quiet = found.age_s > ops.QUIET_S or safe_files.file_system(found.path) in LOCAL
            with contextlib.suppress(FileNotFoundError):  # torch closes a lock and removes its file within microseconds
                if found.state != "held" and quiet and ops.judge_lock(found.path).state != "held":
                    say(
                        f"warning: the lock {found}. A program that loads this extension waits for it forever if its "
                        f"builder was killed. If nothing compiles there, remove it: rm {found.path}"
                    )


def _roots(env: Mapping[str, str]) -> list[Path]:
    """Return the folders of extensions: the user's, or torch's, ~/.cache/torch_extensions/py311_cu128."""
    if env.get(ops.VARIABLE):
        return [Path(env[ops.VARIABLE])]
    return [*(Path(env.get("XDG_CACHE_HOME") or home() / ".cache") / "torch_extensions").glob("py*")]
