"""The script's lines that read secrets: from files that are named and never copied, with tracing off."""

from __future__ import annotations

from collections.abc import Mapping

from hpcinit.facts import quoting
from hpcinit.facts.user_paths import expanded

# `set -x`, bash -x and SHELLOPTS would print every value; {...} 2>/dev/null keeps even this line out of the trace.
QUIET = "{ hpcinit_flags=$-; set +x; } 2>/dev/null"
AS_BEFORE = "case $hpcinit_flags in *x*) set -x ;; esac"


def lines(secrets: Mapping[str, str]) -> list[str]:
    """Shell lines that export each name with the text of its file; none for no secrets."""
    if not secrets:
        return []
    read = []
    for name, place in secrets.items():
        path = str(expanded(place).absolute())
        said = quoting.shell(f"secrets.{name}: cannot read {path} on this node")
        read.append(f'{name}="$(cat -- {quoting.shell(path)})" || {{ echo {said} >&2; exit 1; }}; export {name}')
    return [QUIET, *read, AS_BEFORE]
