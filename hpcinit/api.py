"""Submits and follows runs from Python, as in pipelines, notebooks and tests.

    from hpcinit import api

    run = api.submit("cluster=x", nodes=8, program=["train.py", "--lr", "3e-4"])
    if run.wait() != "COMPLETED":
        print(run.why()["verdict"])
    print(run.result())

`submit` and `sweep` run the command `hpcinit submit` in a new process. So the checks and the run folder are the same as
at the terminal, and several threads may submit at the same time. Nothing is printed and nothing is pickled. From
asyncio, call the blocking functions in a thread: `await asyncio.to_thread(run.wait)`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcinit.base import errors
from hpcinit.base.errors import (
    INTERRUPTED,
    NOTHING_SUBMITTED,
    Failure,
    HpcinitError,
    RequestError,
    SubmissionInterrupted,
    SubmitError,
)
from hpcinit.config import python_arguments
from hpcinit.observe import find_runs, logs, poll, progress, resubmitted, state
from hpcinit.records import job_record, results

__all__ = ["Run", "find", "runs", "submit", "sweep"]

POLL_S = 0.2  # between two reads of the run folder; Slurm is queried less often: observe/poll.py


def __dir__() -> list[str]:
    """Return only the public names, so that Tab completion offers no others."""
    return __all__


@dataclass(frozen=True)
class Run:
    """A submitted run, identified by its run folder.

    path: the absolute path of the run folder.
    notes: the warnings and notes of the submission, one line each.
    combination: for a task of a sweep, its overrides; otherwise ''.
    """

    path: Path
    notes: Sequence[str] = field(default=(), compare=False)
    combination: str = ""

    @property
    def name(self) -> str:
        """Return the name that commands accept: 'train-0001', or 'train-0001/0' for a task of a sweep."""
        return find_runs.name_of(self.path)

    @property
    def job_id(self) -> str:
        """Return the id of the run's job, or of the first job of a chain."""
        return str(job_record.submission(self.path)["job_id"])

    @property
    def state(self) -> str:
        """Return Slurm's name of the current state: PENDING, RUNNING, COMPLETED, FAILED, ... or UNKNOWN."""
        return state.read(self.path).name

    @property
    def progress(self) -> dict[str, Any]:
        """Return the last step, the total number of steps and the values that the program passed to `run.progress()`.

        The keys are step, total, values and time. The dict is empty before the first step.
        """
        return progress.read(self.path)

    def status(self) -> dict[str, Any]:
        """Return what `hpcinit status --json` prints, as a dict: state, times, progress, restarts, hang."""
        return _documents("status", str(self.path))[0]

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the run has ended and return its final state.

        Raise TimeoutError after `timeout_s` seconds; the run continues. Raise RequestError if `timeout_s` is not
        a number. If Slurm has had no record of the run for a minute, the run counts as ended, with the state UNKNOWN.
        """
        python_arguments.check_timeout(timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        watched = poll.Polls([self.path])
        while not watched.ask():
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"{self.name} has not ended after {timeout_s:g} s (state: {watched.first.name}); the run continues"
                )
            time.sleep(POLL_S)
        return watched.first.name

    def logs(self, rank: int = 0) -> str:
        """Return what `rank` has printed so far, or '' if it has not started yet.

        Raise RequestError if there is no such rank.
        """
        python_arguments.check_rank(rank)
        known = logs.ranks(self.path)
        if known and rank not in known:
            raise RequestError(f"{self.name} has no log of rank {rank}; ranks with a log: {', '.join(map(str, known))}")
        return logs.of_rank(self.path, rank).read_text(errors="replace") if known else ""

    def why(self) -> dict[str, Any]:
        """Return what `hpcinit why --json` prints, as a dict: verdict, kind, rank, host, advice, ..."""
        return _documents("why", str(self.path))[0]

    def report(self) -> dict[str, Any]:
        """Return what `hpcinit report --json` prints, as a dict: how the charged time was used, and each start-up."""
        return _documents("report", str(self.path))[0]

    def cancel(self, save: bool = False) -> None:
        """Cancel the run.

        save: if True, ask the program to save and exit: `run.should_stop()` then returns a reason.
        """
        _documents("cancel", *["--save"] * save, str(self.path))

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the run has ended. Return what the program passed to `run.result()`, or None.

        Raise Failure with the verdict of `why` if the run failed or was canceled. Raise TimeoutError after `timeout_s`
        seconds. Raise RequestError if result.json cannot be read. If Slurm has no record of the run any more, return
        the result that the program wrote.
        """
        ended = self.wait(timeout_s)
        found = results.read(self.path)
        if ended == "COMPLETED" or (ended == "UNKNOWN" and found is not None):
            return found
        raise Failure(f"{self.name} is {ended}, expected COMPLETED: {self.why()['verdict']}")


