"""The Python API: submit, follow, find and cancel runs, with the errors of the command."""

from __future__ import annotations

import asyncio
import os
import re
import rlcompleter
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import hpcinit
from hpcinit import api
from hpcinit.base.errors import ConfigError, Failure, MaybeSubmitted, RequestError, SubmitError
from hpcinit.config import python_arguments
from tests import json_documents, waiting
from tests.minislurm import MiniSlurm

until = partial(waiting.until, timeout_s=200)
SMALL = {"cluster": "mini", "ranks_per_node": 1, "cluster.gpu_flag": None}
TRAIN = """
    import sys, hpcinit
    with hpcinit.session() as run:
        for step in range(1, 4):
            run.progress(step, 3, loss=1 / step)
        print("rank", run.rank, "of", run.world_size, sys.argv[1:])
        run.result(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test works in its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return tmp_path


def test_a_run_from_start_to_result(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    """Without Slurm: submit, wait, logs, progress, result, verdict and report of a run of two ranks, all silent."""
    run = api.submit(cluster="local", nodes=2, ranks_per_node=1, program=["train.py", "0.25", "two parts"])
    assert run.wait(timeout_s=120) == run.state == "COMPLETED"
    assert "rank 1 of 2 ['0.25', 'two parts']" in run.logs(1) and "rank 0 of 2" in run.logs()
    assert run.progress["step"] == 3 and run.progress["values"] == {"loss": pytest.approx(1 / 3)}
    assert run.result() == 0.25 and run.why()["kind"] == "none"
    assert run.report()["attempts"] and run.status()["exit_status"] == 0
    assert run == api.find(run.name) == api.find(run.path) == api.runs()[0] and run.path == folder / "runs/train-0001"
    assert capfd.readouterr() == ("", "")
    failing = api.submit(cluster="local", program=["train.py", "low"])
    with pytest.raises(Failure, match=r"train-0002 is FAILED, expected COMPLETED: .*ValueError: could not convert"):
        failing.result()  # which waits
    with pytest.raises(RequestError, match="no log of rank 7; ranks with a log: 0, 1"):
        run.logs(7)


def test_the_pages_example_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """The first example of docs/python.md runs as it is and prints what its comments claim."""
    page = Path(__file__).parent.parent / "docs/python.md"
    exec(compile(page.read_text().partition("```python\n")[2].partition("```")[0], str(page), "exec"), {})
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == ["train-0001 COMPLETED", "0.25"] and "rank 1 of 2 ['0.25']" in lines


def test_errors_are_those_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All problems of a config arrive as one ConfigError, and a wrong request as a RequestError; nothing is written."""
    with pytest.raises(ConfigError) as caught:
        api.submit(cluster="local", nodes=0, time_min=-1)
    assert len(caught.value.problems) == 2 and "nodes" in str(caught.value) and "time_min" in str(caught.value)
    with pytest.raises(RequestError, match="no run 'x'"):
        api.find("x")
    with pytest.raises(RequestError, match=re.escape("program=['train.py', '--lr', '1e-3']")):
        api.submit(program="train.py")
    with pytest.raises(RequestError, match=re.escape("use Run.wait()")):
        api.submit(wait=True)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SubmitError, match="sbatch is not on PATH"):
        api.submit(cluster="mini")
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_all_wrong_types_at_once(folder: Path) -> None:
    """Each argument of a wrong type is named with its value, what was expected and what to type; nothing is written."""
    with pytest.raises(RequestError) as caught:
        api.submit(
            {"nodes": 8},  # type: ignore[arg-type]
            print,  # type: ignore[arg-type]
            program=["train.py", 3, max, b"x"],  # type: ignore[list-item]
            nodes={4},
            job={"env": {"A": [b"x"]}},
        )
    lines = str(caught.value).splitlines()
    parts = [
        ("argument 1 is {'nodes': 8} (dict), expected an override as text", "the keyword nodes=8"),
        (
            "argument 2 is print, a function of this process, which the ranks cannot call (put it in a script), expected an",
            "nodes=8",
        ),
        ("program[1] is 3 (int), expected text", "program=['train.py', '--lr', '1e-3']"),
        (
            "program[2] is max, a function of this process, which the ranks cannot call (put it in a script), expected text",
            "program=['train.py', '--lr', '1e-3']",
        ),
        ("program[3] is b'x' (bytes), expected text", "program=['train.py', '--lr', '1e-3']"),
        ("nodes is {4} (set), expected None, a bool, a number, text, a path, a list or a dict", "list()"),
        ("job.env.A[0] is b'x' (bytes), expected None, ", "str()"),
    ]
    for line, (first, last) in zip(lines, parts, strict=True):
        assert line.startswith(first) and last in line, line
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            lambda: 3,
            r"program is .*<lambda>, a function of this process, which the ranks cannot call \(put it in a script\), expected",
        ),
        (dict, r"program is dict, .*expected a list: "),
        (7, r"program is 7 \(int\), expected a list: program=\['train.py', '--lr', '1e-3'\]"),
        (
            Path("train.py"),
            r"program is PosixPath\('train.py'\) \(PosixPath\), expected a list: program=\['train.py', ",
        ),
        (b"train.py", r"program is b'train.py' \(bytes\), expected a list"),
    ],
    ids=["lambda", "class", "int", "path", "bytes"],
)
@pytest.mark.parametrize("call", [api.submit, api.sweep])
def test_a_program_that_is_no_list(call: Callable[..., object], program: object, message: str) -> None:
    """A function, a path or a number as the program is a RequestError that shows the list to type."""
    with pytest.raises(RequestError, match=message):
        call(program=program)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.wait("60"), "timeout_s is '60' (str), expected a number of seconds or None: timeout_s=60"),
        (lambda run: run.wait(timeout_s=True), "timeout_s is True (bool), expected a number of seconds"),
        (lambda run: run.result(float("nan")), "timeout_s is nan (float), expected a number of seconds"),
        (lambda run: run.logs("0"), "rank is '0' (str), expected a whole number: rank=0"),
        (lambda run: run.logs(0.0), "rank is 0.0 (float), expected a whole number"),
        (lambda run: run.logs(rank=[0, 1]), "rank is [0, 1] (list), expected a whole number"),
        (lambda run: run.logs(rank=True), "rank is True (bool), expected a whole number"),
    ],
)
def test_a_wrong_timeout_or_rank(call: Callable[[api.Run], object], message: str, folder: Path) -> None:
    """It is a RequestError with its value, what was expected and what to type, before the run folder is read."""
    with pytest.raises(RequestError, match=re.escape(message)):
        call(api.Run(folder / "no run"))


