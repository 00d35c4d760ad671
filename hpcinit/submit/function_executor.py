"""Implements `hpcinit.Executor`, which submits Python functions as runs. It has the same interface as submitit.

executor = hpcinit.Executor("jobs", cluster="x")
executor.update_parameters(nodes=2, tasks_per_node=4, timeout_min=60)
job = executor.submit(train, 3e-4)
print(job.result())
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment

from hpcinit.base import quoting
from hpcinit.base.errors import ConfigError, Failure, RequestError, SubmissionInterrupted, SubmitError
from hpcinit.checks import all_checks
from hpcinit.config import compose, resources
from hpcinit.config.python_arguments import override_value
from hpcinit.config.request import Request
from hpcinit.observe import cancel, overview, state
from hpcinit.records import run_folder
from hpcinit.submit import program_arguments, submit_command, sweep, transaction
from hpcinit.submit.executor import Executor, Job, Watcher

MODULE = "hpcinit.jobs.function"  # what each rank runs
TAIL = 40  # how many lines of a rank's log an error shows
# Maps submitit's parameters, without the prefix slurm_, to our keys. Other options of sbatch are in SBATCH.
KEYS = {
    "job_name": "name",
    "timeout_min": "time_min",
    "time": "time_min",
    "tasks_per_node": "ranks_per_node",
    "ntasks_per_node": "ranks_per_node",
    "cpus_per_task": "cpus_per_rank",
    "array_parallelism": "sweep.at_once",
    "signal_delay_s": "stop.signal_before_s",
    "setup": "cluster.setup",
    "exclusive": "cluster.exclusive",
}
SBATCH = ("constraint", "exclude", "gres", "mail_type", "mail_user", "nodelist", "wckey", "mem_per_gpu", "mem_per_cpu")
# Parameters of submitit that a run does not support. The value is the reason or what to use instead.
REFUSED = {
    "teardown": "a run executes nothing after its ranks",
    "srun_args": "use **{'++cluster.srun.OPTION': VALUE}",
    "use_srun": "srun starts the ranks",
    "stderr_to_stdout": "a rank has one log for stdout and stderr, which job.stdout() and job.stderr() return",
    "num_gpus": "use gpus_per_node",
    "gpus_per_task": "use gpus_per_node",
    "cpus_per_gpu": "use cpus_per_task",
    "mem": "use mem_gb",
}
ALWAYS = ("use_srun", "stderr_to_stdout")  # refused only with the value False


class ForPrograms(ConfigError):
    """A function cannot be submitted, because a config key works only for a program."""


class RunWatcher(Watcher):
    """Queries the states of runs as `hpcinit status` does, from Slurm and the run folder.

    It also works without Slurm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folders: dict[str, Path] = {}  # the run folder of each job

    def _states(self, ids: Sequence[str]) -> dict[str, str]:
        found = state.read_all([self.folders[job_id] for job_id in ids])
        known = {job_id: now for job_id, now in zip(ids, found, strict=True) if isinstance(now, state.State)}
        return {job_id: "" if now.purged else now.name for job_id, now in known.items() if not now.away or now.over}


class RunPaths(utils.JobPaths):
    """The paths of the files that submitit uses for a run, and of the logs of its ranks."""

    @property
    def stdout(self) -> Path:
        return self.folder / run_folder.RANK_LOG.format(rank=self.task_id)

    @property
    def submission_file(self) -> Path:
        return self.folder / run_folder.SCRIPT

    @property
    def submitted_pickle(self) -> Path:
        started = super().submitted_pickle  # a link, or the checkpoint that replaced it
        return started if started.exists() else self.folder / run_folder.PICKLE


class RunJob(Job[core.R]):
    """The job that runs a function. Use `job.paths.folder`, its run folder, for `hpcinit why`, `status` and `logs`."""

    watcher = RunWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = RunPaths(folder, job_id=job_id, task_id=self.task_id)

    def _register_in_watcher(self) -> None:
        self.watcher.folders[self.job_id] = self.paths.folder
        super()._register_in_watcher()

    def cancel(self, check: bool = True) -> None:
        """Cancel the job as `hpcinit cancel` does.

        check: whether to raise Failure if Slurm refuses.
        """
        path = self.paths.folder
        try:
            cancel.cancel(overview.read([path]), {path: [self.job_id]})
        except Failure:
            if check:
                raise

    def results(self) -> list[core.R]:
        """Return the results of all ranks. If a rank failed, raise the error that exception() returns."""
        try:
            found: list[core.R] = super().results()
            return found
        except utils.UncompletedJobError as error:
            raise (self.exception() if self._sub_jobs else None) or error from None

    def exception(self) -> utils.UncompletedJobError | utils.FailedJobError | None:
        """Return the error of the first rank that raised one, else of the first rank without a result, else None.

        If a rank fails, the others are ended and have no result. submitit waits 15 s for each missing result, so the
        ranks with a result are read first.
        """
        if not self._sub_jobs:
            return super().exception()
        self.wait()
        ranks = sorted(self._sub_jobs, key=lambda rank: not rank.paths.result_pickle.exists())
        return next((error for rank in ranks if (error := rank.exception())), None)

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        try:
            return super()._get_outcome_and_result()
        except utils.UncompletedJobError as error:
            lines = str(error).splitlines()  # submitit's error contains the whole log
            why = f"to see why: hpcinit why {quoting.shell(str(self.paths.folder))}"
            raise type(error)("\n".join([*lines[:4], *lines[4:][-TAIL:], why])) from error


