"""The Hydra launcher `hydra/launcher=hpcinit`: each job of a multirun becomes ranks of a Slurm job.

    python train.py -m hydra/launcher=hpcinit hydra.launcher.cluster=x hydra.launcher.nodes=2 lr=1e-3,3e-4

Each rank calls the pickled function of the program with the job's config (hpcinit/jobs/hydra_task.py). If that is not
possible, each rank runs the program again with the job's overrides. The sweeper gets rank 0's return value.

`hpcinit submit -m` also uses this launcher if the sweeper waits for results. The trials of such a sweeper are already
runs of hpcinit (hpcinit/config/search_space.py).

Hydra imports this module in every program of the environment, so the module imports hpcinit only when it is used. Hydra
does not add the module to sys.modules. Therefore there is no `from __future__ import annotations`, with which
@dataclass would look up the module there.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, filter_overrides
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from hpcinit.observe.state import State

log = logging.getLogger(__name__)
HERE = "hydra_plugins.hpcinit_launcher"
# The overrides of this process that a program that runs again must not repeat.
OF_THE_SWEEP = ("hydra.mode=", "hydra/launcher=", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")


@dataclass
class HpcinitLauncherConf:
    """The keys of hydra.launcher. A key that is None keeps hpcinit's default.

    overrides: further overrides for hpcinit, such as 'parallel=fsdp'.
    """

    _target_: str = f"{HERE}.HpcinitLauncher"
    cluster: str | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    time_min: int | None = None
    at_once: int | None = None  # jobs that run at the same time; None: no limit
    wait: bool = True  # false: return as soon as the jobs are submitted
    overrides: list[str] = field(default_factory=list)


ConfigStore.instance().store(
    group="hydra/launcher", name="hpcinit", node=HpcinitLauncherConf, provider="hpcinit_launcher"
)


class HpcinitLauncher(Launcher):
    """Submits the jobs of a multirun with hpcinit and waits for their results."""

    def __init__(self, **keys: Any) -> None:
        self._wait, self._overrides = keys.pop("wait", True), list(keys.pop("overrides", ()))
        keys["sweep.at_once"] = keys.pop("at_once", None)
        self._keys = {name: value for name, value in keys.items() if value is not None}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what launch() needs later. Hydra calls this method first."""
        self._context, self._config, self._function = hydra_context, config, task_function
        self._batch = getattr(task_function, "launch_batch", None)  # hpcinit's own search, which submits its trials

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit a job for each list of overrides and return their results, in order."""
        if self._batch is not None:
            return cast(Sequence[JobReturn], self._batch(job_overrides, initial_job_idx))
        from hpcinit.base.errors import HpcinitError, SubmissionInterrupted  # noqa: PLC0415
        from hpcinit.submit import launcher_output  # noqa: PLC0415

        configs = [self._composed(list(words), initial_job_idx + at) for at, words in enumerate(job_overrides)]
        runs: list[Path] = []
        try:
            ends = self._run(configs, runs)
            return self._returned(configs, runs, ends)
        except HpcinitError as error:
            raise CompactHydraException(str(error)) from error
        except KeyboardInterrupt as error:  # the sweeper ends with this process, and no one would read the results
            more = error.runs if isinstance(error, SubmissionInterrupted) else ()
            launcher_output.cancel([*runs, *more], log.info)
            raise

    def _composed(self, words: list[str], number: int) -> DictConfig:
        """Return the config of job `number`, composed with the overrides `words`. Create the job's output folder."""
        config = self._context.config_loader.load_sweep_config(self._config, words)
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        _output_folder(config).mkdir(parents=True, exist_ok=True)
        return config

    def _run(self, configs: Sequence[DictConfig], runs: list[Path]) -> "dict[Path, State]":
        """Submit the jobs, append their run folders to `runs`, wait for the jobs, and return their final states.

        On Slurm, submit all jobs together. With cluster=local, which has no queue, run them one by one. If
        hydra.launcher.wait is false, do not wait, and return {}.
        """
        from hpcinit.config import folders  # noqa: PLC0415
        from hpcinit.config.python_arguments import override_value  # noqa: PLC0415
        from hpcinit.submit import launcher_output  # noqa: PLC0415

        words = [*self._overrides, *(f"{key}={override_value(value)}" for key, value in self._keys.items())]
        cluster = folders.chosen_cluster(words)
        local = cluster == folders.LOCAL_CLUSTER
        ends: dict[Path, State] = {}
        for batch in [[config] for config in configs] if local else [configs]:
            new = self._submit_functions(batch, cluster, words) or self._submit_programs(batch, words)
            runs += new
            for config, run in zip(batch, new, strict=True):
                log.info(_line(config, f"job {launcher_output.job_id(run)}, {run}"))
            if self._wait:
                ends |= launcher_output.wait(new, log.info)
        return ends

    def _submit_functions(self, configs: Sequence[DictConfig], cluster: str, words: Sequence[str]) -> list[Path]:
        """Submit jobs that call the program's function, and return their run folders.

        Return [] if the function can't be submitted. The jobs must then run the whole program instead.
        """
        from hpcinit.jobs import hydra_task  # noqa: PLC0415
        from hpcinit.submit.function_executor import ForPrograms, FunctionExecutor  # noqa: PLC0415

        name = Path(_program()[-1]).stem
        named = [(" ".join(filter_overrides(config.hydra.overrides.task)), config) for config in configs]
        try:
            tasks = hydra_task.tasks(name, self._function, self._context, named)
        except Exception as error:  # the program's objects may raise anything
            log.info(f"the function cannot be pickled, so each job runs the program: {type(error).__name__}: {error}")
            return []
        try:
            executor = FunctionExecutor(None, cluster=cluster, overrides=words)
            return [job.paths.folder for job in executor.submit_array(tasks)]
        except ForPrograms as error:
            log.info(f"each job runs the program: {error}")
            return []

    def _submit_programs(self, configs: Sequence[DictConfig], words: Sequence[str]) -> list[Path]:
        """Submit jobs that run the whole program with their overrides, and return their run folders."""
        from hpcinit import api  # noqa: PLC0415
        from hpcinit.config.python_arguments import override_value  # noqa: PLC0415

        arguments = ",".join(override_value(_arguments(config)) for config in configs)
        return [run.path for run in api.sweep(*words, f"job.args={arguments}", "job=program", program=_program())]

    def _returned(
        self, configs: Sequence[DictConfig], runs: Sequence[Path], ends: "Mapping[Path, State]"
    ) -> Sequence[JobReturn]:
        """Return the result of each job, and print all failed jobs.

        A failed job's result contains its error. The sweeper raises the error of the first failed job.
        """
        from hpcinit.jobs import hydra_task  # noqa: PLC0415
        from hpcinit.records import results  # noqa: PLC0415
        from hpcinit.submit import launcher_output  # noqa: PLC0415

        failed, found = [], []
        for config, run in zip(configs, runs, strict=True):
            job = _job_return(config)
            found.append(job)
            if not self._wait:
                continue
            if launcher_output.succeeded(run, ends[run]):
                found[-1] = job = hydra_task.read(run) or job
                if job.status == JobStatus.COMPLETED and job.return_value is None:
                    job.return_value = results.read(run)
                continue
            about = launcher_output.failure(run, ends[run])
            failed.append(_line(config, about))
            of_rank_0 = hydra_task.read(run)
            job.status, job.return_value = JobStatus.FAILED, _exception(of_rank_0, about)
        launcher_output.show_failures(failed, len(configs), log.error)
        return found


