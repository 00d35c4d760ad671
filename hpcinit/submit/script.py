"""Renders the batch script of a run from its Config.

The script consists of comments, #SBATCH directives, bash code from lib/, the job's set-up (job_setup.py) and the step
that starts the ranks (srun_step.py).
"""

from __future__ import annotations

import difflib
import json
import os
import pwd
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console, quoting, versions
from hpcinit.base.quoting import Raw, shell
from hpcinit.checks import dependency, environment
from hpcinit.checks.checkout import SnapshotPlan
from hpcinit.config import hetjob, job_spec, keys
from hpcinit.config.resources import cpus_per_rank, gpus_per_node, ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.records import components, run_folder
from hpcinit.records.spec import OFF, REPLACE
from hpcinit.records.starts import STARTS
from hpcinit.records.startup_timeout import ENV_LIMIT_S
from hpcinit.submit import job_setup, restart, shell_blocks, srun_step
from hpcinit.submit.run_path import RunPath

WRITTEN, COMMAND = "# Written by hpcinit", "# Command: "

NO_KILL = "#SBATCH --no-kill"
ABOUT_NO_KILL = "# --no-kill: the job continues without a node that fails, and the ranks restart on a spare node."
# If the folder of the job's log does not exist, Slurm ends the job with 0:53 and without a message.
ALONE = "# It needs the run folder that hpcinit submit creates. For a script that needs no run folder: hpcinit export"


def program_of(config: Config) -> str:
    """Return the user's program with its arguments, as the user typed it after --."""
    job = config.job
    program = ["-m", job.module] if job.module else [job.script or job.command or ""]
    return shlex.join([*program, *job.args])


def origin(config: Config, argv: Sequence[str], folder: Path) -> list[str]:
    """Return comments for the top of the script: version, user, date, config and command.

    argv: the command line, without secrets.
    """
    version = versions.by_folder(tuple(sys.path)).get("hpcinit", "")
    command = shlex.join(argument for argument in argv if argument != "dry_run=true")
    user = _user()
    return [
        comment(f"{WRITTEN} {version} for {user} on {time.strftime('%Y-%m-%d')}. Config: {folder / run_folder.CONFIG}"),
        comment(f"{COMMAND}{command}"),
    ]


def _user() -> str:
    """Return this user's name, or the number if the system has no entry for it, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def recorded_origin(script: str) -> list[str]:
    """Return the comments that origin() wrote, from a script that was submitted."""
    return [line for line in script.splitlines()[1:4] if line.startswith((WRITTEN, COMMAND))]


def comment(text: str) -> str:
    """Return `text` as one line of a shell comment, whatever characters `text` contains."""
    return console.plain(text).replace("\n", "\\n").encode("utf-8", "backslashreplace").decode(errors="replace")


def render(
    config: Config, folder: Path, workdir: Path, code: SnapshotPlan | None = None, origin: Sequence[str] = ()
) -> str:
    """Return the batch script of the run in `folder`. The config must have passed its checks.

    code: the code snapshot, if the run has one.
    origin: comments about the submission.
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
    tasks: Sequence[Config] = (),
) -> str:
    """Return the batch script for the run folder `run`. The job starts in the folder `workdir`.

    program, origin: for the comments at the top.
    tasks: the configs of all tasks, if the script is for an array.
    """
    shape = components.shape(hetjob.parts(config))
    about = [comment(f"# {config.name}: {program}, {shape}")] if program else []
    start = _about_ranks(tasks or [config], program) if program else []
    steps = _command(config, srun_step.step_lines(config, run, workdir))
    command = "\n".join([*_cores_of_tasks(config), *start, *steps])
    text = text_of(run.path, command, parameters(config, run, workdir, code), [*about, *origin, ALONE])
    return _with_components(text, config, run, workdir).replace(f"\n{NO_KILL}\n", f"\n{ABOUT_NO_KILL}\n{NO_KILL}\n", 1)


