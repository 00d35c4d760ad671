"""The Spec of a run with its paths, and where it runs."""

from __future__ import annotations

from pathlib import Path

from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.facts.spec import Spec
from hpcinit.facts.user_paths import expanded
from hpcinit.submission import snapshot


def make_spec(config: Config, workdir: Path, code: snapshot.Plan | None = None, path: Path | None = None) -> Spec:
    """Return what the job needs of a config that has passed its checks.

    code: with a snapshot, from which the run in the folder `path` runs.
    """
    target = getattr(config.job, job_spec.program_kind(config))
    if code and path:
        workdir, target = code.place(path), code.target(path, target)
    return job_spec.make(config, str(workdir), target)


def workdir_of(config: Config) -> Path:
    return expanded(config.job.workdir or ".").absolute()


def runs_dir_of(config: Config) -> Path:
    return expanded(config.runs_dir).absolute()
