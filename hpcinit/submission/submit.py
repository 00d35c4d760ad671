"""One submission from a checked config to a job that exists, and nothing in between that looks like one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config import checks, secret_files
from hpcinit.config.schema import Config
from hpcinit.facts import runfolder
from hpcinit.facts.errors import ConfigError, RequestError
from hpcinit.submission import after, ask, chain, environment, folder, script, snapshot, syntax, transaction, twice
from hpcinit.submission.for_job import make_spec, runs_dir_of, workdir_of

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
    """Return the script that submit() would write and submit now. The config passed check()."""
    path = folder.next_path(runs_dir_of(config), config.name)
    return script.render(config, path, workdir_of(config), snapshot.of(config, workdir_of(config)))


def submit(config: Config, document: Mapping[str, Any], argv: Sequence[str]) -> Submitted:
    """Render, write the run folder and hand the script to Slurm or to the local engine. The config passed check().

    document: the config as plain containers, for config.yaml. argv: the command line, for the record.
    Raise RequestError where the same request is queued already, or SubmitError; then there is no job and no folder,
    except with MaybeSubmitted.
    """
    workdir = workdir_of(config)
    code = snapshot.of(config, workdir)
    records: list[dict[str, Any]] = []
    with transaction.begin(config, argv) as one:
        path = one.path
        taken = snapshot.take(code, path) if code else None
        request = twice.request_hash(document, workdir, runs_dir_of(config), taken["sha256"] if taken else "")
        one.refuse_duplicates(request, config.chain)
        text = script.render(config, path, workdir, code)
        files = {
            runfolder.SCRIPT: text,
            runfolder.SPEC: make_spec(config, workdir, code, path).to_json(),
            runfolder.CONFIG: yaml.safe_dump(dict(document), sort_keys=False),
            runfolder.PROVENANCE: one.provenance.to_json(taken),
        }
        folder.fill(path, files)
        one.check_duplicates()
        asked = config.test_only and config.cluster.engine == "slurm"
        expected = ask.test_only(path / runfolder.SCRIPT, one.env) if asked else ""
        if config.after or config.after_ok or config.singleton:  # Slurm's estimate does not know of it
            expected = ""
        one.check_interrupted()

        def hand_over(*options: str) -> tuple[str, Sequence[str]]:
            job_id, command = one.submit(path / runfolder.SCRIPT, options)
            records.append(one.record(job_id, command))
            return job_id, command

        links = chain.hand_over(hand_over, config)
        transaction.mark(path, records[0] | ({"jobs": list(links.jobs)} if config.chain > 1 else {}))
    return Submitted(links.jobs[0], path, one.dropped, one.interrupted, links.jobs, links.missing, expected)
