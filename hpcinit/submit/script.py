"""Render the batch script from a Config: directives, setup, secrets, container and the srun step."""

from __future__ import annotations

import hashlib
import math
import os
import pwd
import re
import shlex
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console, quoting, versions
from hpcinit.base.quoting import Raw, joined, option_flags, shell
from hpcinit.base.text import expanded
from hpcinit.config import hetjob, job_spec, keys, python_environment
from hpcinit.config.resources import cpus_per_rank, gpus_per_node, mem_gb, ranks_per_node
from hpcinit.config.schema import Cluster, Config
from hpcinit.records import components, run_folder, scratch
from hpcinit.records.startup_timeout import ENV_LIMIT_S
from hpcinit.submit import dependencies, restart, shell_blocks, srun_step
from hpcinit.submit.code_snapshot import SnapshotPlan
from hpcinit.submit.run_path import RunPath

# The lines that read secrets. The script contains the names of the files, never their content.

# `set -x`, bash -x and SHELLOPTS would print every value; {...} 2>/dev/null hides this line from the trace as well.
QUIET = "{ hpcinit_flags=$-; set +x; } 2>/dev/null"
AS_BEFORE = "case $hpcinit_flags in *x*) set -x ;; esac"


def secret_lines(secrets: Mapping[str, str]) -> list[str]:
    """Return the shell lines that export each secret with the content of its file."""
    if not secrets:
        return []
    read = []
    for name, place in secrets.items():
        path = str(expanded(place).absolute())
        error = quoting.shell(f"secrets.{name}: cannot read {path} on this node")
        read.append(f'{name}="$(cat -- {quoting.shell(path)})" || {{ echo {error} >&2; exit 1; }}; export {name}')
    return [QUIET, *read, AS_BEFORE]


# The setup before the ranks start: modules, environment, variables, the user's own lines.

# The bash of a batch script is not a login shell, but most sites export the function `module` as BASH_FUNC_module.
HAVE_MODULES = "type module > /dev/null 2>&1 || . /etc/profile"
NO_CONDA = (
    "cluster.conda is the name of an environment, and there is no command conda: give the environment's folder, "
    "or load conda's module with cluster.modules, or instead of cluster.conda set "
)


INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def setup_names(config: Config) -> list[str]:
    """Return the sorted names of the variables that the config sets."""
    return sorted(
        {*config.cluster.env, *config.job.env, *config.secrets, *(INTERFACE if config.cluster.interface else ())}
    )


# The number of a line and the start of its command. Inside an eval the number is another line's, which does not
# contain that start. bash runs the EXIT trap with line 1. BASH_SOURCE has several items in a file that a line sources.
NOTE_LINES = (
    "# For hpcinit why: the line that runs, and the first that fails.",
    """trap '[ "$LINENO" -le 1 ] || hpcinit_line="$LINENO ${BASH_COMMAND%%[!a-zA-Z0-9_./=-]*}"' DEBUG""",
    """trap 'case ${#BASH_SOURCE[@]} in 1) : "${hpcinit_failed:=$? $hpcinit_line}" ;; esac' ERR""",
)
NOTE_NO_LINES = "trap - DEBUG ERR; hpcinit_line=''"


def setup_lines(config: Config, run: RunPath, sourced: bool = False, noted: bool = False) -> Iterator[str]:
    """Yield the lines of each block that is not empty, with its comment. sourced: hpcinit_source exists already. noted:
    the script records in exit.json which line of the user's blocks ended it, and which failed."""
    cluster = config.cluster
    blocks = {
        "The network interface and the folders of the cluster.": [*_interface(cluster), *_folders(cluster)],
        "The ports of comm.ports.": _variables(job_spec.ports_variable(config), (), False),
        "Modules and the environment of Python.": _noted([*_modules(cluster), *_environment(cluster)], noted),
        "Variables of cluster.env and job.env.": _variables({**cluster.env, **config.job.env}, run.own_env, sourced),
        "Secrets, read from files when the job starts.": secret_lines(config.secrets),
        "Shell lines of cluster.setup.": _noted(cluster.setup, noted),
    }
    for about, block in blocks.items():
        if found := list(block):
            yield from ("", f"# {about}", *found)


