"""Implements `hpcinit exec RUN -- command` and `hpcinit shell RUN`: runs a command on the node of a running rank.

The command gets the environment, the working folder and the container of the rank, but does not join the process group.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base import console
from hpcinit.base.errors import Failure, RequestError
from hpcinit.base.quoting import option_flags
from hpcinit.config.request import Request
from hpcinit.observe import find_runs, job_step
from hpcinit.observe.job_step import RunningJob
from hpcinit.records.starts import STARTS
from hpcinit.slurm import slurm_client
from hpcinit.slurm.slurm_client import NotStarted
from hpcinit.submit import container, provenance
from hpcinit.submit.run_path import RunPath

STARTED = "hpcinit: the command starts"
SHELL = ("sh", "-c", "command -v bash > /dev/null && exec bash; exec sh")


@dataclass(frozen=True)
class Container:
    """How to start a command inside the container of a run.

    options: options for srun.
    prefix: the arguments in front of the command.
    python: the path of Python inside the image if pyxis starts the container, otherwise ''.
    """

    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    python: str = ""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit exec",
        usage="hpcinit exec RUN [--rank N | --node HOST] -- command args...",
        description="Run a command on a node of a run, beside its ranks and with their environment. The exit "
        "status is the command's. The run continues, whatever the command does.",
    )
    return _with_place(parser)


def shell_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit shell",
        description="Open a shell on a node of a run, beside its ranks and with their environment. Leave it "
        "with exit; the run continues.",
    )
    return _with_place(parser)


def _with_place(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("run", help="run folder, its name, or a job id")
    find_runs.add_runs_dir(parser)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--rank", type=int, metavar="N", help="beside this rank; default: 0")
    place.add_argument("--node", metavar="HOST", help="on this node, beside its first rank")
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    words, command = list(argv), []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    options = console.parse_arguments(parser(), words)
    if not command:
        raise RequestError(
            "no command, expected one after --: hpcinit exec RUN -- command args... To open a shell: hpcinit shell RUN"
        )
    return run(options, command)


def shell_main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(shell_parser(), list(argv))
    return run(options, SHELL, announced=True)


def run(options: argparse.Namespace, command: Sequence[str], announced: bool = False) -> int:
    """Run `command` on a node of the job and return its exit status. Raise Failure if it cannot be started.

    announced: whether to print first on which node the command runs.
    """
    job = job_step.running(options.run, options.runs_dir)
    rank, host = _place(job, options.rank, options.node)
    container = _container(job)
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() and job.engine.other_machines
    asked = {
        "run": str(job.path),
        "slurm": job.engine.uses_slurm,
        "tasks": STARTS[job.spec.launch.kind].task_per_rank,
        "rank": rank,
        "workdir": job.spec.workdir,
        "command": list(command),
        "container": list(container.prefix),
        # In a terminal, the command's output is not on srun's stderr, so everything on that stderr is an error of srun.
        "started": "" if terminal else STARTED,
        "verbose": announced and not options.quiet,
    }
    step = [*job_step.collector(asked), *([container.python] if container.python else [])]
    env = job_step.environment(os.environ)
    options_of_srun = (*container.options, "--quit-on-interrupt", *(["--pty"] if terminal else ["--unbuffered"]))
    srun = job_step.srun(job, [host], step, options_of_srun)
    try:
        status, errors = slurm_client.attached(srun, env, "" if terminal else STARTED)
    except NotStarted as error:
        raise Failure(f"{error}: run this on the machine where the job was submitted") from None
    if errors and (not terminal or status != 0):
        said = "; ".join(errors)
        what = "the command ended with a Slurm error" if terminal else "the command did not start"
        raise Failure(f"{what} on {host}: {said}. The run continues: hpcinit status {job.path.name}")
    return status


def _place(job: RunningJob, rank: int | None, node: str | None) -> tuple[int | None, str]:
    """Return the rank whose environment the command gets, and the node on which it runs.

    If the user named a node, the rank is None: use the first rank of that node.
    """
    if node is None:
        return rank or 0, job.host(rank or 0)
    if node not in job.nodes:
        raise RequestError(f"{node} is not a node of job {job.job_id}, which has: {', '.join(job.nodes)}")
    return None, node


def _container(job: RunningJob) -> Container:
    document = provenance.read_recorded(job.path)
    if not (document.get("container") or {}).get("image"):
        return Container()
    found: list[Container] = []

    def read(requests: Sequence[Request]) -> int:
        config, path, workdir = requests[0].config, RunPath(job.path), Path(job.spec.workdir)
        options = option_flags(container.container_options(config, path, workdir))
        prefix = container.container_prefix(config, path, workdir)
        found.append(Container(tuple(options), tuple(prefix), "" if prefix else config.container.python))
        return 0

    provenance.recorded_request(document, [], lambda request: None, read)
    return found[0]
