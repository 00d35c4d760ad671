"""`hpcinit submit cluster=x nodes=8 [key=value ...] [-- train.py --its-own arguments]`"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.config import checks, compose
from hpcinit.config.schema import Config
from hpcinit.facts import quoting
from hpcinit.facts.errors import INTERRUPTED, RequestError
from hpcinit.submission import submit as submission


def main(argv: Sequence[str]) -> int:
    words, program = _split(list(argv))
    if "--" in argv and not program:
        raise RequestError("nothing stands after --, expected a program: hpcinit submit nodes=2 -- train.py")
    if program and not any(word.startswith("job=") for word in words):
        words.append("job=program")

    def task(config: Config, document: dict[str, Any]) -> int:
        if program:
            _put(program, config, document)
        return _submit(config, document, argv)

    try:
        return compose.main(words, task)
    except KeyboardInterrupt:
        # submit() never lets one through once a job exists; of a sweep the earlier jobs have been reported.
        print("hpcinit: interrupted; nothing was submitted", file=sys.stderr)
        return INTERRUPTED


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first -- and what after it."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _put(program: list[str], config: Config, document: dict[str, Any]) -> None:
    """Make `train.py --lr 3`, `-m package.train ...` or `any-command ...` what the job runs."""
    job = config.job
    job.script = job.module = job.command = None
    if program[0] == "-m" and len(program) > 1:
        job.module, job.args = program[1], program[2:]
    elif program[0].endswith(".py"):
        job.script, job.args = program[0], program[1:]
    else:
        job.command, job.args = program[0], program[1:]
    if config.name == job.name == "program":
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(job.script or job.module or job.command or "").stem)
        config.name = stem if quoting.PLAIN_NAME.fullmatch(stem) else "program"
    document["name"] = config.name
    document["job"] |= {k: getattr(job, k) for k in ("script", "module", "command", "args")}


def _submit(config: Config, document: dict[str, Any], argv: Sequence[str]) -> int:
    if config.dry_run:
        sys.stdout.write(submission.dry_run(config))
        return 0
    done = submission.submit(config, document, ["hpcinit", "submit", *argv])
    if done.dropped:
        print(f"not passed on to the job: {', '.join(done.dropped)}", file=sys.stderr)
    per_node = checks.ranks_per_node(config)
    shape = f"{config.nodes} node{'s' * (config.nodes != 1)} x {per_node} rank{'s' * (per_node != 1)}"
    print(f"job {done.job_id} on {config.cluster.name}: {config.name}, {shape}")
    print(f"run folder: {done.path}", flush=True)
    if done.interrupted:
        print(f"interrupted, but the job was submitted already; hpcinit cancel {done.path} ends it", file=sys.stderr)
        return INTERRUPTED
    if not config.wait:
        return 0
    from hpcinit.observe.follow import follow  # noqa: PLC0415 - rich, only for those who wait

    return follow(done.path)
