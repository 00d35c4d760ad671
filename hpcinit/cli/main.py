"""`hpcinit COMMAND ...`, and how every command ends: with a message and an exit status, never a traceback."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from hpcinit.base import console
from hpcinit.base.console import say
from hpcinit.base.errors import INTERRUPTED, ConfigError, HpcinitError
from hpcinit.cli.commands import COMMANDS

HELP, COMPLETION = {"-h", "--help"}, {"-sc", "--shell-completion"}


def entry(argv: Sequence[str] | None = None) -> int:
    """What the shell starts. A submission ends here and now: Python's own ending takes apart, object by object, what
    Hydra has built, a tenth of the whole time (mypy ends in the same way)."""
    words = list(sys.argv[1:] if argv is None else argv)
    status = 0
    try:
        status = main(words)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BrokenPipeError:
        return _nobody_reads(status)
    except OSError:
        return status or 1  # Python says what is wrong with them
    if words[:1] == ["submit"]:
        os._exit(status)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    console.set_verbosity(console.PLAIN)
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
        return guarded("hpcinit.cli.completion", words[1 if words[0] in COMPLETION else 2 :])
    if words[0] not in COMMANDS:
        say(f"error: {_no_such(words)}")
        return 2
    # What follows `run` is a program, whose own --help it may be.
    if HELP & set(own[1:2] if words[0] == "run" else own[1:]):
        return _help(words)
    with _patience(words[0]):
        return guarded(COMMANDS[words[0]].module, words[1:])


def _patience(name: str) -> contextlib.AbstractContextManager[None]:
    """A line while one waits, in a terminal; a rank's streams are its program's."""
    if name == "run" or sys.stderr is None or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from hpcinit.cli import waiting_note  # noqa: PLC0415 - for a terminal only

    return waiting_note.shown(name)


def _no_such(words: list[str]) -> str:
    first = words[0]
    close = [] if first.startswith("-") else difflib.get_close_matches(first, COMMANDS, n=1)  # --nodes is no command
    guess = f"; did you mean {close[0]!r}?" if close else ""
    if first.startswith("-") and set(words[1:2]) & COMMANDS.keys():
        guess = f"; did you mean: hpcinit {shlex.join([words[1], first, *words[2:]])}"
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
    lines: list[str] = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:10} {command.about}" for name, command in COMMANDS.items() if command.group == group]
    return "\n".join(
        [
            "hpcinit: PyTorch on a Slurm cluster, from one command to a process group that is up.",
            "",
            "usage: hpcinit COMMAND ...",
            *lines,
            "",
            "examples:",
            "  hpcinit submit                                    a smoke test on this machine",
            "  hpcinit submit cluster=x nodes=8 -- train.py      your script on 8 nodes, each of its GPUs a rank",
            "  hpcinit why train-0001                            what failed first in that run, and what to do",
            "",
            "every command has:",
            "  hpcinit COMMAND --help    its options, and examples",
            "  --json                    its answer for programs",
            "  -q, --quiet               the shortest answer; on stderr errors alone",
            "  -v, --verbose             also print each command of Slurm and git, with its duration, on stderr",
            "",
            "hpcinit --shell-completion install=bash prints TAB completion for bash, zsh or fish.",
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
    except BrokenPipeError:
        return _nobody_reads()
    except OSError as error:
        say(f"error: {_of_the_system(error)}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _nobody_reads(status: int = 0) -> int:
    """`hpcinit logs ... | head`: what is left to say goes nowhere, and that is no failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _of_the_system(error: OSError) -> str:
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder was deleted: cd to one that exists"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


if __name__ == "__main__":
    sys.exit(entry())
