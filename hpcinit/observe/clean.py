"""`hpcinit clean [RUN ...]`: lists finished runs with state, age and size, and removes them if the user agrees.

With --outside, it lists and removes what hpcinit wrote outside of run folders. With --all, it does both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base import console, json_output, safe_files
from hpcinit.base.console import plain
from hpcinit.base.errors import Failure, RequestError
from hpcinit.base.text import counted
from hpcinit.observe import find_runs, outside, overview
from hpcinit.records import heartbeats, job_record, run_folder, run_numbers

DAY_S = 86_400.0
ALIVE_S = 120.0  # a rank that wrote a heartbeat within this time is treated as running
SUBMITTING_S = 3600.0  # for this long, a sweep may still be submitting tasks, because it may wait for the controller


@dataclass(frozen=True)
class Finished:
    """A run that is over.

    age_s: seconds since its end.
    size: bytes on disk.
    """

    run: overview.Run
    age_s: float
    size: int

    @property
    def state(self) -> str:
        return self.run.now.name if self.run.now else find_runs.count_states(self.run.tasks)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit clean", description="List finished runs and remove their folders after a confirmation."
    )
    parser.add_argument("run", nargs="*", help="run folder, its name, a job id, or all (the default)")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--older-than", type=float, default=0.0, metavar="DAYS", help="only runs that ended more than DAYS days ago"
    )
    parser.add_argument("--state", default="", help="only runs in this state, or in one of several: FAILED,CANCELLED")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--outside",
        action="store_true",
        help="instead of runs, list and remove what hpcinit wrote outside of run folders",
    )
    which.add_argument(
        "--all", action="store_true", help="list and remove finished runs, and then what --outside removes"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="remove without a confirmation")
    return console.add_verbosity_options(parser, "one JSON object per line, for each finished run")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    if (options.outside or options.all) and (options.run or options.state or options.older_than):
        raise RequestError(
            f"{_flag(options)} cannot be combined with a run, --state or --older-than, because it removes files that "
            f"do not belong to a run. Type: hpcinit clean {_flag(options)}"
        )
    if not (options.outside or (options.all and not find_runs.all_runs(options.runs_dir))):
        _runs(options)
    if options.outside or options.all:
        _outside(options)
    return 0


def _runs(options: argparse.Namespace) -> None:
    """List the finished runs, and remove them if the user agrees. Raise Failure if a run can't be removed."""
    paths = find_runs.matching_runs(options.run, options.runs_dir)
    named = not find_runs.means_all_runs(options.run)
    found = list(_finished(paths, options, named))
    if not found:
        console.note(f"no finished runs to remove in {options.runs_dir.absolute()}")
        return
    for one in found if not options.json else ():
        if options.quiet:
            print(plain(one.run.path.name))
        else:
            print(plain(f"{one.run.path.name:24} {one.state:10} {_age(one.age_s):>7}  {_size(one.size):>9}"))
    size = _size(sum(one.size for one in found))
    question = f"remove {counted(len(found), 'run')} ({size}) with their logs and checkpoints? [y/N] "
    if options.yes or (not options.json and _confirmed(question)):
        removed = _remove(found)
    else:
        removed = set()
        console.note("nothing was removed. To remove these runs without confirmation, repeat the command with --yes")
    for one in found if options.json else ():
        states = Counter(now.name for _, now in one.run.parts)
        fields = {"run": str(one.run.path), "states": states, "age_s": one.age_s, "bytes": one.size}
        print(json_output.line("clean", {**fields, "removed": one.run.path in removed}))
    if removed and not options.json:
        freed = sum(one.size for one in found if one.run.path in removed)
        console.note(f"removed {counted(len(removed), 'run')}, {_size(freed)}")
    if options.yes and len(removed) < len(found):
        raise Failure(f"{counted(len(found) - len(removed), 'run')} could not be removed; see the messages above")


def _finished(paths: Sequence[Path], options: argparse.Namespace, named: bool) -> Iterator[Finished]:
    """Yield the runs that can be removed. Raise RequestError if a run that the user named is not finished."""
    wanted = {name.strip().upper() for name in options.state.split(",") if name.strip()}
    for run in overview.read(paths):
        if problem := _problem(run):
            if named:
                raise RequestError(problem)
            continue
        names = {now.name for _, now in run.parts}
        age_s = max(0.0, time.time() - _end(run))
        if names and (not wanted or names <= wanted) and age_s >= options.older_than * DAY_S:
            yield Finished(run, age_s, _used(run.path))


def _problem(run: overview.Run) -> str:
    if run.error:
        return str(run.error)
    return next(_problems(run), "")


