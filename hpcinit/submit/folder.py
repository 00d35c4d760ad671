"""The run folder: claimed, filled, and marked as submitted once it is; one submission at a time per request."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.errors import NOTHING_SUBMITTED, RequestError, SubmitError
from hpcinit.records import run_folder

PRIVATE, PRIVATE_FILE = 0o700, 0o600


_promised: set[Path] = set()  # by next_path in this process: the dry run of a sweep prints several scripts


def next_path(runs_dir: Path, name: str) -> Path:
    """The folder that claim() would make, and at the next call the one after it. Touches nothing."""
    path = _free(runs_dir, name, _promised)
    _promised.add(path)
    return path


def _free(runs_dir: Path, name: str, promised: Collection[Path] = ()) -> Path:
    """runs_dir/NAME-0001, or the number after the highest there is."""
    pattern = re.compile(re.escape(name) + r"-(\d{4,})")
    there = [path for path in promised if path.parent == runs_dir]
    there += list(runs_dir.iterdir()) if runs_dir.is_dir() else []
    taken = [int(m[1]) for path in there if (m := pattern.fullmatch(path.name))]
    return runs_dir / f"{name}-{max(taken, default=0) + 1:04d}"


def claim(runs_dir: Path, name: str, below: Sequence[str] = (run_folder.LOGS, run_folder.ERRORS)) -> Path:
    """Make the next run folder, mode 0700, and those `below` it. Safe beside others that do the same: mkdir decides.

    Raises SubmitError where it cannot be made (read-only, full, no permission).
    """
    for _ in range(100):
        path = _free(runs_dir, name)
        try:
            safe_files.make_folders(runs_dir)
            if said := safe_files.runs_dir_ownership_problems(runs_dir):
                raise SubmitError(said, NOTHING_SUBMITTED)
            path.mkdir(mode=PRIVATE)
            for inner in below:
                (path / inner).mkdir(mode=PRIVATE)
            _refuse_strange_owner(path, path)
            return path
        except FileExistsError:
            if not runs_dir.is_dir():
                raise SubmitError(f"runs_dir is {str(runs_dir)!r}, which is not a folder") from None
        except OSError as error:
            discard(path)
            raise cannot_write(path, error) from None
    raise SubmitError(f"100 others claimed a run folder in {runs_dir} before this one; submit again")


def make(task: str) -> None:
    """The run folder of a task, inside of its sweep's. Raises OSError."""
    for path in (task, f"{task}/{run_folder.LOGS}", f"{task}/{run_folder.ERRORS}"):
        os.mkdir(path, PRIVATE)  # noqa: PTH102 - a thousand of them: Path takes three times as long


def _refuse_strange_owner(path: Path, made: Path) -> None:
    """Raise SubmitError if what hpcinit has just made in the run folder `path` is not this user's alone: the job would
    refuse it, after its time in the queue. Some file systems choose the owner or the mode (NFS all_squash, inherited
    access lists)."""
    if said := safe_files.path_ownership_problems(
        made, "its file system chooses the owner: choose another runs_dir=..."
    ):
        discard(path)
        raise SubmitError(f"{said}, or choose another runs_dir=...", NOTHING_SUBMITTED)


def fill(path: Path, files: Mapping[str, str]) -> None:
    """Write the files, name to text. Raises SubmitError, and then the folder is gone."""
    try:
        for name, text in files.items():
            write(f"{path}/{name}", text)
        for name in list(files)[:1]:
            _refuse_strange_owner(path, path / name)
    except OSError as error:
        discard(path)
        raise cannot_write(path, error) from None


