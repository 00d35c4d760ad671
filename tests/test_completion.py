"""Shell completion, as bash asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
eval "$(hpcinit submit -sc install=bash)"
COMP_POINT=${#COMP_LINE}; COMP_WORDS=($COMP_LINE); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); COMPREPLY=()
hydra_bash_completion hpcinit "${COMP_WORDS[$COMP_CWORD]}" ""
echo "${COMPREPLY[*]}"
"""


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("hpcinit submit cluster=", "cluster=example cluster=local cluster=mini"),
        ("hpcinit submit cluster=mini node", "nodes="),
        ("hpcinit sub", "submit"),
        ("hpcinit submit -- trai", ""),
        ("hpcinit logs x", ""),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, answer: str) -> None:
    """Commands, keys and choices are completed, and nothing else is printed into the prompt."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COMP_LINE": line}
    done = subprocess.run(["bash", "-c", ASK], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (answer, "")
