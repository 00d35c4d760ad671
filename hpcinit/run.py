"""`python -m hpcinit.run SPEC | script.py args... | -m module args... | command args...`

It runs once per rank of a job. It determines the rank and the world size, exports torch's variables, and runs the
program unchanged.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcinit.base import processes, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.cli.main import guarded
from hpcinit.node import node_check
from hpcinit.records import rank_log, run_folder, safeguards, startup_settings
from hpcinit.records.components import shape
from hpcinit.records.spec import Program, Spec, load, of_this_run
from hpcinit.records.startup_timeout import check_clock
from hpcinit.runtime import extension_locks, interpreter_exit, program, startup
from hpcinit.runtime.lifecycle import stack_signal
from hpcinit.world import World, launchers


def main(argv: Sequence[str]) -> int:
    """Run the program as this rank, and return its exit status. Raise RequestError if the arguments are wrong.

    argv: the path of a run folder's spec.json, or a program with its arguments.
    """
    processes.die_with_agent()
    if not argv or argv[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if argv else 2
    try:
        Path.cwd()
    except FileNotFoundError:
        raise RequestError("the current folder was deleted: run this command in a folder that exists") from None
    if argv[0].startswith("-") and argv[0] != "-m":
        raise RequestError(
            f"{argv[0]}: no such option, expected the path of a run folder's {run_folder.SPEC}, or a program: "
            "script.py args..., -m module args... or command args..."
        )
    spec = enter(argv[0]) if argv[0].endswith(".json") and len(argv) == 1 else None
    return become_rank(argv, spec, check=node_check.start(spec, os.environ) if spec else None)


def become_rank(
    argv: Sequence[str],
    spec: Spec | None,
    protected: tuple[str, ...] = (),
    imported: str = "",
    check: node_check.Running | None = None,
) -> int:
    """Run the program as the rank that this process's environment describes. Return its exit status.

    argv: the arguments of main().
    spec: the spec of the run, or None if argv contains the program.
    protected: the names of the environment variables that hpcinit has already set to protect the run.
    imported: a line for the log about the modules that launch=fork imported before the fork, or ''.
    check: the running check of this node, or None.
    """
    rank_log.protect()
    what = spec.program if spec else _program_of(list(argv))
    world = launchers.read(os.environ)
    processes.raise_open_files_limit(world.world_size)
    if doubt := check_clock(os.environ, time.time()):
        say(doubt)
    if world.rank == 0:
        for warning in (*world.warnings, *_world_size_warnings(spec, world, argv)):
            say(f"warning: {warning}")
    run_spec, folder = of_this_run(os.environ, world.world_size)
    startup.begin_startup(world, folder, first_line=True)
    if what.kind != "command":
        stack_signal.install(world.rank)
    if what.kind != "command" and world.launcher != "single":
        processes.set_title(f"rank {world.rank}/{world.world_size} {Path(what.target).name}")
    # Set the safeguards' variables before torch is imported, which reads some only once. A single process needs none.
    if world.launcher != "single":
        protected = safeguards.apply(os.environ, folder, world.job) or protected
        if world.local_rank == 0:
            extension_locks.report_abandoned(os.environ, say)
    if world.rank == 0 and (lines := [line for line in (safeguards.describe(os.environ, protected), imported) if line]):
        startup_settings.record(folder, world.job, lines)
    if (restart := os.environ.get("SLURM_RESTART_COUNT", "0")) != "0":  # a restart appends to the logs
        say(f"restart {restart} of job {world.job.partition('.')[0]} starts")
    elif world.rank == 0 and protected and folder:
        say(f"set {len(protected)} environment variables, listed in {run_folder.STARTUP} of the run folder")
    if spec and folder:
        with program.recorded(world):
            node_check.finish(check, folder)
    status = program.run(what, world, run_spec)
    interpreter_exit.end(status)
    return status


def _world_size_warnings(spec: Spec | None, world: World, argv: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the world size differs from the spec's.

    A different size is not an error, because a debugger may run a single rank.
    """
    if spec and world.world_size != spec.world_size:
        script = shlex.quote(str(Path(argv[0]).absolute().parent / run_folder.SCRIPT))
        yield (
            f"{world.launcher} started {counted(world.world_size, 'rank')}, but {argv[0]} is for "
            f"{shape(spec.parts)} = {spec.world_size}, so the layout, timeouts and seed of the file are not used; "
            f"to start all ranks: {script}"
        )


def enter(name: str) -> Spec:
    """Return the Spec in the file `name`, and change to its working folder.

    Raise RequestError if the spec cannot be read or the folder cannot be entered.
    """
    path = Path(name).absolute()
    spec = load(path)
    if problem := safe_files.path_ownership_problems(path.parent, "submit again"):
        raise RequestError(problem)
    os.environ[run_folder.ENV_FOLDER] = str(path.parent)
    try:
        os.chdir(spec.workdir)
    except OSError as error:
        raise RequestError(
            f"cannot enter the working folder {spec.workdir} on {os.uname().nodename}: {error.strerror}. Is it on a "
            "file system that this node shares?",
            quoted=error.strerror or "",
        ) from None
    return spec


def _program_of(words: list[str]) -> Program:
    if words[0] == "-m":
        if len(words) == 1:
            raise RequestError("-m without a module, expected: -m package.module args...")
        return Program("module", words[1], tuple(words[2:]))
    kind = "script" if words[0].endswith(".py") else "command"
    return Program(kind, words[0], tuple(words[1:]))


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.run", sys.argv[1:]))