class ResultCallback(Callback):
    """Writes rank 0's return value to the run folder, in a job that runs the whole program again."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Write the return value if JSON can contain it and the program has written no result."""
        from hpcinit.base.errors import RequestError  # noqa: PLC0415
        from hpcinit.jobs import hydra_task  # noqa: PLC0415

        folder = hydra_task.rank_0s_folder()
        if folder is None or job_return.status != JobStatus.COMPLETED:
            return
        try:
            hydra_task.write_result(folder, job_return.return_value)
        except RequestError as error:
            log.warning(f"no result for the sweeper: {error}")


def _job_return(config: DictConfig) -> JobReturn:
    """Return a JobReturn with the job's config and overrides, but without a return value."""
    return JobReturn(
        overrides=OmegaConf.to_container(config.hydra.overrides.task),  # type: ignore[arg-type]
        cfg=OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]),
        hydra_cfg=OmegaConf.masked_copy(config, ["hydra"]),
        working_dir=str(_output_folder(config)),
        task_name=JobRuntime.instance().get("name"),
        status=JobStatus.COMPLETED,
    )


def _exception(of_rank_0: JobReturn | None, about: str) -> Exception:
    """Return an error that Hydra prints as the single line `about`.

    If possible, the error is also an instance of the exception class that rank 0 raised. For other errors Hydra prints
    a traceback, which would only show how Hydra called its launcher.
    """
    if of_rank_0 is None or of_rank_0.status != JobStatus.FAILED:
        return CompactHydraException(about)
    raised = of_rank_0._return_value
    try:
        kind = type(type(raised).__name__, (CompactHydraException, type(raised)), {"__str__": lambda self: about})
        error = kind.__new__(kind, *raised.args)
        error.__dict__.update(raised.__dict__)
    except TypeError:  # a class that cannot be combined
        error = CompactHydraException(about)
    error.__cause__ = raised
    return cast(Exception, error)


def _arguments(config: DictConfig) -> list[str]:
    """Return the command-line arguments that make the program run this one job of the multirun."""
    from hydra._internal.utils import get_args_parser  # noqa: PLC0415 - for the flags of this process

    from hpcinit.config.python_arguments import override_value  # noqa: PLC0415

    flags = get_args_parser().parse_known_args()[0]
    names = ("config_name", "config_path", "config_dir")
    given = {f"--{name.replace('_', '-')}": getattr(flags, name) for name in names}
    number, typed = config.hydra.job.num, config.hydra.overrides
    return [
        *(f"{flag}={value}" for flag, value in given.items() if value is not None),
        *typed.task,
        *(word for word in typed.hydra if not word.lstrip("+~").startswith(OF_THE_SWEEP)),
        f"hydra.run.dir={override_value(str(_output_folder(config)))}",
        f"hydra.job.num={number}",
        f"hydra.job.id={number}",
        f"+hydra.callbacks.hpcinit_result._target_={HERE}.ResultCallback",
    ]


def _output_folder(config: DictConfig) -> Path:
    return Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()


def _program() -> list[str]:
    """Return the program of this process in the form that `hpcinit submit` accepts: a script, or -m and a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    return [str(Path(sys.argv[0]).absolute())]


def _line(config: DictConfig, about: str) -> str:
    from hpcinit.submit import launcher_output  # noqa: PLC0415

    return launcher_output.job_line(config.hydra.job.num, filter_overrides(config.hydra.overrides.task), about)
