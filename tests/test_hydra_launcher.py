"""The Hydra launcher: jobs of a multirun become ranks of Slurm jobs, with results for sweepers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite

from hpcinit import api
from hpcinit.base.errors import Failure
from tests import waiting
from tests.minislurm import MiniSlurm

until = partial(waiting.until, timeout_s=200)
LOCAL = ["hydra/launcher=hpcinit", "hydra.launcher.cluster=local", "hydra.launcher.ranks_per_node=1"]
MINI = [
    *("hydra/launcher=hpcinit", "hydra.launcher.cluster=mini", "hydra.launcher.ranks_per_node=1"),
    "hydra.launcher.overrides=['cluster.gpu_flag=null']",
]
TRAIN = """
    import contextlib, os, sys, threading, time
    import hydra
    import helper
    from hydra.core.hydra_config import HydraConfig

    USED = contextlib.nullcontext()

    @hydra.main(config_path=None, **({"version_base": None} if hydra.__version__ < "1.4" else {}))  # 1.4 warns with it
    def train(config):
        assert USED is not None
        now = HydraConfig.get()
        print("job", now.job.num, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], now.runtime.output_dir)
        if config.lr == 4:
            raise ValueError("lr is 4")
        time.sleep(config.get("sleep", 0))
        return helper.loss(config.lr)

    if __name__ == "__main__":
        train()
"""
HELPER = "def loss(lr):\n    return (lr - 2) ** 2\n"
SWEEPER = """
    import json
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    class Second(Sweeper):
        'Its second batch depends on the results of the first.'

        def __init__(self, **unused):
            pass

        def setup(self, *, hydra_context, task_function, config):
            self.launcher = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )

        def sweep(self, arguments):
            first = self.launcher.launch([["+lr=7"], ["+lr=8"]], 0)
            best = min(first, key=lambda job: job.return_value)
            second = self.launcher.launch([[f"+lr={best.cfg.lr - 4}"], ["+lr=4"]], 2)
            assert second[0].return_value == 1
            try:
                second[1].return_value
            except Exception as error:
                assert isinstance(error, ValueError) == FUNCTIONS, type(error).__mro__
                assert "ValueError: lr is 4" in str(error) and "FAILED" in str(error)
                assert not FUNCTIONS or error.args == ("lr is 4",)
            for number, job in enumerate([*first, *second]):
                assert job.hydra_cfg.hydra.job.num == number and job.overrides == [f"+lr={job.cfg.lr}"]
                assert job.task_name == "train" and job.status.name == ("FAILED" if number == 3 else "COMPLETED")
                assert job.working_dir
            print("the sweeper has ended")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test works in its own folder, with a Hydra program that does not use hpcinit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


def use_as_program(train: Path) -> None:
    """Change the program so that its function cannot be pickled."""
    train.write_text(train.read_text().replace("contextlib.nullcontext()", "threading.Lock()"))


def modules() -> set[str]:
    """Return what the runs started: a module, or a script's name."""
    specs = [json.loads(file.read_text()) for file in Path("runs").rglob("spec.json")]
    return {Path(spec["program"]["target"]).name for spec in specs}


