"""`hpcinit --shell-completion install=bash|zsh|fish`: what the TAB key offers after `hpcinit`.

In the place of Hydra's own scripts, which know one program with no commands, take the `=` out of bash's word breaks
for the whole shell, and for zsh are bash's. Keys and choices are Hydra's answer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from hpcinit.base.errors import RequestError
from hpcinit.cli.commands import COMMANDS

# Each asks `hpcinit -sc query=SHELL` with the line up to the cursor in COMP_LINE: one candidate per line, whole words.
# zsh reads bash's script too, as Hydra's help tells its users to: hence the first line.
BASH = r"""if [ -n "${ZSH_VERSION-}" ]; then eval "$(hpcinit -sc install=zsh)"; else
_hpcinit() {
    local line=${COMP_LINE:0:COMP_POINT} word before found
    word=${line##*[[:space:]]}
    before=${word%"$2"} # bash breaks words at = and wants only what comes after
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
UNINSTALL = {
    "bash": "complete -r hpcinit; unset -f _hpcinit",
    "zsh": "compdef -d hpcinit; unfunction _hpcinit",
    "fish": "complete -e -c hpcinit; functions -e __hpcinit",
}
WITH_OVERRIDES = {"submit", "plan", "doctor", "nodes", "timeouts", "build-ops"}
WITH_HYDRAS_FLAGS = {"submit", "plan"}
OF_A_RUN = {"status", "watch", "logs", "report", "why", "cancel", "resubmit", "render"}
RUNS_TOO = {("timeouts", "fit")}  # and commands of two words


def main(argv: Sequence[str]) -> int:
    """`install=SHELL` and `uninstall=SHELL` print what the shell is to evaluate, `query=SHELL` the candidates."""
    action, _, shell = " ".join(argv).partition("=")
    if action not in {"install", "uninstall", "query"}:
        seen = " ".join(["--shell-completion", *argv])
        raise RequestError(f"{seen}: expected install=SHELL or uninstall=SHELL, SHELL one of: {', '.join(INSTALL)}")
    if shell not in INSTALL:
        raise RequestError(f"no completion for the shell {shell!r}, expected one of: {', '.join(INSTALL)}")
    if action == "query":
        print("".join(f"{found}\n" for found in candidates(os.environ.get("COMP_LINE", ""))), end="")
    else:
        print((INSTALL if action == "install" else UNINSTALL)[shell])
    return 0


def candidates(line: str) -> list[str]:
    """The words that may stand where `line` ends; none where a file may, which the shell completes itself."""
    *words, word = line.lstrip().split(" ")
    return sorted(found for found in _all([w for w in words if w][1:], word) if words and found.startswith(word))


def _all(words: list[str], word: str) -> Iterable[str]:
    """What may follow the command line `hpcinit WORDS`. `word` is begun already."""
    if words in ([], ["help"]):
        return COMMANDS
    if words[0] not in COMMANDS or words[0] == "run" or "--" in words:
        return ()
    if word.startswith("-"):
        return flags(words[0], words[1:])
    if words[0] in OF_A_RUN or tuple(words[:2]) in RUNS_TOO:
        from hpcinit.observe import find_runs  # noqa: PLC0415 - not for the other commands

        given = [after for option, after in pairwise(words) if option == "--runs-dir"]
        return (path.name for path in find_runs.all_runs(Path(given[-1] if given else "runs")))
    if words[0] in WITH_OVERRIDES:
        also = ["fit"] if words == ["timeouts"] else []
        return [*also, *_of_hydra([*(each for each in words[1:] if not each.startswith("-")), word])]
    return ()


def flags(command: str, after: Sequence[str] = ()) -> list[str]:
    """All flags of a command, as its own parser has them; of submit and plan Hydra's too. after: what follows it."""
    module = COMMANDS[command].module
    if (command, *after[:1]) == ("timeouts", "fit"):
        module = "hpcinit.timeouts.fit"
    parser: argparse.ArgumentParser = importlib.import_module(module).parser()
    found = {word for action in parser._actions for word in action.option_strings}
    if command in WITH_HYDRAS_FLAGS:
        from hpcinit.config import compose  # noqa: PLC0415 - Hydra takes its time

        found |= set(compose.flags())
    return sorted(found)


def _of_hydra(words: Sequence[str]) -> list[str]:
    """Keys, groups and choices. Hydra reads the line from COMP_LINE and takes its first word for the program."""
    from hpcinit.submit import submit_command  # noqa: PLC0415 - not for the other commands

    os.environ["COMP_LINE"] = " ".join(["hpcinit", *words])
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        submit_command.main(["--shell-completion", "query=fish"])
    inside = words[-1].startswith("hydra")  # Hydra's own settings only for those who look for them
    return [found for found in answer.getvalue().splitlines() if inside or not found.startswith("hydra")]
