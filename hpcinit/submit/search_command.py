"""The trials of a search: each batch is submitted as a sweep, waited for, and its results are read."""

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

from hpcinit.base import console
from hpcinit.base.errors import INTERRUPTED, Failure, HpcinitError, RequestError
from hpcinit.config.compose import Ended, Request
from hpcinit.observe import state
from hpcinit.records import results, run_folder
from hpcinit.records.results import Value
from hpcinit.submit import folder, job_environment, transaction
from hpcinit.submit.messages import say

LATE_S = 10.0  # for what a compute node has written to show here: a network file system's cache
FOUND = "optimization_results.yaml"  # by which name Hydra's sweepers leave what they found
TRIALS = "trials.jsonl"  # a line for each trial


class Trials:
    """submit: submits requests and waits for their end; their run folders by number, and an exit status."""

    def __init__(self, submit: Callable[[Sequence[Request], dict[int, Path]], int], as_json: bool = False) -> None:
        self._submit, self._as_json = submit, as_json
        self._folder: Path | None = None
        self._done = 0

    def batch(self, requests: Sequence[Request]) -> Sequence[Value | HpcinitError]:
        config = requests[0].config
        if config.dry_run:
            status = self._submit(requests, {})
            console.note("# the batches after this one depend on its results")
            raise Ended(status)
        if self._folder is None:
            transaction.require_sbatch(config)
            self._folder = folder.claim(job_environment.runs_dir_of(config), f"{config.name}-search", ())
        runs: dict[int, Path] = {}
        try:
            status = self._submit(requests, runs)
        except BaseException:
            if not self._done:
                with suppress(OSError):
                    self._folder.rmdir()  # nothing was submitted for it
            raise
        if status == INTERRUPTED:
            print(f"the search ends here, after {self._so_far()}", file=sys.stderr)
            raise Ended(status)
        end = time.monotonic() + (LATE_S if config.cluster.engine == "slurm" else 0)
        came = [_came(request, runs.get(request.number), end) for request in requests]
        self._record(requests, runs, came)
        self._done += len(requests)
        return came

    def end(self, written: Path) -> int:
        if self._folder is None:
            raise Failure("the sweeper asked for no trial at all: look at its settings, hydra.sweeper.*")
        for file in written.iterdir():
            shutil.move(file, self._folder / file.name)
        best, about = _best(self._folder / FOUND), f"{self._done} trials: {self._folder}"
        if self._as_json:
            say(json.dumps({"best": best, "trials": self._done, "folder": str(self._folder)}))
        else:
            say(*([best] if console.quiet() else [best, about]))
        return 0

    def interrupted(self) -> int:
        print(f"hpcinit: interrupted, nothing of it runs now; after {self._so_far()}", file=sys.stderr)
        return INTERRUPTED

    def _so_far(self) -> str:
        return f"{self._done} trials" + (f": {self._folder}" if self._done else "")

    def _record(self, requests: Sequence[Request], runs: dict[int, Path], came: Sequence[Value | HpcinitError]) -> None:
        assert self._folder is not None
        with (self._folder / TRIALS).open("a") as file:
            for request, value in zip(requests, came, strict=True):
                outcome = {"error": str(value)} if isinstance(value, HpcinitError) else {"value": value}
                line = {"trial": request.number, "combination": request.combination, **outcome}
                file.write(json.dumps({**line, "run": str(runs.get(request.number, ""))}) + "\n")


def _came(request: Request, run: Path | None, end: float) -> Value | HpcinitError:
    """The result of a run that is over, or what there is instead. end: until when a file may yet appear."""
    trial = f"trial {request.number} ({request.combination})"
    if run is None:
        return Failure(f"{trial} was not submitted")
    logs = f"hpcinit logs {shlex.quote(str(run))}"
    while True:
        status = state.exit_status(run)
        try:
            value = results.read(run)
        except RequestError as error:
            return Failure(f"{trial}: {error}")
        if status or (status == 0 and value is not None) or time.monotonic() >= end:
            break
        time.sleep(0.2)
    if status is None:
        return Failure(f"{trial} was ended from outside, it left no exit record:  {logs}")
    if status:
        return Failure(f"{trial} failed with exit status {status}:  {logs}")
    if value is None:
        return Failure(
            f"{trial} ended well and left no result: expected run.result(value) in the program, or "
            f'{{"value": 0.25}} in $HPCINIT_RUN/{run_folder.RESULT}:  {logs}'
        )
    return value


def _best(file: Path) -> str:
    """'best: 0.01 with lr=0.1 seed=3', of what the sweeper says in the way of Optuna's or Nevergrad's."""
    try:
        found = yaml.safe_load(file.read_text())
        value = found.get("best_value", found.get("best_evaluated_result"))
        chosen = found.get("best_params", found.get("best_evaluated_params"))
        if "solutions" in found:
            return f"best: {len(found['solutions'])} solutions, none of which is better than another in everything"
        return f"best: {value} with {' '.join(f'{key}={word}' for key, word in chosen.items())}"
    except (OSError, yaml.YAMLError, AttributeError):
        return "the sweeper has ended"
