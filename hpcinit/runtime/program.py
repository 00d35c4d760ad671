"""Runs the user's program in this process, as Python itself would. If the program fails, writes an error record."""

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
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import FIELDS, BringUpError, HpcinitError, RequestError
from hpcinit.records import drill_records, error_records, program_use, run_folder, tracker
from hpcinit.records.error_records import ErrorRecord
from hpcinit.records.spec import Program, Spec
from hpcinit.records.startup_timeout import StartupTimeout, left_of_job
from hpcinit.runtime import startup
from hpcinit.runtime.lifecycle import output_watch, phase, signal_watch
from hpcinit.runtime.process_state import state
from hpcinit.world import World


def run(program: Program, world: World, spec: Spec | None = None) -> int:
    """Run the program and return its exit status. If the program is a command, it replaces this process.

    If the program raises an exception, print the exception with the program's own traceback, record it, and return 1.
    Before the program starts, connect the ranks, so that rank 0 can choose a free port as MASTER_PORT.
    """
    formula = spec.comm.timeout if spec else StartupTimeout()
    timeout = formula.start_up(world.nodes, left_of_job(os.environ, time.time()))
    rendezvous = startup.join_rendezvous(world, spec, timeout)
    os.environ.update(startup.program_environment(world, rendezvous))
    folder = Path(os.environ.get(run_folder.ENV_FOLDER, "")) if spec and world.rank == 0 else None
    if spec and folder:
        program_use.start(folder, spec)
        os.environ.update(tracker.variables(spec, folder, os.environ))
    if program.kind == "command":
        startup.barrier_and_close(world, timeout)
        return _command(program)
    if spec and spec.stop.signal:
        signal_watch.hold(signal.Signals[f"SIG{spec.stop.signal}"])
    run = os.environ.get(run_folder.ENV_FOLDER)
    if spec and spec.hang.after_s and run:
        output_watch.start(world, spec.hang.after_s, Path(run))
    status = _python(program, world)
    output_watch.stop(failed=status != 0)
    if status == 0:
        startup.record_return()
        try:
            startup.barrier_and_close(world, timeout)
        except BringUpError as error:  # the program has finished anyway
            say(f"warning: the program succeeded on rank {world.rank}, but {error}")
            startup.leave_rendezvous()
        if note := _accelerates_worlds(world):
            say(f"warning: {note}")
        if folder and (use := program_use.read(folder)) and use.note:
            say(f"warning: {use.note}; {use.advice}")
    return run_folder.ENDED_EARLY if status == 0 and state.stop_not_recorded else status


def _python(program: Program, world: World) -> int:
    sys.argv = [program.target, *program.args]
    if drill := os.environ.get(drill_records.ENV_DRILL):
        from hpcinit.runtime import drill_recorder  # noqa: PLC0415 - imports torch, which not every program needs

        drill_recorder.install(Path(drill), world.rank)
    try:
        start = _script(Path(program.target)) if program.kind == "script" else _module(program.target)
        start()
    except SystemExit as error:
        status = _status(error)
        if status != 0:
            record(error, world)
            startup.leave_rendezvous(f"exit status {status}")
        else:
            _forget(world)
        return status
    except HpcinitError as error:
        output_watch.stop(failed=True)
        # The message is enough for the log; the record contains the traceback.
        say(f"error: {error}")
        record(error, world)
        startup.leave_rendezvous(str(error))
        return error.exit_status
    except BaseException as raised:
        found = raised
        try:  # first: torch's handler may raise an error about a dead DataLoader worker at any time
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except RuntimeError as death:
            found = death
        except ValueError:  # not the main thread, which has no handlers
            pass
        from hpcinit.runtime.lifecycle import loader_workers  # noqa: PLC0415 - imports multiprocessing

        found = loader_workers.behind(found)
        output_watch.stop(failed=True)
        _print(found)
        record(found, world)
        startup.leave_rendezvous("".join(traceback.format_exception_only(found)).strip())
        return 130 if isinstance(found, KeyboardInterrupt) else 1
    _forget(world)
    return 0


