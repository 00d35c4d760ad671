"""A command line that its parser refuses, reported as every other error."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence

from hpcinit.facts.errors import RequestError


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
