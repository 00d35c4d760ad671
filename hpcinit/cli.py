"""`hpcinit COMMAND ...`, and how every command ends: with a message and an exit status, never a traceback."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hpcinit.facts.errors import INTERRUPTED, ConfigError, HpcinitError
from hpcinit.facts.saying import say


class Command(NamedTuple):
    module: str  # whose main(argv) it is
    about: str
    examples: str = ""  # of submit: conf/hydra/help


COMMANDS = {
    "submit": Command("hpcinit.submission.command", "compose, check, render and submit a job"),
    "plan": Command(
        "hpcinit.submission.plan",
        "what each rank will hold, and whether it fits",
        """
  hpcinit plan cluster=x nodes=8 parallel=zero3 model.params=7e9
  hpcinit plan cluster=x nodes=8 parallel=fsdp model.params=7e9 --json""",
    ),
    "doctor": Command(
        "hpcinit.doctor.command",
        "is all well, here and on the nodes",
        """
  hpcinit doctor                    versions, Slurm, config, folders, clocks, environment
  hpcinit doctor cluster=x          the same with what cluster=x says
  hpcinit doctor cluster=x nodes=4  as a job: devices, names, links, disks, clocks of the nodes
  hpcinit doctor cluster=x nodes=4 --remember    and what is bad is left out of submissions
  hpcinit doctor --run doctor-0001  what an earlier one has found; --json for programs""",
    ),
    "status": Command(
        "hpcinit.observe.status",
        "how runs are doing",
        """
  hpcinit status                    a line for each run in ./runs
  hpcinit status train-0001         one run; a job id or a path will do too
  hpcinit status --json             one JSON object per line, for programs""",
    ),
    "watch": Command(
        "hpcinit.observe.watch",
        "the same until all are over",
        """
  hpcinit watch                     all runs in ./runs that are not over
  hpcinit watch train-0001          exit status as the run's
  hpcinit watch --json              one JSON object for each change""",
    ),
    "logs": Command(
        "hpcinit.observe.logs",
        "what a run's ranks printed",
        """
  hpcinit logs train-0001           rank 0
  hpcinit logs --rank 0,4-7 train-0001
  hpcinit logs --all train-0001     every rank, each line with its rank in front
  hpcinit logs -f train-0001        until the run is over
  hpcinit logs --job train-0001     what the batch script and Slurm itself said""",
    ),
    "why": Command(
        "hpcinit.observe.why",
        "what went wrong first in a run, and what to do",
        """
  hpcinit why train-0001            the first failure, its cause, what to do, how many echoes
  hpcinit why 4242 --json           by its job id, for programs""",
    ),
    "report": Command(
        "hpcinit.observe.report.command",
        "how long each phase of a start took, and which ranks were slow",
        """
  hpcinit report train-0001         a table, and report.html in the run folder
  hpcinit report train-0001 --html start.html
  hpcinit report train-0001 --json  for programs""",
    ),
    "nodes": Command(
        "hpcinit.nodes",
        "nodes that have failed, and are left out of submissions",
        """
  hpcinit nodes                     each, how often and of what
  hpcinit nodes cluster=x           of one cluster, with the limits that a submission to it has
  hpcinit nodes --forget n3         it is well again
  hpcinit nodes --cluster x --add n3 --why 'slow network'""",
    ),
    "cancel": Command(
        "hpcinit.observe.cancel",
        "end a run",
        """
  hpcinit cancel train-0001
  hpcinit cancel 4242               by its job id
  hpcinit cancel --save train-0001  asks the training to save first: run.should_stop()""",
    ),
    "discover": Command(
        "hpcinit.discover.command",
        "ask Slurm what this cluster is, and describe it in conf/cluster",
        """
  hpcinit discover --name x         writes conf/cluster/x.yaml, for cluster=x
  hpcinit discover --print          shows it, and writes nothing
  hpcinit discover --name x --diff  what has changed since; exit status 1 if anything has""",
    ),
    "timeouts": Command(
        "hpcinit.timeouts.command",
        "how long a start-up may take, and what past runs say of it",
        """
  hpcinit timeouts cluster=x        the law in force, from 1 to 16384 nodes
  hpcinit timeouts fit              from all runs in ./runs: a law for their cluster
  hpcinit timeouts fit train-0001 train-0002 --write    into the cluster's YAML""",
    ),
    "resubmit": Command(
        "hpcinit.submission.resubmit",
        "submit a run's request once more",
        """
  hpcinit resubmit train-0001
  hpcinit resubmit train-0001 time_min=120
  hpcinit resubmit --fresh-code train-0001    snapshot=git: the checkout as it is now""",
    ),
    "render": Command(
        "hpcinit.submission.compare",
        "a run's script, and how two runs differ",
        """
  hpcinit render train-0001                  the script as it would be now
  hpcinit render train-0001 train-0002       a diff of config and script
  hpcinit render train-0001 nodes=8          what nodes=8 would change""",
    ),
    "build-ops": Command(
        "hpcinit.build_ops",
        "compile DeepSpeed's ops once, before ranks need them",
        """
  hpcinit build-ops parallel=zero3_offload deepspeed.optimizer=adamw
  hpcinit build-ops --ops cpu_adam""",
    ),
    "run": Command(
        "hpcinit.run",
        "inside a job: become a rank and run a program",
        """
  srun python -m hpcinit.run train.py --lr 3e-4
  srun python -m hpcinit.run -m package.train""",
    ),
    "world": Command(
        "hpcinit.world",
        "inside a job: which rank am I, as JSON",
        """
  srun -n 2 python -m hpcinit.world""",
    ),
}
HELP, COMPLETION = {"-h", "--help"}, {"-sc", "--shell-completion"}


