"""`make gpu`: run the checks on one GPU, or with CPU=1 on CPUs, and write a report.

    python -m tests.gpu [--part 1|2|all] [--out FOLDER] [--cpu] [--only NAME,NAME] [--list]

Needs torch with CUDA (2.10 or newer), numpy and Python 3.10 or newer. It installs nothing and uses no network.
Exit status: 0 no claim failed, 1 some did, 2 the suite cannot start.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu import findings, report
from tests.gpu.check_groups import ENV_DEVICES
from tests.gpu.checks import CHECKS, CPU_FACTOR, PART_S, Check
from tests.gpu.findings import CPU_LABEL, FAILED, NOT_SHOWN, Finding, Findings

ROOT = Path(__file__).parents[2]
ENV_TOKEN = "GPU_SUITE_TOKEN"  # in the environment of every process that a check starts, to find and kill them
# The suite may run inside a job: the variables of its launcher are not for the ranks that it starts.
FOREIGN = ("SLURM", "HPCINIT_", "PMI", "OMPI_", "TORCHELASTIC_")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.child:
        return child(options.child, options.folder, options.findings, options.cpu)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:16} part {check.part}, at most {check.limit_s:.0f} s: {check.about}")
        return 0
    chosen = [one for one in CHECKS if options.part in ("all", str(one.part))]
    if options.only:
        names = options.only.split(",")
        if unknown := [name for name in names if name not in {one.name for one in CHECKS}]:
            print(f"no check {unknown[0]!r}, expected one of: {', '.join(one.name for one in CHECKS)}", file=sys.stderr)
            return 2
        chosen = [one for one in CHECKS if one.name in names]
    environment = _environment(options.cpu)
    machine = _machine(environment)
    problem = machine.get("problem", "")
    if problem and not (options.cpu and "torch" in machine):
        print(_refusal(problem, "torch" in machine), file=sys.stderr)
        return 2
    return _run(chosen, machine, environment, options.out.absolute(), options.cpu)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", choices=("1", "2", "all"), default="all", help="each part takes ten minutes at most")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the report")
    parser.add_argument(
        "--cpu", action="store_true", help="without a GPU: test the suite itself, every line is labelled"
    )
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="some checks; --list shows their names")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    return parser


def _refusal(problem: str, torch: bool) -> str:
    do = (
        "run it on a machine with an NVIDIA GPU and its driver, or run it on CPUs to test the suite itself: make gpu CPU=1"
        if torch
        else "name a Python that has torch: make gpu PYTHON=/path/to/python"
    )
    return f"make gpu needs a GPU: {problem} ({sys.executable}); {do}"


def _environment(cpu: bool) -> dict[str, str]:
    """Return the environment of all processes of the suite: no variables of another launcher, one GPU or none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in RANKS}
    kept[ENV_DEVICES] = kept.get("CUDA_VISIBLE_DEVICES") or ",".join(_gpus(kept)) or "0"
    first = kept[ENV_DEVICES].split(",")[0]
    kept["CUDA_VISIBLE_DEVICES"] = "" if cpu else first
    kept.setdefault("OMP_NUM_THREADS", "1" if cpu else "4")
    kept["PYTHONPATH"] = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    return kept


def _gpus(environment: dict[str, str]) -> list[str]:
    """Return the numbers of the machine's GPUs, [] if nvidia-smi does not list them."""
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _machine(environment: dict[str, str]) -> dict[str, Any]:
    """Describe the machine in another process, so that this one never has a CUDA context."""
    command = [sys.executable, "-m", "tests.gpu.machine"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"problem": f"describing this machine failed with status {done.returncode}: {done.stderr[-500:]}"}
    return found


def _run(chosen: Sequence[Check], machine: dict[str, Any], environment: dict[str, str], out: Path, cpu: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    (out / "logs").mkdir(exist_ok=True)
    outcomes: list[report.Outcome] = []
    began = time.monotonic()
    budget = PART_S * len({check.part for check in chosen}) * (CPU_FACTOR if cpu else 1)
    for check in chosen:
        left = budget - (time.monotonic() - began)
        _say(f"{check.name}: {check.about}", cpu)
        if left < 20:
            late = Finding(
                "the check runs", NOT_SHOWN, "no time is left in this part: run it alone with ONLY=" + check.name
            )
            outcomes.append(report.Outcome(check, [late], 0.0))
        else:
            outcomes.append(_one(check, min(left, check.limit_s * (CPU_FACTOR if cpu else 1)), environment, out, cpu))
        _say(f"{check.name}: {outcomes[-1].status} ({outcomes[-1].seconds:.0f} s)", cpu)
        report.write(out, machine, outcomes, cpu)
    for line in report.markdown(machine, outcomes, cpu).splitlines():
        _say(line, cpu)
    _say(f"report: {out / 'report.md'} and {out / 'report.json'}, logs in {out / 'logs'}", cpu)
    return 1 if any(one.status == FAILED for one in outcomes) else 0


def _say(line: str, cpu: bool) -> None:
    print(f"[{CPU_LABEL}] {line}" if cpu else line, flush=True)


def _one(check: Check, limit_s: float, environment: dict[str, str], out: Path, cpu: bool) -> report.Outcome:
    """Run one check in a separate process. If it crashes, its findings so far are kept."""
    token, log = f"{os.getpid()}-{check.name}", out / f"logs/{check.name}.log"
    with tempfile.TemporaryDirectory(prefix=f"gpu-{check.name}-", ignore_cleanup_errors=True) as work:
        found = Path(work) / "findings.jsonl"
        command = [sys.executable, "-u", "-m", "tests.gpu", "--child", check.name, "--findings", str(found)]
        command += ["--folder", str(Path(work) / "runs")] + ["--cpu"] * cpu
        began, ended = time.monotonic(), ""
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env={**environment, ENV_TOKEN: token}, cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=file, start_new_session=True, text=True,
            )  # fmt: skip
            timer = _kill_later(token, limit_s)
            assert process.stdout is not None
            for line in process.stdout:
                _say(line.rstrip("\n"), cpu)
            status = process.wait()
            timer.cancel()
        seconds = time.monotonic() - began
        _end_all(token)
        if status:
            limit = f"stopped after its {limit_s:.0f} s"
            ended = limit if seconds >= limit_s else f"its process ended with status {status}: {_tail(log)}"
        return report.Outcome(check, findings.read(found), seconds, ended)


def _kill_later(token: str, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, _end_all, (token,))
    timer.daemon = True
    timer.start()
    return timer


def _end_all(token: str) -> None:
    """Kill the remaining processes of a check, which have its token in their environment."""
    wanted = f"{ENV_TOKEN}={token}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-500:]


def child(name: str, folder: Path, path: Path, cpu: bool) -> int:
    """Run one check in this process. An exception is a failed claim with its last line."""
    check = next(one for one in CHECKS if one.name == name)
    found = Findings(path, cpu)
    try:
        importlib.import_module(check.module).main(found, folder)
    except Exception as error:
        traceback.print_exc()
        found.add("the check finishes", FAILED, f"{type(error).__name__}: {str(error).strip()[-700:]}")
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
