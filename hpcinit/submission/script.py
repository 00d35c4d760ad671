"""From a Config to the text of the batch script. A dry run prints this very text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcinit.config import keys
from hpcinit.config.job_spec import cpus_per_rank
from hpcinit.config.partition import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.facts import hangs, quoting, runfolder
from hpcinit.facts.quoting import Raw
from hpcinit.facts.timeouts import ENV_LIMIT_S
from hpcinit.submission import after, launching, restart, setup, shell_blocks
from hpcinit.submission.run_path import RunPath
from hpcinit.submission.snapshot import Plan


def render(config: Config, folder: Path, workdir: Path, code: Plan | None = None) -> str:
    """The script of the run in `folder`. The config must have passed its checks. code: of a run from a snapshot."""
    return render_at(config, RunPath(folder), code.place(folder) if code else workdir, code)


def render_at(config: Config, run: RunPath, workdir: Path, code: Plan | None = None) -> str:
    """Return the script of the run in `run`, whose job starts in `workdir`."""
    # Imported here: submitit costs a login node 0.08 s, and only what renders needs it.
    from hpcinit.submission import slurm_executor  # noqa: PLC0415

    command = "\n".join(_command(config, launching.step(config, run, workdir)))
    return slurm_executor.render(run.path, command, parameters(config, run, workdir, code))


def parameters(config: Config, run: RunPath, workdir: Path, code: Plan | None = None) -> dict[str, Any]:
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
        "setup": _setup(config, run, code),
    }
    extra: dict[str, Any] = {
        "chdir": str(workdir),
        "output": run.in_directive(runfolder.JOB_LOG),
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


def _setup(config: Config, run: RunPath, code: Plan | None) -> list[str]:
    """Return the lines before the ranks start: the blocks of lib/ in their order, each if its condition is true."""
    slurm = config.cluster.engine == "slurm"
    chain, spares = config.chain > 1, bool(config.spares) and slurm
    requeues = restart.wanted(config)
    asks = requeues or spares  # why the ranks ended
    on: Mapping[str, str | int] = {"hpcinit_hung": hangs.HUNG, "hpcinit_on": " ".join(config.restart.on)}
    most = {
        "hpcinit_budget": config.restart.budget or 0,
        "hpcinit_without_progress": config.restart.without_progress or restart.NEVER,
    }
    blocks: list[tuple[bool, str, Mapping[str, str | int]]] = [
        (chain or asks, "facts", {}),
        (chain or spares, "srun_messages", {}),
        (chain, "chain_check", {}),
        (True, "record", {"hpcinit_job": run.job_id}),
        (chain or asks, "preempted", {}),
        (chain, "chain_record", {}),
        (requeues, "restarts", most),
        (slurm and not requeues, "requeued", {}),
        (asks, "reason", on),
        (spares, "spares", {"hpcinit_nodes": config.nodes}),
        (requeues, "requeue", {}),
    ]
    body = [line for wanted, name, values in blocks if wanted for line in ["", *shell_blocks.block(name, values)]]
    first = [
        *(shell_blocks.block(run.guard) if slurm else []),
        *shell_blocks.block("token"),
        "",
        *_run_folder(run, "\n".join(body)),
    ]
    return [*first, *body, "", *_end_time(config), *setup.lines(config, run), *_code(run, code)]


def _run_folder(run: RunPath, body: str) -> list[str]:
    """Return the block that names the run folder and those of its files that `body` uses."""
    names = {
        "exit": runfolder.EXIT,
        "log": runfolder.JOB_LOG,
        "chain": runfolder.CHAIN,
        "stopped": runfolder.STOPPED,
        "progress": runfolder.STEP,
        "restart": runfolder.RESTART,
        "restarts": runfolder.RESTARTS,
        "errors": runfolder.ERRORS,
        "hang": hangs.FOLDER,
    }
    files = {f"hpcinit_{key}": Raw(f'"${runfolder.ENV_FOLDER}/{name}"') for key, name in names.items()}
    lines = shell_blocks.block("run_folder", {runfolder.ENV_FOLDER: run.in_shell(), **files})
    used = set(re.findall(r"\$(hpcinit_\w+)", body))
    return [line for line in lines if line.partition("=")[0] not in files.keys() - used]


def _end_time(config: Config) -> list[str]:
    """Return the lines that export when the job ends. Slurm 24.11 has a variable for it, and 22.05 has none."""
    end = f"$(($(date +%s) + 60 * {config.time_min}))"
    return [
        "# When the job ends: no start-up waits longer.",
        f'export HPCINIT_JOB_END_TIME="${{SLURM_JOB_END_TIME:-{end}}}" {ENV_LIMIT_S}={60 * config.time_min}',
    ]


def _code(run: RunPath, code: Plan | None) -> list[str]:
    """Return the lines that put a snapshot's packages before those of everything above."""
    if code is None:
        return []
    path = quoting.shell(":".join(code.python_path(run.path)))
    about = "# The packages of the code snapshot come first."
    return ["", about, f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}"]


def _command(config: Config, step: str) -> list[str]:
    """Return the lines that run `step`, which starts the ranks, and what decides after their end."""
    own = ["hpcinit_own_status $?"] if config.chain > 1 else []
    requeue = ["hpcinit_requeue $?"] if restart.wanted(config) else []
    if not config.spares:
        return [step, *own, *requeue]
    launcher, _, rest = step.partition(" ")
    # Slurm 22.05 counts what a step on a lost node used as taken forever ('unable to update job's core use information
    # due to job resizing'), hence --overlap.
    ranks = f'{launcher} ${{hpcinit_excluded:+--overlap --exclude="$hpcinit_excluded"}} {rest}'
    body = [f"  {line}" for line in (ranks, *own)]
    return ["hpcinit_ranks() {", *body, "}", "hpcinit_run_with_spares", *requeue]
