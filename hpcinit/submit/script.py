"""Render the batch script from a Config: directives, setup, secrets, container and the ranks. A dry run prints it."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import quoting
from hpcinit.base.quoting import Raw, joined, option_flags, shell
from hpcinit.base.text import expanded
from hpcinit.config import keys
from hpcinit.config.job_spec import cpus_per_rank
from hpcinit.config.partition import ranks_per_node
from hpcinit.config.schema import Cluster, Config
from hpcinit.records import hang_report, run_folder, scratch
from hpcinit.records.startup_timeout import ENV_LIMIT_S
from hpcinit.submit import dependencies, restart, shell_blocks, srun_step
from hpcinit.submit.code_snapshot import SnapshotPlan
from hpcinit.submit.run_path import RunPath

# The script's lines that read secrets: from files that are named and never copied, with tracing off.

# `set -x`, bash -x and SHELLOPTS would print every value; {...} 2>/dev/null keeps even this line out of the trace.
QUIET = "{ hpcinit_flags=$-; set +x; } 2>/dev/null"
AS_BEFORE = "case $hpcinit_flags in *x*) set -x ;; esac"


def secret_lines(secrets: Mapping[str, str]) -> list[str]:
    """Shell lines that export each name with the text of its file; none for no secrets."""
    if not secrets:
        return []
    read = []
    for name, place in secrets.items():
        path = str(expanded(place).absolute())
        said = quoting.shell(f"secrets.{name}: cannot read {path} on this node")
        read.append(f'{name}="$(cat -- {quoting.shell(path)})" || {{ echo {said} >&2; exit 1; }}; export {name}')
    return [QUIET, *read, AS_BEFORE]


# What the batch script does before the ranks start: modules, environment, variables, the user's own lines.

# A batch script's bash is no login shell; most sites hand the function `module` down all the same, as BASH_FUNC_module.
HAVE_MODULES = "type module > /dev/null 2>&1 || . /etc/profile"


INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def setup_names(config: Config) -> list[str]:
    """The variables that the config sets, sorted."""
    return sorted(
        {*config.cluster.env, *config.job.env, *config.secrets, *(INTERFACE if config.cluster.interface else ())}
    )


def setup_lines(config: Config, run: RunPath) -> Iterator[str]:
    """Yield the lines, with a comment for each block that has any."""
    cluster = config.cluster
    blocks = {
        "The network interface and the folders of the cluster.": [*_interface(cluster), *_folders(cluster)],
        "Modules and the environment of Python.": [*_modules(cluster), *_environment(cluster)],
        "Variables of cluster.env and job.env.": _variables({**cluster.env, **config.job.env}, run.own_env),
        "Secrets, read from files when the job starts.": secret_lines(config.secrets),
        "cluster.setup, shell by design.": cluster.setup,
    }
    for about, block in blocks.items():
        if found := list(block):
            yield from ("", f"# {about}", *found)


def _interface(cluster: Cluster) -> Iterator[str]:
    if cluster.interface:
        yield from (f"export {name}={shell(cluster.interface)}" for name in INTERFACE)


def _variables(env: Mapping[str, str], own: Container[str]) -> Iterator[str]:
    """Set the variables of cluster.env and job.env. own: a task of an array reads those from its own file."""
    sourced = False
    for name, value in env.items():
        if name not in own:
            yield f"export {name}={shell(value)}"
        elif not sourced:
            yield from shell_blocks.block("trusted")
            yield f'hpcinit_source "${run_folder.ENV_FOLDER}/{run_folder.ENV}"'
            sourced = True


def _folders(cluster: Cluster) -> Iterator[str]:
    """What the user's own environment says of them wins."""
    if cluster.scratch:
        yield _unless_set("SCRATCH", cluster.scratch)
    if cluster.cache:
        yield _unless_set("HF_HOME", f"{cluster.cache}/huggingface")
        yield _unless_set("TORCH_HOME", f"{cluster.cache}/torch")
    if cluster.local_disk:
        yield f"export {scratch.ENV_LOCAL_DISK}={shell(cluster.local_disk)}"