def _accelerates_worlds(world: World) -> str:
    """Return a warning on rank 0 if accelerate has made each rank train alone, else ''.

    On machines without a GPU, accelerate does this without an error, even under torchrun.
    """
    accelerate = sys.modules.get("accelerate.state")
    found = getattr(getattr(accelerate, "PartialState", None), "_shared_state", {}).get("num_processes")
    if world.rank or world.world_size == 1 or found != 1:
        return ""
    return (
        f"accelerate found no GPU, so each of the {world.world_size} ranks was a separate training run; set "
        '+cluster.env.ACCELERATE_USE_CPU="true", or pass cpu=True to Accelerator()'
    )


def _script(path: Path) -> Callable[[], None]:
    """Return a function that runs a script like `python path`.

    Like Python, the function sets sys.path[0], sys.modules['__main__'] and __file__.
    """
    file = str(path.absolute())
    try:
        source = path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"cannot read {file}: {error.strerror}. Is this file on a file system that all nodes share?",
            quoted=error.strerror or "",
        ) from None

    def start() -> None:
        main = types.ModuleType("__main__")
        loader = SourceFileLoader("__main__", file)
        main.__dict__.update(__file__=file, __builtins__=__builtins__, __loader__=loader)
        sys.modules["__main__"] = main  # stays, because data loader workers and pickles find classes in it
        sys.path[0] = str(Path(file).parent)
        exec(compile(source, file, "exec"), main.__dict__)

    return start


def _module(name: str) -> Callable[[], None]:
    sys.path[0] = str(Path.cwd())  # like `python -m`
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise  # the package exists, but one of its imports does not
        found = None
    if found is None:
        raise RequestError(f"no module {name!r} on this node: searched {sys.path[0]} and {sys.prefix}")

    def start() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return start


def _command(program: Program) -> int:
    sys.stdout.flush()
    background_writer.flush()  # exec ends the writer's thread
    try:
        os.execvp(program.target, [program.target, *program.args])
    except OSError as error:
        message = f"cannot run {program.target!r}: {error.strerror} (searched PATH)"
        raise RequestError(message, quoted=error.strerror or "") from None


def _status(error: SystemExit) -> int:
    """Return the exit status for sys.exit(): 0 for None, and 1 for a text, which is also printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    """Print the traceback of the program's frames, without those of hpcinit and runpy above them."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in here:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def record(error: BaseException, world: World) -> None:
    """Write the error to errors/rank-N.json in the run folder.

    If this attempt already has such a record, keep it, because the first error is the cause.
    """
    folder = os.environ.get(run_folder.ENV_FOLDER)
    if not folder or (isinstance(error, SystemExit) and not error.code):
        return
    at, step = phase.now()
    document = ErrorRecord(
        time=time.time(),
        rank=world.rank,
        host=world.host or os.uname().nodename,
        error="".join(traceback.format_exception_only(_cause(error))).strip(),
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

    # The disk may have failed; the traceback is in the log anyway.
    background_writer.later(f"the error record {document.name}", write, keep_first=True)
    background_writer.flush()


def _cause(error: BaseException) -> BaseException:
    """Return the exception that made the program call sys.exit(1), as Hydra and click do, else return `error`.

    An exit status of 128 or more means a signal. Return `error` then, because the exception may be unrelated.
    """
    status = error.code if isinstance(error, SystemExit) else None
    cause = error.__context__
    return cause if isinstance(status, int) and status < 128 and isinstance(cause, Exception) else error


def _fields(error: BaseException) -> dict[str, Any]:
    """Return the fields of the record that only an error of hpcinit has, or {} for another error."""
    return {name: getattr(error, name) for name in FIELDS} if isinstance(error, HpcinitError) else {}


@contextlib.contextmanager
def recorded(world: World) -> Iterator[None]:
    """If the block raises a BringUpError, write this rank's error record."""
    try:
        yield
    except BringUpError as error:
        record(error, world)
        raise


def _forget(world: World) -> None:
    """Remove this attempt's error record of this rank. The rank succeeded, so the program has caught that error."""
    folder = os.environ.get(run_folder.ENV_FOLDER)
    below = Path(folder or os.devnull) / run_folder.ERRORS
    for found in error_records.read(below, f"rank-{world.rank}.json"):
        if found.record.job == world.job:
            with contextlib.suppress(OSError):
                (below / found.record.name).unlink()
