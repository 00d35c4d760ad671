"""Checks and translates the key `dependency`: Slurm's own syntax, in which a run's name can replace a job id.

An example is afterok:4242,singleton. For sbatch, hpcinit replaces the names of runs with job ids and omits conditions
that are already fulfilled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hpcinit.base.errors import RequestError
from hpcinit.base.text import expanded
from hpcinit.config.schema import Config
from hpcinit.engine import from_record, slurm_engine
from hpcinit.records import job_record
from hpcinit.slurm import slurm_client

if TYPE_CHECKING:
    from hpcinit.observe.state import State

SINGLETON = "singleton"
TYPES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")  # sbatch(1), --dependency
EXPECTED = (
    "expected Slurm's syntax, such as afterok:JOB, afterany:JOB or singleton, joined by ',' (all) or '?' (any); "
    "JOB is a job id or the name of a run"
)


@dataclass(frozen=True)
class Condition:
    """One condition of a dependency: `type:name+delay`.

    name: a job id or the name of a run; '' for singleton.
    delay: '+MINUTES' or ''.
    """

    type: str
    name: str = ""
    delay: str = ""

    def __str__(self) -> str:
        return f"{self.type}:{self.name}{self.delay}" if self.name else self.type


def separator(text: str) -> str:
    """Return the separator of the conditions: '?' if one fulfilled condition is enough, ',' if all are required."""
    return "?" if "?" in text else ","


def conditions(text: str | None) -> list[Condition]:
    """Return the conditions in `text`, one for each job. Call this only if syntax_problems(text) finds no problem."""
    found = []
    for part in re.split("[,?]", text or ""):
        kind, *names = part.split(":")
        if not names and kind:
            found.append(Condition(kind.lower()))
        for each in names:
            name, delay = re.fullmatch(r"(.*?)(\+\d+)?", each, re.DOTALL).groups()  # type: ignore[union-attr]
            found.append(Condition(kind.lower(), name, delay or ""))
    return found


def syntax_problems(text: str | None) -> Iterator[str]:
    """Yield a message for each part of `text` that is not valid in Slurm's syntax."""
    if text is None:
        return
    if "," in text and "?" in text:
        yield f"dependency is {text!r}: Slurm does not combine ',' (all) and '?' (any); use one of them"
    for part in re.split("[,?]", text):
        kind, *names = part.split(":")
        kind = kind.lower()
        if kind == SINGLETON and not names:
            continue
        if kind not in TYPES:
            types = f"the types are {', '.join((*TYPES, SINGLETON))}"
            near = f"; did you mean afterok:{part}?" if part and not names else f"; {types}"
            yield f"dependency has {part!r}, {EXPECTED}{near}"
        elif not names or not all(name.strip() for name in names):
            yield f"dependency has {part!r} without a job, expected for example {kind}:4242 or {kind}:train-0001"
        elif kind != "after" and (delayed := [name for name in names if re.search(r"\+\d+$", name)]):
            yield f"dependency has {part!r}: only 'after' accepts a delay; use {kind}:{delayed[0].partition('+')[0]}"


def written(config: Config) -> Iterator[str]:
    """Yield a message for each syntax error in `dependency`.

    Yield another message if dependency or chain is set and the cluster has no queue.
    """
    yield from syntax_problems(config.dependency or None)
    requested = ["dependency"] * bool(config.dependency) + ["chain"] * (config.chain > 1)
    if requested and not config.engine.has_queue:
        verb = "is" if len(requested) == 1 else "are"
        yield (
            f"{', '.join(requested)} {verb} set, but cluster {config.cluster.name} has no queue (engine: local), so "
            "jobs start at once; run the first with wait=true, then the next, or choose a cluster with Slurm"
        )


NOT_SUBMITTED = "NOT_SUBMITTED"  # a copy of the name in observe.find_runs, which a plain submission does not import
JOB_ID = re.compile(r"\d+(_\d+)?")  # '4242', and '4242_7' of an array


