"""What a command prints beside its answer, on stderr: notes, warnings, lines of a rank; and the options -q and -v.

-q leaves all of that out, errors alone stay, and has the answer in its shortest form. One process, one command: the
choice is made once, from the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from hpcinit.base.errors import RequestError

if TYPE_CHECKING:
    import argparse

# Text that other programs wrote (ranks, their errors, file names), before it is printed to a terminal.
#
# A terminal obeys control sequences in what it prints: they move the cursor over other text, change the window's title,
# write to the clipboard, or make the terminal answer as if the user had typed.

# ESC [ 1 ; 31 m: a color or a style, which is harmless. Else C0 but tab and line feed, DEL, and C1 (0x9b is ESC [ too).
_CONTROL = re.compile(r"(\x1b\[[0-9;:]{0,40}m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return `text` with each control character as '\\x1b', but for tabs and line feeds."""
    return _CONTROL.sub(lambda found: "".join(map(_shown, found[0])), text)


def colored(text: str) -> str:
    """Return `text` with each control character as '\\x1b', but for tabs, line feeds, and colors, which end with it."""
    safe = _CONTROL.sub(lambda found: found[1] or _shown(found[0]), text)
    return f"{safe}\x1b[0m" if "\x1b" in safe else safe


def _shown(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x20 or 0x7F <= code < 0xA0 else character


QUIET, PLAIN, VERBOSE = -1, 0, 1
LONGEST = 200  # characters of a command line that -v shows
_chosen = {"level": PLAIN}
_began = time.monotonic()


def set_verbosity(level: int) -> None:
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


def add_verbosity_options(
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


def parse_arguments(parser: argparse.ArgumentParser, words: list[str], intermixed: bool = False) -> argparse.Namespace:
    """What `parser`, which has options(), makes of `words`; -q and -v hold from here on. Raises RequestError."""

    def refuse(message: str) -> NoReturn:
        raise error(parser, words, message)

    parser.error = refuse  # type: ignore[method-assign] # argparse's own prints the usage, and exits
    found = (parser.parse_intermixed_args if intermixed else parser.parse_args)(words)
    _as_asked(found)
    return found


def parse_known_arguments(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The same for a command whose other words are Hydra's: those, in their order, come back."""
    found, rest = parser.parse_known_args(words)
    _as_asked(found)
    return found, rest


def _as_asked(found: argparse.Namespace) -> None:
    set_verbosity(QUIET if found.quiet else VERBOSE if found.verbose else PLAIN)


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


# What a process of a job says on stderr: whole lines, though others write to the same log.


def say(text: str) -> None:
    """'hpcinit: text' and its end of line in one write(2).

    print() writes text and end of line apart, with and without python -u, and another process's line came between the
    two. Raises nothing: a full disk below the log is no reason to end a rank.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the program has closed it
        if sys.stderr is not None:
            sys.stderr.write(f"hpcinit: {plain(text)}\n")
            sys.stderr.flush()


# A command line that its parser refuses, reported as every other error.


def error(parser: argparse.ArgumentParser, words: Sequence[str], message: str) -> RequestError:
    """Return argparse's `message` as an error; an option that does not exist comes first, with the nearest one."""
    command = re.sub(r"^(hpcinit |python -m hpcinit\.)", "", parser.prog)
    known = [option for action in parser._actions for option in action.option_strings]
    names = {option.lstrip("-"): option for option in known if option not in ("-h", "--help")}
    options = words[: words.index("--")] if "--" in words else words
    for at, word in enumerate(options):
        name, given, value = word.partition("=")
        if not re.match(r"-[^\d.]", word) or any(option.startswith(name) or name[:2] == option for option in known):
            continue
        said = f"expected one of: {', '.join(option for option in names.values() if option.startswith('--'))}"
        key = name.lstrip("-")
        if close := difflib.get_close_matches(key, names, n=1):
            said += f"; did you mean {names[close[0]]}{given}{value}?"
        elif any("key=value" in str(action.metavar).lower() for action in parser._actions):
            after = next((after for after in options[at + 1 : at + 2] if not after.startswith("-")), "...")
            said += f"; a key of the config has no dashes: {key.replace('-', '_')}={value or after}"
        return RequestError(f"{command} {word}: no such option, {said}")
    if message.startswith("the following arguments are required"):  # argparse names optional ones too
        needed = [one for one in parser._actions if not one.option_strings and one.nargs not in ("?", "*")]
        message = "expected " + "; ".join(f"{str(one.metavar or one.dest).upper()} ({one.help})" for one in needed)
    return RequestError(f"{command}: {message}; see {parser.prog} --help")
