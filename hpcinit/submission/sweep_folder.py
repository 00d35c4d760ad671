"""A sweep's folder on the disk: what stands in it once, and a run folder for each task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config.compose import Request
from hpcinit.facts import runfolder
from hpcinit.facts.errors import MaybeSubmitted
from hpcinit.submission import array, folder, for_job
from hpcinit.submission.provenance import Provenance
from hpcinit.submission.sweep_jobs import Job

FORMAT = 1
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def fill(path: Path, requests: Sequence[Request], jobs: Sequence[Job], provenance: Provenance) -> None:
    """Everything but what says that the jobs exist. Raises SubmitError."""
    names = {request.number: job.env_names for job in jobs for request in job.requests}
    sections: dict[tuple[str, str], str] = {}
    tasks = {str(request.number): request.combination for request in requests}
    try:
        for request in requests:
            task = f"{path}/{request.number}"
            folder.make(task)
            folder.write(
                f"{task}/{runfolder.SPEC}",
                for_job.make_spec(request.config, for_job.workdir_of(request.config)).to_json(),
            )
            folder.write(f"{task}/{runfolder.CONFIG}", _yaml(request.document, sections))
            if names[request.number]:
                folder.write(f"{task}/{runfolder.ENV}", array.env_file(request.config, names[request.number]))
        for job in jobs:
            folder.write(f"{path}/{job.file}", job.text)
        folder.write(f"{path}/{runfolder.SWEEP}", json.dumps({"format": FORMAT, "tasks": tasks}, indent=1) + "\n")
        folder.write(f"{path}/{runfolder.PROVENANCE}", provenance.to_json())
    except OSError as error:
        raise folder.cannot_write(path, error) from None


def mark(task: Path, record: Mapping[str, Any]) -> None:
    """The task's job exists. Raises MaybeSubmitted."""
    try:
        folder.write(f"{task}/{runfolder.SUBMISSION}", json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise MaybeSubmitted(
            f"job {record['job_id']} was submitted, but its record {task / runfolder.SUBMISSION} cannot be written: "
            f"{error.strerror}; it runs, and `scancel {record['job_id']}` ends it"
        ) from None


def _yaml(document: Mapping[str, Any], known: dict[tuple[str, str], str]) -> str:
    """As yaml.safe_dump; each section that is the same in several tasks once."""
    parts = []
    for name, value in document.items():
        key = (name, repr(value))
        if key not in known:
            known[key] = yaml.dump({name: value}, Dumper=DUMPER, sort_keys=False)
        parts.append(known[key])
    return "".join(parts)