def _unless_set(name: str, value: str) -> str:
    return f'[ -n "${{{name}:-}}" ] || export {name}={shell(value)}'


def _modules(cluster: Cluster) -> Iterator[str]:
    if not (cluster.module_purge or cluster.module_paths or cluster.modules):
        return
    yield HAVE_MODULES
    if cluster.module_purge:
        yield "module purge"
    for place in cluster.module_paths:
        yield f"module use {shell(place)}"
    if cluster.modules:  # in one call, as it is typed: modules know each other's order
        load = " ".join(shell(name) for name in cluster.modules)
        yield f"module load {load} || {_end('cluster.modules: `module load` failed')}"


def _environment(cluster: Cluster) -> Iterator[str]:
    if cluster.venv:
        activate = shell(f"{cluster.venv}/bin/activate")
        yield f". {activate} || {_end('cluster.venv cannot be activated')}"
    if cluster.conda:
        yield 'eval "$(conda shell.bash hook)"'
        yield f"conda activate {shell(cluster.conda)} || {_end('cluster.conda cannot be activated')}"


def _end(why: str) -> str:
    return "{ echo " + shell(f"hpcinit: error: {why}") + ' "on $(hostname)" >&2; exit 1; }'


def render(config: Config, folder: Path, workdir: Path, code: SnapshotPlan | None = None) -> str:
    """The script of the run in `folder`. The config must have passed its checks. code: of a run from a snapshot."""
    return render_at(config, RunPath(folder), code.place(folder) if code else workdir, code)


def render_at(config: Config, run: RunPath, workdir: Path, code: SnapshotPlan | None = None) -> str:
    """Return the script of the run in `run`, whose job starts in `workdir`."""
    # Imported here: submitit costs a login node 0.08 s, and only what renders needs it.
    from hpcinit.submit import slurm_executor  # noqa: PLC0415

    command = "\n".join(_command(config, srun_step.srun_step_line(config, run, workdir)))
    return slurm_executor.render(run.path, command, parameters(config, run, workdir, code))


