"""Creates and fills run folders, and marks them as submitted.

Prevents two submissions of one request at the same time.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.base import processes, safe_files
from hpcinit.base.errors import NOTHING_SUBMITTED, RequestError, SubmitError
from hpcinit.records import run_folder, run_numbers

PRIVATE, PRIVATE_FILE = 0o700, 0o600


_promised: set[Path] = set()  # the results of next_path(): each script in the dry run of a sweep gets another path


def next_path(runs_dir: Path, name: str) -> Path:
    """Return the folder that claim() would create, without creating it. Each call returns a different folder."""
    path = _free(runs_dir, name, _promised)
    _promised.add(path)
    return path


def _free(runs_dir: Path, name: str, promised: Collection[Path] = ()) -> Path:
    """Return the path runs_dir/NAME-NNNN with the next number that no run has had, such as NAME-0001.

    promised: paths to skip, although their folders do not exist yet.
    """
    names = {path.name for path in promised if path.parent == runs_dir}
    return runs_dir / f"{name}-{run_numbers.next_number(runs_dir, name, names):04d}"


def claim(runs_dir: Path, name: str, below: Sequence[str] = (run_folder.LOGS, run_folder.ERRORS)) -> Path:
    """Create the next run folder with mode 0700, and the folders `below` in it.

    Parallel calls are safe, because mkdir is atomic. Raise SubmitError if the folder cannot be created (read-only,
    full, no permission).
    """
    for _ in range(100):
        path, made = _free(runs_dir, name), False
        try:
            safe_files.make_folders(runs_dir)
            if problem := safe_files.runs_dir_ownership_problems(runs_dir):
                raise SubmitError(problem, NOTHING_SUBMITTED)
            path.mkdir(mode=PRIVATE)
            made = True
            run_numbers.take(path)
            for inner in below:
                (path / inner).mkdir(mode=PRIVATE)
            _refuse_wrong_owner(path, path)
            return path
        except FileExistsError:
            if made:  # another run had this number
                path.rmdir()
            elif not runs_dir.is_dir():
                raise SubmitError(f"runs_dir is {str(runs_dir)!r}, which is not a folder") from None
        except OSError as error:
            if made:  # otherwise the folder may belong to another submission
                discard(path)
            raise cannot_write(path, error) from None
    raise SubmitError(f"cannot create a run folder in {runs_dir}: 100 other submissions were faster; submit again")


def make(task: str) -> None:
    """Create the run folder of a task in the folder of its sweep. Raise OSError if that is not possible."""
    for path in (task, f"{task}/{run_folder.LOGS}", f"{task}/{run_folder.ERRORS}"):
        os.mkdir(path, PRIVATE)  # noqa: PTH102 - a thousand of them: Path takes three times as long


def make_component(path: Path, number: int, spec: str) -> None:
    """Create a run folder for one component of a heterogeneous job. The component's ranks form a separate world.

    If that fails, remove the folder of the whole run and raise SubmitError.
    """
    place = path / f"{run_folder.COMPONENT}{number}"
    try:
        make(str(place))
        for name in run_folder.SHARED_BY_COMPONENTS:
            (place / name).symlink_to(f"../{name}")
        write(f"{place}/{run_folder.SPEC}", spec)
    except OSError as error:
        discard(path)
        raise cannot_write(path, error) from None


def _refuse_wrong_owner(path: Path, made: Path) -> None:
    """Raise SubmitError unless the new file or folder `made` in the run folder `path` belongs to this user alone.

    Some file systems choose the owner or the mode themselves (NFS all_squash, inherited access lists). Without this
    check, the job would only fail after its time in the queue.
    """
    if problem := safe_files.path_ownership_problems(made, "the file system chose this owner"):
        discard(path)
        raise SubmitError(f"{problem}. If you cannot change that, choose another runs_dir=...", NOTHING_SUBMITTED)


def fill(path: Path, files: Mapping[str, str]) -> None:
    """Write `files` into the run folder. If that fails, remove the folder and raise SubmitError.

    files: the text of each file, by name.
    """
    try:
        for name, text in files.items():
            write(f"{path}/{name}", text)
        for name in list(files)[:1]:
            _refuse_wrong_owner(path, path / name)
    except OSError as error:
        discard(path)
        raise cannot_write(path, error) from None


def write(path: str, text: str) -> None:
    """Write a file that only this user can read.

    The function makes only four system calls, because a sweep has thousands of files.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
    try:
        data = text.encode()
        while data:  # an almost full disk accepts only a part
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def mark_submitted(path: Path, submission: Mapping[str, object]) -> None:
    """Write submission.json atomically. This file shows that the job exists."""
    safe_files.write_atomically(path / run_folder.SUBMISSION, json.dumps(submission, indent=2) + "\n", PRIVATE_FILE)
    run_numbers.remove_lower(path)


