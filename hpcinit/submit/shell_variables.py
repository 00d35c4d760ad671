"""Records the names of the shell's variables that a job gets, so that `hpcinit resubmit` can print which ones differ.

Values are not recorded: docs/decisions/0165-names-of-the-shells-variables.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from hpcinit.config.schema import Config
from hpcinit.submit import job_environment

# Variables of a login session, a terminal, an editor or a tool around the shell. They differ between any two logins,
# and do not affect training.
SESSION = re.compile(
    r"_.*|(OLD)?PWD|SHLVL|SHELL|TERM|COLORTERM|COLUMNS|LINES|PS\d|PROMPT_.*|(LS|S|GCC|NO|FORCE|CLICOLOR)_COLORS?|CLICOLOR"
    r"|(SSH|XDG|DBUS|TMUX|TERM|LC|LESS|VSCODE|GIT|GPG|SUDO|GNOME|KDE|QT|GTK|VTE|ITERM|KITTY|WEZTERM|JPY|PYTEST"
    r"|BASH|ZSH|HIST|LMOD|MODULES|SLURM)(_.*)?"
    r"|STY|WINDOW(ID)?|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|DESKTOP_SESSION|SESSION_MANAGER|INVOCATION_ID|JOURNAL_STREAM"
    r"|HIST\w+|LESS\w+|PAGER|MANPAGER|EDITOR|VISUAL|BROWSER|MAIL|MOTD_SHOWN|HOSTNAME|HOST|LANG|LANGUAGE|KRB5CCNAME"
    r"|MAKE\w*|MFLAGS|(CONDA|VIRTUAL_ENV)_PROMPT\w*|CONDA_SHLVL|CONDA_PREFIX_\d+|which_declare"
)
SHOWN = 8  # names in a message


def names(env: Mapping[str, str]) -> list[str]:
    """Return the sorted names of the variables in the job's environment `env`, without those of the login session."""
    return sorted(name for name in env if not SESSION.fullmatch(name))


def differences(run: str, recorded: Iterable[str], config: Config) -> str:
    """Return a sentence that lists the variables that differ from the first submission, or '' if none does.

    Variables that the config sets are ignored, because they are submitted again.

    recorded: what names() returned at the first submission.
    """
    env, _ = job_environment.job_environment(os.environ, config)
    then, now = set(recorded), set(names(env))
    set_again = {*config.cluster.env, *config.job.env, *config.secrets}
    missing = sorted(name for name in then - now - set_again if not SESSION.fullmatch(name))
    added = sorted(now - then - set_again)
    if not missing and not added:
        return ""
    found = [
        *([f"{_listed(missing)} {_was(missing)} set then, but not now"] if missing else []),
        *([f"{_listed(added)} {_was(added)} not set then"] if added else []),
    ]
    keep = f"export {missing[0]}=VALUE or add +job.env.{missing[0]}=VALUE" if missing else f"unset {added[0]}"
    return (
        f"this shell differs from the one that submitted {run}: {', and '.join(found)}. If the program reads "
        f"{'one of them' if len(missing) + len(added) > 1 else 'it'}, the result may differ; to repeat the run: {keep}"
    )


def _listed(found: Sequence[str]) -> str:
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


def _was(found: Sequence[str]) -> str:
    return "was" if len(found) == 1 else "were"
