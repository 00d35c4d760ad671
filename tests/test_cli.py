"""The help and the error messages of `hpcinit` for new users."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hpcinit.cli import main
from hpcinit.config.compose import compose
from hpcinit.config.schema import Config
from tests.conftest import Run


def examples(text: str) -> list[str]:
    """Return the lines of the only paragraph after 'examples:'."""
    (after,) = text.split("\nexamples:\n")[1:]
    return [line.strip() for line in after.partition("\n\n")[0].splitlines()]


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_usage(hpcinit: Run, words: list[str]) -> None:
    """Without arguments, or with --help, it lists every command and how to get the help of one."""
    done = hpcinit(*words)
    assert done.returncode == 0 and not done.stderr
    assert all(f"  {name} " in done.stdout for name in main.COMMANDS)
    assert "hpcinit COMMAND --help" in done.stdout


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_help_of_each_command_has_examples(hpcinit: Run, name: str) -> None:
    """`hpcinit COMMAND --help`, `-h` and `hpcinit help COMMAND` end with examples of that very command."""
    answers = {(done.stdout, done.stderr, done.returncode)
            for done in (hpcinit(name, "--help"), hpcinit(name, "-h"), hpcinit("help", name))}  # fmt: skip
    assert len(answers) == 1
    out, err, status = answers.pop()
    assert (err, status) == ("", 0)
    assert all(f"hpcinit {name}" in line or f"hpcinit.{name}" in line for line in examples(out))


def test_examples_of_submit_work(hpcinit: Run, tmp_path: Path) -> None:
    """Each example of `hpcinit submit --help` is a request that can be rendered."""
    (tmp_path / "train.py").touch()
    lines = examples(hpcinit("submit", "--help").stdout)
    column = lines[0].index("a smoke test")  # where the explanations start
    for line in lines:
        words = line[:column].split()
        at = words.index("--") if "--" in words else len(words)
        done = hpcinit(*words[1:at], "dry_run=true", *words[at:])
        assert done.returncode == 0 and "#!/bin/bash" in done.stdout, f"{line}\n{done.stderr}"


def test_help_of_submit_explains_every_key(hpcinit: Run) -> None:
    """`--help all` has each key of the schema with its default and its explanation; quoted examples work in a shell."""
    out = hpcinit("submit", "--help", "all").stdout

    def check(prefix: str, table: Any) -> None:
        for item in fields(table):
            if is_dataclass(item.default_factory):
                check(f"{prefix}{item.name}.", item.default_factory)
            else:
                assert re.search(
                    rf"^  {re.escape(prefix + item.name)}=.*\n?\s+{re.escape(item.metadata['help'])}$", out, re.M
                )

    check("", Config)
    assert "\n  nodes=1                           number of nodes\n" in out and "name=${job.name} " in out
    [image] = re.findall(r"'(container\.image=.*)'", out)
    assert compose([image]).container.image == "nvcr.io#nvidia/pytorch:YY.MM-py3"


def test_help_of_submit_lists_the_most_common_settings(hpcinit: Run) -> None:
    """`--help` has the groups and the twelve keys of docs/configuration.md, and how to list all keys."""
    out = hpcinit("submit", "--help").stdout
    shown = re.findall(r"^  ([a-z_.]+)=", out, re.M)
    page = (
        (Path(__file__).parent.parent / "docs/configuration.md").read_text().partition("## The most common settings")[2]
    )
    first = [key for row in re.findall(r"^\| (`.*?) \|", page, re.M) for key in re.findall(r"`([^`=]+)[^`]*`", row)]
    assert sorted([*shown, "cluster", "parallel"]) == sorted(first) and len(first) == 12
    assert re.search(r"\.\.\. and \d{3} more: hpcinit submit --help all lists all keys\n", out)


def test_help_of_one_key(hpcinit: Run) -> None:
    """`submit --help KEY` prints default, explanation and expected value of a key, or the keys of a table."""
    out = hpcinit("submit", "--help", "time_min").stdout
    assert re.search(
        r"^  time_min=\$\{cluster.time_min\} +time limit in minutes\n  expected: a whole number of minutes, 1 or more$",
        out,
        re.M,
    )
    table = hpcinit("submit", "--help", "stop").stdout
    assert "  stop.margin_s=" in table and "nodes=" not in table
    wrong = hpcinit("submit", "--help", "tim_min")
    assert wrong.returncode == 2 and "no such key 'tim_min'; did you mean 'time_min'?" in wrong.stderr
    wrong = hpcinit("submit", "--help", "margin_s")
    assert wrong.returncode == 2 and "no such key 'margin_s'; did you mean stop.margin_s?" in wrong.stderr


@pytest.mark.parametrize(
    ("name", "key"), [("venv", "cluster.venv"), ("cpus-per-task", "cpus_per_rank"), ("time", "time_min")]
)
def test_help_of_another_spelling(hpcinit: Run, name: str, key: str) -> None:
    """`submit --help` takes each name of a key that the command line takes."""
    assert hpcinit("submit", "--help", name).stdout.startswith(f"  {key}=")


@pytest.mark.parametrize("words", [["--help"], ["status", "--help"], ["--version"], ["submit", "--help"]])
def test_a_closed_pipe(words: list[str]) -> None:
    """`hpcinit --help | head -1` prints no error about the closed pipe."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "hpcinit", *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["--version"], ["submit", "--version"], ["status", "--version"]])
def test_version(hpcinit: Run, words: list[str]) -> None:
    """--version prints hpcinit's version, not Hydra's, with any command."""
    assert hpcinit(*words).stdout == f"hpcinit {version('hpcinit')}\n"


def test_options_of_the_program_are_passed_on(hpcinit: Run) -> None:
    """Options after the program of `hpcinit run`, or after --, are the program's."""
    echo = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
    assert hpcinit("run", *echo, "--help", "-sc").stdout == "['--help', '-sc']\n"
    done = hpcinit("submit", "dry_run=true", "--", "train", "--help", "-sc", "--version")
    assert done.stdout.startswith("#!/bin/bash"), done.stderr


@pytest.mark.parametrize(
    ("line", "guess"),
    [
        ("sumbit nodes=2", "; did you mean 'submit'?"),
        ("help statsu", "; did you mean 'status'?"),
        ("nodes=2 cluster=mini", "; did you mean: hpcinit submit nodes=2 cluster=mini"),
        ("train.py --lr 'a b'", "; did you mean: hpcinit submit -- train.py --lr 'a b'"),
        ("--nodes", ""),
        ("-q status --json", "; did you mean: hpcinit status -q --json"),
    ],
)
def test_no_such_command(hpcinit: Run, line: str, guess: str) -> None:
    """An unknown command gives one message with the commands and a suggestion."""
    done = hpcinit(*shlex.split(line))
    first = line.removeprefix("help ").split()[0]
    assert done.stderr == f"hpcinit: error: no command '{first}', expected one of: {', '.join(main.COMMANDS)}{guess}\n"
    assert (done.stdout, done.returncode) == ("", 2)
