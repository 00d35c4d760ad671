"""Run the user's program in this process, as Python itself would, and leave a record if it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError, HpcinitError, RequestError, TrainingHang
from hpcinit.records import error_records, run_folder
from hpcinit.records.error_records import ErrorRecord
from hpcinit.records.spec import Program, Spec
from hpcinit.records.startup_timeout import StartupTimeout, left_of_job
from hpcinit.rendezvous import join
from hpcinit.rendezvous.process_state import state
from hpcinit.runtime.lifecycle import phase, signal_watch
from hpcinit.world import World


def run(program: Program, world: World, spec: Spec | None = None) -> int:
    """Returns what the process should end with; does not return for a command, which replaces it.

    An exception of the program is printed with its own traceback, recorded, and becomes exit status 1. The other
    ranks are met first, so that a program's own rendezvous has a port that is free on rank 0's host.
    """
    formula = spec.comm.timeout if spec else StartupTimeout()
    timeout = formula.start_up(world.nodes, left_of_job(os.environ, time.time()))
    rendezvous = join.join_rendezvous(world, spec, timeout)
    os.environ.update(join.program_environment(world, rendezvous))
    if program.kind == "command":
        join.barrier_and_close(world, timeout)
        return _command(program)
    if spec and spec.stop.signal:
        signal_watch.hold(signal.Signals[f"SIG{spec.stop.signal}"])
    status = _python(program, world)
    if status == 0:
        try:
            join.barrier_and_close(world, timeout)
        except BringUpError as error:  # the program is done all the same
            say(f"this rank has ended well, but {error}")
            join.leave_rendezvous()
    return run_folder.ENDED_EARLY if status == 0 and state.stop_not_recorded else status


def _python(program: Program, world: World) -> int:
    sys.argv = [program.target, *program.args]
    try:
        start = _script(Path(program.target)) if program.kind == "script" else _module(program.target)
        start()
    except SystemExit as error:
        status = _status(error)
        if status != 0:
            record(error, world)
            join.leave_rendezvous(f"exit status {status}")
        else:
            _forget(world)
        return status
    except HpcinitError as error:
        # The message says it all; where it was raised from stands in the record.
        say(f"error: {error}")
        record(error, world)
        join.leave_rendezvous(str(error))
        return error.exit_status
    except BaseException as error:
        _print(error)
        record(error, world)
        join.leave_rendezvous("".join(traceback.format_exception_only(error)).strip())
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    _forget(world)
    return 0


def _script(path: Path) -> Callable[[], None]:
    """As `python path` does: sys.path[0] is its folder, it is sys.modules['__main__'], its __file__ is absolute."""
    file = str(path.absolute())
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"cannot read {file}: {error.strerror}; is it shared with this node?", quoted=error.strerror or ""
        ) from None

    def start() -> None:
        main = types.ModuleType("__main__")
        loader = SourceFileLoader("__main__", file)
        main.__dict__.update(__file__=file, __builtins__=__builtins__, __loader__=loader)
        sys.modules["__main__"] = main  # stays: data loader workers and pickles look their classes up in it
        sys.path[0] = str(Path(file).parent)
        exec(compile(source, file, "exec"), main.__dict__)

    return start


def _module(name: str) -> Callable[[], None]:
    sys.path[0] = str(Path.cwd())  # as `python -m` does
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise  # the package is there, and what it imports is not
        found = None
    if found is None:
        raise RequestError(f"no module {name!r} on this node: looked in {sys.path[0]} and in {sys.prefix}")

    def start() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return start


def _command(program: Program) -> int:
    sys.stdout.flush()
    try:
        os.execvp(program.target, [program.target, *program.args])
    except OSError as error:
        said = f"cannot run {program.target!r}: {error.strerror}; looked for it on PATH"
        raise RequestError(said, quoted=error.strerror or "") from None


def _status(error: SystemExit) -> int:
    """What Python would end with: None is 0, a text is printed and 1."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    """The program's own frames; those of hpcinit and runpy above them say nothing."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in here:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def record(error: BaseException, world: World) -> None:
    """errors/rank-N.json in the run folder, if there is one; the first of this attempt stays, it is the nearer one."""
    folder = os.environ.get(run_folder.ENV_FOLDER)
    if not folder or (isinstance(error, SystemExit) and not error.code):
        return
    at, step = phase.now()
    document = ErrorRecord(
        time=time.time(),
        rank=world.rank,
        host=world.host or os.uname().nodename,
        error="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(error)),
        phase=at,
        step=step,
        job=world.job,
        monotonic=time.monotonic(),
        **_fields(error),
    )
    below = Path(folder) / run_folder.ERRORS

    def write() -> None:
        if not any(found.record.job == world.job for found in error_records.read(below, document.name)):
            safe_files.write_atomically(below / document.name, document.to_json())

    # The disk may be what failed; the traceback is in the log all the same.
    background_writer.later(f"the error record {document.name}", write, keep_first=True)
    background_writer.flush()


def _fields(error: BaseException) -> dict[str, Any]:
    """The fields of a record that only errors of hpcinit have."""
    if not isinstance(error, HpcinitError):
        return {}
    names = ("kind", "rank_at_fault", "host_at_fault", "quoted")
    hang = error.report if isinstance(error, TrainingHang) else None
    return {**{name: getattr(error, name) for name in names}, "hang": hang}


def _forget(world: World) -> None:
    """What a session has recorded in this attempt, and the program has caught: the rank has ended well."""
    folder = os.environ.get(run_folder.ENV_FOLDER)
    below = Path(folder or os.devnull) / run_folder.ERRORS
    for found in error_records.read(below, f"rank-{world.rank}.json"):
        if found.record.job == world.job:
            with contextlib.suppress(OSError):
                (below / found.record.name).unlink()