class FunctionExecutor(Executor):
    """Submits Python functions to Slurm. It has submitit's methods `submit`, `map_array`, `batch`, `update_parameters`.

    With a cluster, each function becomes a run of hpcinit with its own run folder below `folder`. Each rank calls the
    function. Before the call, hpcinit sets up the rank, so hpcinit.init() and submitit.JobEnvironment() report the same
    rank.

    Args:
        folder: where the run folders are created. All nodes must share it. None: the config's runs_dir.
        args: the arguments of submitit.SlurmExecutor after the folder: max_num_timeout, max_pickle_size_gb, python.
        cluster: name of the cluster's config, as in `hpcinit submit cluster=x`; None: use submitit's own files.
        overrides: settings as on the command line: ["parallel=fsdp", "nodes=2"]. With overrides, the defaults are those
            of `hpcinit submit`: one rank per GPU, and no signal that requeues the job.
        more: the same as `args`, but by name. The prefix slurm_ is allowed, as for submitit.AutoExecutor.
    """

    def __init__(
        self,
        folder: Path | str | None,
        *args: Any,
        cluster: str | None = None,
        overrides: Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        more = {name.removeprefix("slurm_"): value for name, value in more.items()}
        super().__init__(folder or "runs", *args, **more)
        self._cluster, self._words = cluster, overrides
        self._runs_dir = folder and utils.JobPaths.get_first_id_independent_folder(self.folder)
        if cluster is not None:
            if self.python not in (sys.executable, quoting.shell(sys.executable)):
                raise RequestError(
                    f"python={self.python!r} has no effect with cluster=...: set the key cluster.python instead"
                )
            if overrides is None:  # overrides may need parameters that are set later
                self._requests([abs])  # an unknown cluster is refused here

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set submitit's parameters, or keys of hpcinit's config. Raise a ConfigError that lists all wrong ones."""
        if self._cluster is None:
            own = {name.removeprefix("slurm_"): value for name, value in kwargs.items()}
            shared = {name: own.pop(name) for name in self._equivalence_dict() if name in own}
            super()._internal_update_parameters(**own, **self._convert_parameters(shared))
            return
        before = self.parameters
        self.parameters = {**before, **kwargs}
        try:
            self._requests([abs])  # any function
        except BaseException:
            self.parameters = before
            raise

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        if self._cluster is None:
            return super()._internal_process_submissions(delayed_submissions)
        requests = self._requests([each.function for each in delayed_submissions])
        config = requests[0].config
        for each in delayed_submissions:
            each.set_timeout(config.time_min, self.max_num_timeout)

        made: list[Path] = []

        def write(path: Path, number: int) -> None:
            made.append(path)
            pickle = path / run_folder.PICKLE
            delayed_submissions[number].dump(pickle)
            if number == 0:
                self._check_size(pickle, len(requests))

        world_size = config.nodes * resources.ranks_per_node(config)
        try:
            submitted = _submitted(requests, ["hpcinit.Executor", *config.job.args], write)
            return [RunJob(path, job_id, list(range(world_size))) for path, job_id in submitted]
        except KeyboardInterrupt:
            exist = [path for path in made if (path / run_folder.SUBMISSION).exists()]
            raise SubmissionInterrupted(exist) from None

    def _check_size(self, pickle: Path, number: int) -> None:
        total_gb = number * pickle.stat().st_size / 2**30
        if total_gb > self.max_pickle_size_gb:
            raise RequestError(
                f"the pickled functions and arguments take {total_gb:.2g} GB in total, expected at most "
                f"{self.max_pickle_size_gb:g} GB: pass the names of files instead of data, or set "
                "executor.max_pickle_size_gb"
            )

    def _requests(self, functions: Sequence[Callable[..., Any]]) -> list[Request]:
        """Return a checked request for each function. Raise ConfigError with all errors of the configuration."""
        found: list[Request] = []
        first = _name(functions[0])

        def prepare(request: Request) -> None:
            config = request.config
            config.job.module, config.job.args = MODULE, [first]
            config.name = first if config.name == "program" else config.name
            if problems := _problems(config):
                raise ForPrograms(*problems)
            request.document["name"] = config.name
            request.document["job"] |= {"module": MODULE, "args": [first]}
            all_checks.check(config, request.document)

        def keep(requests: Sequence[Request]) -> int:
            found.extend(requests)
            return 0

        compose.main(self._overrides(), prepare, keep)
        if len(functions) == 1:
            return found
        labels = [getattr(each, "combination", f"{_name(each)} {at}") for at, each in enumerate(functions)]
        return [replace(found[0], number=number, combination=label) for number, label in enumerate(labels)]

    def _overrides(self) -> list[str]:
        values: dict[str, Any] = {"cluster": self._cluster, "job": "program", "again": True}  # two calls are two jobs
        if self._runs_dir is not None:
            values["runs_dir"] = self._runs_dir
        if self._words is None:
            values["ranks_per_node"] = 1  # as submitit: a function runs once
            values["stop.signal"] = JobEnvironment.USR_SIG  # submitit then requeues the job
            values["stop.signal_before_s"] = 90
        refused = []
        for given, value in self.parameters.items():
            name = given.removeprefix("slurm_")
            if value is None or (name in ALWAYS and value):
                continue
            if name in REFUSED:
                refused.append(f"{given} is a parameter of submitit that does not apply to a run: {REFUSED[name]}")
            elif name == "additional_parameters":
                values |= {_of_sbatch(option): each for option, each in value.items()}
            else:
                values[_of_sbatch(name) if name in SBATCH else KEYS.get(name, name)] = value
        if refused:
            raise ConfigError(*refused)
        words = self._words or ()
        typed = program_arguments.given_keys(words)
        return [*(f"{key}={override_value(value)}" for key, value in values.items() if key not in typed), *words]


def _of_sbatch(option: str) -> str:
    return f"++cluster.sbatch.{option.replace('_', '-')}"


def _problems(config: Any) -> Sequence[str]:
    """Return a message for each setting in the config that works for a program but not for a function."""
    reasons = {
        f"chain={config.chain}": (config.chain > 1, "a checkpointable function requeues its own job"),
        f"restart.max_restarts={config.restart.max_restarts}": (
            bool(config.restart.max_restarts),
            "a checkpointable function requeues its own job, at most max_num_timeout times after the time limit",
        ),
        "restart.warm=true": (
            config.restart.warm,
            "if a function raises an error, the caller gets the error and no rank fails",
        ),
        "launch=torchrun": (
            config.launch.kind == "torchrun",
            "submitit.JobEnvironment would read the rank of torchrun's agent; use launch=srun or launch=fork",
        ),
        "hetjob": (bool(config.hetjob), "submitit supports only one component"),
        "dry_run=true": (config.dry_run, "the script would need the pickled function, which a dry run does not write"),
    }
    return [f"{key} is for programs, not for functions: {why}" for key, (wrong, why) in reasons.items() if wrong]


def _name(function: Callable[..., Any]) -> str:
    """Return the function's name, for the run folder and for `status`."""
    inner = getattr(function, "func", function)  # of functools.partial
    name = str(getattr(inner, "__name__", type(inner).__name__))
    return name if quoting.PLAIN_NAME.fullmatch(name) else "function"


def _submitted(
    requests: Sequence[Request], argv: Sequence[str], write: Callable[[Path, int], None]
) -> list[tuple[Path, str]]:
    """Submit the requests. Return the run folder and job id of each.

    Raise SubmitError if Slurm refuses one, and KeyboardInterrupt after Ctrl-C.
    """
    requests = submit_command.announced(requests)
    if sweep.is_one(requests):
        done = sweep.submit_all(requests, argv, write)
        if done.refused:
            raise SubmitError(done.refused, f"{len(done.ids)} of {len(requests)} functions were submitted: {done.path}")
        if done.interrupted:
            raise KeyboardInterrupt
        return [(done.path / str(number), job_id) for number, job_id in done.ids.items()]
    found: list[tuple[Path, str]] = []
    for request in requests:
        each = transaction.submit(request, argv, write)
        found.append((each.path, each.job_id))
        if each.interrupted:
            raise KeyboardInterrupt
    return found