def _noted(lines: Sequence[str], noted: bool) -> Sequence[str]:
    return [*NOTE_LINES, *lines, NOTE_NO_LINES] if noted and lines else lines


def _interface(cluster: Cluster) -> Iterator[str]:
    if cluster.interface:
        yield from (f"export {name}={shell(cluster.interface)}" for name in INTERFACE)


def _variables(env: Mapping[str, str], own: Container[str], sourced: bool) -> Iterator[str]:
    """Yield lines that set cluster.env and job.env. own: variables that an array task reads from its own file."""
    read = False
    for name, value in env.items():
        if name not in own:
            yield f"export {name}={shell(value)}"
        elif not read:
            yield from () if sourced else shell_blocks.block("trusted")
            yield f'hpcinit_source "${run_folder.ENV_FOLDER}/{run_folder.ENV}"'
            read = True


def _folders(cluster: Cluster) -> Iterator[str]:
    """Yield lines that set the cluster's folders. Variables in the user's own environment win."""
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
    if cluster.modules:  # in one call, so that the module system can order them
        load = " ".join(shell(name) for name in cluster.modules)
        yield f"module load {load} || {_end('cluster.modules: `module load` failed')}"


def _environment(cluster: Cluster) -> Iterator[str]:
    if cluster.venv:
        activate = shell(f"{cluster.venv}/bin/activate")
        yield f". {activate} || {_end('cluster.venv cannot be activated')}"
    if cluster.conda and python_environment.is_folder(cluster.conda):  # needs no conda command
        yield f"export CONDA_PREFIX={shell(cluster.conda)}"
        yield f'[ -x "$CONDA_PREFIX/bin/python" ] || {_end("cluster.conda: the folder has no bin/python")}'
        yield 'export PATH="$CONDA_PREFIX/bin:$PATH"'
        yield 'for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do [ ! -r "$script" ] || . "$script"; done'
    elif cluster.conda:
        missing = f"{NO_CONDA}{python_environment.conda_setup(cluster.conda)};"
        yield f"command -v conda > /dev/null || {_end(missing)}"
        yield 'eval "$(conda shell.bash hook)"'
        yield f"conda activate {shell(cluster.conda)} || {_end('cluster.conda cannot be activated')}"


def _end(why: str) -> str:
    return "{ echo " + shell(f"hpcinit: error: {why}") + ' "on $(hostname)" >&2; exit 1; }'


# The header of the script: comments that show what runs, and where the script is from.

WRITTEN, COMMAND = "# Written by hpcinit", "# Command: "

# Slurm ends a job whose log has no folder with 0:53, without any message.
ALONE = "# It needs the run folder that hpcinit submit creates, also for its log. A script without one: hpcinit export"


def program_of(config: Config) -> str:
    """Return the user's program with its arguments, as typed after --."""
    job = config.job
    program = ["-m", job.module] if job.module else [job.script or job.command or ""]
    return shlex.join([*program, *job.args])


def origin(config: Config, argv: Sequence[str], folder: Path) -> list[str]:
    """Return comments with version, user, date, config and command. argv: without secrets."""
    version = versions.by_folder(tuple(sys.path)).get("hpcinit", "")
    command = shlex.join(argument for argument in argv if argument != "dry_run=true")
    user = _user()
    return [
        comment(f"{WRITTEN} {version} for {user} on {time.strftime('%Y-%m-%d')}. Config: {folder / run_folder.CONFIG}"),
        comment(f"{COMMAND}{command}"),
    ]


