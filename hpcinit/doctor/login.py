"""What can be looked at on the login node, before anything waits in a queue."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.doctor import places, slurm
from hpcinit.facts import private_names, versions
from hpcinit.facts.checkup import BAD, OK, WARNING, Check
from hpcinit.facts.errors import HpcinitError
from hpcinit.submission import environment
from hpcinit.submission import submit as submission


def checks(config: Config, document: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Check]:
    """All of them, in the order in which they are worth mending."""
    yield from of_versions(config)
    yield from slurm.checks(config, env)
    yield from _config(config, document)
    yield from places.checks(config, env)
    yield from _environment(config, env)


def of_versions(config: Config | None) -> Iterator[Check]:
    """config: None where there is none that can be used."""
    yield Check("hpcinit", OK, f"{versions.installed('hpcinit') or 'not installed'}, in {Path(__file__).parents[1]}")
    yield Check("Python", OK, f"{platform.python_version()}, {sys.executable}")
    said = [f"{name} {versions.installed(name) or 'missing'}" for name in ("submitit", "hydra-core", "omegaconf")]
    yield Check("submits with", OK, ", ".join(said))
    other = _other_python(config) if config else ""
    yield _torch(other)
    deepspeed = versions.installed("deepspeed")
    needed = config is not None and job_spec.uses_deepspeed(config)
    if needed and not deepspeed and not other:
        yield Check("deepspeed", BAD, "not installed, and this request needs it", "pip install 'hpcinit[deepspeed]'")
    elif deepspeed and not other and (newer := private_names.newer_than_tested("deepspeed", deepspeed)):
        yield Check("deepspeed", WARNING, newer, _older("deepspeed"))
    else:
        yield Check("deepspeed", OK, deepspeed or "not installed here")


def _torch(other: str) -> Check:
    found = versions.installed("torch")
    if other:
        return Check("torch", OK, f"the ranks run with {other}; here: {found or 'not installed'}")
    if not found:
        return Check("torch", BAD, "not installed, and the ranks run with this Python", "pip install 'hpcinit[job]'")
    oldest = private_names.TESTED["torch"].oldest
    if versions.key(found) < versions.key(oldest):
        return Check("torch", BAD, f"{found}, expected {oldest} or newer", f"pip install 'torch>={oldest}'")
    if newer := private_names.newer_than_tested("torch", found):
        return Check("torch", WARNING, newer, _older("torch"))
    return Check("torch", OK, f"{found} (installed; not imported here)")


def _older(package: str) -> str:
    return f"nothing, if your job works with it; else: pip install '{package}<={private_names.TESTED[package].newest}'"


def _other_python(config: Config) -> str:
    """Where the ranks' Python is said to be another one than this; ''."""
    cluster = config.cluster
    for key, value in (
        ("container.image", config.container.image),
        ("cluster.venv", cluster.venv),
        ("cluster.conda", cluster.conda),
        ("cluster.python", cluster.python),
    ):
        if value:
            return f"{key}={value}"
    return "modules of the cluster" if cluster.modules else ""


def _config(config: Config, document: Mapping[str, Any]) -> Iterator[Check]:
    try:
        submission.check(config, document)
    except HpcinitError as error:
        for problem in getattr(error, "problems", None) or [str(error)]:
            yield Check("config", BAD, problem)
        return
    per_node = config.ranks_per_node or config.cluster.gpus_per_node or 1
    yield Check("config", OK, f"cluster {config.cluster.name}, {config.nodes} x {per_node} ranks: no problem")


def _environment(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """What this shell holds that will not reach a job."""
    _, dropped = environment.of_job(env, config.secrets, config.secret_names, devices=config.cluster.engine == "slurm")
    inside = env.get("SLURM_JOB_ID")
    if inside and config.cluster.engine == "slurm":
        do = "nothing, if that is meant; else submit from a login shell"
        yield Check("this shell", WARNING, f"is inside of job {inside}", do)
    if dropped.foreign:
        names = ", ".join(dropped.foreign)
        do = f"meant for the job? {' '.join(dropped.instead)}" if dropped.instead else "nothing: they are another job's"
        yield Check("environment", WARNING if dropped.instead else OK, f"not passed on to a job: {names}", do)
    else:
        yield Check("environment", OK, "nothing of another job's")
    for name in dropped.secrets:
        do = f"put it in a file with mode 0600: '+secrets.{name}=FILE'; if it is none: 'secret_names=[-{name}]'"
        yield Check("secrets", WARNING, f"{name} looks like a secret, and is not passed on to a job", do)
    for name, place in config.secrets.items():
        yield Check("secrets", OK, f"{name} is read by the job from {place}")
