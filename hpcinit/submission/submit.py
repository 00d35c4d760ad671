"""One submission from a checked config to a job that exists, and nothing in between that looks like one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config import checks, secret_files
from hpcinit.config.schema import Config
from hpcinit.facts import runfolder, secret_names
from hpcinit.facts.errors import ConfigError, MaybeSubmitted, RequestError, SubmitError
from hpcinit.submission import (
    after,
    ask,
    chain,
    claim,
    environment,
    folder,
    interrupts,
    once,
    queue,
    refusal,
    script,
    snapshot,
    syntax,
    twice,
)
from hpcinit.submission.for_job import make_spec, runs_dir_of, workdir_of
from hpcinit.submission.provenance import Provenance

LONGEST_NAME = 240  # of 255 bytes that a file system allows: room for -0001, and for a temporary file's ending


@dataclass(frozen=True)
class Submitted:
    """A job that exists. interrupted: Ctrl-C came while it was being submitted.

    jobs: all of a chain. missing: why there are fewer than were asked for, else ''. expected: when Slurm
    would start it, in words.
    """

    job_id: str
    path: Path
    dropped: environment.Dropped
    interrupted: bool
    jobs: Sequence[str]
    missing: str
    expected: str = ""


def check(config: Config, document: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError with everything that is wrong with the request.

    document: the config as it will be written, with the user's own keys.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise RequestError("the current folder was deleted under this shell: cd to one that exists") from None
    problems = [*checks.problems(config), *secret_files.in_document(document or {}, config.secret_names)]
    if len(config.name) > LONGEST_NAME:
        problems.append(
            f"name has {len(config.name)} characters, expected at most {LONGEST_NAME}: a folder is named so"
        )
    if not problems and config.cluster.engine == "local":
        from hpcinit.local.capacity import problem  # noqa: PLC0415 - psutil, for this engine only

        world_size = config.nodes * checks.ranks_per_node(config)
        problems.extend(problem(config.nodes, world_size, config.cluster.mem_gb_per_rank))
    if not problems:
        problems.extend((*after.problems(config), *snapshot.problems(config, workdir_of(config))))
    setup = config.cluster.setup
    if not problems and setup:
        # The run's number is not known yet, and bash does not mind: a path is one quoted word.
        text = script.render(config, runs_dir_of(config) / config.name, workdir_of(config))
        if said := syntax.problem(text, setup):
            problems.append(said)
    if problems:
        raise ConfigError(*problems)


def dry_run(config: Config) -> str:
    """The script that submit() would write and submit now."""
    check(config)
    path = folder.next_path(runs_dir_of(config), config.name)
    return script.render(config, path, workdir_of(config), snapshot.of(config, workdir_of(config)))


def require_sbatch(config: Config) -> None:
    """Raise SubmitError where the cluster has Slurm and this machine has no sbatch, and RequestError where the user's
    environment sends jobs to another cluster than this machine's."""
    if config.cluster.engine != "slurm":
        return
    if (
        (other := os.environ.get("SLURM_CLUSTERS"))
        and (ours := queue.cluster(os.environ))
        and other.lower() != ours.lower()
    ):
        raise RequestError(
            f"SLURM_CLUSTERS is {other!r}, expected {ours!r} or nothing: hpcinit submits to this machine's cluster and "
            "looks for jobs there only. To submit here: unset SLURM_CLUSTERS. For the other cluster: submit on its "
            "login nodes, or set SLURM_CONF to its slurm.conf"
        )
    if shutil.which("sbatch") is None:
        raise SubmitError(
            f"sbatch is not on PATH, and cluster {config.cluster.name} needs it: is this a login node, and is the "
            "slurm module loaded? dry_run=true renders without it, cluster=local runs on this machine"
        )