def write(path: str, text: str) -> None:
    """Write a file that only this user can read. In four calls of the system: a sweep has thousands of files."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
    try:
        data = text.encode()
        while data:  # a disk that is almost full takes a part
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def mark_submitted(path: Path, submission: Mapping[str, object]) -> None:
    """Write submission.json whole or not at all: its presence means that the job exists."""
    safe_files.write_atomically(path / run_folder.SUBMISSION, json.dumps(submission, indent=2) + "\n", PRIVATE_FILE)


def discard(path: Path) -> None:
    """Take away a run folder that never became a job."""
    if not (path / run_folder.SUBMISSION).exists():
        shutil.rmtree(path, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> SubmitError:
    do = {
        errno.ENOSPC: "the file system is full; free some space or choose another runs_dir=...",
        errno.EDQUOT: "your quota is used up; free some space or choose another runs_dir=...",
        errno.EROFS: "the file system is read-only; choose another runs_dir=...",
        errno.EACCES: "you may not write there; choose another runs_dir=...",
    }.get(error.errno or 0, "choose another runs_dir=...")
    return SubmitError(f"cannot write the run folder {path}: {error.strerror}; {do}", NOTHING_SUBMITTED)


# One submission of a request at a time, on all login nodes: a file in runs_dir that only one process can make.
#
# Two processes that search the queue in the same second both find no job. Why a file, and what remains:
# docs/decisions/0037-one-submission-at-a-time.md.

TRIES = 20  # each failed one means that another process has just taken or released the claim
UNREADABLE_S = 60.0  # how long a claim counts whose owner has not written it, or not whole


@dataclass(frozen=True)
class Owner:
    """The process that submits. place: host and pid namespace, in which `pid` means something. began: the kernel's
    start time of the process. run: its run folder. expires_s: after how many seconds the claim no longer counts."""

    host: str
    place: str
    pid: int
    began: str
    run: str
    since: float
    expires_s: float


@contextmanager
def claim_held(run: Path, request: str, expires_s: float) -> Iterator[None]:
    """Hold the claim of the request with this hash, whose run folder is `run`; release it at the end.

    expires_s: longer than the submission can take; after it other hosts ignore the claim. Raises RequestError while
    another process holds it, and SubmitError where the file cannot be written.
    """
    path = run.parent / f".submitting-{os.getuid()}-{request}"
    place = f"{platform.node()} {_link('/proc/self/ns/pid')}"
    me = Owner(platform.node(), place, os.getpid(), _began(os.getpid()), str(run), time.time(), expires_s)
    _take(path, me, run)
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(path)[1] == me:  # not one that has replaced it after expires_s
                path.unlink()


def _take(path: Path, me: Owner, run: Path) -> None:
    for _ in range(TRIES):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            text, owner = _read(path)
            if not _is_stale(path, owner, run, me.place):
                raise RequestError(_refusal(path, owner)) from None
            _remove(path, text)
            continue
        except OSError as error:
            raise cannot_write(run, error) from None
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(me)))
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise cannot_write(run, error) from None
        return
    raise RequestError(_refusal(path, None))


def _read(path: Path) -> tuple[str, Owner | None]:
    """Return the text of the claim and its owner; None where it is gone, or not written whole so far."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        return text, run_folder.from_known_fields(Owner, json.loads(text))
    except (OSError, ValueError, TypeError, AttributeError):
        return text, None


def _is_stale(path: Path, owner: Owner | None, run: Path, place: str) -> bool:
    """Whether the owner is gone. Ages are the file server's: the run folder was made there a moment ago."""
    if owner is not None and owner.place == place and owner.began:
        return _began(owner.pid) != owner.began
    try:
        age_s = run.stat().st_mtime - path.stat().st_mtime
    except OSError:  # released meanwhile
        return True
    return age_s > (UNREADABLE_S if owner is None else owner.expires_s)


def _remove(path: Path, text: str) -> None:
    """Remove a stale claim, and not one that another process has put in its place since `text` was read."""
    aside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
    with suppress(OSError):
        path.rename(aside)
        if aside.read_text(encoding="utf-8", errors="replace") != text:
            os.link(aside, path)
    with suppress(OSError):
        aside.unlink()


def _refusal(path: Path, owner: Owner | None) -> str:
    if owner is None:
        return f"the same request is being submitted by another process ({path}); try again in a minute"
    since, until = (time.strftime("%H:%M", time.localtime(at)) for at in (owner.since, owner.since + owner.expires_s))
    return (
        f"the same request is being submitted by process {owner.pid} on {owner.host} since {since}, run folder "
        f"{owner.run}; expected a request that differs in something: `hpcinit status {shlex.quote(owner.run)}` shows "
        "what becomes of it, again=true submits this one a second time. If that process is gone: rm "
        f"{shlex.quote(str(path))}, which otherwise counts until {until}"
    )


def _began(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, proc(5); '' where there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return words[19] if words[0] != "Z" else ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