def _problems(run: overview.Run) -> Iterator[str]:
    name, path = run.path.name, run.path
    if find_runs.is_sweep(path.absolute().parent):
        whole = path.absolute().parent
        yield f"{path} is a task of a sweep, and only a whole sweep can be removed: hpcinit clean {whole}"
    if path.is_symlink():
        yield f"{path} is a link to {path.readlink()}: remove the folder and the link yourself"
    if not safe_files.is_own(path):
        yield f"{path} belongs to {safe_files.user(path.stat().st_uid)}: only its owner can remove it"
    yourself = f"so the run may not have ended. If it has ended, remove the folder yourself: rm -r {path}"
    written = (path / run_folder.SUBMISSION).stat().st_mtime
    if len(run.parts) < len(run.tasks) and time.time() - written < SUBMITTING_S:
        yield f"{name} has tasks that are not submitted yet, {yourself}"
    for part, now in run.parts:
        if now.name == "UNKNOWN":
            yield f"the state of {name} is UNKNOWN ({now.reason}), {yourself}"
        if now.away and now.exit_status != 0:
            yield f"Slurm does not answer ({now.reason}) and may restart {name}, {yourself}"
        if now.by_hand and now.name == "NODE_FAIL":
            yield f"{name} was started manually, perhaps on another host, {yourself}"
        if not now.over or now.others or _is_alive(part):
            about = "has jobs in the queue" if now.over and now.others else f"is {now.name}" if not now.over else ""
            about = about or "still writes heartbeats"
            yield f"{name} {about}: only finished runs are removed. Cancel it first: hpcinit cancel {name}"
    for inner in _inner_runs(run):
        yield f"{name} contains another run, {inner}: remove that first, hpcinit clean {shlex.quote(str(inner))}"


def _inner_runs(run: overview.Run) -> Iterator[Path]:
    """Yield the runs inside this run's folder. A program that runs in a code snapshot may submit runs there."""
    own = {str(run.path), *(str(run.path / str(task.number)) for task in run.tasks)}
    for place, _, files in os.walk(run.path):
        if run_folder.SUBMISSION in files and place not in own:
            yield Path(place)


def _is_alive(path: Path) -> bool:
    """Return whether a rank recently wrote a heartbeat and the batch script has not recorded its end.

    If Slurm can't reach a node, a rank can still run there although Slurm reports that the job is over.
    """
    if job_record.exit_status(path) is not None:
        return False
    beats = (file.stat().st_mtime for file in (path / heartbeats.FOLDER).glob("*/*.json"))
    return time.time() - max(beats, default=0.0) < ALIVE_S


def _end(run: overview.Run) -> float:
    """Return when the run, or the last task of a sweep, ended, in seconds since 1970.

    This is when the newest of its records (submission, cancellation, exit) was written.
    """
    times = [0.0]
    for path, _ in run.parts:
        for name in (run_folder.EXIT, run_folder.CANCELLED, run_folder.SUBMISSION):
            with contextlib.suppress(OSError):
                times.append((path / name).stat().st_mtime)
    return max(times)


def _used(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += 512 * os.lstat(f"{place}/{name}").st_blocks
    return total


def _confirmed(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _outside(options: argparse.Namespace) -> None:
    """List what hpcinit wrote outside of run folders, and remove it if the user agrees.

    Raise Failure if a folder can't be removed.
    """
    found = [(one, _used(one.path), one.why_kept()) for one in outside.places(options.runs_dir, os.environ)]
    free = [one for one, _, why in found if not why]
    for one, size, why in found if not options.json else ():
        kept = f"; kept: {why}" if why else ""
        print(plain(str(one.path) if options.quiet else f"{_size(size):>9}  {one.path}  {one.what}{kept}"))
    removed = set()
    if options.yes or (free and not options.json and _confirmed(f"remove {counted(len(free), 'folder')}? [y/N] ")):
        removed = {one.path for one in free if _removed(one)}
    elif free:
        console.note(
            f"nothing was removed. To remove these folders without confirmation: hpcinit clean {_flag(options)} --yes"
        )
    for one, size, why in found if options.json else ():
        document = {"path": str(one.path), "what": one.what, "bytes": size, "kept": why}
        print(json_output.line("clean outside", {**document, "removed": one.path in removed}))
    if not options.json:
        console.note(
            f"hpcinit clean {_flag(options)} never removes your settings (~/.config/hpcinit, conf/cluster), files on "
            "disks of other machines, or files of your programs, such as Hydra's multirun/ and outputs/"
        )
    if options.yes and len(removed) < len(free):
        raise Failure(f"{counted(len(free) - len(removed), 'folder')} could not be removed; see the messages above")


def _flag(options: argparse.Namespace) -> str:
    return "--all" if options.all else "--outside"


def _removed(place: outside.Place) -> bool:
    with _reported(place.path):
        if why := outside.remove(place):
            console.warning(f"{place.path} was not removed: {why}")
        return not why
    return False


def _remove(found: Sequence[Finished]) -> set[Path]:
    """Check the states of the runs again and remove their folders. Return the folders that were removed."""
    removed: set[Path] = set()
    try:
        run_numbers.keep(one.run.path.absolute() for one in found)
    except OSError as error:
        console.warning(f"nothing was removed, because {error.filename} cannot be written: {error.strerror}")
        return removed
    renamed: dict[Path, Path] = {}
    # Rename all before removing any: removing takes minutes, in which someone may start one of the runs again.
    for run in overview.read([one.run.path for one in found]):
        if problem := _problem(run):
            console.warning(f"not removed: {problem}")
            continue
        path = run.path.absolute()
        with _reported(path):
            renamed[run.path] = path.rename(outside.hidden(path))
    try:
        for path in [*renamed]:
            aside = renamed.pop(path)
            with _reported(aside):
                shutil.rmtree(aside)
                removed.add(path)
    finally:  # after Ctrl-C: the runs that are still complete get their names back
        for path, aside in renamed.items():
            aside.rename(path)
    return removed


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Print a warning if removing `folder` fails."""
    try:
        yield
    except OSError as error:
        console.warning(f"cannot remove {folder}: {error.strerror} ({error.filename}); remove it with rm -r")


def _age(seconds: float) -> str:
    for unit, length in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(size: int) -> str:
    for unit, length in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"
