"""What a command says beside its answer, on stderr: notes and warnings; with -v also each command of Slurm and git.

-q leaves all of that out, errors alone stay, and has the answer in its shortest form. One process, one command: the
choice is made once, from the command line.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from hpcinit.facts.terminal import plain

if TYPE_CHECKING:
    import argparse

QUIET, PLAIN, VERBOSE = -1, 0, 1
LONGEST = 200  # characters of a command line that -v shows
_chosen = {"level": PLAIN}
_began = time.monotonic()


def choose(level: int) -> None:
    """QUIET, PLAIN or VERBOSE, for the rest of this process."""
    _chosen["level"] = level


def quiet() -> bool:
    return _chosen["level"] == QUIET


def note(text: str) -> None:
    """A line beside the answer, on stderr, unless quiet; behind what was printed before it, in one pipe too."""
    if not quiet():
        with suppress(OSError, ValueError):  # nobody reads the answer: who prints it is told
            sys.stdout.flush()
        print(plain(text), file=sys.stderr, flush=True)


def message(text: str) -> None:
    """A note that says who it is from: in a terminal with other programs' words."""
    note(f"hpcinit: {text}")


def warning(text: str) -> None:
    message(f"warning: {text}")


def options(
    parser: argparse.ArgumentParser,
    json: str = "one JSON object, for programs",
    instead: argparse._MutuallyExclusiveGroup | None = None,
) -> argparse.ArgumentParser:
    """Add what every command has: --json (json: what it gives; instead: of which others), -q and -v."""
    (instead or parser).add_argument("--json", action="store_true", help=json)
    parser.add_argument("-q", "--quiet", action="store_true", help="the shortest answer; on stderr errors alone")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print each command of Slurm and git, and its duration, on stderr",
    )
    return parser


def parsed(parser: argparse.ArgumentParser, words: list[str], intermixed: bool = False) -> argparse.Namespace:
    """What `parser`, which has options(), makes of `words`; -q and -v hold from here on. Raises RequestError."""

    def refuse(message: str) -> NoReturn:
        from hpcinit.facts import usage  # noqa: PLC0415 - for words that are wrong

        raise usage.error(parser, words, message)

    parser.error = refuse  # type: ignore[method-assign] # argparse's own prints the usage, and exits
    found = (parser.parse_intermixed_args if intermixed else parser.parse_args)(words)
    _as_asked(found)
    return found


def parsed_beside(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The same for a command whose other words are Hydra's: those, in their order, come back."""
    found, rest = parser.parse_known_args(words)
    _as_asked(found)
    return found, rest


def _as_asked(found: argparse.Namespace) -> None:
    choose(QUIET if found.quiet else VERBOSE if found.verbose else PLAIN)


def started(command: Sequence[str]) -> float:
    """Print with -v the command that starts now. Return the time, for ended()."""
    now = time.monotonic()
    if _chosen["level"] == VERBOSE:
        text = " ".join(shlex.join(command).split())
        _print_verbose(now, text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
    return now


def ended(command: Sequence[str], seconds: float, status: int) -> None:
    """Print with -v how long a command took, and its exit status."""
    if _chosen["level"] == VERBOSE:
        _print_verbose(time.monotonic(), f"{command[0]} took {seconds:.2f} s, exit status {status}")


def _print_verbose(now: float, text: str) -> None:
    with suppress(OSError):
        print(plain(f"hpcinit: [{now - _began:.2f} s] {text}"), file=sys.stderr, flush=True)
