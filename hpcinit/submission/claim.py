"""One submission of a request at a time, on all login nodes: a file in runs_dir that only one process can make.

Two processes that search the queue in the same second both find no job. Why a file, and what remains:
docs/decisions/0037-one-submission-at-a-time.md.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcinit.facts import known_fields
from hpcinit.facts.errors import RequestError
from hpcinit.submission.folder import cannot_write

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
def held(run: Path, request: str, expires_s: float) -> Iterator[None]:
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
        return text, known_fields.made(Owner, json.loads(text))
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
