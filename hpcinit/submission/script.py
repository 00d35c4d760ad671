"""From a Config to the text of the batch script. A dry run prints this very text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpcinit.config import keys
from hpcinit.config.job_spec import cpus_per_rank
from hpcinit.config.partition import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.facts import quoting, runfolder, timeline
from hpcinit.facts.timeouts import ENV_LIMIT_S
from hpcinit.submission import after, chain, launching, preemption, restart, setup, to_local
from hpcinit.submission.snapshot import Plan

# What the batch script leaves behind: a record of its start, and one of its end in its place, whatever ended it but
# SIGKILL. Shell and not Python: the environment may be what is broken. A record of an attempt before goes first. By
# hand and without Slurm, the job's name is the script's process id. bash's EXIT trap sees status 0 when SIGTERM ends
# it, hence the TERM trap.
RECORD = f"${runfolder.ENV_FOLDER}/{runfolder.EXIT}"
ALLOCATED = timeline.ENV_ALLOCATED
JOB_ID = '"${SLURM_JOB_ID:-$$}"'
ATTEMPT = [
    f"hpcinit_job={JOB_ID}",
    "hpcinit_record() {",
    r"""  printf '{"job": "%s", "pid": %d, "restart": %d, "%s": %d%s}\n' \ """.rstrip(),
    r"""    "$hpcinit_job" "$$" "${SLURM_RESTART_COUNT:-0}" "$1" "$(date +%s)" "${2:-}" \ """.rstrip(),
    f"""    > "{RECORD}.tmp" && mv "{RECORD}.tmp" "{RECORD}\"""",
    f'  [ "$1" = ended ] || {{ {ALLOCATED}=$(date +%s.%N); export {ALLOCATED}; }}',
    "}",
    f"""rm -f "{RECORD}"; hpcinit_record began; trap 'exit 143' TERM""",
    f'{ALLOCATED}="${{SLURM_JOB_START_TIME:-${ALLOCATED}}}"',
    r"""trap 'hpcinit_record ended ", \"exit_status\": $?"' EXIT""",
]
# srun outside of a job makes one of its own, without GPUs, partition and account: it reads no #SBATCH line.
IN_A_JOB = (
    """[ -n "${SLURM_JOB_ID:-}" ] || """
    """{ echo "$0 is not in a job; start it with: sbatch $(printf %q "$0")" >&2; exit 2; }"""
)
# sbatch may need this token to submit, and passes it to the job. There it would reach every rank, and srun would use it
# instead of munge.
NO_TOKEN = "unset SLURM_JWT"


def render(config: Config, folder: Path, workdir: Path, code: Plan | None = None) -> str:
    """The script of the run in `folder`. The config must have passed its checks. code: of a run from a snapshot."""
    # Imported here: submitit costs a login node 0.08 s, and only what renders needs it.
    from hpcinit.submission import slurm_executor  # noqa: PLC0415

    if code:
        workdir = code.place(folder)
    return slurm_executor.render(
        folder, launching.step(config, folder, workdir), parameters(config, folder, workdir, code)
    )


def parameters(config: Config, folder: Path, workdir: Path, code: Plan | None = None) -> dict[str, Any]:
    """submitit's parameters; whatever is None gets no directive."""
    cluster = config.cluster
    known = {
        **{option.replace("-", "_"): keys.value(config, key) for option, key in keys.options("sbatch").items()},
        "nodes": config.nodes + config.spares,
        "ntasks_per_node": ranks_per_node(config),
        "cpus_per_task": cpus_per_rank(config),
        "time": config.time_min,
        "mem": None if config.mem_gb is None else _mem(config.mem_gb),
        "exclusive": cluster.exclusive or None,
        "stderr_to_stdout": True,
        "setup": _setup(config, folder, code),
    }
    extra: dict[str, Any] = {
        "chdir": str(workdir),
        "output": quoting.pattern(str(folder / runfolder.JOB_LOG)),
        "dependency": after.dependency(config),
        **restart.option(config),
    }
    if cluster.gpus_per_node and cluster.gpu_flag:
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        prefix = "gpu:" if cluster.gpu_flag == "gres" else ""
        extra[cluster.gpu_flag] = f"{prefix}{kind}{cluster.gpus_per_node}"
    if config.stop.signal:  # to the steps, whose ranks wait for it; B:USR1 would end the batch shell
        extra["signal"] = f"{config.stop.signal}@{config.stop.signal_before_s}"
    extra.update(cluster.sbatch)
    kept = {key: _data(value) for key, value in extra.items() if value is not None and value is not False}
    return {k: _data(v) for k, v in known.items() if v is not None} | {"additional_parameters": kept}


def _data(value: Any) -> Any:
    return quoting.directive(value) if isinstance(value, str) else value


def _mem(gb: float) -> str:
    # Slurm's --mem=0 means all memory of the node; fractions of a gigabyte have no spelling but megabytes.
    return f"{int(gb)}G" if gb == int(gb) and gb else f"{math.ceil(gb * 1024)}M" if gb else "0"


def _setup(config: Config, folder: Path, code: Plan | None) -> list[str]:
    lines = [IN_A_JOB] if config.cluster.engine == "slurm" else []
    lines += [NO_TOKEN]
    lines += [f"export {runfolder.ENV_FOLDER}={quoting.shell(str(folder))}"]
    lines += [*chain.lines(config.chain), *ATTEMPT]
    lines += preemption.LINES if config.chain > 1 or restart.asks(config) else []
    lines += restart.lines(config)
    # Slurm 24.11 says when the job ends; 22.05 does not, and no start-up should wait beyond it.
    end = f'HPCINIT_JOB_END_TIME="${{SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * {config.time_min}))}}"'
    lines += [f"export {end} {ENV_LIMIT_S}={60 * config.time_min}"]
    lines += setup.lines(config)
    if code:  # last, so that the snapshot's packages are found before those of anything above
        path = quoting.shell(":".join(code.python_path(folder)))
        lines += [f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}"]
    return [*lines, *to_local.lines(config)]