def discard(path: Path) -> None:
    """Remove a run folder, unless a job was submitted for it."""
    if not (path / run_folder.SUBMISSION).exists():
        run_numbers.unmark(path)  # first: while the folder exists, no other submission takes its number
        shutil.rmtree(path, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> SubmitError:
    advice = {
        errno.ENOSPC: "the file system is full; free some space or choose another runs_dir=...",
        errno.EDQUOT: "your quota is used up; free some space or choose another runs_dir=...",
        errno.EROFS: "the file system is read-only; choose another runs_dir=...",
        errno.EACCES: "you may not write there; choose another runs_dir=...",
    }.get(error.errno or 0, "choose another runs_dir=...")
    return SubmitError(f"cannot write the run folder {path}: {error.strerror}; {advice}", NOTHING_SUBMITTED)


# The claim allows one submission of a request at a time, on all login nodes.
#
# Two processes that search the queue in the same second would both find no job. So each of them first creates the same
# file in runs_dir, the claim, and only one succeeds.

TRIES = 20  # a failed try means that another process has just taken or released the claim
UNREADABLE_S = 60.0  # a claim with incomplete content is valid for this time


@dataclass(frozen=True, kw_only=True)
class Owner(processes.Process):
    """The process that has claimed a request, so that no other process submits it.

    run: the run folder that the process created.
    since: when the process started, in seconds since 1970.
    expires_s: for how many seconds its claim is valid.
    """

    run: str
    since: float
    expires_s: float


@contextmanager
def claim_held(run: Path, request: str, expires_s: float) -> Iterator[None]:
    """Claim a request during this block, so that no other process submits the same request.

    Raise RequestError if another process has claimed the request, and SubmitError if the claim cannot be written.

    run: the run folder for the request.
    request: the hash that identifies the request.
    expires_s: how long the submission can take at most. After this time, other hosts ignore the claim.
    """
    path = run.parent / f".submitting-{os.getuid()}-{request}"
    me = Owner(**processes.identity(), run=str(run), since=time.time(), expires_s=expires_s)
    _take(path, me, run)
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(path)[1] == me:  # another process may have replaced the claim after expires_s
                path.unlink()


def _take(path: Path, me: Owner, run: Path) -> None:
    for _ in range(TRIES):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            text, owner = _read(path)
            if not _is_stale(path, owner, run):
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
    """Return the text of the claim file `path`, and the process that wrote it.

    The process is None if the file does not exist or is incomplete.
    """
    text = ""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        return text, run_folder.from_known_fields(Owner, json.loads(text))
    except (OSError, ValueError, TypeError, AttributeError):
        return text, None


def _is_stale(path: Path, owner: Owner | None, run: Path) -> bool:
    """Return whether the process that wrote the claim has ended.

    If this host cannot see the process, return whether the claim is too old, measured with the file server's clock.
    """
    if owner is not None and (ended := owner.has_ended()) is not None:
        return ended
    try:
        age_s = run.stat().st_mtime - path.stat().st_mtime
    except OSError:  # released meanwhile
        return True
    return age_s > (UNREADABLE_S if owner is None else owner.expires_s)


def _remove(path: Path, text: str) -> None:
    """Remove a stale claim, unless another process has replaced it since.

    text: the content of the stale claim.
    """
    aside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
    with suppress(OSError):
        path.rename(aside)
        if aside.read_text(encoding="utf-8", errors="replace") != text:
            os.link(aside, path)
    with suppress(OSError):
        aside.unlink()


def _refusal(path: Path, owner: Owner | None) -> str:
    if owner is None:
        return f"another process is submitting the same request ({path}); try again in a minute"
    since, until = (time.strftime("%H:%M", time.localtime(at)) for at in (owner.since, owner.since + owner.expires_s))
    return (
        f"process {owner.pid} on {owner.host} has been submitting the same request since {since}: check it with "
        f"hpcinit status {shlex.quote(owner.run)}, or add again=true to submit a second job. If that process no longer "
        f"exists, remove its lock, which expires at {until}: rm {shlex.quote(str(path))}"
    )