def parameters(config: Config, run: RunPath, workdir: Path, code: SnapshotPlan | None = None) -> dict[str, Any]:
    """submitit's parameters; whatever is None gets no directive."""
    cluster = config.cluster
    known = {
        **{option.replace("-", "_"): keys.value(config, key) for option, key in keys.options("sbatch").items()},
        "nodes": config.nodes + config.spare_nodes,
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
        "output": run.in_directive(run_folder.JOB_LOG),
        "dependency": dependencies.dependency_option(config),
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


def _setup(config: Config, run: RunPath, code: SnapshotPlan | None) -> list[str]:
    """Return the lines before the ranks start: the blocks of lib/ in their order, each if its condition is true."""
    slurm = config.cluster.engine == "slurm"
    chain, spares = config.chain > 1, bool(config.spare_nodes) and slurm
    requeues = restart.wanted(config)
    asks = requeues or spares  # why the ranks ended
    on: Mapping[str, str | int] = {"hpcinit_hung": hang_report.HUNG, "hpcinit_on": " ".join(config.restart.on)}
    most = {
        "hpcinit_max_restarts": config.restart.max_restarts or 0,
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
        (spares, "spare_nodes", {"hpcinit_nodes": config.nodes}),
        (requeues, "requeue", {}),
    ]
    body = [line for wanted, name, values in blocks if wanted for line in ["", *shell_blocks.block(name, values)]]
    first = [
        *(shell_blocks.block(run.guard) if slurm else []),
        *shell_blocks.block("token"),
        "",
        *_run_folder(run, "\n".join(body)),
    ]
    return [*first, *body, "", *_end_time(config), *setup_lines(config, run), *_code(run, code)]


def _run_folder(run: RunPath, body: str) -> list[str]:
    """Return the block that names the run folder and those of its files that `body` uses."""
    names = {
        "exit": run_folder.EXIT,
        "log": run_folder.JOB_LOG,
        "chain": run_folder.CHAIN,
        "stopped": run_folder.STOPPED,
        "progress": run_folder.STEP,
        "restart": run_folder.RESTART,
        "restarts": run_folder.RESTARTS,
        "errors": run_folder.ERRORS,
        "hang": hang_report.FOLDER,
    }
    files = {f"hpcinit_{key}": Raw(f'"${run_folder.ENV_FOLDER}/{name}"') for key, name in names.items()}
    lines = shell_blocks.block("run_folder", {run_folder.ENV_FOLDER: run.in_shell(), **files})
    used = set(re.findall(r"\$(hpcinit_\w+)", body))
    return [line for line in lines if line.partition("=")[0] not in files.keys() - used]


def _end_time(config: Config) -> list[str]:
    """Return the lines that export when the job ends. Slurm 24.11 has a variable for it, and 22.05 has none."""
    end = f"$(($(date +%s) + 60 * {config.time_min}))"
    return [
        "# When the job ends: no start-up waits longer.",
        f'export HPCINIT_JOB_END_TIME="${{SLURM_JOB_END_TIME:-{end}}}" {ENV_LIMIT_S}={60 * config.time_min}',
    ]


def _code(run: RunPath, code: SnapshotPlan | None) -> list[str]:
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
    if not config.spare_nodes:
        return [step, *own, *requeue]
    launcher, _, rest = step.partition(" ")
    # Slurm 22.05 counts what a step on a lost node used as taken forever ('unable to update job's core use information
    # due to job resizing'), hence --overlap.
    ranks = f'{launcher} ${{hpcinit_excluded:+--overlap --exclude="$hpcinit_excluded"}} {rest}'
    body = [f"  {line}" for line in (ranks, *own)]
    return ["hpcinit_ranks() {", *body, "}", "hpcinit_run_with_spare_nodes", *requeue]


# The words that put a rank into a container: options of srun (pyxis), or a command before its own (apptainer).

PYXIS = "pyxis"


def container_options(config: Config, run: RunPath, workdir: Path) -> dict[str, Any]:
    """Options that srun gets; none where no image is asked for, or another runtime runs it.

    https://github.com/NVIDIA/pyxis/wiki/Usage. --container-env: variables of the job that win over the image's own.
    """
    if not config.container.image or config.cluster.container.runtime != PYXIS:
        return {}
    known = {
        "image": config.container.image,
        "mounts": joined(",", _mounts(config, run, workdir)),
        "env": ",".join(setup_names(config)) or None,
        **_options(config),
    }
    return {f"container-{name}" if not name.startswith("no-") else name: value for name, value in known.items()}


def container_prefix(config: Config, run: RunPath, workdir: Path) -> list[str]:
    """The command that a rank's Python is an argument of, or none.

    https://apptainer.org/docs/user/latest/cli/apptainer_exec.html; Singularity has the same options.
    """
    runtime = config.cluster.container.runtime
    if not config.container.image or runtime in (PYXIS, None):
        return []
    options = {
        "nv": bool(config.cluster.gpus_per_node) and "rocm" not in _options(config),
        "pwd": str(workdir),
        "bind": joined(",", _mounts(config, run, workdir)),
        **_options(config),
    }
    return [runtime, "exec", *option_flags(options), config.container.image]


def _options(config: Config) -> Mapping[str, Any]:
    return {**config.cluster.container.options, **config.container.options}


def _mounts(config: Config, run: RunPath, workdir: Path) -> Sequence[str]:
    """The working folder and the run folder where they are, and what site and user add."""
    own = [joined(":", [place, place]) for place in dict.fromkeys((str(workdir), run.in_shell()))]
    return [*own, *config.cluster.container.mounts, *config.container.mounts]
