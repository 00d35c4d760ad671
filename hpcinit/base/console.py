"""Prints notes and warnings of a command to stderr, and implements the options -q and -v.

With -q, a command prints its answer in the shortest form. Besides the answer, it prints only errors, and how the job
differs from the request. The level is set once per process, because a process runs only one command.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NoReturn

from hpcinit.base.errors import RequestError

QUIET, PLAIN, VERBOSE = -1, 0, 1
LONGEST = 200  # -v cuts longer command lines to this many characters
AGAIN_S = 60.0  # without a terminal, the same message is repeated after this time
_chosen = {"level": PLAIN}
_began = time.monotonic()

# Text from other programs (ranks, their errors, file names) may contain control sequences. A terminal executes them:
# they can move the cursor, change the window's title, write to the clipboard, or send input as if the user typed it.

# Group 1: colors and styles (ESC [ 1 ; 31 m), which are harmless. The rest: C0 except tab and line feed, DEL, and C1
# (0x9b is the same as ESC [); and characters that change the direction of text or end a line, such as U+202E, because
# they can make one line look like another.
_CONTROL = re.compile(
    r"(\x1b\[[0-9;:]{0,40}m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)


def plain(text: str) -> str:
    r"""Return `text` with control characters escaped, as in '\x1b' or '\u202e'. Tabs and line feeds stay."""
    return _CONTROL.sub(lambda found: "".join(map(_shown, found[0])), text)


def plain_lines(lines: Iterable[str]) -> str:
    r"""Join lines that contain text from files, and escape control characters.

    A line feed inside a line becomes '\x0a'.
    """
    return "\n".join(plain(line).replace("\n", "\\x0a") for line in lines)


def colored(text: str) -> str:
    r"""Return `text` with control characters escaped, as in '\x1b', but keep tabs, line feeds and colors.

    Reset the color at the end. If NO_COLOR is set, remove the colors.
    """
    keep = color_system() is not None
    safe = _CONTROL.sub(lambda found: (found[1] if keep else "") if found[1] else _shown(found[0]), text)
    return f"{safe}\x1b[0m" if "\x1b" in safe else safe


def _shown(character: str) -> str:
    code = ord(character)
    if code > 0xFF:
        return f"\\u{code:04x}"
    return f"\\x{code:02x}" if code < 0x20 or 0x7F <= code < 0xA0 else character


def color_system() -> Literal["auto"] | None:
    """Return the argument color_system for rich's Console: 'auto', or None if NO_COLOR is set.

    With 'auto', rich would print bold text even if NO_COLOR is set.
    """
    return None if os.environ.get("NO_COLOR") else "auto"


# Notes and warnings of a command.


def set_verbosity(level: int) -> None:
    """Set the level of output for this process: QUIET, PLAIN or VERBOSE."""
    _chosen["level"] = level


def quiet() -> bool:
    """Return whether -q was given."""
    return _chosen["level"] == QUIET


def note(text: str) -> None:
    """Print a line to stderr, unless -q was given.

    Flush stdout first, so that the lines are in the right order if stdout and stderr are one pipe.
    """
    if not quiet():
        always(text)


def always(text: str) -> None:
    """Print a line to stderr even with -q. Used to report how the submitted job differs from the request."""
    with contextlib.suppress(OSError, ValueError):  # stdout is closed; the code that prints the answer handles it
        sys.stdout.flush()
    print(plain(text), file=sys.stderr, flush=True)


def message(text: str) -> None:
    """Print a note that starts with 'hpcinit:'. Used where other programs print to the same terminal."""
    note(f"hpcinit: {text}")


def warning(text: str) -> None:
    """Print a note that starts with 'hpcinit: warning:'."""
    message(f"warning: {text}")


def in_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@cache
def note_slow(command: str) -> None:
    """Print that hpcinit is waiting for `command`, but only once per command."""
    message(f"waiting for {command}")


def say(text: str) -> None:
    """Print 'hpcinit: TEXT' to stderr with one write(2), because several processes write to the same log.

    print() would write the text and the line end separately, so a line of another process could land between them.
    Errors are ignored: a full disk must not end a rank.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the program has closed it
        if sys.stderr is not None:
            sys.stderr.write(f"hpcinit: {plain(text)}\n")
            sys.stderr.flush()


# The options -q and -v, and errors in the arguments of a command.


def add_verbosity_options(
    parser: argparse.ArgumentParser,
    json: str = "one JSON object, for programs",
    instead: argparse._MutuallyExclusiveGroup | None = None,
) -> argparse.ArgumentParser:
    """Add the options that every command has: --json, -q and -v.

    json: the help text of --json.
    instead: add --json to this group of mutually exclusive options; None: add it to the parser.
    """
    (instead or parser).add_argument("--json", action="store_true", help=json)
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print the shortest answer, and only errors to stderr"
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print each command of Slurm and git with its duration to stderr",
    )
    return parser


