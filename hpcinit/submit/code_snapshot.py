"""Implements snapshot=git: copies the checkout, with its uncommitted changes, into the run folder.

The job runs the program from this copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from hpcinit.base.errors import NOTHING_SUBMITTED, SubmitError
from hpcinit.checks.checkout import SnapshotPlan, checkout_commit, checkout_diff, untracked
from hpcinit.records import run_folder


def take_snapshot(plan: SnapshotPlan, folder: Path) -> dict[str, Any]:
    """Copy the files of the checkout into the run folder. Return what provenance.json records about the copy.

    Raise SubmitError if a file cannot be copied.
    """
    digest = hashlib.sha256()
    (folder / run_folder.CODE).mkdir(mode=0o700)
    try:
        for name in plan.files:
            source, target = plan.root / name, folder / run_folder.CODE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = source.lstat().st_mode
            if stat.S_ISLNK(mode):
                target.symlink_to(what := _link(plan, name))
                content = what.encode(errors="surrogateescape")
            else:
                shutil.copy2(source, target)
                content = target.read_bytes()
            # The hash includes the name and the mode, because a change of the executable bit is a change, too.
            digest.update(os.fsencode(f"{name}\0{stat.S_IMODE(mode) & 0o111:o}\0"))
            digest.update(hashlib.sha256(content).digest())
        (folder / run_folder.CODE_FILES).write_text(json.dumps(plan.files) + "\n")
        earlier = plan.root.parent / run_folder.CODE_DIFF
        changed = earlier.read_bytes() if plan.before else checkout_diff(plan.root)
        (folder / run_folder.CODE_DIFF).write_bytes(changed)
    except OSError as error:
        raise SubmitError(
            f"snapshot=git: cannot copy {error.filename} into {folder}: {error.strerror}", NOTHING_SUBMITTED
        ) from None
    if plan.before:
        return _the_same(plan, digest.hexdigest())
    return {
        "root": str(plan.root),
        "workdir": os.path.relpath(plan.workdir, plan.root),
        "commit": checkout_commit(plan.root),
        "untracked": [name for name in untracked(plan.root) if name in plan.contents],
        "files": len(plan.files),
        "bytes": plan.size,
        "sha256": digest.hexdigest(),
    }


def _the_same(plan: SnapshotPlan, sha256: str) -> dict[str, Any]:
    if sha256 != plan.before.get("sha256"):
        raise SubmitError(
            f"snapshot=git: the files in {plan.root} have changed since the run was submitted (sha256 is "
            f"{sha256[:12]}, and was {str(plan.before.get('sha256'))[:12]}); --fresh-code submits the changed files",
            NOTHING_SUBMITTED,
        )
    return {**plan.before, "from": str(plan.root)}


def _link(plan: SnapshotPlan, name: str) -> str:
    """Return the path to which the copy of the symbolic link `name` should point.

    If the link points to a file of the checkout, its copy points to the copy of that file.
    """
    source = plan.root / name
    text = os.readlink(source)  # noqa: PTH115 - Path.readlink() would normalize the path
    leads = os.path.normpath(source.parent / text)
    inside = os.path.relpath(leads, plan.root)
    if inside in plan.contents:
        return text if not os.path.isabs(text) else os.path.relpath(leads, source.parent)  # noqa: PTH117
    return leads
