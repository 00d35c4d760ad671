"""Words of a command line that its parser does not take, told as every other error is."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence

from hpcinit.facts.errors import RequestError

# What argparse says (3.10 to 3.13), and what is said in its place.
WORDS = [
    (r"argument (\S+): expected .*argument.*", r"\1: expected a value after it"),
    (r"argument (\S+): invalid int value: (.*)", r"\1 \2: expected a whole number"),
    (r"argument (\S+): invalid float value: (.*)", r"\1 \2: expected a number"),
    (r"argument (\S+): invalid choice: (\S+) \(choose from (.*)\)", r"\1 \2: expected one of \3"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1 and \2: expected one of them"),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1: expected alone, it takes no value such as \2"),
    (r"unrecognized arguments: (.*)", r"\1: too many words"),
]


def error(parser: argparse.ArgumentParser, words: Sequence[str], message: str) -> RequestError:
    """message: argparse's own. Options that do not exist come first: a run that is missing may be the value of one."""
    command, known = re.sub(r"^(hpcinit |python -m hpcinit\.)", "", parser.prog), _options(parser)
    for at, word in _flags(words):
        if not _stands_for(word, known):
            after = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
            return RequestError(f"{command} {word}: no such option, {_instead(word, after, parser, known)}")
    if message.startswith("the following arguments are required"):
        wanted = "; ".join(f"{_name(one).upper()} ({one.help})" for one in _required(parser))
        return RequestError(f"{command}: expected {wanted} after it")
    for pattern, said in WORDS:
        message = re.sub(f"^{pattern}$", said, message)
    return RequestError(f"{command} {message}; see {parser.prog} --help")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _required(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from (one for one in parser._actions if not one.option_strings and one.nargs not in ("?", "*"))


def _name(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)


def _flags(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """What looks like an option, and where: argparse takes no such word for a value, unless it is a number."""
    for at, word in enumerate(words):
        if word == "--":
            return
        if word.startswith("-") and not re.fullmatch(r"-|-\d+(\.\d*)?|-\.\d+", word):
            yield at, word


def _stands_for(word: str, known: Sequence[str]) -> bool:
    """Also --runs=x, an abbreviation that argparse takes, and -qv or -fn3, short ones together."""
    name = word.partition("=")[0]
    if word.startswith("--"):
        return any(option.startswith(name) for option in known)
    return word[:2] in known


def _instead(word: str, after: str, parser: argparse.ArgumentParser, known: Sequence[str]) -> str:
    """after: the word that follows, if it may be the value."""
    name, given, value = word.partition("=")
    names = {option.lstrip("-"): option for option in known if option not in ("-h", "--help")}
    expected = f"expected one of: {', '.join(option for option in names.values() if option.startswith('--'))}"
    if close := difflib.get_close_matches(name.lstrip("-"), names, n=1):
        return f"{expected}; did you mean {names[close[0]]}{given}{value}?"
    if any("key=value" in _name(action).lower() for action in parser._actions):
        key = name.lstrip("-").replace("-", "_")
        return f"{expected}; a key of the config has no dashes: {key}={value or after or '...'}"
    return expected
