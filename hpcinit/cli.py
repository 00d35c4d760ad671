"""`hpcinit COMMAND ...`, and how every command ends: with a message and an exit status, never a traceback."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from hpcinit.facts.errors import INTERRUPTED, ConfigError, HpcinitError

COMMANDS = {
    "submit": ("hpcinit.submission.command", "compose, check, render and submit a job"),
    "status": ("hpcinit.observe.status", "how a run is doing"),
    "logs": ("hpcinit.observe.logs", "what a run's ranks printed"),
    "cancel": ("hpcinit.observe.cancel", "end a run"),
    "run": ("hpcinit.run", "inside a job: become a rank and run a program"),
    "world": ("hpcinit.world", "inside a job: which rank am I, as JSON"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help", "help"}:
        print(usage())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version  # noqa: PLC0415

        print(f"hpcinit {version('hpcinit')}")
        return 0
    if words[0] in {"-sc", "--shell-completion"}:  # Hydra's, which knows the program's name only
        if words[1:] and words[1].startswith("query=") and not _completes_a_submission():
            return 0
        words.insert(0, "submit")
    if words[0] not in COMMANDS:
        close = difflib.get_close_matches(words[0], COMMANDS, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        print(
            f"hpcinit: error: no command {words[0]!r}, expected one of: {', '.join(COMMANDS)}{guess}", file=sys.stderr
        )
        return 2
    return guarded(COMMANDS[words[0]][0], words[1:])


def _completes_a_submission() -> bool:
    """Hydra completes 'hpcinit key=value ...': take `submit` out of the line. Other commands are completed here."""
    line = os.environ.get("COMP_LINE", "")
    program, _, rest = line.partition(" ")
    command, space, keys = rest.lstrip().partition(" ")
    if not space:
        print(" ".join(name for name in COMMANDS if name.startswith(command)))
        return False
    if command != "submit" or " -- " in line:
        return False
    os.environ["COMP_LINE"] = f"{program} {keys}"
    os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    return True


def usage() -> str:
    lines = [f"  {name:8} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "hpcinit: PyTorch on a Slurm cluster, from submission to a process group that is up.",
            "",
            *lines,
            "",
            "  hpcinit submit                                    a smoke test on this machine",
            "  hpcinit submit cluster=x nodes=8 -- train.py      your script on 8 nodes",
            "  hpcinit submit --help                             every key and choice",
        ]
    )


def guarded(module: str, argv: Sequence[str]) -> int:
    """Run `module.main(argv)`; errors meant for a person become a message on stderr and an exit status."""
    try:
        status: int = importlib.import_module(module).main(argv)
        return status
    except ConfigError as error:
        for problem in error.problems:
            print(f"hpcinit: error: {problem}", file=sys.stderr)
        return error.exit_status
    except HpcinitError as error:
        print(f"hpcinit: error: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # `hpcinit logs ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"hpcinit: error: {where}{error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hpcinit: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
