"""What a job is told: its Spec, and where it runs."""

from __future__ import annotations

import secrets
from pathlib import Path

from hpcinit.config import checks, parallel, timeouts
from hpcinit.config.schema import Config
from hpcinit.facts.spec import Comm, Hang, Program, Spec
from hpcinit.facts.stopping import Stopping
from hpcinit.facts.user_paths import expanded
from hpcinit.submission import launching, snapshot


def make_spec(config: Config, workdir: Path, code: snapshot.Plan | None = None, path: Path | None = None) -> Spec:
    """What the job needs to know, from a config that has passed its checks.

    code: with a snapshot, from which the run in the folder `path` runs.
    """
    job, comm = config.job, config.comm
    kind = next(k for k in ("script", "module", "command") if getattr(job, k))
    target = getattr(job, kind)
    if code and path:
        workdir, target = code.place(path), code.target(path, target)
    per_node = checks.ranks_per_node(config)
    return Spec(
        name=config.name,
        cluster=config.cluster.name,
        nodes=config.nodes,
        ranks_per_node=per_node,
        program=Program(kind, target, tuple(job.args)),
        workdir=str(workdir),
        nonce=secrets.token_hex(16),
        seed=config.seed,
        layout=parallel.layout(config).over(config.nodes * per_node, per_node),
        comm=Comm(
            comm.backend,
            parallel.needs_deepspeed(config),
            timeouts.law(config),
            comm.collective_timeout_s,
            config.cluster.host_template,
            comm.device_id,
            comm.checkpoint_timeout_s,
        ),
        seed_by=config.seed_by,
        deterministic=config.deterministic,
        batch=parallel.samples(config),
        training=parallel.training(config),
        stop=Stopping(config.stop.margin_s, config.stop.every_steps, config.stop.signal or ""),
        hang=Hang(config.hang.after_s, config.hang.action),
        launch=launching.for_job(config),
    )


def workdir_of(config: Config) -> Path:
    return expanded(config.job.workdir or ".").absolute()


def runs_dir_of(config: Config) -> Path:
    return expanded(config.runs_dir).absolute()
