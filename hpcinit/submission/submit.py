"""One submission from a checked config to a job that exists, and nothing in between that looks like one."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config import checks
from hpcinit.config.schema import Config
from hpcinit.facts import runfolder
from hpcinit.facts.errors import ConfigError, MaybeSubmitted, SubmitError
from hpcinit.facts.layout import Layout
from hpcinit.facts.spec import Comm, Program, Spec
from hpcinit.facts.timeouts import TimeoutLaw
from hpcinit.submission import environment, folder, script
from hpcinit.submission.provenance import Provenance


@dataclass(frozen=True)
class Submitted:
    """A job that exists. interrupted: Ctrl-C came while it was being submitted."""

    job_id: str
    path: Path
    dropped: Sequence[str]
    interrupted: bool


def check(config: Config) -> None:
    """Raises ConfigError with everything that is wrong with the request."""
    problems = checks.problems(config)
    if not problems and config.cluster.engine == "local":
        from hpcinit.local.capacity import problem  # noqa: PLC0415 - psutil, for this engine only

        world_size = config.nodes * checks.ranks_per_node(config)
        problems.extend(problem(config.nodes, world_size, config.cluster.mem_gb_per_rank))
    if problems:
        raise ConfigError(*problems)


def dry_run(config: Config) -> str:
    """The script that submit() would write and submit now."""
    check(config)
    return script.render(config, folder.next_path(_runs_dir(config), config.name), _workdir(config))


def submit(config: Config, document: Mapping[str, Any], argv: Sequence[str]) -> Submitted:
    """Check, render, write the run folder and hand the script to Slurm or to the local engine.

    document: the config as plain containers, for config.yaml. argv: the command line, for the record.
    Raises ConfigError (nothing was done) or SubmitError (no job; the folder is gone).
    """
    check(config)
    if config.cluster.engine == "slurm" and shutil.which("sbatch") is None:
        raise SubmitError(
            f"sbatch is not on PATH, and cluster {config.cluster.name} needs it: is this a login node, and is the "
            "slurm module loaded? dry_run=true renders without it, cluster=local runs on this machine"
        )
    workdir = _workdir(config)
    provenance = Provenance(workdir, argv)
    with _deferred_interrupt() as interrupts:
        path = folder.claim(_runs_dir(config), config.name)
        try:
            text = script.render(config, path, workdir)
            files = {
                runfolder.SCRIPT: text,
                runfolder.SPEC: make_spec(config, workdir).to_json(),
                runfolder.CONFIG: yaml.safe_dump(dict(document), sort_keys=False),
                runfolder.PROVENANCE: provenance.to_json(),
            }
            folder.fill(path, files)
            if interrupts:
                raise KeyboardInterrupt
            env, dropped = environment.clean(os.environ)
            job_id, command = _hand_over(config, path, env)
        except BaseException as error:
            if not isinstance(error, MaybeSubmitted):
                folder.discard(path)
            raise
        record = {
            "job_id": job_id,
            "engine": config.cluster.engine,
            "cluster": config.cluster.name,
            "submitted": time.time(),
            "command": list(command),
        }
        _mark(path, record)
    return Submitted(job_id, path, dropped, bool(interrupts))


def _mark(path: Path, record: Mapping[str, object]) -> None:
    try:
        folder.mark_submitted(path, record)
    except OSError as error:
        end = f"scancel {record['job_id']}" if record["engine"] == "slurm" else f"kill {record['job_id']}"
        raise MaybeSubmitted(
            f"job {record['job_id']} was submitted, but its record {path / runfolder.SUBMISSION} cannot be written: "
            f"{error.strerror}; it runs, and `{end}` ends it"
        ) from None


def _hand_over(config: Config, path: Path, env: Mapping[str, str]) -> tuple[str, Sequence[str]]:
    if config.cluster.engine == "local":
        from hpcinit.local import engine  # noqa: PLC0415

        return engine.start(path, config.time_min, env)
    from hpcinit.submission import slurm_executor  # noqa: PLC0415

    try:
        return slurm_executor.sbatch(path / runfolder.SCRIPT, env)
    except MaybeSubmitted as error:
        raise MaybeSubmitted(
            f"{error}\nthe job may exist all the same: look for {path / runfolder.SCRIPT} in the output of\n"
            f"  squeue --me --format '%i %o'\nbefore you submit again; the run folder was kept"
        ) from None
    except SubmitError as error:
        raise SubmitError(f"{error}\n{_options_to_blame(str(error), path)}nothing was submitted") from None


# What sbatch says, and the key that set the option it means. Texts of Slurm 22.05 to 24.11, slurm_errno.c.
BLAME = {
    "account/partition combination": ("account or partition", "account"),
    "accounting/qos policy": ("qos, account, nodes or time_min", "qos"),
    "partition": ("partition", "partition"),
    "account": ("account", "account"),
    "qos": ("qos", "qos"),
    "generic resource": ("cluster.gpu_flag, cluster.gpu_type, cluster.gpus_per_node", "gpus-per-node"),
    "time limit": ("time_min", "time"),
    "memory": ("mem_gb", "mem"),
    "node count": ("nodes", "nodes"),
    "node configuration": (
        "nodes, ranks_per_node, cpus_per_rank, mem_gb, cluster.gpus_per_node or cluster.gpu_type",
        "nodes",
    ),
    "constraint": ("cluster.sbatch.constraint", "constraint"),
    "feature": ("cluster.sbatch.constraint", "constraint"),
    "reservation": ("cluster.sbatch.reservation", "reservation"),
    "dependency": ("cluster.sbatch.dependency", "dependency"),
    "unrecognized option": ("cluster.sbatch", ""),
}


def _options_to_blame(words: str, path: Path) -> str:
    """The directive that sbatch's words are about, and the key that set it."""
    text = (path / runfolder.SCRIPT).read_text()
    for sign, (key, option) in BLAME.items():
        if sign in words.lower():
            lines = [line for line in text.splitlines() if option and line.startswith(f"#SBATCH --{option}=")]
            return f"the option was set by {key}" + (f": {lines[0]}" if lines else "") + "\n"
    return ""


@contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Ctrl-C between sbatch's start and the record of its job id would lose a job: note it, act after."""
    noted: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    except ValueError:  # not the main thread: Ctrl-C does not come here
        yield noted
        return
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def make_spec(config: Config, workdir: Path) -> Spec:
    """What the job needs to know, from a config that has passed its checks."""
    job, comm, parallel = config.job, config.comm, config.parallel
    kind = next(k for k in ("script", "module", "command") if getattr(job, k))
    law = TimeoutLaw(comm.timeout_base_s, comm.timeout_per_node_s, comm.timeout_max_s)
    layout = Layout(parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp)
    per_node = checks.ranks_per_node(config)
    return Spec(
        name=config.name,
        cluster=config.cluster.name,
        nodes=config.nodes,
        ranks_per_node=per_node,
        program=Program(kind, getattr(job, kind), tuple(job.args)),
        workdir=str(workdir),
        nonce=secrets.token_hex(16),
        seed=config.seed,
        layout=layout.over(config.nodes * per_node),
        comm=Comm(comm.backend, comm.deepspeed, law, comm.collective_timeout_s, config.cluster.host_template),
    )


def _workdir(config: Config) -> Path:
    return Path(config.job.workdir or ".").expanduser().absolute()


def _runs_dir(config: Config) -> Path:
    return Path(config.runs_dir).expanduser().absolute()
