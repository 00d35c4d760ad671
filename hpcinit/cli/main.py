"""The entry point of `hpcinit COMMAND ...`.

Every command ends with a message and an exit status, never with a traceback.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import os
import shlex
import sys
from collections.abc import Sequence

from hpcinit.base import console, failure_kinds, json_output
from hpcinit.base.console import say
from hpcinit.base.errors import ConfigError, Failure, HpcinitError, Interrupted
from hpcinit.cli.commands import ABOUT, COMMANDS, EXAMPLES, OPTIONS

HELP, COMPLETION = {"-h", "--help"}, {"-sc", "--shell-completion"}


def entry(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    A submission and `hpcinit status` end with os._exit(), as mypy does. Python's normal shutdown would free all objects
    first, which takes a tenth of the total time.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    status = 0
    if words[:1] == ["status"]:
        gc.disable()  # garbage collection would scan the records of a thousand runs several times and free nothing
    if words[:1] == ["submit"]:
        # A submission creates 90,000 objects and keeps most of them. Scanning them takes a tenth of its time.
        gc.set_threshold(200_000)
    try:
        status = main(words)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BrokenPipeError:
        return _ignore_closed_pipe(status)
    except OSError:
        return status or 1  # Python reports the error of the stream
    if words[:1] in (["submit"], ["status"]):
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
    if COMPLETION & set(own[:2]):  # also in Hydra's position: `hpcinit submit --shell-completion ...`
        return guarded("hpcinit.cli.completion", words[1 if words[0] in COMPLETION else 2 :])
    if words[0] not in COMMANDS:
        say(f"error: {_no_such(words)}")
        return 2
    # After `run`, --help may be an option of the program.
    if HELP & set(own[1:2] if words[0] == "run" else own[1:]):
        return _help(words)
    return guarded(COMMANDS[words[0]].module, words[1:])


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
    """Let the command's own parser print its help. Then print examples of the command."""
    try:
        status = guarded(COMMANDS[words[0]].module, words[1:])
    except SystemExit as end:  # raised by argparse after it has printed its help
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
            f"hpcinit: {ABOUT}.",
            "",
            "usage: hpcinit COMMAND ...",
            *lines,
            "",
            "examples:",
            *(f"  {line:49} {about}" for line, about in EXAMPLES.items()),
            "",
            "options of every command:",
            *(f"  {option:25} {about}" for option, about in OPTIONS.items()),
            "",
            'For TAB completion in bash, zsh or fish: eval "$(hpcinit --shell-completion install=bash)"',
        ]
    )


def guarded(module: str, argv: Sequence[str]) -> int:
    """Run `module.main(argv)` and return its exit status. Print errors that are meant for the user."""
    try:
        status: int = importlib.import_module(module).main(argv)
        return status
    except HpcinitError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [error]:
            say(f"error: {problem}")
        return _as_json(error, argv)
    except BrokenPipeError:
        return _ignore_closed_pipe()
    except OSError as error:
        say(f"error: {_system_error(error)}")
        return _as_json(Failure(_system_error(error), kind=failure_kinds.FILE), argv)
    except KeyboardInterrupt:
        say("interrupted")
        return _as_json(Interrupted("interrupted"), argv)


def _as_json(error: HpcinitError, argv: Sequence[str]) -> int:
    """Print the error as JSON if --json was given. Return the error's exit status."""
    if "--json" in argv[: argv.index("--") if "--" in argv else None]:
        print(json_output.line("error", error.document()), flush=True)
    return error.exit_status


def _ignore_closed_pipe(status: int = 0) -> int:
    """Discard all further output and return `status`.

    It is not a failure if `hpcinit logs ... | head` closes the pipe.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _system_error(error: OSError) -> str:
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder was deleted: cd to a folder that exists"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


if __name__ == "__main__":
    sys.exit(entry())
