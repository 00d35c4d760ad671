"""Fixtures for all tests: hpcinit as its users run it, in the folder of the test."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hpcinit.base.versions import installed
from hpcinit.submit import job_environment
from tests.warm import COMMAND, COMMANDS, Files, needs_a_new_python

pytest_plugins = [
    "tests.minislurm.plugin",
    "tests.workers",
    "tests.left_behind",
    "tests.unmeasured",
    "tests.cost",
]
# `make test-horovod` has an environment with it; in the daily run its build would take as long as all the tests.
collect_ignore = [] if importlib.util.find_spec("horovod") else ["systems/test_horovod.py"]
if not any(Path(folder, "nvidia/nccl/lib").is_dir() for folder in sys.path):  # `make test-nccl`
    collect_ignore.append("systems/test_nccl.py")
if shutil.which("apptainer") is None:  # `make test-apptainer`
    collect_ignore.append("systems/test_apptainer.py")
collect_ignore.append("gpu")  # `make gpu`: a separate suite, for Pythons without pytest
if "HPCINIT_SCALE" not in os.environ:  # `make scale`
    collect_ignore.append("test_many_nodes.py")
if "HPCINIT_CUDA_BUILD" not in os.environ:  # `make test-cuda-build`; its value is the folder of the oldest DeepSpeed
    collect_ignore.append("cuda_build")

# Without this, a user's PYTHONDONTWRITEBYTECODE makes each process compile hpcinit (a third of the processor time of a dry
# run), and each worker rewrite the assertions of every test file. Child processes read this cache and keep the variable.
sys.dont_write_bytecode = False

Run = Callable[..., "subprocess.CompletedProcess[str]"]


MADE_BY = {"deepspeed": "make test-deepspeed-0.18", "torch": "make test-torch"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deepspeed", metavar="VERSION", help="the DeepSpeed that must be the one imported here")
    parser.addoption("--all", action="store_true", help="also the tests marked more, as make test-all does")
    parser.addoption("--torch", metavar="VERSION", help="the torch that must be the one imported here")


def pytest_configure(config: pytest.Config) -> None:
    """End the session if the installed DeepSpeed or torch is not the version that the session should test."""
    for package, make in MADE_BY.items():
        asked = config.getoption(f"--{package}")
        if asked is not None:
            _refuse_another(package, asked, make)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all deselect what only make test-all runs. HPCINIT_CHAOS=1 (make chaos) includes the chaos tests."""
    if config.getoption("--all"):
        return
    kinds = ["more"] if os.environ.get("HPCINIT_CHAOS") == "1" else ["more", "chaos"]
    later = [item for item in items if any(item.get_closest_marker(kind) for kind in kinds)]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in set(later)]


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    return (
        ""
        if config.getoption("--all")
        else "tests marked more or chaos are deselected; --all (make test-all) runs them"
    )


def _refuse_another(package: str, asked: str, make: str) -> None:
    code = f"import {package}; print({package}.__version__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    found = (installed(package), done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr[-500:])
    if tuple(version.partition("+")[0] for version in found) != (asked, asked):  # 2.7.0+cu126 is a 2.7.0
        raise pytest.UsageError(
            f"--{package} {asked}, and {sys.executable} has {found[0] or 'none'} installed and imports {found[1]}: "
            f"{make} makes an environment with it"
        )


@pytest.fixture(autouse=True, scope="session")
def _not_a_job() -> None:
    """The tests may themselves run inside an allocation: its variables must not reach them."""
    clean, _ = job_environment.clean_environment(os.environ)
    os.environ.clear()
    os.environ.update({k: v for k, v in clean.items() if k != "HPCINIT_CONF"})
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HPCINIT_CLUSTER"] = "local"  # sbatch is on PATH here, so without a cluster nothing would be submitted
    # A shell that starts the tests with & has them ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forked(words: Sequence[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Do what subprocess.run does, with a Python that has imported hpcinit's commands: a third of the processor time."""
    ends = [os.pipe(), os.pipe()]
    with contextlib.ExitStack() as stack:
        files = Files(
            stack.enter_context(Path(os.devnull).open()), *(stack.enter_context(os.fdopen(w, "wb")) for _, w in ends)
        )
        process = COMMANDS.start(COMMAND, env, files, words)
    process.stdout, process.stderr = (os.fdopen(read, "rb") for read, _ in ends)
    with process:
        try:
            streams = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    out, err = (io.TextIOWrapper(io.BytesIO(stream)).read() for stream in streams)
    return subprocess.CompletedProcess([sys.executable, "-m", "hpcinit", *words], process.returncode, out, err)


@pytest.fixture
def hpcinit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`hpcinit("submit", "nodes=2", env={...})` as a process in tmp_path, its streams as text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(
        *words: str, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **(env or {})}
        if not needs_a_new_python(env):
            return _forked(words, env, timeout)
        return subprocess.run(
            [sys.executable, "-m", "hpcinit", *words],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