def _about_ranks(configs: Sequence[Config], program: str) -> list[str]:
    """Return comments on what each rank runs: the program, the settings in spec.json, CPU masks and the node check."""
    first, *others = [job_spec.settings(hetjob.worlds(config)[0]) for config in configs]
    same = {key: value for key, value in first.items() if all(other.get(key, ...) == value for other in others)}
    shown = [f"{key}={json.dumps(value)}" for key, value in same.items()]
    python = "" if configs[0].job.command else "python "
    lines = [comment(f"# Start the ranks. Each one runs: {python}{program}")]
    if shown:
        lines += [
            "# Before that, hpcinit sets up the rank with spec.json, in which these settings differ from the defaults:",
            *(f"#   {comment(line)}" for line in srun_step.wrapped(shown)),
        ]
    if len(same) < len(first):
        lines.append(f"# The tasks differ in: {', '.join(key for key in first if key not in same)}")
    lines += _about_masks(configs[0])
    if configs[0].check_node.action != OFF and configs[0].engine.uses_slurm:
        faulty = "The ranks do not start on a faulty node." if configs[0].check_node.action == REPLACE else ""
        lines += [
            "# The first task of each node checks its node. It reads /proc, /sys and the free space of disks, and runs",
            f"# nvidia-smi. It prints problems to the log, and ends and removes nothing. {faulty}".rstrip(),
        ]
    return lines


def _about_masks(config: Config) -> list[str]:
    """Return comments on the options for CPU masks and lost nodes in the srun command."""
    lines = []
    if str(config.launch.cpu_bind).startswith("mask_cpu:"):
        masks = "a mask for each rank of a node, in rank order. Bit 0 of a mask is core 0."
        if STARTS[config.launch.kind].task_per_rank:
            lines.append(f"# --cpu-bind has {masks}")
        else:
            lines.append(f"# launch.cpu_bind in spec.json has {masks} The task of a node binds its ranks.")
    if job_spec.warm_spares(config):
        lines.append("# --no-kill: if a node fails, the tasks on the other nodes continue.")
    return lines


def text_of(folder: Path, command: str, parameters: Mapping[str, Any], header: Sequence[str] = ()) -> str:
    """Return the script as submitit renders it.

    header: comments for the top of the script.
    """
    # Imported here because submitit takes 0.06 s, and only a submission needs it.
    from hpcinit.submit.executor import Executor  # noqa: PLC0415

    return Executor(folder, program=True, header=header).render(command, **parameters)


def _cores_of_tasks(config: Config) -> list[str]:
    """Return the lines that unset SLURM_CPUS_PER_TASK if one task starts all ranks of a node."""
    if STARTS[config.launch.kind].task_per_rank or not config.engine.uses_slurm or not cpus_per_rank(config):
        return []
    why = (
        "# srun starts one task per node, with the cores of all its ranks. With this variable, Slurm 26.05 would warn."
    )
    return [why, "unset SLURM_CPUS_PER_TASK", ""]


def _with_components(text: str, config: Config, run: RunPath, workdir: Path) -> str:
    """Add `#SBATCH hetjob` and the directives of each further component to the script of a heterogeneous job."""
    lines = text.split("\n")
    end = next(at for at, line in enumerate(lines) if _directive(lines[at - 1]) and not _directive(line))
    for each in reversed(hetjob.components(config)[1:]):
        other = text_of(run.path, "", parameters(each, run, workdir))
        lines[end:end] = ["#SBATCH hetjob", *filter(_directive, other.split("\n"))]
    return "\n".join(lines)


def _directive(line: str) -> bool:
    return line.startswith("#SBATCH ")


