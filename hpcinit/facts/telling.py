"""What a command says beside its answer, on stderr: notes and warnings; with -v also each program that it starts.

-q leaves all of that out, errors alone stay, and has the answer in its shortest form. One process, one command: the
choice is made once, from the command line.
"""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from hpcinit.facts.terminal import plain

if TYPE_CHECKING:
    import argparse

QUIET, PLAIN, VERBOSE = -1, 0, 1
LONGEST = 200  # characters of a command line that -v shows
_chosen = {"level": PLAIN, "hooked": False}
_began = time.monotonic()


def choose(level: int) -> None:
    """QUIET, PLAIN or VERBOSE, for the rest of this process."""
    _chosen["level"] = level
    if level == VERBOSE and not _chosen["hooked"]:
        _chosen["hooked"] = True  # an audit hook stays to the end of the process
        sys.addaudithook(_heard)


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
        "-v", "--verbose", action="store_true", help="also each program that is started, and when, on stderr"
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


def _heard(event: str, about: tuple[Any, ...]) -> None:
    """Python's audit hook. about, of subprocess.Popen: executable, arguments, folder, environment."""
    if event != "subprocess.Popen" or _chosen["level"] != VERBOSE:
        return
    words = about[1] if isinstance(about[1], (list, tuple)) else [about[1]]
    text = " ".join(shlex.join(str(word) for word in words).split())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    with suppress(OSError):
        print(f"hpcinit: [{time.monotonic() - _began:.2f} s] {text}", file=sys.stderr, flush=True)
