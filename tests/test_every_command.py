"""What every command has in common: --json, -q, -v, help, completion, colors and a note while Slurm does not answer.

Every command needs an entry in ARGUMENTS.
"""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpcinit.base import console, json_output
from hpcinit.base.errors import INTERRUPTED
from hpcinit.cli import completion, main
from hpcinit.cli.commands import COMMANDS
from hpcinit.discover import live_site
from tests import json_documents
from tests.conftest import Run
from tests.discover import recorded

# The arguments for each command, in a folder with the finished run train-0001. `run` is a rank and has its own tests.
ARGUMENTS = {
    "submit": ["name=more", "--", "true"],
    "plan": ["cluster=dgx_superpod_h100", "nodes=2", "parallel=zero3", "model.params=1e9"],
    "render": ["train-0001"],
    "export": ["cluster=mini", "job=smoke"],
    "resubmit": ["train-0001"],
    "drill": ["--", "train.py"],
    "status": [],
    "watch": ["train-0001"],
    "logs": ["train-0001"],
    "cancel": ["train-0001"],
    "clean": [],
    "why": ["train-0001"],
    "stacks": ["train-0001"],
    "exec": ["train-0001", "--", "true"],
    "shell": ["train-0001"],
    "report": ["smoke-0001"],
    "doctor": [],
    "nodes": [],
    "discover": ["--name", "x"],
    "timeouts": [],
    "build-ops": ["parallel=ddp"],
    "world": [],
}
# The documents of docs/reference/json.md that are not called as their command.
DOCUMENTS = {"render": "script", "export": "script", "resubmit": "submit", "watch": "status"}
FLAGS = {"--json", "-q", "--quiet", "-v", "--verbose"}
WITH_TORCH = {"build-ops"}  # runs in another process, because the tests' process must not import torch
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PLURAL = re.compile(r"\b1 (?:more )?(?!ms\b|bus\b|class\b|process\b|pass\b|is\b|was\b|has\b)[a-zA-Z]+s\b")
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with two finished local runs; the ranks of smoke-0001 have called hpcinit.init()."""
    folder = tmp_path_factory.mktemp("user")
    for words in (["name=train", "wait=true", "--", "echo", "some text"], ["name=smoke", "wait=true"]):
        done = subprocess.run(
            [sys.executable, "-m", "hpcinit", "submit", *words],
            cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Change to that folder, with an empty home folder; Slurm's answers for discover are recorded."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(live_site, "query_site", lambda user, env: recorded.answers(recorded.VERSIONS[0]))
    yield folder
    console.set_verbosity(console.PLAIN)


def answer(capfd: pytest.CaptureFixture[str], name: str, *flags: str) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr."""
    words = [name, *flags, *ARGUMENTS[name]]
    if name in WITH_TORCH:
        done = subprocess.run([sys.executable, "-m", "hpcinit", *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr
    status = main.main(words)
    return status, *capfd.readouterr()


def test_every_command_has_arguments() -> None:
    """ARGUMENTS contains every command."""
    assert ARGUMENTS.keys() | {"run"} == COMMANDS.keys()


# These need a run that runs, or take long: tests/observe/test_stacks.py, tests/submit/test_exec.py and tests/drill.
BESIDE_RANKS = {"stacks", "exec", "shell", "drill"}


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name not in BESIDE_RANKS])
def test_json_quiet_and_verbose(here: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """--json prints only JSON; -q prints at most the usual answer and no notes; -v the same answer and more notes.

    A count of one has no plural.
    """
    undo(here)
    status, plain, beside = answer(capfd, name)
    undo(here)
    assert status in (0, 1) and "hpcinit: error" not in beside, beside
    assert not PLURAL.search(plain + beside)
    as_json, quiet = answer(capfd, name, "--json"), (undo(here), answer(capfd, name, "-q"))[1]
    undo(here)
    verbose = answer(capfd, name, "-v")
    undo(here)
    assert {as_json[0], quiet[0], verbose[0]} == {status}
    assert json_documents.parse(as_json[1], DOCUMENTS.get(name, name)) or name == "nodes"
    assert len(quiet[1]) <= len(plain) and quiet[2] == ""
    assert len(verbose[1].splitlines()) == len(plain.splitlines())
    assert len(verbose[2].splitlines()) >= len(beside.splitlines())


# The documents that the commands print with other arguments.
OTHERS = [
    ("submit --json dry_run=true", 0, "script"),
    ("submit --json -m seed=1,2 dry_run=true -- true", 0, "script"),
    ("render --json smoke-0001 nodes=2", 1, "diff"),
    ("nodes --json --cluster x --add n1 --why noise", 0, "nodes"),
    ("nodes --json", 0, "nodes"),
    ("status --json nowhere", 2, "error"),
    ("status --json --bogus", 2, "error"),
    ("submit --json nodse=2", 2, "error"),
    ("render --json train-0001 smoke-0001 more-0001", 2, "error"),
    ("render --json train-0001 smoke-0001", 1, "diff"),
]


@pytest.mark.parametrize(("line", "status", "document"), OTHERS)
def test_other_documents(here: Path, capfd: pytest.CaptureFixture[str], line: str, status: int, document: str) -> None:
    """Other arguments and errors print documents of the same schema; the kind of an invalid request is `request`."""
    if "nodes --json" in line:
        assert main.main(["nodes", "--cluster", "x", "--add", "n1", "--why", "noise"]) == 0
        capfd.readouterr()
    assert main.main(line.split()) == status
    found = json_documents.parse(capfd.readouterr().out, document)
    assert found and (document != "error" or [one["kind"] for one in found] == ["request"])


def test_an_error_of_the_file_system_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With --json, an error of the file system prints a document of kind `file`."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(["status", "--json"]) == 1
    (found,) = json_documents.parse(capfd.readouterr().out, "error")
    assert (found["kind"], found["error"]) == ("file", "the current folder was deleted: cd to a folder that exists")


def test_ctrl_c_in_json(tmp_path: Path, hpcinit: Run) -> None:
    """With --json, a command that Ctrl-C ends prints a document of kind `interrupted`, and exits with 130."""
    assert hpcinit("submit", "name=long", "--", "sh", "-c", "echo started; exec sleep 600").returncode == 0
    command = [sys.executable, "-m", "hpcinit", "logs", "--json", "-f", "long-0001"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while "started" not in (first := process.stdout.readline()):  # after hpcinit's own lines
            assert first
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    hpcinit("cancel", "long-0001")
    assert json_documents.parse(first, "logs") and process.returncode == INTERRUPTED
    (found,) = json_documents.parse(rest, "error")
    assert (found["kind"], found["error"], found["type"]) == ("interrupted", "interrupted", "Interrupted")


def test_one_place_prints_json() -> None:
    """No module prints JSON without base/json_output.py, which adds the document's name and the version.

    The ranks of a replay, which import nothing of hpcinit, write to their own parent.
    """
    printed = re.compile(r"(?:print|print_reliably|stdout\.write)\(\s*\*?\(?json\.dumps")
    sources = Path(console.__file__).parents[1].rglob("*.py")
    assert [path.name for path in sources if printed.search(path.read_text())] == ["replay_ranks.py"]


def test_json_has_no_nan() -> None:
    """NaN and infinity, which JSON does not have, become null, in lists and objects too."""
    line = json_output.line("logs", {"values": {"loss": math.nan}, "list": [1.0, (math.inf,)]})
    assert json.loads(line) == {"document": "logs", "version": 1, "values": {"loss": None}, "list": [1.0, [None]]}


def undo(folder: Path) -> None:
    """Remove what a command has written, so that the next answer is the same."""
    (folder / "conf/cluster/x.yaml").unlink(missing_ok=True)


def test_verbose_shows_each_program(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """-v prints each command that is started to stderr, with the time since the start."""
    assert re.search(r"^hpcinit: \[\d+\.\d\d s\] .*git ", answer(capfd, "submit", "-v")[2], re.M)


def test_submit_prints_ids_and_json_for_programs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """-q prints only the job id, like sbatch --parsable; --json contains the run folder, or the script of a dry run."""
    _, out, _ = answer(capfd, "submit", "--quiet")
    assert re.fullmatch(r"\d+\n", out)
    document = json.loads(answer(capfd, "submit", "--json")[1])
    assert (document["nodes"], document["cluster"]) == (1, "local") and Path(document["run"]).is_dir()
    assert main.main(["submit", "--json", "dry_run=true"]) == 0
    assert json.loads(capfd.readouterr().out)["script"].startswith("#!/bin/bash")
    assert main.main(["submit", "--json", "wait=true", "--", "echo", "some text"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["job_id"] and "some text" in err


def test_hydras_own_flags_work(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Our options can be anywhere among Hydra's; after -- they are the program's."""
    assert main.main(["submit", "-q", "--cfg", "job", "-v", "nodes=3"]) == 0
    assert "\nnodes: 3\n" in capfd.readouterr().out
    assert main.main(["submit", "nodes=1,2", "-q", "-m", "dry_run=true", "--", "true", "-q", "--json"]) == 0
    out, err = capfd.readouterr()
    assert out.count("#!/bin/bash") == 2 and err == ""


def test_sbatchs_qos_option_is_not_taken_for_quiet(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message for `-q NAME` suggests qos=NAME."""
    assert main.main(["submit", "-q", "debug"]) == 2
    assert "qos=debug" in capfd.readouterr().err


@pytest.mark.parametrize("name", [*ARGUMENTS, "run"])
def test_an_option_that_does_not_exist(here: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every command reports an unknown option in one line and exits with 2."""
    assert main.main([*name.split(), "--bogus"]) == 2
    out, err = capfd.readouterr()
    assert re.fullmatch(r"hpcinit: error: .*--bogus: no such option, expected .*\n", err) and not out


USAGE = [
    ("status --jsom", "status --jsom: no such option, expected one of: --runs-dir, --sort, --reverse, --top, --csv, --json, --quiet, --verbose; did you "
     "mean --json?"),
    ("logs --rnak=3 train-0001", "; did you mean --rank=3?"),
    ("cancel --sav --now train-0001", "cancel --now: no such option"),
    ("doctor --nodes 4", "; keys of the config have no dashes: nodes=4"),
    ("build-ops --deepspeed-fp16", "; keys of the config have no dashes: deepspeed_fp16=..."),
    ("cancel", "cancel: expected RUN (run folder, its name, or a job id); see hpcinit cancel --help"),
    ("resubmit --fresh-code", "resubmit: expected RUN (run folder, its name, or a job id)"),
    ("why train-0001 train-0002", "why: unrecognized arguments: train-0002; see hpcinit why --help"),
    ("logs --rank", "logs: argument --rank: expected one argument; see hpcinit logs --help"),
    ("clean --older-than x", "clean: argument --older-than: invalid float value: 'x'"),
    ("nodes --add n1 --forget n2", "nodes: argument --forget: not allowed with argument --add"),
    ("build-ops --device cpu", "build-ops --device: no such option, expected one of: "),
    ("status --json=3", "status: argument --json: ignored explicit argument '3'"),
    ("logs --r 3", "logs: ambiguous option: --r could match --runs-dir, --rank"),
    ("world --started-by", "world: argument --started-by: expected one argument; see python -m hpcinit.world --help"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), USAGE)
def test_invalid_arguments(here: Path, line: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One line names what was expected and a similar option; the exit status is 2, and no usage is printed."""
    assert main.main(line.split()) == 2
    out, err = capfd.readouterr()
    assert err.startswith("hpcinit: error: ") and message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("name", ARGUMENTS)
def test_completion_offers_every_flag(here: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """TAB offers the options that --help shows, including the common ones."""
    assert main.main([name, "--help"]) == 0
    shown = capfd.readouterr().out.partition("\nexamples:")[0].partition("  examples:")[0]
    offered = set(completion.candidates(f"hpcinit {name} -"))
    assert offered >= FLAGS and set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", shown)) & offered >= FLAGS
    assert set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", shown, re.M)) <= offered


def test_completion_of_runs_and_keys(here: Path) -> None:
    """TAB offers runs, keys and flags after the commands that take them."""
    assert "train-0001" in completion.candidates("hpcinit why tr")
    assert completion.candidates("hpcinit nodes -q cluster=loc") == ["cluster=local"]
    assert completion.candidates("hpcinit submit --multi") == ["--multirun"]
    assert completion.candidates("hpcinit submit -- --multi") == completion.candidates("hpcinit nothing --q") == []


COLORED = ("status", "watch", "plan", "doctor")  # their output has colors in a terminal


@pytest.mark.parametrize("name", COLORED)
def test_colors_in_a_terminal_only(folder: Path, name: str) -> None:
    """A terminal shows colors unless NO_COLOR=1, then no bold text either; a pipe gets no escape sequences."""
    command = [sys.executable, "-m", "hpcinit", name, *ARGUMENTS[name]]
    assert STYLE.search(in_a_terminal(command, folder))
    assert not STYLE.search(in_a_terminal(command, folder, NO_COLOR="1"))
    piped = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert "\x1b" not in piped.stdout + piped.stderr and piped.stdout


def test_every_console_applies_no_color() -> None:
    """No command makes a Console of rich that prints bold text with NO_COLOR."""
    calls = [
        (path.name, line.strip())
        for path in Path(main.__file__).parents[1].rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\bConsole\(", line)
    ]
    assert calls and not [call for call in calls if "color_system=" not in call[1]]


def test_a_terminal_shows_the_next_commands(tmp_path: Path) -> None:
    """After a submission, a terminal shows what to type next; a pipe gets only the job, and so does wait=true."""
    command = [sys.executable, "-m", "hpcinit", "submit", "name=next", "--", "true"]
    assert "hpcinit logs -f next-0001    cancel it:  hpcinit cancel next-0001" in in_a_terminal(command, tmp_path)
    elsewhere = in_a_terminal([*command[:-2], "runs_dir=mine", "--", "true"], tmp_path)
    assert f"if it fails:  hpcinit why {tmp_path}/mine/next-0001" in elsewhere
    assert "hpcinit why" not in in_a_terminal([*command[:-2], "wait=true", "again=true", "--", "true"], tmp_path)
    done = subprocess.run([*command, "x"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout.startswith("job ") and "hpcinit" not in done.stdout


def in_a_terminal(command: Sequence[str], folder: Path, **env: str) -> str:
    """Return the output of a command on stdout and stderr in a pseudo-terminal."""
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    mine, its = pty.openpty()
    process = subprocess.Popen(
        command, cwd=folder, env={**clean, "TERM": "xterm-256color", **env}, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    shown = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:  # EIO: the other end is closed
            break
        shown += piece
        if not piece:
            break
    os.close(mine)
    process.wait(TIMEOUT_S)
    return shown.decode(errors="replace")


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """Install a fake squeue that takes three seconds, like the real one with a busy controller, and knows no jobs."""
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\nsleep 3\n")
    squeue.chmod(0o755)
    run = tmp_path / "runs/train-0001"
    run.mkdir(parents=True)
    (run / "submission.json").write_text('{"job_id": "1", "engine": "slurm"}')
    (run / "job.sbatch").touch()
    return {"PATH": f"{squeue.parent}:{os.environ['PATH']}"}


def test_a_slow_command_of_slurm_is_named(tmp_path: Path, slow: dict[str, str]) -> None:
    """A terminal shows one line about a Slurm command that runs for more than a second; -q and a pipe show none."""
    status = [sys.executable, "-m", "hpcinit", "status"]
    line, _, answer = in_a_terminal(status, tmp_path, **slow).strip().partition("\n")
    assert line.strip() == "hpcinit: waiting for squeue"
    assert "train-0001" in answer and "waiting for squeue" not in answer
    assert "waiting" not in in_a_terminal([*status, "-q"], tmp_path, **slow)
    done = subprocess.run(status, cwd=tmp_path, env={**os.environ, **slow}, capture_output=True, text=True, check=False)
    assert done.stderr == "" and "train-0001" in done.stdout
