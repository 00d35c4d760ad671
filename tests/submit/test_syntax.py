"""cluster.setup is shell code, and bash checks it on the login node."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.base.errors import ConfigError
from hpcinit.checks import all_checks, environment
from hpcinit.config.compose import compose
from hpcinit.config.schema import Config
from hpcinit.submit import transaction


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_setup(*lines: str) -> Config:
    config = compose(["cluster=mini", "job=smoke"])
    config.cluster.setup = list(lines)
    return config


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["true", "echo 'unbalanced"], "unexpected EOF while looking for matching `''"),
        (["if true; then"], "syntax error: unexpected end of file"),
        (["done"], "syntax error near unexpected token `done'"),
        (["cat <<END", "all that follows"], "here-document at line"),
    ],
)
def test_invalid_shell_is_refused(lines: list[str], said: str) -> None:
    """Submission and dry run print bash's error and the lines of cluster.setup with their numbers."""
    config = with_setup(*lines)
    with pytest.raises(ConfigError) as caught:
        all_checks.check(config, {})
    (problem,) = caught.value.problems
    assert problem.startswith("bash cannot parse cluster.setup") and said in problem
    assert problem.endswith("\n".join(f"  {number}: {line}" for number, line in enumerate(lines, 1)))
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "lines",
    [
        ["module load gcc", "export A='x y'"],
        ["shopt -s extglob", "ls !(*.py)"],
        ["both() {", "  true", "}", "both && both"],
        ["echo ünï # it's a comment"],
    ],
)
def test_valid_shell_passes(lines: list[str], tmp_path: Path) -> None:
    """Commands over several lines, comments and extended patterns pass."""
    text = transaction.dry_run(with_setup(*lines), [])[0]
    assert "\n".join(lines) in text


def test_bash_runs_only_for_setup_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without setup lines no bash starts. With some, it does not get the user's environment."""
    (tmp_path / "bash").write_text("#!/bin/bash\nprintf '%s|' ${!HPCINIT_*} x >> env\n")
    (tmp_path / "bash").chmod(0o755)
    monkeypatch.setenv("HPCINIT_SEEN", "1")
    monkeypatch.setattr(environment, "COMMAND", (str(tmp_path / "bash"),))
    all_checks.check(with_setup(), {})
    assert not (tmp_path / "env").exists()
    all_checks.check(with_setup("true"), {})
    assert (tmp_path / "env").read_text() == "x|"


def test_without_bash_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bash, or if it does not end, nothing is refused."""
    monkeypatch.setattr(environment, "COMMAND", ("no-such-bash",))
    all_checks.check(with_setup("echo 'open"), {})
    monkeypatch.setattr(environment, "COMMAND", ("sleep", "60"))
    monkeypatch.setattr(environment, "BASH_S", 0.1)
    all_checks.check(with_setup("echo 'open"), {})
