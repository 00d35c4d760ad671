"""Runs one job of a Hydra multirun on each rank: calls the program's function with the job's config, as Hydra does.

`hydra/launcher=hpcinit` submits a HydraTask for each job with hpcinit.Executor.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals

from hpcinit.base import safe_files, signals
from hpcinit.base.errors import RequestError
from hpcinit.records import results, run_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProgramPath:
    """The folders from which the program imports its modules, except those of its Python environment.

    before: folders that are before the environment's on sys.path.
    after: folders that are after the environment's on sys.path.
    workdir: the folder in which the program was started.
    """

    before: Sequence[str]
    after: Sequence[str]
    workdir: str

    @classmethod
    def current(cls) -> ProgramPath:
        """Return the folders of sys.path, except those of this Python's environment."""
        environment = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        found = [Path(path).absolute() for path in sys.path]
        standard = found.index(environment[0]) if environment[0] in found else len(found)

        def own(paths: Sequence[Path]) -> list[str]:
            others = [path for path in paths if not any(map(path.is_relative_to, environment))]
            return [str(path) for path in others if path.is_dir()]

        return cls(own(found[:standard]), own(found[standard:]), str(Path.cwd()))

    def restore(self) -> None:
        """Add the folders to sys.path.

        With snapshot=git, the program runs in a copy of `workdir`. If a folder in `before` is inside `workdir`, add the
        same folder of the copy first.
        """
        inside = [Path(path) for path in self.before if Path(path).is_relative_to(self.workdir)]
        copied = [str(Path.cwd() / path.relative_to(self.workdir)) for path in inside]
        sys.path[:] = [*copied, *self.before, *sys.path, *self.after]


@dataclass(frozen=True)
class HydraTask:
    """One job of a multirun, as a callable for hpcinit.Executor.

    name: the run's name.
    combination: the job's overrides, for display.
    program: the pickled function, Hydra's context, and the state of Hydra's singletons.
    config: the job's pickled config, including its node `hydra`.
    path: the folders from which the program imports its modules.
    """

    name: str
    combination: str
    program: bytes
    config: bytes
    path: ProgramPath

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Run the function, and raise what it raises. Rank 0 writes its return value to the run folder."""
        _leave_signals_to_the_program()
        self.path.restore()
        function, context, state = pickle.loads(self.program)
        Singleton.set_state(state)
        setup_globals()
        done = run_job(
            hydra_context=context,
            task_function=function,
            config=pickle.loads(self.config),
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if (folder := rank_0s_folder()) is not None:
            _write(folder, done)
        _ = done.return_value  # raises the function's exception


def tasks(name: str, function: Any, context: Any, configs: Sequence[tuple[str, Any]]) -> list[HydraTask]:
    """Return one task per combination. If the function or a config can't be pickled, the exception is not caught.

    configs: each combination with its config.
    """
    program = cloudpickle.dumps((function, context, Singleton.get_state()))
    path = ProgramPath.current()
    return [HydraTask(name, combination, program, cloudpickle.dumps(config), path) for combination, config in configs]


def read(run: Path) -> JobReturn | None:
    """Return what rank 0 returned, or None if it wrote nothing or this machine can't unpickle it.

    run: the run folder.

    Raise RequestError if the pickle belongs to another user.
    """
    file = run / run_folder.JOB_RETURN
    if problem := safe_files.pickle_problem(file):
        raise RequestError(problem)
    try:
        found = pickle.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except Exception as error:  # a class of the program may raise anything, for example a tensor that needs a GPU
        log.warning(f"{file} cannot be loaded on this machine: {type(error).__name__}: {error}")
        return None
    return found if isinstance(found, JobReturn) else None


def rank_0s_folder() -> Path | None:
    """Return the run folder if this process is rank 0 of a run, otherwise None."""
    folder = os.environ.get(run_folder.ENV_FOLDER)
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    return Path(folder) if folder is not None and rank == "0" else None


def write_result(folder: Path, value: Any) -> None:
    """Write `value` to result.json, unless the program has already written that file.

    Raise RequestError if JSON can't represent the value.
    """
    if value is not None and not (folder / run_folder.RESULT).exists():
        results.write_or_print(folder, results.reported(value))


def _write(folder: Path, done: JobReturn) -> None:
    """Write the JobReturn for the launcher, and its return value for `hpcinit` and api.Run.result().

    Errors are ignored, because they would make a finished training run fail.
    """
    if done.status == JobStatus.COMPLETED:
        with suppress(RequestError):  # the pickle has the value
            write_result(folder, done.return_value)
    try:
        safe_files.write_atomically(folder / run_folder.JOB_RETURN, cloudpickle.dumps(done), 0o600)
    except Exception as error:  # the value is from the program, so pickling it may raise anything
        log.warning(f"cannot save the program's return value for the sweeper: {type(error).__name__}: {error}")


def _leave_signals_to_the_program() -> None:
    """Undo submitit's signal handlers, so that the program handles the signals itself.

    submitit's handlers would be useless, because submitit can't checkpoint a job of a multirun.
    """
    signals.reset([signal.SIGTERM, signal.SIGCONT])
    # If stop.signal is submitit's signal, it must not end the program before its hpcinit.init() watches for it.
    number = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
    signals.Handlers([number], lambda number, frame: None)
