"""Submits a run, a chain or a sweep: creates the folder, submits the jobs, and cleans up if there is no job.

    with begin(config, argv) as transaction:
        transaction.refuse_duplicates(request, jobs=1)
        ...                                     # write the files into transaction.path
        transaction.check_with_slurm()
        job_id, command = transaction.submit(script)
        mark(transaction.path, transaction.record(job_id, command))

If the block fails, the folders are removed. A folder is kept only if its job exists or may exist.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hpcinit.base import console, signals
from hpcinit.base.errors import MaybeSubmitted, RequestError, SubmitError
from hpcinit.checks import checkout, duplicates, validate
from hpcinit.checks.checkout import SnapshotPlan
from hpcinit.config import hetjob, job_spec
from hpcinit.config.request import Request
from hpcinit.config.schema import Config
from hpcinit.engine import from_record
from hpcinit.records import job_record, run_folder, secret_names
from hpcinit.slurm import exactly_once, scontrol, slurm_client, tokens
from hpcinit.slurm.queue import QueueQuery
from hpcinit.submit import code_snapshot, folder, job_environment, restart, script, shell_variables
from hpcinit.submit.job_environment import make_spec
from hpcinit.submit.provenance import Provenance


class Transaction:
    """One submission of a run or a sweep, until its jobs exist.

    path: the folder of the run or sweep.
    env: the environment for sbatch.
    dropped: the variables of the user's environment that are not in `env`.
    parts: the folders of a sweep's tasks in `path`. Those without a job are removed if the sweep fails.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        env: Mapping[str, str],
        dropped: job_environment.DroppedVariables,
        provenance: Provenance,
        received: Sequence[int],
        claims: ExitStack,
    ) -> None:
        self.path, self.env, self.dropped, self.provenance = path, env, dropped, provenance
        self.parts: Sequence[Path] = ()
        self._config, self._received, self._claims = config, received, claims
        self._request = ""
        self._token = ""  # the token of the latest sbatch call; '' before the first call
        self._queued: QueueQuery | None = None
        self._kept: set[Path] = set()  # folders of jobs that exist or may exist

    @property
    def interrupted(self) -> bool:
        """Return whether the user pressed Ctrl-C, or SIGTERM or SIGHUP arrived."""
        return bool(self._received)

    def refuse_duplicates(self, request: str, jobs: int) -> None:
        """Claim a request, so that no other process submits it, and start squeue to look for an earlier job.

        Raise RequestError if another process has claimed the request, and SubmitError if the claim cannot be written.

        request: the hash that identifies the request.
        jobs: how many jobs it needs.
        """
        self._request = request
        if self._config.engine.has_queue and not self._config.again:
            longest_s = exactly_once.longest_s(self._config.cluster.submit_patience_s, jobs)
            self._claims.enter_context(folder.claim_held(self.path, request, longest_s))
            self._queued = tokens.own_jobs(self.env, ended=False)

    def check_with_slurm(self) -> None:
        """Run the checks that query Slurm. Raise RequestError if a job with the same request is already queued."""
        if self._queued is not None:
            duplicates.refuse_duplicate(self._queued, self._request)
        self.check_interrupted()

    def check_interrupted(self) -> None:
        """Raise KeyboardInterrupt if the user has pressed Ctrl-C."""
        if self.interrupted:
            raise KeyboardInterrupt

    def submit(
        self, script: Path, options: Sequence[str] = (), parts: Sequence[Path] = ()
    ) -> tuple[str, Sequence[str]]:
        """Submit `script` exactly once: with sbatch, or on this machine with cluster=local.

        Return the job id and the command. Raise SubmitError if there is no job, and MaybeSubmitted if there may be one.

        options: options for sbatch.
        parts: the run folders that belong to this job.
        """
        self._token = tokens.new(self._request)  # each job of a chain or a sweep has a different token
        exists = True  # the job exists or may exist
        try:
            how = partial(self._sbatch, script, options)
            return self._config.engine.submit(self.path, self._config.time_min, self.env, how)
        except (SubmitError, KeyboardInterrupt) as error:
            exists = isinstance(error, MaybeSubmitted)
            raise
        finally:
            if exists:
                self._kept |= {self.path, *parts}

    def record(self, job_id: str, command: Sequence[str]) -> dict[str, Any]:
        """Return the content of submission.json for a job that was just submitted."""
        return {
            "job_id": job_id,
            "engine": self._config.cluster.engine,
            "cluster": self._config.cluster.name,
            **({"clusters": name} if (name := self._config.cluster.clusters) else {}),
            "token": self._token,
            "submitted": time.time(),
            "command": list(command),
        }

    def _sbatch(self, script: Path, options: Sequence[str]) -> tuple[str, Sequence[str]]:
        from hpcinit.submit.executor import Executor  # noqa: PLC0415 - submitit takes 0.06 s

        waiting = console.ProgressLine()
        try:
            return Executor(script.parent, program=True).submit_script(
                script,
                self.env,
                self._token,
                options,
                comment=self._config.comment,
                patience_s=self._config.cluster.submit_patience_s,
                confirm=self._config.cluster.submit_confirm,
                interrupted=lambda: self.interrupted,
                show=waiting.show,
                started=lambda: job_record.last_job(script.parent),
            )
        except MaybeSubmitted:
            raise
        except SubmitError as error:
            raise validate.refused(str(error), script.read_text(encoding="utf-8")) from None
        finally:
            waiting.end()

    def failure(self, error: BaseException) -> BaseException:
        """Remove the folders whose jobs certainly do not exist, and return the error to raise instead of `error`."""
        if self._queued is not None:
            self._queued.drop()
        if self._token and not isinstance(error, (SubmitError, KeyboardInterrupt)):
            error = exactly_once.unexpected(error, self._token)
        if not self._kept:
            folder.discard(self.path)
        for part in self.parts if self._kept else ():
            if part not in self._kept:
                shutil.rmtree(part, ignore_errors=True)
        return error