def test_tab_offers_the_public_names() -> None:
    """Tab after `api.` and `hpcinit.` offers the documented names and no imports, and each name can be used."""
    for module, names in ((api, api.__all__), (hpcinit, [*hpcinit.__all__, "api"])):
        space = {"it": module}
        completer = rlcompleter.Completer(space)
        offered = {word.partition("(")[0] for at in range(99) if (word := completer.complete("it.", at))}
        assert offered == {f"it.{name}" for name in names}
        assert all(hasattr(module, name) for name in names)
    code = "import hpcinit; print(hpcinit.api.find.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "find\n"


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            0,
            -3,
            1e-05,
            1e22,
            float("inf"),
            "plain",
            "a/b.c",
            "true",
            "NULL",
            "3",
            "1e3",
            "two parts",
            "",
            "it's",
            'a "b"',
        ),
        *(
            "back\\slash",
            "end\\",
            "\\'",
            "a,b",
            "{x}",
            "[1]",
            "$HOME",
            "é",
            [1, "a b", None],
            {"a": [True], "b": "x y"},
        ),
    ],
    ids=repr,
)
def test_values_arrive_as_they_are(value: object) -> None:
    """Hydra reads the override of a Python value as the same value."""
    override = OverridesParser.create().parse_override(f"key={python_arguments.override_value(value)}")
    assert override.value() == value