def entry(argv: Sequence[str] | None = None) -> int:
    """What the shell starts. A submission ends here and now: Python's own ending takes apart, object by object, what
    Hydra has built, a tenth of the whole time (mypy ends in the same way)."""
    words = list(sys.argv[1:] if argv is None else argv)
    status = main(words)
    if words[:1] == ["submit"]:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            return status  # Python says what is wrong with them
        os._exit(status)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in HELP | {"help"}:
        print(usage())
        return 0
    if "--version" in (words[0], *words[1:2]):
        from importlib.metadata import version  # noqa: PLC0415

        print(f"hpcinit {version('hpcinit')}")
        return 0
    own = words[: words.index("--")] if "--" in words else words
    if COMPLETION & set(own[:2]):  # also where Hydra has it, `hpcinit submit --shell-completion ...`
        return guarded("hpcinit.completion", words[1 if words[0] in COMPLETION else 2 :])
    if words[0] not in COMMANDS:
        say(f"error: {_no_such(words)}")
        return 2
    # What follows `run` is a program, whose own --help it may be.
    if HELP & set(own[1:2] if words[0] == "run" else own[1:]):
        return _help(words)
    return guarded(COMMANDS[words[0]].module, words[1:])


def _no_such(words: list[str]) -> str:
    first = words[0]
    close = [] if first.startswith("-") else difflib.get_close_matches(first, COMMANDS, n=1)  # --nodes is no command
    guess = f"; did you mean {close[0]!r}?" if close else ""
    if "=" in first or first.endswith(".py"):
        guess = f"; did you mean: hpcinit submit {'' if '=' in first else '-- '}{shlex.join(words)}"
    return f"no command {first!r}, expected one of: {', '.join(COMMANDS)}{guess}"


def _help(words: list[str]) -> int:
    """What the command's own parser says of its options, and examples."""
    try:
        status = guarded(COMMANDS[words[0]].module, words[1:])
    except SystemExit as end:  # argparse, once it has printed its help
        status = int(end.code or 0)
    if status == 0 and COMMANDS[words[0]].examples:
        print(f"\nexamples:{COMMANDS[words[0]].examples}")
    return status


def usage() -> str:
    lines = [f"  {name:9} {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "hpcinit: PyTorch on a Slurm cluster, from one command to a process group that is up.",
            "",
            "usage: hpcinit COMMAND ...",
            "",
            *lines,
            "",
            "  hpcinit submit                                    a smoke test on this machine",
            "  hpcinit submit cluster=x nodes=8 -- train.py      your script on 8 nodes",
            "  hpcinit COMMAND --help                            options and examples of a command",
            "  hpcinit --shell-completion install=bash           prints TAB completion for bash, zsh or fish",
        ]
    )


def guarded(module: str, argv: Sequence[str]) -> int:
    """Run `module.main(argv)`; errors meant for a person become a message on stderr and an exit status."""
    try:
        status: int = importlib.import_module(module).main(argv)
        return status
    except ConfigError as error:
        for problem in error.problems:
            say(f"error: {problem}")
        return error.exit_status
    except HpcinitError as error:
        say(f"error: {error}")
        return error.exit_status
    except BrokenPipeError:  # `hpcinit logs ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say(f"error: {_of_the_system(error)}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _of_the_system(error: OSError) -> str:
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder was deleted: cd to one that exists"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


if __name__ == "__main__":
    sys.exit(entry())