def submit(*overrides: str, program: Sequence[str | os.PathLike[str]] = (), **keys: Any) -> Run:
    """Submit one run and return it.

    overrides: as on the command line, "cluster=x" or "cluster.partition=gpu".
    program: the script with its arguments, such as ["train.py", "--lr", "3e-4"]; or ["-m", "package.train"]; or a
        command.
    keys: top-level config keys and groups, such as nodes=8 or cluster="x". A value can be None, a bool, a number, a
        string, a list or a dict.

    Raise RequestError if an argument has a wrong type, or if the same request is already queued. Raise ConfigError with
    all problems of the config. Raise SubmitError if no job was created, and MaybeSubmitted if there might be a job.

    After Ctrl-C, wait until the submission has ended, and raise KeyboardInterrupt. If a job was created, the message of
    the exception names the run.
    """
    submitted = _submit(overrides, program, keys, multirun=False)
    if len(submitted) != 1:
        raise RequestError(
            f"the overrides describe {len(submitted)} jobs, but api.submit submits only one: use api.sweep"
        )
    return submitted[0]


def sweep(*overrides: str, program: Sequence[str | os.PathLike[str]] = (), **keys: Any) -> list[Run]:
    """Submit each combination of the overrides ("lr=1e-3,3e-4"). Return a run for each, in order.

    The arguments and errors are those of `submit`. If Slurm accepts only some of the jobs, raise SubmitError, which
    names the runs that were submitted.
    """
    return _submit(overrides, program, keys, multirun=True)


def find(run: str | int | os.PathLike[str], runs_dir: str | os.PathLike[str] = "runs") -> Run:
    """Return a run by its folder, its name in `runs_dir`, or its job id. Raise RequestError if there is none."""
    path = find_runs.find_run(str(run), Path(runs_dir)).absolute()
    sweep = resubmitted.sweep_of(path)
    return Run(path, (), " ".join(find_runs.combinations(sweep).get(int(path.name), ())) if sweep else "")


def runs(runs_dir: str | os.PathLike[str] = "runs") -> list[Run]:
    """Return all submitted runs in `runs_dir`, latest last. For a sweep, return each task."""
    found: list[Run] = []
    for path in find_runs.all_runs(Path(runs_dir)):
        if find_runs.is_sweep(path):
            tasks = find_runs.combinations(path)
            found += [Run((path / str(number)).absolute(), (), " ".join(words)) for number, words in tasks.items()]
        else:
            found.append(Run(path.absolute()))
    return found


def _submit(
    overrides: Sequence[str], program: Sequence[str | os.PathLike[str]], keys: Mapping[str, Any], multirun: bool
) -> list[Run]:
    python_arguments.check(overrides, program, keys)
    words = [*overrides, *(f"{key}={python_arguments.override_value(value)}" for key, value in keys.items())]
    for key in ("wait", "dry_run"):
        if f"{key}=true" in [word.lower() for word in words]:
            advice = "use Run.wait()" if key == "wait" else "remove it"
            raise RequestError(f"api.submit and api.sweep do not accept {key}=true: {advice}")
    given = ["--", *(os.fspath(word) for word in program)] if program else []
    documents, notes = _run(["submit", "--json", *["--multirun"] * multirun, *words, *given])
    return [Run(Path(one["run"]).absolute(), notes, one.get("combination", "")) for one in documents]


def _documents(*words: str) -> list[dict[str, Any]]:
    """Run `hpcinit WORDS` and return the JSON documents that it prints."""
    return _run([words[0], "--json", *words[1:]])[0]


def _run(words: Sequence[str]) -> tuple[list[dict[str, Any]], Sequence[str]]:
    """Run `hpcinit WORDS`. Return its JSON documents and the lines on stderr. Raise the error that it reports.

    The command runs in its own session, so that Ctrl-C reaches this process first. This process forwards Ctrl-C and
    waits, because a submission that is killed halfway could leave a job behind.
    """
    command = [sys.executable, "-m", "hpcinit", *words]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **streams) as process:
        try:
            out, err = process.communicate()
        except BaseException as interrupt:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
            if isinstance(interrupt, KeyboardInterrupt):
                raise _interruption(_json_lines(out)) from None
            raise
    documents = _json_lines(out)
    notes = tuple(line.removeprefix("hpcinit: ") for line in err.splitlines() if line.strip())
    if process.returncode == 0:
        return documents, notes
    found = next((one for one in documents if one["document"] == "error"), None)
    if process.returncode == INTERRUPTED:
        raise _interruption(documents)
    made = _run_folders(documents)
    if found is not None and not made:
        raise _reported_error(found)
    text = "\n".join(notes) or f"`{' '.join(command)}` exited with status {process.returncode}"
    if words[0] == "submit":
        raise SubmitError(text, f"these runs were submitted: {', '.join(made)}" if made else NOTHING_SUBMITTED)
    raise Failure(text)


def _interruption(documents: Sequence[Mapping[str, Any]]) -> SubmissionInterrupted:
    return SubmissionInterrupted([Path(run).absolute() for run in _run_folders(documents)])


def _run_folders(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    return [one["run"] for one in documents if one["document"] == "submit"]


def _json_lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _reported_error(document: Mapping[str, Any]) -> HpcinitError:
    """Return the error that `hpcinit ... --json` printed, as an instance of its class in base/errors.py."""
    kind = getattr(errors, document["type"], Failure)
    error: HpcinitError = kind(*document.get("problems", [document["error"]]))
    for name in errors.FIELDS:
        setattr(error, name, document[name])
    return error