def test_commands_print_errors_as_json(folder: Path) -> None:
    """--json prints an error as an object on stdout, beside the message on stderr."""
    command = [sys.executable, "-m", "hpcinit", "status", "nosuch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    [document] = json_documents.parse(done.stdout, "error")
    assert done.returncode == 2 and document["type"] == "RequestError" and document["error"] in done.stderr


@pytest.mark.slurm
def test_four_nodes(mini: MiniSlurm) -> None:
    """A run on 4 nodes of the real cluster: its ranks, its state, its result, and the same request refused."""
    run = api.submit(**SMALL, nodes=4, program=["train.py", "3"])
    assert run.wait(timeout_s=200) == "COMPLETED" and run.result() == 3.0
    assert "rank 3 of 4" in run.logs(3) and api.find(run.job_id) == api.find(int(run.job_id)) == run
    waiting_run = api.submit(**SMALL, program=["sleep", "600"])
    with pytest.raises(RequestError, match="again=true"):
        api.submit(**SMALL, program=["sleep", "600"])
    until(lambda: waiting_run.state == "RUNNING")
    with pytest.raises(TimeoutError, match=r"sleep-0001 has not ended after 0 s \(state: RUNNING\)"):
        waiting_run.result(timeout_s=0)
    with pytest.raises(TimeoutError, match=r"sleep-0001 has not ended after 0\.5 s"):
        waiting_run.wait(timeout_s=0.5)
    waiting_run.cancel()
    assert waiting_run.wait(timeout_s=60) == "CANCELLED" and waiting_run.why()["kind"] == "cancelled"


@pytest.mark.slurm
def test_a_sweep_with_a_failing_task(mini: MiniSlurm) -> None:
    """A sweep of 6 tasks, 2 at a time, returns a run for each, by the name that commands accept; one fails alone."""
    code = 'test "$SEED" != 4'
    options = ["sweep.at_once=2", "+job.env.SEED='${seed}'", "seed=1,2,3,4,5,6"]
    runs = api.sweep(*options, **SMALL, program=["sh", "-c", code])
    assert [run.combination for run in runs] == [f"seed={seed}" for seed in range(1, 7)]
    assert [run.wait(timeout_s=300) for run in runs] == ["COMPLETED"] * 3 + ["FAILED"] + ["COMPLETED"] * 2
    assert runs[3].why()["rank"] == 0 and api.runs() == runs
    assert [run.name for run in runs] == [run.name for run in api.runs()] == [f"sh-0001/{at}" for at in range(6)]
    assert api.find(runs[3].name) == runs[3] and api.find("sh-0001").name == "sh-0001"
    with pytest.raises(Failure, match=r"sh-0001/3 is FAILED, expected COMPLETED: "):
        runs[3].result()


@pytest.mark.slurm
def test_threads_and_asyncio(mini: MiniSlurm) -> None:
    """Four threads submit at once, and asyncio waits for all: four runs, four jobs."""
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda at: api.submit(**SMALL, program=["echo", str(at)]), range(4)))

    async def all_ends() -> list[str]:
        return list(await asyncio.gather(*(asyncio.to_thread(run.wait, 200) for run in runs)))

    assert asyncio.run(all_ends()) == ["COMPLETED"] * 4 and len({run.job_id for run in runs}) == 4
    assert [run.logs().splitlines()[-1] for run in runs] == ["0", "1", "2", "3"]


SLOW_SBATCH = """#!/bin/sh
case "$*" in --version | *--test-only*) ;; *) touch {folder}/called; sleep 2 ;; esac
exec {real} "$@"
"""
SUBMIT_SLOWLY = """
    import sys
    from hpcinit import api
    print("started", flush=True)
    try:
        run = api.submit("cluster=mini", "cluster.gpu_flag=null", ranks_per_node=1, program=["sleep", "600"])
        print("run", run.path, flush=True)
    except KeyboardInterrupt as interrupt:
        print("interrupted:", interrupt, flush=True)
"""


@pytest.mark.slurm
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_interrupted_submission_leaves_no_unknown_job(mini: MiniSlurm, folder: Path, how: signal.Signals) -> None:
    """Ctrl-C or SIGKILL while sbatch runs: a job that exists has a run folder that names it, else there is no folder."""
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "bin").mkdir()
    (folder / "bin/sbatch").write_text(SLOW_SBATCH.format(folder=folder, real=real))
    (folder / "bin/sbatch").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    command = [sys.executable, "-c", textwrap.dedent(SUBMIT_SLOWLY)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    until((folder / "called").exists)
    process.send_signal(how)
    out, _ = process.communicate(timeout=150)
    until(lambda: len(api.runs()) == 1)
    [run] = api.runs()
    queued = subprocess.run(["squeue", "--me", "--noheader", "--format=%i"], capture_output=True, text=True, check=True)
    assert queued.stdout.split() == [run.job_id]
    assert (str(run.path) in out) == (how == signal.SIGINT)


@pytest.mark.slurm
def test_the_controller_is_down(mini: MiniSlurm, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No controller replies: the submission raises SubmitError and leaves no folder; a run's state is UNKNOWN."""
    run = api.submit(**SMALL, program=["true"])
    run.wait(timeout_s=100)
    (folder / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=127.0.0.1\nSlurmctldPort=1\nMessageTimeout=1\n")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    with pytest.raises(SubmitError) as caught:
        api.submit("cluster.submit_patience_s=1", **SMALL, program=["true", "again"])
    assert not isinstance(caught.value, MaybeSubmitted) and "nothing was submitted" in str(caught.value)
    assert [path.name for path in (folder / "runs").glob("[!.]*")] == ["true-0001"]
    assert run.state in ("COMPLETED", "UNKNOWN")