def parameters(config: Config, run: RunPath, workdir: Path, code: SnapshotPlan | None = None) -> dict[str, Any]:
    """Return the parameters for submitit. A parameter that is None gets no #SBATCH line."""
    cluster = config.cluster
    known = {
        **{option.replace("-", "_"): keys.value(config, key) for option, key in keys.options("sbatch").items()},
        "nodes": config.nodes + config.spare_nodes,
        "ntasks_per_node": ranks_per_node(config),
        "cpus_per_task": cpus_per_rank(config),
        "time": slurm_time(config.time_min),
        "mem": srun_step.memory_option(config),
        "exclusive": cluster.exclusive or None,
        "stderr_to_stdout": True,
        "setup": _setup(config, run, code),
        "use_srun": False,  # the script's own lines start the ranks, with options that submitit's srun lacks
    }
    extra: dict[str, Any] = {
        "clusters": cluster.clusters,
        "chdir": str(workdir),
        "output": run.in_directive(run_folder.JOB_LOG),
        "dependency": dependency.dependency_option(config),
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
    # Without None, submitit would set a wckey, and sites without wckeys would refuse the job.
    return {**given, "wckey": None, "additional_parameters": kept}


def _data(value: Any) -> Any:
    return quoting.directive(value) if isinstance(value, str) else value


def slurm_time(minutes: int) -> str:
    """Return a time limit in Slurm's form, such as '01:30:00' or '1-12:00:00'."""
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00" if days else f"{hours:02}:{minutes:02}:00"


def _setup(config: Config, run: RunPath, code: SnapshotPlan | None) -> list[str]:
    queue, chain = config.engine.has_queue, config.chain > 1
    after = {"hpcinit_pythons": _words(_pythons(config)), "hpcinit_policy": _words(restart.policy(config))}
    blocks: list[tuple[bool, str, Mapping[str, str | int]]] = [
        (queue, run.guard, {}),
        (True, "token", {}),
        (True, "run_folder", {run_folder.ENV_FOLDER: run.in_shell()}),
        (chain, "chain", {}),
        (True, "record", {"hpcinit_job": run.job_id}),
        (chain, "chain_end", {}),
        (queue, "after", after),
    ]
    lines = [line for wanted, name, values in blocks if wanted for line in [*shell_blocks.block(name, values), ""]]
    lines += [*_end_time(config), *job_setup.setup_lines(config, run, noted=True), *code_lines(run, code)]
    unlimited = "" if restart.wanted(config) else "1"
    return lines + (["", *shell_blocks.block("restarted", {"hpcinit_unlimited": unlimited})] if queue else [])


def _pythons(config: Config) -> list[str]:
    """Return the Pythons that can run hpcinit.after on the host: this one, and that of a job without a container."""
    own = [] if config.container.image else [environment.python(config)]
    return list(dict.fromkeys([*own, sys.executable]))


def _words(values: Sequence[str]) -> Raw:
    return Raw(f"({' '.join(map(shell, values))})")


def with_files(text: str, files: Mapping[str, str]) -> str:
    """Append the files that the job reads to the script of a dry run, as comments. The result is still a valid script.

    If several files have the same name, show the first one, and only the differing lines of the others.

    files: the text of each file, by its path below the folder of the run or sweep.
    """
    lines = [f"{text}", "# End of the script. The job also reads these files of its folder:"]
    shown: dict[str, str] = {}
    for path, content in files.items():
        first = shown.setdefault(Path(path).name, path)
        own = content.splitlines()
        if path == first:
            lines.append(f"# {path}:")
        else:
            lines.append(f"# {path}, where it differs from {first}:")
            own = _differences(files[first].splitlines(), own)
        lines += [comment(f"# | {line}").rstrip() for line in own]
    return "\n".join([*lines, ""])


def _differences(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the lines that are in only one of the texts, marked with - or +."""
    found = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in found if not line.startswith("@@")] or ["(nowhere)"]


def _end_time(config: Config) -> list[str]:
    """Return lines that export the time when the job will end.

    Slurm 24.11 sets a variable with this time. Slurm 22.05 sets none, so the time is calculated.
    """
    end = f"$(($(date +%s) + 60 * {config.time_min}))"
    return [
        "# The time at which the job reaches its limit. At the start, no rank waits for the others beyond this time.",
        f'export HPCINIT_JOB_END_TIME="${{SLURM_JOB_END_TIME:-{end}}}" {ENV_LIMIT_S}={60 * config.time_min}',
    ]


def code_lines(run: RunPath, code: SnapshotPlan | None) -> list[str]:
    """Return shell lines that put the packages in the code snapshot first on PYTHONPATH."""
    if code is None:
        return []
    path = quoting.shell(":".join(code.python_path(run.path)))
    about = "# Use the packages of the code snapshot first."
    return ["", about, f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}"]


def _command(config: Config, steps: Sequence[str]) -> list[str]:
    """Return the lines that run `steps` and then hpcinit.after."""
    after = ["hpcinit_after $?"] if config.engine.has_queue and config.worlds != hetjob.EACH else []
    if not config.spare_nodes:
        return [*steps, *after]
    launcher, _, rest = steps[0].partition(" ")
    # --overlap, because Slurm 22.05 never releases the cores of a step on a lost node. It logs 'unable to update job's
    # core use information due to job resizing'.
    ranks = f'{launcher} ${{hpcinit_excluded:+--overlap --exclude="$hpcinit_excluded"}} \\\n    {rest}'
    if job_spec.warm_spares(config):
        number = config.nodes + config.spare_nodes
        after.append(f'{srun_step.NODES}=$(({number} - $(wc -w <<< "${{hpcinit_excluded//,/ }}")))')
        return [f"{srun_step.NODES}={number}", *_loop(ranks, *after)]
    return _loop(ranks, *after)


def _loop(*lines: str) -> list[str]:
    return ["while :; do", *(f"  {line}" for line in lines), "done"]