@contextmanager
def begin(
    config: Config, argv: Sequence[str], below: Sequence[str] = (run_folder.LOGS, run_folder.ERRORS)
) -> Iterator[Transaction]:
    """Create the folder of a run or sweep, with the folders `below` in it. During the block, Ctrl-C is deferred.

    Raise RequestError if the request is wrong, and SubmitError if the folder cannot be created.

    argv: the command line to record.
    """
    require_sbatch(config)
    provenance = Provenance(job_spec.workdir(config), secret_names.masked(argv, config.secret_names))
    env, dropped = job_environment.job_environment(os.environ, config)
    provenance.variables = shell_variables.names(env)
    with (
        signals.deferred_interrupts() as received,
        ExitStack() as claims,
        slurm_client.on_cluster(config.cluster.clusters),
    ):
        path = folder.claim(job_spec.runs_dir(config), config.name, below)
        transaction = Transaction(config, path, env, dropped, provenance, received, claims)
        try:
            yield transaction
        except BaseException as seen:
            error = transaction.failure(seen)
            if error is seen:
                raise
            raise error from seen


def mark(
    path: Path, record: Mapping[str, Any], write: Callable[[Path, Mapping[str, Any]], None] = folder.mark_submitted
) -> None:
    """Write submission.json, because the job exists. Raise MaybeSubmitted if the file cannot be written."""
    try:
        write(path, record)
    except OSError as error:
        end = " ".join(slurm_client.addressed([from_record(record).cancel_command, str(record["job_id"])]))
        raise MaybeSubmitted(
            f"job {record['job_id']} was submitted and will run, but {path / run_folder.SUBMISSION} cannot be "
            f"written: {error.strerror}. To cancel the job: {end}"
        ) from None


def require_sbatch(config: Config) -> None:
    """Raise SubmitError if sbatch is missing, and RequestError if SLURM_CLUSTERS does not name the job's cluster."""
    if not config.engine.uses_slurm:
        return
    other, named = os.environ.get("SLURM_CLUSTERS"), config.cluster.clusters
    if other and (ours := named or _cluster_name()) and other.lower() != ours.lower():
        here = "cluster.clusters names the job's cluster" if named else "hpcinit submits to this machine's cluster"
        raise RequestError(
            f"SLURM_CLUSTERS is {other!r}, expected {ours!r} or unset: {here}. To submit to {ours}: unset "
            f"SLURM_CLUSTERS. To submit to {other}: cluster.clusters={other}"
        )
    if shutil.which("sbatch") is None:
        raise SubmitError(
            f"sbatch is not on PATH, but cluster {config.cluster.name} needs it: is this a login node, and is the "
            "slurm module loaded? To print the script without sbatch: dry_run=true; to run on this machine: "
            "cluster=local"
        )


