"""Runs the trials of a hyperparameter search: submits each batch as a sweep, waits for it, and reads the results."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from hpcinit.base import console, json_output
from hpcinit.base.errors import INTERRUPTED, Failure, HpcinitError, RequestError
from hpcinit.base.text import counted
from hpcinit.config import job_spec
from hpcinit.config.request import Ended, Request
from hpcinit.records import job_record, results, run_folder, run_numbers
from hpcinit.records.results import Value
from hpcinit.submit import folder, transaction
from hpcinit.submit.messages import print_reliably

LATE_S = 10.0  # a network file system may show a compute node's new file this late
FOUND = "optimization_results.yaml"  # the file with the result of Hydra's sweepers
TRIALS = "trials.jsonl"  # a line for each trial


class Trials:
    """Runs the trials of a hyperparameter search, batch by batch.

    submit: a function that submits requests, waits for them and returns an exit status. It adds the run folder of each
        request to the dict, by the request's number.
    """

    def __init__(self, submit: Callable[[Sequence[Request], dict[int, Path]], int], as_json: bool = False) -> None:
        self._submit, self._as_json = submit, as_json
        self._folder: Path | None = None
        self._done = 0

    def batch(self, requests: Sequence[Request]) -> Sequence[Value | HpcinitError]:
        config = requests[0].config
        if config.dry_run:
            status = self._submit(requests, {})
            console.note("# later batches depend on the results of this one")
            raise Ended(status)
        if self._folder is None:
            transaction.require_sbatch(config)
            self._folder = folder.claim(job_spec.runs_dir(config), f"{config.name}-search", ())
        runs: dict[int, Path] = {}
        try:
            status = self._submit(requests, runs)
        except BaseException:
            if not self._done:
                with suppress(OSError):
                    run_numbers.unmark(self._folder)
                    self._folder.rmdir()  # nothing was submitted for it
            raise
        if status == INTERRUPTED:
            print(f"the search stopped after {self._so_far()}", file=sys.stderr)
            raise Ended(status)
        end = time.monotonic() + (LATE_S if config.engine.other_machines else 0)
        outcomes = [_outcome(request, runs.get(request.number), end) for request in requests]
        self._record(requests, runs, outcomes)
        self._done += len(requests)
        return outcomes

    def end(self, written: Path) -> int:
        if self._folder is None:
            raise Failure("the sweeper requested no trials: check its settings, hydra.sweeper.*")
        for file in written.iterdir():
            shutil.move(file, self._folder / file.name)
        best, about = _best(self._folder / FOUND), f"{counted(self._done, 'trial')}: {self._folder}"
        if self._as_json:
            print_reliably(
                json_output.line("search", {"best": best, "trials": self._done, "folder": str(self._folder)})
            )
        else:
            print_reliably(*([best] if console.quiet() else [best, about]))
        return 0

    def interrupted(self) -> int:
        print(f"hpcinit: interrupted after {self._so_far()}; no trial is running now", file=sys.stderr)
        return INTERRUPTED

    def _so_far(self) -> str:
        return f"{counted(self._done, 'trial')}" + (f": {self._folder}" if self._done else "")

    def _record(
        self, requests: Sequence[Request], runs: dict[int, Path], outcomes: Sequence[Value | HpcinitError]
    ) -> None:
        assert self._folder is not None
        with (self._folder / TRIALS).open("a") as file:
            for request, value in zip(requests, outcomes, strict=True):
                outcome = {"error": str(value)} if isinstance(value, HpcinitError) else {"value": value}
                line = {"trial": request.number, "combination": request.combination, **outcome}
                file.write(json.dumps({**line, "run": str(runs.get(request.number, ""))}) + "\n")


def _outcome(request: Request, run: Path | None, end: float) -> Value | HpcinitError:
    """Return the result of a finished run, or the error to report for it.

    end: when to stop waiting for the result file, in seconds of time.monotonic().
    """
    trial = f"trial {request.number} ({request.combination})"
    if run is None:
        return Failure(f"{trial} was not submitted")
    logs = f"hpcinit logs {shlex.quote(str(run))}"
    while True:
        status = job_record.exit_status(run)
        try:
            value = results.read_numbers(run)
        except RequestError as error:
            return Failure(f"{trial}: {error}")
        if status or (status == 0 and value is not None) or time.monotonic() >= end:
            break
        time.sleep(0.2)
    if status is None:
        return Failure(f"{trial} was terminated from outside: it has no exit record. Read its logs:  {logs}")
    if status:
        return Failure(f"{trial} failed with exit status {status}. Read its logs:  {logs}")
    if value is None:
        return Failure(
            f"{trial} completed without a result: expected run.result(value) in the program, or "
            f'{{"value": 0.25}} in $HPCINIT_RUN/{run_folder.RESULT}. Read its logs:  {logs}'
        )
    return value


def _best(file: Path) -> str:
    """Return 'best: 0.01 with lr=0.1 seed=3' from the sweeper's results file (Optuna, Nevergrad)."""
    try:
        found = yaml.safe_load(file.read_text())
        value = found.get("best_value", found.get("best_evaluated_result"))
        chosen = found.get("best_params", found.get("best_evaluated_params"))
        if "solutions" in found:
            return f"best: {len(found['solutions'])} Pareto-optimal solutions"
        return f"best: {value} with {' '.join(f'{key}={item}' for key, item in chosen.items())}"
    except (OSError, yaml.YAMLError, AttributeError):
        return "the sweeper finished without a best value"