def _user() -> str:
    """Return the name of this user; its number if the system has no entry for it, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def recorded_origin(script: str) -> list[str]:
    """Return the comments of origin() in a script that was submitted."""
    return [line for line in script.splitlines()[1:4] if line.startswith((WRITTEN, COMMAND))]


def comment(text: str) -> str:
    """Return `text` as one line of a shell comment, whatever characters it contains."""
    return console.plain(text).replace("\n", "\\n").encode("utf-8", "backslashreplace").decode(errors="replace")


def render(
    config: Config, folder: Path, workdir: Path, code: SnapshotPlan | None = None, origin: Sequence[str] = ()
) -> str:
    """Return the script of the run in `folder`. The config has passed its checks.

    code: the snapshot, if any. origin: comments about the submission.
    """
    place = code.place(folder) if code else workdir
    return render_at(config, RunPath(folder), place, code, program_of(config), origin)


def render_at(
    config: Config,
    run: RunPath,
    workdir: Path,
    code: SnapshotPlan | None = None,
    program: str = "",
    origin: Sequence[str] = (),
) -> str:
    """Return the script of the run in `run`, whose job starts in `workdir`. program, origin: for the comments."""
    shape = components.shape(hetjob.parts(config))
    about = [comment(f"# {config.name}: {program}, {shape}")] if program else []
    runs = f"# Start the ranks. hpcinit prepares each one as in spec.json, and runs: {program}"
    start = [comment(runs)] if program else []
    steps = _command(config, srun_step.step_lines(config, run, workdir))
    command = "\n".join([*_cores_of_tasks(config), *start, *steps])
    text = text_of(run.path, command, parameters(config, run, workdir, code), [*about, *origin, ALONE])
    return _with_components(text, config, run, workdir)


def text_of(folder: Path, command: str, parameters: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Return the script as submitit renders it. header: comments at its top."""
    # Imported here because submitit takes 0.06 s, and only a submission needs it.
    from hpcinit.submit.executor import Executor  # noqa: PLC0415

    return Executor(folder, program=True, header=header).render(command, **parameters)


def _cores_of_tasks(config: Config) -> list[str]:
    """Return lines for a job in which one task starts all ranks of a node, with the cores of them all."""
    if config.launch.kind == "srun" or config.cluster.engine != "slurm" or not cpus_per_rank(config):
        return []
    why = "# One task per node gets the cores of all its ranks. Slurm 26.05 warns if that is more than this variable."
    return [why, "unset SLURM_CPUS_PER_TASK", ""]


def _with_components(text: str, config: Config, run: RunPath, workdir: Path) -> str:
    """Return the script with the directives of each further component after a line `#SBATCH hetjob`."""
    lines = text.split("\n")
    end = next(at for at, line in enumerate(lines) if _directive(lines[at - 1]) and not _directive(line))
    for each in reversed(hetjob.components(config)[1:]):
        other = text_of(run.path, "", parameters(each, run, workdir))
        lines[end:end] = ["#SBATCH hetjob", *filter(_directive, other.split("\n"))]
    return "\n".join(lines)


def _directive(line: str) -> bool:
    return line.startswith("#SBATCH ")


def parameters(config: Config, run: RunPath, workdir: Path, code: SnapshotPlan | None = None) -> dict[str, Any]:
    """Return submitit's parameters. A parameter that is None gets no directive."""
    cluster = config.cluster
    known = {
        **{option.replace("-", "_"): keys.value(config, key) for option, key in keys.options("sbatch").items()},
        "nodes": config.nodes + config.spare_nodes,
        "ntasks_per_node": ranks_per_node(config),
        "cpus_per_task": cpus_per_rank(config),
        "time": slurm_time(config.time_min),
        "mem": memory_option(config),
        "exclusive": cluster.exclusive or None,
        "stderr_to_stdout": True,
        "setup": _setup(config, run, code),
        "use_srun": False,  # the script's own lines start the ranks, with options that submitit's srun lacks
    }
    extra: dict[str, Any] = {
        "clusters": cluster.clusters,
        "chdir": str(workdir),
        "output": run.in_directive(run_folder.JOB_LOG),
        "dependency": dependencies.dependency_option(config),
        **restart.option(config),
    }
    if (gpus := gpus_per_node(config)) and cluster.gpu_flag:
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        prefix = "gpu:" if cluster.gpu_flag == "gres" else ""
        extra[cluster.gpu_flag] = f"{prefix}{kind}{gpus}"
    if config.stop.signal:  # sent to the steps, whose ranks handle it; B:USR1 would end the batch shell
        extra["signal"] = f"{config.stop.signal}@{config.stop.signal_before_s}"
    extra.update(cluster.sbatch)
    kept = {key: _data(value) for key, value in extra.items() if value is not None and value is not False}
    given = {k: _data(v) for k, v in known.items() if v is not None}
    return {**given, "wckey": None, "additional_parameters": kept}  # None: sites without wckeys refuse submitit's own