def _cluster_name() -> str:
    """Return the name of the cluster whose controller SLURM_CONF selects, or '' if the controller does not reply."""
    try:
        text = slurm_client.run(["scontrol", "show", "config"]).stdout
    except slurm_client.Unreachable:
        return ""
    return scontrol.config(text).get("ClusterName", "")


# Render and submit one run.


@dataclass(frozen=True)
class Submitted:
    """A run that has been submitted.

    jobs: the ids of its jobs. A chain has several.
    missing: why there are fewer jobs than requested, or ''.
    expected: a sentence with the start time that Slurm estimates.
    interrupted: whether the user pressed Ctrl-C during the submission.
    """

    job_id: str
    path: Path
    dropped: job_environment.DroppedVariables
    interrupted: bool
    jobs: Sequence[str]
    missing: str
    expected: str = ""


def dry_run(config: Config, argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the script that submit() would submit, and the files that its job would read.

    The files are as files_read() returns them. The config must have passed its checks.
    """
    path, workdir = folder.next_path(job_spec.runs_dir(config), config.name), job_spec.workdir(config)
    origin = script.origin(config, secret_names.masked(argv, config.secret_names), path)
    code = checkout.plan_snapshot(config, workdir)
    text = script.render(config, path, workdir, code, origin)
    return text, files_read(config, workdir, code, path)


def files_read(
    config: Config, workdir: Path, code: SnapshotPlan | None = None, path: Path | None = None
) -> dict[str, str]:
    """Return the text of each file that the ranks will read, by its name in the run folder `path`.

    The text contains a placeholder for the job's secret, because only submit() creates the secret.
    """
    files = {}
    for number, world in enumerate(hetjob.worlds(config)):
        below = f"{run_folder.COMPONENT}{number}/" if number else ""
        files[below + run_folder.SPEC] = make_spec(world, workdir, code, path).shown()
    return files


def submit(
    asked: Request, argv: Sequence[str], write_more: Callable[[Path, int], None] = lambda path, number: None
) -> Submitted:
    """Render the script, write the run folder and submit the job. The config must have passed its checks.

    Raise RequestError if the same request is already queued, and SubmitError for other failures. After an error there
    is no job and no folder, except after MaybeSubmitted.

    argv: the command line to record.
    write_more: a function that writes additional files into the run folder of the request with this number.
    """
    config, document = asked.config, asked.document
    workdir = job_spec.workdir(config)
    code = checkout.plan_snapshot(config, workdir)
    records: list[dict[str, Any]] = []
    with begin(config, argv) as one:
        path = one.path
        taken = code_snapshot.take_snapshot(code, path) if code else None
        request = duplicates.request_hash(
            document, workdir, job_spec.runs_dir(config), taken["sha256"] if taken else ""
        )
        one.refuse_duplicates(request, config.chain)
        text = script.render(config, path, workdir, code, script.origin(config, one.provenance.argv, path))
        first, *others = hetjob.worlds(config)
        spec = make_spec(first, workdir, code, path)
        files = {
            run_folder.SCRIPT: text,
            run_folder.SPEC: spec.to_json(),
            run_folder.CONFIG: yaml.safe_dump(dict(document), sort_keys=False),
            run_folder.PROVENANCE: one.provenance.to_json(taken),
        }
        folder.fill(path, files)
        for number, each in enumerate(others, 1):
            folder.make_component(path, number, make_spec(each, workdir, code, path).to_json())
        write_more(path, asked.number)
        one.check_with_slurm()
        asks_slurm = config.validate and config.engine.uses_slurm
        expected = validate.sbatch_test_only(path / run_folder.SCRIPT, one.env) if asks_slurm else ""
        if config.dependency:  # Slurm's estimate ignores dependencies
            expected = ""
        one.check_interrupted()

        def hand_over(*options: str) -> tuple[str, Sequence[str]]:
            job_id, command = one.submit(path / run_folder.SCRIPT, options)
            records.append(one.record(job_id, command))
            return job_id, command

        links = restart.hand_over(hand_over, config)
        shown = {"program": spec.command(), "typed": secret_names.masked(asked.given, config.secret_names)}
        chain = {"jobs": list(links.jobs), "tokens": [record["token"] for record in records]}
        mark(path, records[0] | shown | (chain if config.chain > 1 else {}))
    return Submitted(links.jobs[0], path, one.dropped, one.interrupted, links.jobs, links.missing, expected)
