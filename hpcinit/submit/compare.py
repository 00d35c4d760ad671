"""Implements `hpcinit render RUN`: prints the script that hpcinit would render now for the request of a run.

If the user names a second run or overrides, it prints the differences in config and script instead.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from hpcinit.base import console, json_output
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.checks import checkout
from hpcinit.config.request import Request
from hpcinit.observe import find_runs, resubmitted
from hpcinit.records import run_folder
from hpcinit.submit import provenance, script

# These lines depend on the time of submission, because jobs end and excluded nodes recover.
MOMENTARY = ("#SBATCH --dependency=", "#SBATCH --exclude=")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit render",
        description="Print the script that hpcinit would render now for the request of a run. With a second run or "
        "key=value, print the differences in config and script. The exit status is 1 if something differs.",
    )
    parser.add_argument("run", help="run folder, its name, or a job id")
    parser.add_argument("other", nargs="*", metavar="RUN | key=value", help="another run, or keys to change")
    find_runs.add_runs_dir(parser)
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv), intermixed=True)
    run = _single(find_runs.find_run(options.run, options.runs_dir).absolute())
    runs = [argument for argument in options.other if "=" not in argument]
    if len(runs) > 1 or (runs and len(options.other) > 1):
        raise RequestError(
            f"{' '.join(options.other)}: expected either one other run, or key=value settings for this run"
        )
    if runs:
        other = _single(find_runs.find_run(runs[0], options.runs_dir).absolute())
        return _differ(run, _written(run), other.name, _written(other), options.json)
    config, text = _rendered(run, options.other)
    if options.other:
        document, before = _written(run)
        before = [line for line in before if not line.startswith(MOMENTARY[1])]
        return _differ(
            run,
            (document, before),
            f"{run.name} with {' '.join(options.other)}",
            (config, _own(text, run)),
            options.json,
        )
    changed = _changed(run, text)
    if options.json:
        fields = {"run": str(run), "combination": "", "files": {}, "changed_lines": changed}
        print(json_output.line("script", {**fields, "script": "\n".join(text) + "\n"}))
        return int(changed > 0)
    print("\n".join(text))
    note = (
        f"{counted(changed, 'line')} different from the submitted script"
        if changed
        else "identical to the submitted script"
    )
    console.message(f"{run / run_folder.SCRIPT}: {note}")
    return int(changed > 0)


def _single(run: Path) -> Path:
    """Return `run`. Raise RequestError for sweeps and their tasks, because tasks of a sweep share one script."""
    sweep = run if find_runs.is_sweep(run) else resubmitted.sweep_of(run)
    if sweep:
        raise RequestError(
            f"{find_runs.name_of(run)} is {'a sweep' if run == sweep else 'a task of a sweep'}, and all tasks of a "
            f"sweep share a script: read {sweep / run_folder.SCRIPT}, and config.yaml in the folder of each task"
        )
    return run


def _changed(run: Path, text: Sequence[str]) -> int:
    """Return the number of lines in which `text` and the submitted script differ."""
    before = [line for line in provenance.recorded_lines(run) if not line.startswith(MOMENTARY)]
    return sum(
        line[0] in "+-" for line in difflib.ndiff(before, [line for line in text if not line.startswith(MOMENTARY)])
    )


def _written(run: Path) -> tuple[list[str], list[str]]:
    return _yaml(provenance.read_recorded(run)), _own(list(provenance.recorded_lines(run)), run)


def _rendered(run: Path, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines of the config and of the script that hpcinit would render now for this run."""
    found: list[tuple[list[str], list[str]]] = []

    def render(requests: Sequence[Request]) -> int:
        config = replace(requests[0].config, dependency=None)
        workdir = provenance.workdir_of(run, config.snapshot == "git")
        origin = script.recorded_origin("\n".join(provenance.recorded_lines(run)))
        text = script.render(config, run, workdir, checkout.plan_snapshot(config, workdir), origin)
        found.append((_yaml(requests[0].document), text.splitlines()))
        return 0

    provenance.recorded_request(provenance.read_recorded(run), overrides, lambda request: None, render)
    return found[0]


def _own(text: Sequence[str], run: Path) -> list[str]:
    """Return the lines of `text` in a form that can be compared between two runs.

    Replace the path of the run with RUN, and omit the comments with the date and the command.
    """
    return [line.replace(str(run), "RUN") for line in text if not line.startswith((script.WRITTEN, script.COMMAND))]


def _yaml(document: object) -> list[str]:
    return yaml.safe_dump(document, sort_keys=False).splitlines()


def _differ(
    run: Path, before: tuple[list[str], list[str]], name: str, after: tuple[list[str], list[str]], as_json: bool
) -> int:
    """Print the unified diffs of config and script. Return 1 if there are any, as diff does."""
    lines: list[str] = []
    for file, old, new in zip((run_folder.CONFIG, run_folder.SCRIPT), before, after, strict=True):
        lines += difflib.unified_diff(old, new, f"{run.name}/{file}", f"{name}/{file}", lineterm="")
    if as_json:
        print(json_output.line("diff", {"run": str(run), "other": name, "diff": lines}))
    elif not console.quiet():  # as with diff -q, the exit status is the result
        print("".join(f"{line}\n" for line in lines), end="")
    return int(bool(lines))