def _data(value: Any) -> Any:
    return quoting.directive(value) if isinstance(value, str) else value


def slurm_time(minutes: int) -> str:
    """Return a time limit as Slurm prints it: '01:30:00', '1-12:00:00'."""
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00" if days else f"{hours:02}:{minutes:02}:00"


def memory_option(config: Config) -> str | None:
    """Return --mem, the memory per node; None if the job does not set it."""
    return None if (memory := mem_gb(config)) is None else _mem(memory)


def _mem(gb: float) -> str:
    # Slurm's --mem=0 means all memory of the node. Fractions of a gigabyte must be written in megabytes.
    return f"{int(gb)}G" if gb == int(gb) and gb else f"{math.ceil(gb * 1024)}M" if gb else "0"


def _bookkeeping(config: Config, run: RunPath) -> tuple[list[str], list[str], bool]:
    """Return the lines that name the run folder, the blocks of lib/, and whether the blocks are in a separate file.

    The blocks are in their order, each if its condition is true.
    """
    slurm = config.cluster.engine == "slurm"
    chain, spares = config.chain > 1, bool(config.spare_nodes) and slurm
    requeues = restart.wanted(config)
    needs_reason = requeues or spares  # the reason why the ranks ended
    on: Mapping[str, str | int] = {"hpcinit_hung": run_folder.HUNG, "hpcinit_on": " ".join(config.restart.on)}
    most = {
        "hpcinit_max_restarts": config.restart.max_restarts or 0,
        "hpcinit_without_progress": config.restart.without_progress or restart.NEVER,
    }
    blocks: list[tuple[bool, str, Mapping[str, str | int]]] = [
        (chain or needs_reason, "facts", {}),
        (chain or spares, "srun_messages", {}),
        (chain, "chain_check", {}),
        (True, "record", {"hpcinit_job": run.job_id}),
        (chain or needs_reason, "preempted", {}),
        (chain, "chain_record", {}),
        (requeues, "restarts", most),
        (slurm and not requeues, "requeued", {}),
        (needs_reason, "reason", on),
        (spares, "spare_nodes", {"hpcinit_nodes": config.nodes}),
        (requeues, "requeue", {}),
    ]
    body = [line for wanted, name, values in blocks if wanted for line in ["", *shell_blocks.block(name, values)]]
    named, files = _run_folder(run, "\n".join(body))
    return named, [*files, *body], chain or needs_reason


def _setup(config: Config, run: RunPath, code: SnapshotPlan | None) -> list[str]:
    """Return the lines before the ranks start."""
    folder, bookkeeping, in_file = _bookkeeping(config, run)
    first = shell_blocks.block(run.guard) if config.cluster.engine == "slurm" else []
    lines = [*first, *shell_blocks.block("token"), "", *folder]
    if file := restart_file(config, run):
        lines += ["", *shell_blocks.block("trusted"), f"hpcinit_source {shell(str(run.path / file[0]))}"]
    else:
        lines += bookkeeping
    setup = setup_lines(config, run, sourced=in_file, noted=True)
    return [*lines, "", *_end_time(config), *setup, *code_lines(run, code)]


def restart_file(config: Config, run: RunPath) -> tuple[str, str] | None:
    """Return name and text of the file that the script of a chain, or of a job with restarts, reads from run.path.

    The name depends on the text, so that the arrays of a sweep can have different ones.
    """
    _, lines, in_file = _bookkeeping(config, run)
    if not in_file:
        return None
    text = "\n".join(["# shellcheck shell=bash", "# Written by hpcinit, and read by the batch script.", *lines, ""])
    return f"restart-{hashlib.sha256(text.encode()).hexdigest()[:8]}.sh", text