def parse_arguments(parser: argparse.ArgumentParser, words: list[str], intermixed: bool = False) -> argparse.Namespace:
    """Parse the arguments `words` and set the verbosity. Raise RequestError if the arguments are wrong.

    intermixed: whether options are allowed between positional arguments.
    """

    def refuse(message: str) -> NoReturn:
        raise error(parser, words, message)

    parser.error = refuse  # type: ignore[method-assign] # argparse's own prints the usage, and exits
    found = (parser.parse_intermixed_args if intermixed else parser.parse_args)(words)
    _set_from_options(found)
    return found


def parse_known_arguments(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options in `words`. Return them and the remaining arguments, which are for Hydra."""
    found, rest = parser.parse_known_args(words)
    _set_from_options(found)
    return found, rest


def _set_from_options(found: argparse.Namespace) -> None:
    set_verbosity(QUIET if found.quiet else VERBOSE if found.verbose else PLAIN)


def error(parser: argparse.ArgumentParser, words: Sequence[str], message: str) -> RequestError:
    """Return argparse's `message` as a RequestError.

    If an option is unknown, the error names the option and suggests a similar one.
    """
    command = re.sub(r"^(hpcinit |python -m hpcinit\.)", "", parser.prog)
    known = [option for action in parser._actions for option in action.option_strings]
    names = {option.lstrip("-"): option for option in known if option not in ("-h", "--help")}
    options = words[: words.index("--")] if "--" in words else words
    for at, word in enumerate(options):
        name, given, value = word.partition("=")
        if not re.match(r"-[^\d.]", word) or any(option.startswith(name) or name[:2] == option for option in known):
            continue
        expected = f"expected one of: {', '.join(option for option in names.values() if option.startswith('--'))}"
        key = name.lstrip("-")
        if close := difflib.get_close_matches(key, names, n=1):
            expected += f"; did you mean {names[close[0]]}{given}{value}?"
        elif any("key=value" in str(action.metavar).lower() for action in parser._actions):
            after = next((after for after in options[at + 1 : at + 2] if not after.startswith("-")), "...")
            expected += f"; keys of the config have no dashes: {key.replace('-', '_')}={value or after}"
        return RequestError(f"{command} {word}: no such option, {expected}")
    if message.startswith("the following arguments are required"):  # argparse's text lists optional ones too
        needed = [one for one in parser._actions if not one.option_strings and one.nargs not in ("?", "*")]
        message = "expected " + "; ".join(f"{str(one.metavar or one.dest).upper()} ({one.help})" for one in needed)
    return RequestError(f"{command}: {message}; see {parser.prog} --help")


# With -v: the commands that hpcinit runs.


def started(command: Sequence[str]) -> float:
    """With -v, print the command that is about to start. Return the time.monotonic() of the start."""
    now = time.monotonic()
    if _chosen["level"] == VERBOSE:
        text = " ".join(shlex.join(command).split())
        _print_verbose(now, text if len(text) <= LONGEST else f"{text[:LONGEST]}...")
    return now


def ended(command: Sequence[str], seconds: float, status: int) -> None:
    """With -v, print how long a command took and its exit status."""
    if _chosen["level"] == VERBOSE:
        _print_verbose(time.monotonic(), f"{command[0]} took {seconds:.2f} s, exit status {status}")


def _print_verbose(now: float, text: str) -> None:
    with contextlib.suppress(OSError):
        print(plain(f"hpcinit: [{now - _began:.2f} s] {text}"), file=sys.stderr, flush=True)


class ProgressLine:
    """A line that shows progress. In a terminal it is updated in place; elsewhere each new message is a new line."""

    def __init__(self) -> None:
        self._shown, self._at, self._started = "", 0.0, time.monotonic()
        self._terminal = in_terminal()

    def show(self, message: str) -> None:
        """Print `message` with the seconds since this object was created."""
        clock = time.monotonic()
        text = f"hpcinit: {message} ({clock - self._started:.0f} s)"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[K{text[:width]}")
        elif message != self._shown or clock - self._at >= AGAIN_S:
            _write(f"{text}\n")
            self._at = clock
        self._shown = message

    def end(self) -> None:
        """Finish the line, so that other output starts on a new line."""
        if self._terminal and self._shown:
            _write("\n")
        self._shown = ""


def _write(text: str) -> None:
    """Write to stderr. Ignore a closed terminal: the job already exists, and its submission must not fail."""
    if sys.stderr is not None and not quiet():  # `2>&-`
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
