"""Completes `hpcinit` commands with TAB. `hpcinit --shell-completion install=bash|zsh|fish` prints the shell's script.

Hydra's own scripts are not used. They do not support subcommands, they change COMP_WORDBREAKS in the whole shell, and
zsh gets the script for bash.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.cli.commands import COMMANDS

# Each script calls `hpcinit -sc query=SHELL` with the line up to the cursor in COMP_LINE. The answer has one complete
# candidate per line. Hydra's help sends zsh users to bash's script, so that script's first line handles zsh.
BASH = r"""if [ -n "${ZSH_VERSION-}" ]; then eval "$(hpcinit -sc install=zsh)"; else
_hpcinit() {
    local line=${COMP_LINE:0:COMP_POINT} word before found
    word=${line##*[[:space:]]}
    before=${word%"$2"} # bash splits at = and expects only the part after it
    COMPREPLY=()
    while IFS= read -r found; do
        [[ $found == *[=./] ]] && compopt -o nospace
        found=${found#"$before"}
        [[ -z $found ]] || printf -v found %q "$found"
        COMPREPLY+=("$found")
    done < <(COMP_LINE=$line "${1/#\~/$HOME}" -sc query=bash 2>/dev/null)
}
complete -o default -F _hpcinit hpcinit
fi"""
ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i -D }
_hpcinit() {
    local -a found
    found=(${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" ${words[1]/#\~/$HOME} -sc query=zsh 2>/dev/null)"})
    (( $#found )) || { _default; return }
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
compdef _hpcinit hpcinit"""
FISH = r"""function __hpcinit
    set -l words (commandline -opc)
    set -lx COMP_LINE (commandline -cp)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    $program -sc query=fish 2>/dev/null
end
complete -c hpcinit -f -a '(__hpcinit)'
complete -c hpcinit -n 'contains -- -- (commandline -opc)' -F"""
INSTALL = {"bash": BASH, "zsh": ZSH, "fish": FISH}
WITH_OVERRIDES = {"submit", "drill", "plan", "export", "doctor", "nodes", "timeouts", "build-ops"}
WITH_HYDRAS_FLAGS = {"submit", "plan"}
OF_A_RUN = {
    "status",
    "watch",
    "logs",
    "report",
    "why",
    "cancel",
    "resubmit",
    "render",
    "export",
    "stacks",
    "exec",
    "shell",
}


def main(argv: Sequence[str]) -> int:
    """Print the script for `install=SHELL`, or the candidates for `query=SHELL`."""
    action, _, shell = " ".join(argv).partition("=")
    if action not in {"install", "query"}:
        seen = " ".join(["--shell-completion", *argv])
        raise RequestError(f"{seen}: expected install=SHELL, where SHELL is one of: {', '.join(INSTALL)}")
    if shell not in INSTALL:
        raise RequestError(f"no completion for the shell {shell!r}, expected one of: {', '.join(INSTALL)}")
    if action == "query":
        print("".join(f"{found}\n" for found in candidates(os.environ.get("COMP_LINE", ""))), end="")
    else:
        print(INSTALL[shell])
    return 0


def candidates(line: str) -> list[str]:
    """Return the arguments that can complete the end of `line`.

    Return [] if a file name is expected, because the shell completes file names itself.
    """
    *words, word = line.lstrip().split(" ")
    return sorted(found for found in _all([w for w in words if w][1:], word) if words and found.startswith(word))


def _all(words: list[str], word: str) -> Iterable[str]:
    """Return the candidates for the argument after `words`, of which the user has typed `word` so far."""
    if words in ([], ["help"]):
        return COMMANDS
    if words[0] not in COMMANDS or words[0] == "run" or "--" in words:
        return ()
    if word.startswith("-"):
        return flags(words[0])
    if words[0] in OF_A_RUN:
        from hpcinit.observe import find_runs  # noqa: PLC0415 - not for the other commands

        given = [after for option, after in pairwise(words) if option == "--runs-dir"]
        return (path.name for path in find_runs.all_runs(Path(given[-1] if given else "runs")))
    if words[0] in WITH_OVERRIDES:
        before = [each for each in words[1:] if not each.startswith("-")]
        return of_config(before, word)
    return ()


def flags(command: str) -> list[str]:
    """Return all options of a command. For submit and plan, they include Hydra's options."""
    parser: argparse.ArgumentParser = importlib.import_module(COMMANDS[command].module).parser()
    found = {word for action in parser._actions for word in action.option_strings}
    if command in WITH_HYDRAS_FLAGS:
        from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

        found |= set(hydra_compose.flags())
    return sorted(found)


def of_config(before: Sequence[str], word: str) -> list[str]:
    """Return the config groups, choices, keys and partitions that complete `word`.

    Return [] for Hydra's own settings, and for overrides that start with +, ~ or a quote.

    before: the overrides before `word`.
    """
    from hpcinit.config import compose, folders, keys  # noqa: PLC0415 - not for the other commands

    if re.search(r"[^\w.=-]|^-|^hydra", word):
        return []
    key, equals, value = word.partition("=")
    groups = {path.name for place in [*folders.user_folders(), folders.folder()] for path in place.glob("*/")}
    if equals and key in groups:
        return [f"{key}={name}" for name in folders.choices(key) if name.startswith(value)]
    if equals:
        partitions = compose.compose(before).cluster.partitions if key == "partition" else {}
        return [f"{key}={name}" for name in partitions if name.startswith(value)]
    table = word[: word.rfind(".") + 1]
    found = [f"{table}{name}" for name in keys.beside(word)]
    found = [f"{name}{'.' if keys.is_container(name) else '='}" for name in found]
    return sorted({name for name in (*found, *(f"{group}=" for group in groups - {"hydra"})) if name.startswith(word)})