def submit(config: Config, document: Mapping[str, Any], argv: Sequence[str]) -> Submitted:
    """Check, render, write the run folder and hand the script to Slurm or to the local engine.

    document: the config as plain containers, for config.yaml. argv: the command line, for the record.
    Raises ConfigError (nothing was done), RequestError where the same request is queued already, or SubmitError; then
    there is no job and no folder, except with MaybeSubmitted.
    """
    check(config, document)
    require_sbatch(config)
    workdir = workdir_of(config)
    code = snapshot.of(config, workdir)
    provenance = Provenance(workdir, secret_names.masked(argv, config.secret_names))
    slurm = config.cluster.engine == "slurm"
    env, dropped = environment.of_job(os.environ, config.secrets, config.secret_names, devices=slurm)
    started = False  # the program that makes the job
    with interrupts.deferred() as interrupted, ExitStack() as claims:
        path = folder.claim(runs_dir_of(config), config.name)
        try:
            taken = snapshot.take(code, path) if code else None
            request = twice.request_hash(document, workdir, runs_dir_of(config), taken["sha256"] if taken else "")
            question = None
            if slurm and not config.again:
                claims.enter_context(
                    claim.held(path, request, once.longest_s(config.cluster.submit_patience_s, config.chain))
                )
                question = queue.Question(env, over=False)  # answered while we render
            text = script.render(config, path, workdir, code)
            files = {
                runfolder.SCRIPT: text,
                runfolder.SPEC: make_spec(config, workdir, code, path).to_json(),
                runfolder.CONFIG: yaml.safe_dump(dict(document), sort_keys=False),
                runfolder.PROVENANCE: provenance.to_json(taken),
            }
            folder.fill(path, files)
            if question is not None:
                twice.refuse(question, request)
            if interrupted:
                raise KeyboardInterrupt
            expected = ask.test_only(path / runfolder.SCRIPT, env) if slurm and config.test_only else ""
            if config.after or config.after_ok or config.singleton:  # Slurm's estimate does not know of it
                expected = ""
            if interrupted:
                raise KeyboardInterrupt
            token = once.token(request)

            def one(*options: str) -> tuple[str, Sequence[str]]:
                own = once.token(request) if options else token  # every job of a chain has its own
                return _hand_over(config, path, env, own, options, lambda: bool(interrupted))

            started = True
            links = chain.hand_over(one, config)
        except BaseException as error:
            if started and not isinstance(error, (SubmitError, KeyboardInterrupt)):
                raise once.unexpected(error, token) from error
            if not isinstance(error, MaybeSubmitted):
                folder.discard(path)
            raise
        record = {
            "job_id": links.jobs[0],
            "engine": config.cluster.engine,
            "cluster": config.cluster.name,
            "token": token,
            "submitted": time.time(),
            "command": list(links.command),
        }
        mark(path, record | ({"jobs": list(links.jobs)} if config.chain > 1 else {}))
    return Submitted(links.jobs[0], path, dropped, bool(interrupted), links.jobs, links.missing, expected)


def mark(path: Path, record: Mapping[str, object]) -> None:
    try:
        folder.mark_submitted(path, record)
    except OSError as error:
        end = f"{'scancel' if record['engine'] == 'slurm' else 'kill'} {record['job_id']}"
        raise MaybeSubmitted(
            f"job {record['job_id']} was submitted, but its record {path / runfolder.SUBMISSION} cannot be written: "
            f"{error.strerror}; it runs, and `{end}` ends it"
        ) from None


def _hand_over(
    config: Config,
    path: Path,
    env: Mapping[str, str],
    token: str,
    options: Sequence[str],
    interrupted: Callable[[], bool],
) -> tuple[str, Sequence[str]]:
    if config.cluster.engine == "local":
        from hpcinit.local import engine  # noqa: PLC0415

        return engine.start(path, config.time_min, env)
    return sbatch(config, path / runfolder.SCRIPT, env, token, options, interrupted)


def sbatch(
    config: Config,
    batch: Path,
    env: Mapping[str, str],
    token: str,
    options: Sequence[str],
    interrupted: Callable[[], bool],
) -> tuple[str, Sequence[str]]:
    """Hand the script `batch` to Slurm; the job id and the command used. Raises SubmitError."""
    try:
        return once.hand_over(
            batch,
            env,
            token,
            options,
            comment=config.comment,
            patience_s=config.cluster.submit_patience_s,
            confirm=config.cluster.submit_confirm,
            interrupted=interrupted,
        )
    except MaybeSubmitted:
        raise
    except SubmitError as error:
        raise refusal.error(str(error), batch.read_text(encoding="utf-8")) from None
