"""`hpcinit drill -- train.py`: checks whether a training run resumes correctly after the faults of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console, json_output
from hpcinit.base.errors import RequestError
from hpcinit.drill import progress_lines
from hpcinit.drill.attempt import Attempt, Record, environment
from hpcinit.drill.comparison import Undisturbed, losses
from hpcinit.drill.faults import Frozen
from hpcinit.drill.parts import Drill, Part
from hpcinit.drill.place import Place
from hpcinit.engine import local_job
from hpcinit.records import secret_names
from hpcinit.submit import job_environment
from hpcinit.submit.submit_command import split_program

GRACE_S = 30.0
PATTERN, RANKS = "drill.pattern=", "ranks_per_node="
OWN_KEYS = ("cluster", "runs_dir", "wait", "again", "dry_run", "chain")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit drill",
        usage="hpcinit drill [options] [key=value ...] -- train.py [arguments]",
        description="Start, interrupt and restart the program on this machine, in a copy of the current folder, and "
        "compare its losses with those of an undisturbed run. The exit status is 1 if the program does not resume "
        "correctly.",
        epilog="drill.pattern='it=(?P<step>\\d+) L=(?P<loss>\\S+)' recognizes steps in the program's output that the "
        "known formats do not match. Other keys work as in hpcinit submit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="end each run after N steps; default: run until the program ends"
    )
    parser.add_argument(
        "--grace",
        type=float,
        metavar="S",
        default=GRACE_S,
        help=f"seconds from SIGTERM to SIGKILL; default: {GRACE_S:g}",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="do not copy files and folders of this name"
    )
    parser.add_argument(
        "--fewer-ranks",
        type=int,
        metavar="N",
        help="also restart with ranks_per_node=N, but check only at which step the program resumes",
    )
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    words, program = split_program(argv, "hpcinit drill")
    options, keys = console.parse_known_arguments(parser(), words)
    if wrong := [word for word in keys if word.startswith("-")]:
        raise console.error(parser(), words, f"unrecognized arguments: {wrong[0]}")
    if not program:
        raise RequestError("no program, expected one after --: hpcinit drill -- train.py")
    if options.steps is not None and options.steps < 3:
        raise RequestError(
            f"--steps is {options.steps}, expected at least 3: a drill stops the program halfway and repeats steps"
        )
    reader = None
    for word in [word for word in keys if word.startswith(PATTERN)]:
        reader = progress_lines.reader_of(word.removeprefix(PATTERN))
        keys.remove(word)
    if wrong := [word for word in keys if word.partition("=")[0] in OWN_KEYS and word != "cluster=local"]:
        raise RequestError(f"remove {wrong[0]}: a drill sets this key itself, and always uses cluster=local")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM acts like Ctrl-C, so nothing is left behind
    place = Place(_folder_of(program), options.without)
    try:
        first = _submitted(place, keys, program)
        place.keep_as_before(first.run)
        drill = Drill(place, first.run, _job_environment(), options.steps, options.grace)
        drill.reader = first.reader = reader
        if options.fewer_ranks:
            fewer = [key for key in keys if not key.startswith(RANKS)] + [f"{RANKS}{options.fewer_ranks}"]
            drill.fewer = lambda: _submitted(place, fewer, program)
        return _run(drill, first, options.json)
    finally:
        _end_all(place)
        place.remove()


def _folder_of(program: Sequence[str]) -> Path:
    """Return the folder to copy: the current folder. Raise RequestError if the script is elsewhere."""
    here, script = Path.cwd(), Path(program[0])
    if script.suffix == ".py" and script.is_absolute() and not script.is_relative_to(here):
        raise RequestError(
            f"{script} is not in the current folder, but a drill copies only that folder. Type: cd {script.parent}, "
            f"then hpcinit drill -- {script.name}"
        )
    return here


def _submitted(place: Place, keys: Sequence[str], program: Sequence[str]) -> Attempt:
    """Submit the program, with all checks of a submission. Raise RequestError if a check finds a problem."""
    folder = place.next_attempt()
    own = ["cluster=local", f"runs_dir={place.now / 'runs'}", "again=true"]
    here = Path.cwd()
    inside = [str(Path(word).relative_to(here)) if word.startswith(f"{here}/") else word for word in program]
    command = [sys.executable, "-m", "hpcinit", "submit", "--json", *[k for k in keys if k != "cluster=local"], *own]
    env = os.environ | environment(folder)
    done = subprocess.run(
        [*command, "--", *inside],
        cwd=place.work,
        env=env,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    documents = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        problems = next((one["error"] for one in documents if one["document"] == "error"), done.stderr)
        raise RequestError(problems.replace(str(place.work), str(here)))
    return Attempt(place, Path(documents[0]["run"]).absolute(), folder, int(documents[0]["job_id"]), {})


def _job_environment() -> dict[str, str]:
    cleaned, _ = job_environment.clean_environment(os.environ)
    return {name: value for name, value in cleaned.items() if not secret_names.is_secret(name, value, ())}


def _run(drill: Drill, attempt: Attempt, as_json: bool) -> int:
    """Run the drill, print its results, and return the exit status."""
    line = console.ProgressLine()
    line.show("undisturbed run")
    first = drill.undisturbed(attempt)
    drill.reader = drill.reader or progress_lines.best_reader(attempt.log(attempt.reporter))
    plan = drill.plan(first)
    if not as_json:
        line.end()
        print(_undisturbed_line(first), flush=True)
        print(f"the rest of the drill takes about {_minutes(drill.estimate_s(first, plan))}", flush=True)
    line.show("second undisturbed run")
    again = drill.start(drill.place.before, 0)
    second = drill.undisturbed(again, frozen := Frozen(again, plan.killed, plan.cut))
    alone = Undisturbed(first, second, drill.saves)
    parts: list[Part] = []
    if not as_json and not alone.deterministic:
        line.end()
        print(
            f"the program is not deterministic: losses that differ by at most {alone.tolerance:.3g} count as equal",
            flush=True,
        )
    line.show("faults")
    shown: set[str] = set()
    for part in drill.parts(alone, plan, frozen):
        parts.append(part)
        if not as_json:
            line.end()
            for text in _part_lines(part, shown):
                print(console.plain(text), flush=True)
        line.show("faults")
    line.end()
    failed = [part for part in parts if part.findings]
    unchecked = [*plan.unchecked, *_not_compared(alone, drill.place)]
    if plan.cut and not frozen.while_saving:
        unchecked.append("a kill during a save: every save was already complete when the drill first saw it")
    if as_json:
        print(json_output.line("drill", _document(alone, parts, unchecked)), flush=True)
    else:
        print("".join(f"not checked: {text}\n" for text in unchecked), end="")
        print("the program resumes correctly" if not failed else "the program does not resume correctly", flush=True)
    return 1 if failed else 0


def _undisturbed_line(first: Record) -> str:
    known = [*losses(first).values()]
    about = f", loss {known[0]:.4g} -> {known[-1]:.4g}" if known else ""
    return f"undisturbed: {first.done} steps{about}"


def _part_lines(part: Part, shown: set[str]) -> list[str]:
    """Return the lines that show a part and its findings. Print the advice for each cause only once.

    shown: the causes whose advice was already printed. The causes of this part are added.
    """
    lines = [f"{part.title}: {part.text}".ljust(100) + (" FAILS" if part.findings else " ok")]
    for finding in part.findings:
        lines.append(f"  {finding.cause}: {finding.text}")
        if finding.cause not in shown:
            lines.append(f"    {finding.advice}")
        shown.add(finding.cause)
    return lines


def _not_compared(alone: Undisturbed, place: Place) -> list[str]:
    found = []
    if not any(step.batch for steps in alone.first.steps for step in steps):
        found.append("the data order: the drill saw no input of a torch.nn.Module")
    if not losses(alone.first):
        found.append(
            "losses: none were recognized in the output, so the weights were compared; to compare losses, set "
            "drill.pattern='...'"
        )
    if not place.reads_visible:
        found.append(f"which files were read: the file system of {place.root.parent} records no access times")
    return found


def _document(alone: Undisturbed, parts: Sequence[Part], unchecked: Sequence[str]) -> dict[str, Any]:
    files = {name for save in alone.saves for name in save.files}
    return {
        "ok": not any(part.findings for part in parts),
        "steps": alone.first.done,
        "ranks": alone.world_size,
        "deterministic": alone.deterministic,
        "tolerance": alone.tolerance,
        "step_s": round(alone.step_s, 3),
        "saves": [save.steps for save in alone.saves],
        "checkpoint_files": len(files),
        "checkpoint_bytes": max((sum(save.files.values()) for save in alone.saves), default=0),
        "parts": [part.document() for part in parts],
        "findings": _findings(parts),
        "unchecked": list(unchecked),
    }


def _findings(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return each cause once, with the names of the parts in which it was found."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for one in part.findings:
            known = {"cause": one.cause, "text": one.text, "advice": one.advice, "parts": []}
            found.setdefault(one.cause, known)["parts"].append(part.name)
    return list(found.values())


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _end_all(place: Place) -> None:
    """Kill all jobs that are still running, including one whose submission was interrupted."""
    for path in place.now.glob(f"runs/*/{local_job.STATE}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads(path.read_text())
            if local_job.is_alive(int(state["pid"]), float(state["started"])):
                Attempt(place, path.parent, place.root, int(state["pid"]), {}).kill()
