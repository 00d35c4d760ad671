"""Implements `hpcinit export RUN > job.sbatch`: prints a batch script that runs the same program without hpcinit."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcinit.base import console, json_output, quoting, versions
from hpcinit.base.errors import RequestError
from hpcinit.base.quoting import option_flags
from hpcinit.checks import all_checks, checkout, environment
from hpcinit.checks.checkout import SnapshotPlan
from hpcinit.config import compose, hetjob, job_spec
from hpcinit.config.request import Request
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.observe import find_runs
from hpcinit.submit import container, job_setup, provenance, script, srun_step, submit_command
from hpcinit.submit.run_path import RunPath
from hpcinit.world import network

FIRST_HOST = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
PORT = "$((20000 + SLURM_JOB_ID % 10000))"  # below the ephemeral ports of Linux, 32768-60999
# Slurm gives each rank its numbers; the program expects torch's names.
RANK = 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" GROUP_RANK="$SLURM_NODEID"; exec "$@"'
# Options of srun that only make sense with hpcinit's run folder.
OF_THE_RUN_FOLDER = ("output", "open-mode")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit export",
        usage="hpcinit export [options] RUN\n       hpcinit export [options] key=value ... [-- PROGRAM ARGUMENTS ...]",
        description="Print a plain batch script that runs a program with srun, without hpcinit. Give a run, or the "
        "arguments of hpcinit submit.",
    )
    parser.add_argument("request", nargs="*", metavar="RUN | key=value", help="a run, or the keys of a request")
    find_runs.add_runs_dir(parser)
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    arguments, program = submit_command.split_program(argv, "hpcinit export cluster=x nodes=2")
    options = console.parse_arguments(parser(), arguments, intermixed=True)
    runs = [argument for argument in options.request if "=" not in argument]
    if runs and (program or len(options.request) > 1):
        raise RequestError(
            f"{' '.join(options.request)}: expected one RUN, or the request of a new job: key=value ... -- train.py"
        )

    def show(config: Config, workdir: Path, code: SnapshotPlan | None = None, folder: Path | None = None) -> int:
        text = plain_script(config, workdir, code, folder)
        run = str(folder) if folder else None
        fields: dict[str, Any] = {"run": run, "combination": "", "script": text, "files": {}, "changed_lines": None}
        sys.stdout.write(json_output.line("script", fields) + "\n" if options.json else text)
        return 0

    if runs:
        run = find_runs.find_run(runs[0], options.runs_dir).absolute()
        if find_runs.is_sweep(run):
            raise RequestError(f"{run} is a sweep, expected one task, as in: hpcinit export {runs[0]}/0")

        def of_run(requests: Sequence[Request]) -> int:
            config = replace(requests[0].config, dependency=None)  # the dependency was for the first submission only
            workdir = provenance.workdir_of(run, config.snapshot == "git")
            return show(config, workdir, checkout.plan_snapshot(config, workdir), run)

        return provenance.recorded_request(provenance.read_recorded(run), [], lambda request: None, of_run)

    def prepare(request: Request) -> None:
        if program:
            submit_command.set_program(program, request, ["hpcinit", "export", *options.request])
        all_checks.check(request.config, request.document)

    def of_request(requests: Sequence[Request]) -> int:
        if len(requests) > 1:
            raise RequestError(
                f"hpcinit export prints one script, but the overrides describe {len(requests)} jobs: give each key "
                "one value"
            )
        return show(requests[0].config, job_spec.workdir(requests[0].config))

    line = [*options.request, *(["job=program"] if program else [])]
    return compose.main(line, prepare, of_request, cluster_required=True)


def plain_script(config: Config, workdir: Path, code: SnapshotPlan | None = None, run: Path | None = None) -> str:
    """Return a batch script that runs the program without hpcinit. Raise RequestError for cluster=local.

    code: the code snapshot of the run.
    run: the run folder.
    """
    hetjob.refuse(config, "hpcinit export")
    if not config.engine.uses_slurm:
        raise RequestError(
            f"cluster {config.cluster.name} has no Slurm (engine: {config.cluster.engine}), so a batch script cannot "
            "run there; export the request for another cluster: hpcinit export cluster=x nodes=2 -- train.py"
        )
    plain = replace(
        config,
        chain=1,
        spare_nodes=0,
        restart=replace(config.restart, max_restarts=None, warm=False),
        launch=replace(config.launch, kind="srun", max_restarts=0),
    )
    path = RunPath(workdir)  # instead of the run folder, which the script does not use
    parameters = script.parameters(plain, path, workdir)
    setup = [*job_setup.setup_lines(plain, path), *(script.code_lines(RunPath(run), code) if run else [])]
    parameters["setup"] = setup[1:]  # without the first empty line
    parameters["additional_parameters"]["output"] = quoting.pattern(f"{config.name}-") + "%j.out"
    return script.text_of(workdir, _ranks(plain, path, workdir), parameters, _header(config))


def _header(config: Config) -> list[str]:
    """Return the comments at the top of the script. They list what hpcinit would do but the script does not."""
    kept = Config()
    lacks = {
        f"chain={config.chain}": config.chain > 1,
        f"spare_nodes={config.spare_nodes}": config.spare_nodes > 0,
        f"restart.max_restarts={config.restart.max_restarts}": bool(config.restart.max_restarts),
        "restart.warm=true": config.restart.warm,
        f"launch={config.launch.kind}": config.launch.kind != kept.launch.kind,
    }
    version = versions.by_folder(tuple(sys.path)).get("hpcinit", "")
    lines = [
        f"# {config.name}: {script.program_of(config)}",
        f"# Exported by hpcinit {version} on {time.strftime('%Y-%m-%d')}. It runs without hpcinit: sbatch THIS_FILE",
    ]
    if missing := [text for text, lacking in lacks.items() if lacking]:
        lines.append(f"# This script omits these settings, because they need hpcinit: {', '.join(missing)}")
    return [script.comment(line) for line in lines]


def _ranks(config: Config, path: RunPath, workdir: Path) -> str:
    host = network.rename_host("HOST", config.cluster.host_template).replace("HOST", FIRST_HOST)
    python, job = environment.python(config), config.job
    target = ["-m", job.module] if job.module else [job.script] if job.script else None
    program = [python, "-u", *target] if target else [job.command or ""]
    options = {
        **srun_step.options(config, path),
        **container.container_options(config, path, workdir),
        **config.cluster.srun,
    }
    flags = option_flags({name: value for name, value in options.items() if name not in OF_THE_RUN_FOLDER})
    prefix = container.container_prefix(config, path, workdir)
    lines = [["srun", *flags], ["sh", "-c", RANK, "sh"], [*prefix, *program, *job.args]]
    return "\n".join(
        [
            "# torch's variables with the same value in all ranks. Rank 0 runs on the first node.",
            f'export MASTER_ADDR="{host}"',
            f'export MASTER_PORT="{PORT}"',
            f"export WORLD_SIZE={config.nodes * ranks_per_node(config)}",
            f"export LOCAL_WORLD_SIZE={ranks_per_node(config)}",
            "",
            "# Start the ranks. Each one exports its own RANK, LOCAL_RANK and GROUP_RANK.",
            " \\\n  ".join(" ".join(quoting.shell(argument) for argument in line) for line in lines),
        ]
    )