def with_restart_file(text: str, file: tuple[str, str] | None) -> str:
    """Return the script of a dry run, followed by the file that it reads, in comments. It remains a valid script."""
    if file is None:
        return text
    lines = "".join(f"# | {line}".rstrip() + "\n" for line in file[1].splitlines())
    return f"{text}\n# End of the script. It reads {file[0]} from the run folder:\n{lines}"


def _run_folder(run: RunPath, body: str) -> tuple[list[str], list[str]]:
    """Return the lines that name the run folder, and those that name the files that `body` uses."""
    names = {
        "exit": run_folder.EXIT,
        "log": run_folder.JOB_LOG,
        "chain": run_folder.CHAIN,
        "stopped": run_folder.STOPPED,
        "progress": run_folder.STEP,
        "restart": run_folder.RESTART,
        "restarts": run_folder.RESTARTS,
        "errors": run_folder.ERRORS,
        "hang": run_folder.HANG_REPORTS,
        "unusable": run_folder.UNUSABLE,
    }
    files = {f"hpcinit_{key}": Raw(f'"${run_folder.ENV_FOLDER}/{name}"') for key, name in names.items()}
    lines = shell_blocks.block("run_folder", {run_folder.ENV_FOLDER: run.in_shell(), **files})
    used = set(re.findall(r"\$(hpcinit_\w+)", body))
    named = [line for line in lines if line.partition("=")[0] not in files]
    return named, [line for line in lines if line.partition("=")[0] in used & files.keys()]


def _end_time(config: Config) -> list[str]:
    """Return the lines that export when the job ends. Slurm 24.11 has a variable for it, and 22.05 has none."""
    end = f"$(($(date +%s) + 60 * {config.time_min}))"
    return [
        "# When the job reaches its time limit. No rank waits longer for the others at the start.",
        f'export HPCINIT_JOB_END_TIME="${{SLURM_JOB_END_TIME:-{end}}}" {ENV_LIMIT_S}={60 * config.time_min}',
    ]


def code_lines(run: RunPath, code: SnapshotPlan | None) -> list[str]:
    """Return the lines that put the snapshot's packages first on PYTHONPATH."""
    if code is None:
        return []
    path = quoting.shell(":".join(code.python_path(run.path)))
    about = "# Use the packages of the code snapshot first."
    return ["", about, f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}"]


def _command(config: Config, steps: Sequence[str]) -> list[str]:
    """Return the lines that run `steps`, which start the ranks, and the lines that decide what to do after it."""
    own = ["hpcinit_own_status $?"] if config.chain > 1 else []
    requeue = ["hpcinit_requeue $?"] if restart.wanted(config) else []
    if not config.spare_nodes:
        return [*steps, *own, *requeue]
    launcher, _, rest = steps[0].partition(" ")
    # Slurm 22.05 never releases the cores of a step on a lost node ('unable to update job's core use information due to
    # job resizing'), hence --overlap.
    ranks = f'{launcher} ${{hpcinit_excluded:+--overlap --exclude="$hpcinit_excluded"}} \\\n    {rest}'
    body = [f"  {line}" for line in (ranks, *own)]
    return ["hpcinit_ranks() {", *body, "}", "hpcinit_run_with_spare_nodes", *requeue]


# Containers: options of srun (pyxis), or a command before the rank's own (apptainer).

PYXIS = "pyxis"


def container_options(config: Config, run: RunPath, workdir: Path) -> dict[str, Any]:
    """Return srun's options for a container; none without an image or with another runtime than pyxis.

    https://github.com/NVIDIA/pyxis/wiki/Usage. --container-env: the job's variables that override the image's own.
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
    """Return the command that runs a rank's Python in a container, or [].

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
    """Return the mounts: the working folder and the run folder at their own paths, then those of site and user."""
    own = [joined(":", [place, place]) for place in dict.fromkeys((str(workdir), run.in_shell()))]
    return [*own, *config.cluster.container.mounts, *config.container.mounts]