def dependency_option(config: Config) -> str | None:
    """Return the value of sbatch's --dependency, as in 'afterany:41:42,afterok:40,singleton', or None.

    Raise RequestError for a condition that can never be fulfilled.
    """
    option, wrong = _resolved(config)
    if wrong:
        raise RequestError(wrong[0])
    return option


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each condition whose job does not exist, or that can never be fulfilled."""
    yield from _resolved(config)[1]


def _resolved(config: Config) -> tuple[str | None, list[str]]:
    """Return the value of sbatch's --dependency, and a message for each condition that is wrong."""
    between = separator(config.dependency or "")
    waits: dict[str, list[str]] = {}  # type -> ids
    unknown: list[str] = []  # messages about conditions that name no job
    impossible: list[str] = []
    fulfilled = False
    for condition in conditions(config.dependency):
        if condition.type == SINGLETON:
            waits[SINGLETON] = []
            continue
        try:
            targets = _targets(condition, config)
        except RequestError as error:
            unknown.append(str(error))
            continue
        for job_id, states in targets:
            if problem := _problem(condition, job_id, states):
                impossible.append(problem)
            elif _is_fulfilled(condition, states):
                fulfilled = True
            else:
                ids = waits.setdefault(condition.type, [])
                ids.extend(text for text in [f"{job_id}{condition.delay}"] if text not in ids)
    if between == "?" and (fulfilled or waits):  # one condition is enough
        impossible = []
        waits = {} if fulfilled else waits
    option = between.join(":".join([kind, *ids]) for kind, ids in waits.items()) or None
    return option, [*unknown, *impossible]


def has_singleton(config: Config) -> bool:
    """Return whether the job starts only when no other job of the same name is running."""
    return Condition(SINGLETON) in conditions(config.dependency)


def _problem(condition: Condition, job_id: str, states: list[State]) -> str:
    """Return a message if waiting for the other job makes no sense, otherwise ''.

    There are two such cases:

    - Slurm has no record of the other job, and would start this job at once.
    - The other job has ended in a state that `condition` excludes, and this job would never start.

    job_id, states: the other job's id, and its states (several for an array).
    """
    if any(now.purged for now in states):
        return (
            f"dependency={condition}: Slurm has no record of job {job_id} and would start this job at once: is the id "
            "right? If the job ended long ago, submit without this dependency"
        )
    if condition.type == "afterok":
        wrong = [now for now in states if now.name == NOT_SUBMITTED or (now.over and now.name != "COMPLETED")]
    elif condition.type == "afternotok":
        wrong = states if all(now.over and now.name == "COMPLETED" for now in states) else []
    else:
        return ""
    if not wrong:
        return ""
    return (
        f"dependency={condition}: job {wrong[0].job_id} ended as {wrong[0].name}, so this job would never start; "
        f"submit without this dependency, or use dependency=afterany:{condition.name} to accept any outcome"
    )


def _is_fulfilled(condition: Condition, states: list[State]) -> bool:
    """Return whether all the jobs have already ended as required.

    In a dry run without Slurm, jobs that were never submitted count as ended.
    """
    if condition.type in ("aftercorr", "afterburstbuffer"):  # Slurm decides
        return False
    return all(now.over or now.name == NOT_SUBMITTED for now in states)


def _targets(condition: Condition, config: Config) -> list[tuple[str, list[State]]]:
    """Return the ids of the jobs that a condition names, each with its states. An array has one state per task."""
    try:
        with slurm_client.on_cluster(name := config.cluster.clusters or ""):
            return _jobs_named(condition.name, config.runs_dir, condition.type == "after", name)
    except RequestError as error:
        raise RequestError(f"dependency={condition}: {error}") from None


@cache
def _jobs_named(name: str, runs_dir: str, first: bool, clusters: str) -> list[tuple[str, list[State]]]:
    """Return the ids and states of the jobs of `name`: all jobs of a sweep, or one job of a chain.

    name: a job id or the name of a run.
    first: whether to return the first job of a chain instead of the last.
    clusters: cluster.clusters in the config of the job that waits.

    The result is cached, so that each name is queried only once.
    """
    from hpcinit.observe import find_runs, state  # noqa: PLC0415 - imports psutil, which a submission without dependencies does not need

    if JOB_ID.fullmatch(name):
        return [(name, slurm_engine.of_array(name))]
    path = find_runs.find_run(name, expanded(runs_dir))
    record = job_record.submission(path)
    if not from_record(record).has_queue:
        raise RequestError(f"{path} runs without Slurm (engine: {record['engine']}), so no Slurm job can wait for it")
    if (other := job_record.clusters(path)) != clusters:
        raise RequestError(
            f"{path} has cluster.clusters={other or 'null'}, but this job has {clusters or 'null'}: a job can wait "
            "only for jobs of the same cluster"
        )
    if find_runs.is_sweep(path):
        arrays: dict[str, list[State]] = {}
        for task in find_runs.read_sweep(path):
            arrays.setdefault(task.state.job_id.partition("_")[0], []).append(task.state)
        return list(arrays.items())
    now = state.read(path)
    return [(now.job_id if now.by_hand else job_record.jobs(record)[0 if first else -1], [now])]
