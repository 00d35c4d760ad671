"""Plain files that the job writes and the batch script reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcinit.records import plain_files
from hpcinit.submit import shell_blocks

FACTS = {"job": "43", "reason": "time_limit", "empty": "", "text": "it is $HOME `date` 'x' \\n * ", "step": "0"}


def fact(path: Path, key: str) -> str:
    """Return what the batch script's reader prints."""
    script = "\n".join([*shell_blocks.block("facts"), 'hpcinit_fact "$1" "$2"'])
    done = subprocess.run(["bash", "-c", script, "bash", path, key], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.removesuffix("\n")


def test_both_languages_read_what_was_written(tmp_path: Path) -> None:
    """Python and bash read each value as it was written; bash drops blanks at its end."""
    plain_files.write(tmp_path / "x.txt", FACTS)
    assert plain_files.read(tmp_path / "x.txt") == FACTS
    assert {key: fact(tmp_path / "x.txt", key) for key in FACTS} == {
        key: value.rstrip() for key, value in FACTS.items()
    }
    assert fact(tmp_path / "x.txt", "unknown") == fact(tmp_path / "missing.txt", "job") == ""


@pytest.mark.parametrize("facts", [{"job": "4\n2"}, {"two parts": 1}, {"": 1}, {"job": "\u2028"}])
def test_a_fact_is_one_line(tmp_path: Path, facts: dict[str, object]) -> None:
    """A key or a value that would make another line is refused, and the file stays as it was."""
    plain_files.write(tmp_path / "x.txt", {"job": 1})
    with pytest.raises(ValueError, match="expected a name and printable text"):
        plain_files.write(tmp_path / "x.txt", facts)
    assert plain_files.read(tmp_path / "x.txt") == {"job": "1"}
