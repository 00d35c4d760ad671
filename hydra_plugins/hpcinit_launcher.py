"""The Hydra launcher `hydra/launcher=hpcinit`: each job of a multirun becomes ranks of a Slurm job.

    python train.py -m hydra/launcher=hpcinit hydra.launcher.cluster=x hydra.launcher.nodes=2 lr=1e-3,3e-4

Each job runs the user's program again with its own overrides; nothing is pickled. The job's result for the sweeper is
what the decorated function returns on rank 0: a number or several. `hpcinit submit -m` with a sweeper that waits for
results uses the same launcher; its trials are runs of hpcinit already (hpcinit/config/search_space.py).

Hydra imports this module in every program of the environment, so it imports hpcinit only when it is used. Hydra does so
without an entry in sys.modules, hence no `from __future__ import annotations`: @dataclass would look for one.
"""

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

if TYPE_CHECKING:
    from hpcinit.api import Run
    from hpcinit.observe.state import State

log = logging.getLogger(__name__)
HERE = "hydra_plugins.hpcinit_launcher"
# The overrides of this process that its jobs must not repeat.
OF_THE_SWEEP = ("hydra.mode=", "hydra/launcher=", "hydra.launcher.", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")


@dataclass
class HpcinitLauncherConf:
    """The keys of hydra.launcher. None: hpcinit's default. overrides: further ones of hpcinit, 'parallel=fsdp'."""

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
    """Submit the jobs of a multirun with hpcinit and wait for their results."""

    def __init__(self, **keys: Any) -> None:
        self._wait, self._overrides = keys.pop("wait", True), list(keys.pop("overrides", ()))
        at_once = keys.pop("at_once", None)
        self._keys = {name: value for name, value in keys.items() if value is not None}
        self._at_once = [] if at_once is None else [f"sweep.at_once={at_once}"]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what `launch` needs. A task function is not used: each job runs the program."""
        self._context, self._config = hydra_context, config
        self._batch = getattr(task_function, "launch_batch", None)  # hpcinit's own search, which submits its trials

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit a job for each list of overrides and return their results, in order."""
        if self._batch is not None:
            return cast(Sequence[JobReturn], self._batch(job_overrides, initial_job_idx))
        from hpcinit.base.errors import HpcinitError  # noqa: PLC0415

        jobs = [self._job(list(words), initial_job_idx + at) for at, words in enumerate(job_overrides)]
        runs: list[Run] = []
        try:
            ends = self._run(jobs, runs)
            return self._returned(jobs, runs, ends)
        except HpcinitError as error:
            raise CompactHydraException(str(error)) from error
        except KeyboardInterrupt:  # the sweeper ends with this process, and no one would read the results
            for run in runs:
                run.cancel()
            raise

    def _job(self, words: list[str], number: int) -> JobReturn:
        """Return what is known of the job before it runs: its overrides, its config, its output folder."""
        config = self._context.config_loader.load_sweep_config(self._config, words)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return JobReturn(
            overrides=OmegaConf.to_container(config.hydra.overrides.task),  # type: ignore[arg-type]
            cfg=task,
            hydra_cfg=OmegaConf.masked_copy(config, ["hydra"]),
            working_dir=str(folder),
        )

    def _arguments(self, job: JobReturn) -> list[str]:
        """Return the arguments with which the program runs as this job."""
        from hydra._internal.utils import get_args_parser  # noqa: PLC0415 - for the flags of this process

        assert job.hydra_cfg is not None and job.working_dir is not None
        flags = get_args_parser().parse_known_args()[0]
        names = ("config_name", "config_path", "config_dir")
        given = {f"--{name.replace('_', '-')}": getattr(flags, name) for name in names}
        number = job.hydra_cfg.hydra.job.num
        hydra = [word for word in job.hydra_cfg.hydra.overrides.hydra if not word.lstrip("+~").startswith(OF_THE_SWEEP)]
        return [
            *(f"{flag}={value}" for flag, value in given.items() if value is not None),
            *(job.overrides or ()),
            *hydra,
            f"hydra.run.dir={_quoted(job.working_dir)}",
            f"hydra.job.num={number}",
            f"hydra.job.id={number}",
            f"+hydra.callbacks.hpcinit_result._target_={HERE}.ResultCallback",
        ]

    def _run(self, jobs: Sequence[JobReturn], runs: "list[Run]") -> "dict[Path, State]":
        """Submit the jobs and return the ends of their runs: all together, or without a queue one after the other."""
        from hpcinit.submit import launcher_output  # noqa: PLC0415

        ends: dict[Path, State] = {}
        local = self._keys.get("cluster", "" if shutil.which("sbatch") else "local") == "local"
        for batch in [[job] for job in jobs] if local else [jobs]:
            new = self._submit(batch, local)
            runs += new
            for job, run in zip(batch, new, strict=True):
                log.info(_line(job, f"job {run.job_id}, {run.path}"))
            if self._wait:
                ends |= launcher_output.wait([run.path for run in new], log.info)
        return ends

    def _submit(self, jobs: Sequence[JobReturn], local: bool) -> "list[Run]":
        """Submit the jobs, as one array where their requests allow it."""
        from hpcinit import api  # noqa: PLC0415
        from hpcinit.config.python_arguments import override_value  # noqa: PLC0415

        texts = [override_value(self._arguments(job)) for job in jobs]
        overrides = [*self._overrides, *self._at_once, f"job.args={','.join(texts)}", "job=program"]
        options = {**self._keys, "program": _program()}
        return [api.submit(*overrides, **options)] if local else api.sweep(*overrides, **options)

    def _returned(
        self, jobs: Sequence[JobReturn], runs: "Sequence[Run]", ends: "Mapping[Path, State]"
    ) -> Sequence[JobReturn]:
        """Add the end of its run to each job, and print all that failed. The sweeper raises the error of the first."""
        from hpcinit.records import results  # noqa: PLC0415
        from hpcinit.submit import launcher_output  # noqa: PLC0415

        failed = []
        for job, run in zip(jobs, runs, strict=True):
            job.status, job.return_value = JobStatus.COMPLETED, None
            if not self._wait:
                continue
            if launcher_output.succeeded(run.path, ends[run.path]):
                job.return_value = results.read(run.path)
                continue
            about = launcher_output.failure(run.path, ends[run.path])
            failed.append(_line(job, about))
            # A compact error: the line names the cause, and a traceback would only show how Hydra called its launcher.
            job.status, job.return_value = JobStatus.FAILED, CompactHydraException(about)
        launcher_output.show_failures(failed, len(jobs), log.error)
        return jobs


class ResultCallback(Callback):
    """In the job: write what the program's function returned on rank 0 to the run folder."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Write the return value if JSON can contain it and the program has written no result."""
        from hpcinit.base.errors import RequestError  # noqa: PLC0415
        from hpcinit.records import results, run_folder  # noqa: PLC0415

        folder = os.environ.get("HPCINIT_RUN")
        value = job_return.return_value if job_return.status == JobStatus.COMPLETED else None
        if value is None or folder is None or os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != "0":
            return
        if (Path(folder) / run_folder.RESULT).exists():
            return
        try:
            results.write_or_print(Path(folder), results.reported(value))
        except RequestError as error:
            log.warning(f"no result for the sweeper: {error}")


def _program() -> list[str]:
    """Return the program of this process as hpcinit takes it: a script, or -m and a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    return [str(Path(sys.argv[0]).absolute())]


def _line(job: JobReturn, about: str) -> str:
    from hpcinit.submit import launcher_output  # noqa: PLC0415

    assert job.hydra_cfg is not None
    number = job.hydra_cfg.hydra.job.num
    return launcher_output.job_line(number, filter_overrides(job.overrides or ()), about)


def _quoted(path: str) -> str:
    from hpcinit.config.python_arguments import override_value  # noqa: PLC0415

    return override_value(path)
