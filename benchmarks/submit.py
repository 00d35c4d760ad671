"""How long does a submission take in the shell, compared with other programs?

    python -m benchmarks.submit [--rounds 15] [--venv DIR]

It measures whole processes in rounds (A B C, A B C, ...) on the real Slurm of the tests (root; see tests/minislurm).
The first round does not count. All submit `true` on 2 nodes. The partition is DOWN, so that Slurm starts no job that
uses CPU time during the next submission. After each submission, the job must be in the queue; it is then cancelled.

The other programs run in a separate virtual environment, created on first use, with the same versions of Hydra and
submitit as hpcinit. Only the program that composes hpcinit's own config runs in hpcinit's environment.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

from tests.minislurm import MiniSlurm, MiniSlurmError

PEERS = Path(__file__).parent / "peers"
TORCHX = "0.7.0"
BASELINE = "bare `@hydra.main` program"
SAME_CONFIG = "the same config with Hydra and submitit, 20 lines"


@dataclass
class Contender:
    """One way to submit, with its wall and CPU seconds per round."""

    name: str
    command: Sequence[str]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


class SubmissionFailed(Exception):
    """A contender created no job, so there is nothing to compare."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected 1 or more")
    contenders, missing = _contenders(options.venv)
    try:
        with MiniSlurm(nodes=2, gpus=8, name=f"bench-{os.getpid()}") as slurm, _project() as project:
            slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
            for number in range(options.rounds + 1):
                if sys.stderr.isatty():
                    print(f"round {number} of {options.rounds}", end="\r", file=sys.stderr)
                for contender in contenders:
                    _measure(contender, slurm, project, counted=number > 0)
            slurm_version = slurm.version()
    except (MiniSlurmError, SubmissionFailed) as error:
        print(f"benchmarks.submit: {error}", file=sys.stderr)
        return 1
    print(_report(contenders, missing, slurm_version, options.rounds))
    return 0


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default: 15)")
    parser.add_argument(
        "--venv", type=Path, default=cache / "hpcinit" / f"benchmarks-{sys.implementation.cache_tag}",
        help="where the other programs are installed (default: %(default)s)",
    )  # fmt: skip
    return parser


def _contenders(peers_venv: Path) -> tuple[list[Contender], dict[str, str]]:
    """Return the available contenders, and the reason for each missing one."""
    python = str(peers_venv.absolute() / "bin/python")
    overrides = ["cluster=mini", "nodes=2", "ranks_per_node=1", "time_min=10"]
    table = (
        ("bare `sbatch job.sh`", "", ["sbatch", "job.sh"]),
        (BASELINE, "hydra-core", [python, "hydra_program.py"]),
        ("submitit `AutoExecutor`", "submitit", [python, "submitit_program.py"]),
        ("torchx, Slurm scheduler", "torchx", [python, "torchx_program.py"]),
        (SAME_CONFIG, "", [sys.executable, "hydra_submitit_program.py", *overrides]),
        ("`hpcinit submit`", "", [str(Path(sys.executable).parent / "hpcinit"), "submit", *overrides, "--", "true"]),
    )
    present = _install(peers_venv)
    lacking = [(name, needs) for name, needs, _ in table if needs and needs not in present]
    missing = {name: f"pip could not install {needs}" for name, needs in lacking}
    return [Contender(name, command) for name, _, command in table if name not in missing], missing


def _requirements() -> dict[str, str]:
    return {"hydra-core": version("hydra-core"), "submitit": version("submitit"), "torchx": TORCHX}


def _install(folder: Path) -> set[str]:
    """Create the environment if it does not exist, and return the packages in it."""
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    present = set()
    for package, wanted in _requirements().items():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        ask = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
        if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() != wanted:
            print(f"installing {package} {wanted} into {folder}", file=sys.stderr)
            if subprocess.run([*pip, f"{package}=={wanted}"], stdout=sys.stderr, check=False).returncode:
                continue
        present.add(package)
    return present


@contextmanager
def _project() -> Iterator[Path]:
    """Create a project with the peers' files in a git repository, because hpcinit records the commit."""
    with tempfile.TemporaryDirectory(prefix="hpcinit-bench-") as name:
        project = Path(name) / "project"
        shutil.copytree(PEERS, project)
        if shutil.which("git"):
            git = ["git", "-c", "user.name=bench", "-c", "user.email=bench@localhost"]
            for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "bench"]):
                subprocess.run([*git, *words], cwd=project, check=True)
        yield project


def _measure(contender: Contender, slurm: MiniSlurm, project: Path, *, counted: bool) -> None:
    env = _environment(slurm.env)
    cpu_before, start = _children_cpu_s(), time.perf_counter()
    done = subprocess.run(contender.command, cwd=project, env=env, capture_output=True, text=True, check=False)
    wall, cpu = time.perf_counter() - start, _children_cpu_s() - cpu_before
    # torchx submits a heterogeneous job, '7+0' and '7+1', which can only be cancelled as a whole.
    jobs = {name.partition("+")[0] for name in slurm.run("squeue", "--noheader", "--format=%i").split()}
    if done.returncode or not jobs:
        seen = f"exit status {done.returncode}, {len(jobs)} jobs queued"
        raise SubmissionFailed(f"{contender.name}: {seen}\n{(done.stderr or done.stdout).strip()}")
    slurm.run("scancel", *jobs)
    if counted:
        contender.wall.append(wall)
        contender.cpu.append(cpu)


def _environment(slurm_env: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment without variables that slow Python down or change its modules."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | dict(slurm_env)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _report(contenders: Sequence[Contender], missing: Mapping[str, str], slurm_version: str, rounds: int) -> str:
    lines = [
        f"{datetime.date.today()}, {os.cpu_count()} cores {platform.machine()}, {_system()}, Python "
        f"{platform.python_version()}, Slurm {slurm_version}, "
        + ", ".join(f"{k} {v}" for k, v in _requirements().items())
        + f"; {rounds} rounds, load average at the end {os.getloadavg()[0]:.1f}",
        "",
        "| submitting with | median ms | min | max | CPU ms | x bare Hydra | its CPU | x the same config | its CPU |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for c in contenders:
        numbers = [f"{1000 * s:.0f}" for s in (median(c.wall), min(c.wall), max(c.wall), median(c.cpu))]
        ratios = [text for name in (BASELINE, SAME_CONFIG) for text in _ratios(c, contenders, name)]
        lines.append(f"| {' | '.join([c.name, *numbers, *ratios])} |")
    lines += [f"| {name} | missing: {why} | | | | | | | |" for name, why in missing.items()]
    return "\n".join(lines)


def _ratios(contender: Contender, contenders: Sequence[Contender], base: str) -> list[str]:
    """Return the ratios of the median wall and CPU times to those of `base`; empty texts if it is missing."""
    for other in contenders:
        if other.name == base:
            wall, cpu = median(contender.wall) / median(other.wall), median(contender.cpu) / median(other.cpu)
            return [f"{wall:.2f}", f"{cpu:.2f}"]
    return ["", ""]


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


if __name__ == "__main__":
    sys.exit(main())