def train(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python train.py --multirun ...`."""
    command = [sys.executable, "train.py", "--multirun", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.more
@pytest.mark.slurm
def test_a_sweep_of_six_two_at_a_time(mini: MiniSlurm, folder: Path) -> None:
    """Six jobs of two nodes become one array; the failing one fails the multirun, and the others keep their results.

    docs/python.md and docs/reference/hydra-launcher.md show this command.
    """
    words = ["hydra.launcher.nodes=2", "hydra.launcher.at_once=2", "hydra.sweep.dir=out", "+lr=1,2,3,4,5,6"]
    done = train(*MINI, *words)
    runs = api.runs()
    assert done.returncode == 1 and len(runs) == 6, done.stderr
    assert len({run.job_id.partition("_")[0] for run in runs}) == 1
    assert [run.state for run in runs] == ["COMPLETED"] * 3 + ["FAILED"] + ["COMPLETED"] * 2
    assert [run.result() for run in runs if run != runs[3]] == [1, 0, 1, 9, 16]
    with pytest.raises(Failure, match="ValueError: lr is 4"):
        runs[3].result()
    assert f"{runs[3].path} FAILED: " in done.stderr and "ValueError: lr is 4" in done.stderr
    assert all(f"job {run.job_id}, {run.path}" in done.stdout for run in runs)
    assert f"job 5 rank 1 of 2 {folder}/out/5" in runs[5].logs(1)


@pytest.mark.slurm
def test_without_waiting(mini: MiniSlurm) -> None:
    """With wait=false the program returns when its jobs are submitted, and prints them."""
    done = train(*MINI, "hydra.launcher.wait=false", "+lr=1,2", "+sleep=600")
    runs = api.runs()
    assert done.returncode == 0 and {run.state for run in runs} <= {"PENDING", "RUNNING"}, done.stderr
    assert all(f"job {run.job_id}" in done.stdout for run in runs)


@pytest.mark.slurm
def test_ctrl_c_cancels_the_jobs(mini: MiniSlurm) -> None:
    """Ctrl-C while the program waits: no job of it runs any more."""
    command = [sys.executable, "train.py", "-m", *MINI, "+lr=1,2", "+sleep=600"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: any(run.state == "RUNNING" for run in api.runs()))
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=150) != 0
    until(lambda: {run.state for run in api.runs()} == {"CANCELLED"})


SBATCH = """#!/bin/sh
case "$*" in --version | *--test-only*) exec {real} "$@" ;; esac
{real} "$@" || exit
test -e {folder}/called || kill -INT $(cat {folder}/pid)
touch {folder}/called
"""


@pytest.mark.slurm
@pytest.mark.parametrize("started", ["function", pytest.param("program", marks=pytest.mark.more)])
def test_ctrl_c_between_two_arrays(mini: MiniSlurm, folder: Path, started: str) -> None:
    """Ctrl-C while the first of several arrays is submitted: the jobs that exist are canceled."""
    if started == "program":
        use_as_program(folder / "train.py")
    (folder / "bin").mkdir()
    (folder / "bin/sbatch").write_text(SBATCH.format(folder=folder, real=shutil.which("sbatch")))
    (folder / "bin/sbatch").chmod(0o755)
    arrays = "hydra.launcher.overrides=['cluster.gpu_flag=null','cluster.max_array_size=2']"
    words = [sys.executable, "train.py", "-m", *MINI[:-1], arrays, "+lr=1,2,3,5,6,7", "+sleep=600"]
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    command = ["sh", "-c", 'echo $$ > pid; exec "$@"', "sh", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode != 0 and "hpcinit cancel " in done.stdout, done.stdout + done.stderr
    runs = [run for run in api.runs() if (run.path / "submission.json").exists()]
    # A program is submitted by a process that this one interrupts, which may be later than the next array.
    assert len(runs) == 1 if started == "function" else runs
    assert modules() == {"hpcinit.jobs.function" if started == "function" else "train.py"}
    until(lambda: {run.state for run in runs} == {"CANCELLED"})
    queued = subprocess.run(["squeue", "--me", "--noheader", "--format=%i"], capture_output=True, text=True, check=True)
    assert not queued.stdout.split()


SLURM = pytest.mark.slurm
WAYS = [
    ("local", "function"),
    pytest.param("local", "program", marks=pytest.mark.more),
    pytest.param("mini", "function", marks=SLURM),
]


@pytest.mark.parametrize(("place", "started"), WAYS)
def test_the_output_of_a_multirun(folder: Path, place: str, started: str, request: pytest.FixtureRequest) -> None:
    """It prints jobs when they are submitted, each change once, and all failed jobs at the end, without a traceback."""
    if place == "mini":
        request.getfixturevalue("mini")
    if started == "program":
        use_as_program(folder / "train.py")
    done = train(*(MINI if place == "mini" else LOCAL), "+lr=2,4,4.0")
    assert done.returncode == 1, done.stderr
    lines, runs = [line.partition("[HYDRA] ")[2] for line in done.stdout.splitlines()], api.runs()
    for number, (run, lr) in enumerate(zip(runs, ("2", "4", "4.0"), strict=True)):
        submitted = f"\t#{number} : +lr={lr} : job {run.job_id}, {run.path}"
        changes = [line for line in lines if re.match(rf"\[\d+ s\] {run.name} {run.job_id} ", line)]
        assert lines.index(submitted) < lines.index(changes[0])
        assert f" {'FAILED' if number else 'COMPLETED'}" in changes[-1], changes
        assert len(changes) == len({line.partition("] ")[2] for line in changes}), changes
    failed = [f"\t#{at} : +lr={lr} : {runs[at].path} FAILED: " for at, lr in ((1, "4"), (2, "4.0"))]
    assert lines[-3].startswith("2 of 3 jobs failed")
    for line, start in zip(lines[-2:], failed, strict=True):
        assert line.startswith(start) and "ValueError: lr is 4" in line
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[0] == "Error executing job with overrides: ['+lr=4']"
    assert done.stderr.splitlines()[1].startswith(f"{runs[1].path} FAILED: ")
    assert modules() == {"hpcinit.jobs.function" if started == "function" else "train.py"}


@pytest.mark.parametrize("started", ["function", pytest.param("program", marks=pytest.mark.more)])
def test_a_sweeper_reads_results_and_errors(folder: Path, started: str) -> None:
    """A sweeper gets what the function returned, the class and arguments of what it raised, and each job's config."""
    if started == "program":
        use_as_program(folder / "train.py")
    (folder / "hydra_plugins").mkdir()
    text = textwrap.dedent(SWEEPER).replace("FUNCTIONS", str(started == "function"))
    (folder / "hydra_plugins/second.py").write_text(text)
    done = train(*LOCAL, "hydra.sweeper._target_=hydra_plugins.second.Second")
    assert "the sweeper has ended" in done.stdout, done.stdout + done.stderr


def test_optunas_sweeper_gets_the_results(folder: Path) -> None:
    """Optuna minimizes what the function returns on rank 0."""
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=out"]
    done = train(*LOCAL, *optuna, "+lr=range(1,4)", "hydra.sweeper.sampler.seed=1")
    assert done.returncode == 0, done.stderr
    found = (folder / "out/optimization_results.yaml").read_text()
    results = [run.result() for run in api.runs()]
    assert len(results) == 4 and f"best_value: {min(results)}" in found


def test_errors_are_one_line(folder: Path) -> None:
    """A wrong key of the launcher and a wrong config of hpcinit give a message, and no job."""
    done = train(*LOCAL, "hydra.launcher.nodes=0", "+lr=1")
    assert done.returncode == 1 and "nodes" in done.stderr and "Traceback" not in done.stderr
    done = train(*LOCAL, "hydra.launcher.node=2", "+lr=1")
    assert done.returncode == 1 and "Key 'node' not in 'HpcinitLauncherConf'" in done.stderr
    assert not list(folder.glob("runs/*"))


def test_a_module_and_its_flags(folder: Path) -> None:
    """A program that runs again runs as `python -m package.train --config-dir ... --config-name ...`, as it was started."""
    (folder / "package").mkdir()
    (folder / "train.py").rename(folder / "package/train.py")
    use_as_program(folder / "package/train.py")
    (folder / "settings").mkdir()
    (folder / "settings/mine.yaml").write_text("lr: 7\n")
    flags = ["--config-dir", "settings", "--config-name", "mine"]
    command = [sys.executable, "-m", "package.train", "-m", *flags, *LOCAL]
    subprocess.run(command, capture_output=True, check=True)
    [run] = api.runs()
    assert run.result() == 25.0
    program = json.loads((run.path / "spec.json").read_text())["program"]
    assert (program["kind"], program["target"]) == ("module", "package.train")


def test_where_a_function_finds_its_modules(folder: Path) -> None:
    """A program in another folder than the working one imports the modules beside it, and those of its sys.path."""
    for below, name in (("code", "train.py"), ("more", "helper.py")):
        (folder / below).mkdir()
        (folder / name).rename(folder / below / name)
    program = folder / "code/train.py"
    program.write_text(f"import sys\nsys.path.append({str(folder / 'more')!r})\n{program.read_text()}")
    command = [sys.executable, "code/train.py", "-m", *LOCAL, "+lr=5"]
    subprocess.run(command, capture_output=True, check=True)
    assert api.runs()[0].result() == 9 and modules() == {"hpcinit.jobs.function"}


def test_what_a_function_cannot_do(folder: Path) -> None:
    """With a setting that only programs can follow, each job runs the program."""
    done = train(*LOCAL, "hydra.launcher.overrides=['launch=torchrun']", "+lr=5")
    assert done.returncode == 0 and "launch=torchrun is for programs" in done.stdout, done.stderr
    assert api.runs()[0].result() == 9 and modules() == {"train.py"}


def test_the_plugin_is_cheap() -> None:
    """Hydra imports the plugin in every program: it imports neither hpcinit nor torch."""
    code = "from hydra.core.plugins import Plugins; Plugins.instance(); import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if re.match(r"(hpcinit|torch)(\.|$)", name)]


@pytest.mark.more
@pytest.mark.parametrize("task_launcher_cfg, extra_flags", [({}, ["-m", *LOCAL])])
class TestHydrasIntegrationSuite(IntegrationTestSuite):
    """Hydra's own tests of launchers that run a program."""


@pytest.mark.parametrize("launcher_name, overrides", [("hpcinit", LOCAL[1:])])
class TestHydrasLauncherSuite(LauncherTestSuite):
    """Hydra's own tests of launchers that call a function."""

    # Of Hydra 1.4. It expects the function's own traceback, which hpcinit leaves in the log: the sweeper gets one line.
    test_failure_preserves_task_traceback = None
