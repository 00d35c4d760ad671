"""Runs that hpcinit submits to a real Slurm, with random faults."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ledger_truth import cluster, plans, rows, truth
from tests.minislurm import MiniSlurm, MiniSlurmError

LIMIT_S = 420.0  # of a run
Plan = dict[str, Any]


@dataclass
class Run:
    """A run on the cluster: its plan and folder, and the faults that this process has already caused."""

    slurm: MiniSlurm
    plan: dict[str, Any]
    case: Path
    jobs: list[str] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    @property
    def truth_folder(self) -> Path:
        return self.case / "truth"

    def submit(self) -> None:
        work = self.case / "work"
        work.mkdir(parents=True)
        self.truth_folder.mkdir()
        for name in ("train.py", "record.py"):
            shutil.copy(cluster.PROGRAMS / name, work)
        (python_path := self.case / "python").mkdir()
        shutil.copy(cluster.PROGRAMS / "sitecustomize.py", python_path)
        (work / "plan.json").write_text(json.dumps(self.plan))
        plan = self.plan
        words = [
            "cluster=mini", f"nodes={plan['nodes']}", f"ranks_per_node={plan['ranks_per_node']}", "parallel=ddp",
            f"launch={plan['launch']}", f"partition={plan['partition']}", "cluster.cpus_per_node=null",
            "cluster.partitions={}", f"cluster.gpus_per_node={plan['gpus']}", f"name={plan['name']}",
            f"hang.after_s={plan['hang_s']:g}", f"+job.env.LEDGER_TRUTH={self.truth_folder}",
            f"+job.env.PYTHONPATH={python_path}", *plan["words"],
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "hpcinit", "submit", *words, "--", "train.py", "plan.json"], cwd=work,
            env=os.environ | self.slurm.env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        (self.case / "submit.txt").write_text(" ".join(words) + "\n" + done.stdout + done.stderr)
        found = re.search(r"^run folder: (.*)$", done.stdout, re.MULTILINE)
        if not found:
            raise RuntimeError(f"{plan['name']}: {done.stderr}")
        listed = self.slurm.run("squeue", "--noheader", "--states=all", f"--name={plan['name']}", "--format=%A")
        self.jobs = sorted(set(listed.split()), key=int)

    def last_step(self) -> int:
        """Return the last step of the newest process of rank 0."""
        newest = max(self.truth_folder.glob("rank-0-*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
        steps = re.findall(r'"kind": "step".*"step": (\d+)', newest.read_text()) if newest else []
        return int(steps[-1]) if steps else 0

    def disturb(self, running: list[str]) -> None:
        """Cause the faults of this process that are due."""
        for number, fault in enumerate(self.plan["faults"]):
            if fault["by"] != "driver" or number in self.done or not running or self.last_step() < fault["step"]:
                continue
            self.done.add(number)
            self.log.append(f"{time.time():.2f} {fault['kind']}")
            job = running[0]
            if fault["kind"] == "scancel":
                self.slurm.run("scancel", job)
            elif fault["kind"] == "requeue":
                self.slurm.run("scontrol", "requeue", job)
            else:
                node = self.slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%B").strip()
                self.slurm.run(
                    "sbatch", "--partition=high", f"--nodelist={node}", "--gres=gpu:8", "--time=1",
                    "--output=/dev/null", "--job-name=preemptor", "--wrap=sleep 4",
                )  # fmt: skip
            return
        limit = self.plan.get("cancel_hang_s")
        if limit and running and "hang" not in "".join(self.log):
            for path in self.truth_folder.glob("rank-*.jsonl"):
                at = re.search(r'"kind": "hang", "at": ([\d.]+)', path.read_text())
                if at and time.time() > float(at[1]) + limit:
                    self.log.append(f"{time.time():.2f} scancel of a hang")
                    self.slurm.run("scancel", running[0])

    def follow(self) -> None:
        """Wait for the end of all jobs."""
        rush, end = cluster.Rush(self.slurm), time.monotonic() + LIMIT_S
        while True:
            now = cluster.states(self.slurm, self.jobs)
            if all(state in cluster.OVER for state, _ in now.values()):
                return
            for job, (state, reason) in now.items():
                rush.look(job, state, reason)
            try:
                self.disturb([job for job, (state, _) in now.items() if state == "RUNNING"])
            except MiniSlurmError as error:  # the job has just ended
                self.log.append(f"{time.time():.2f} {error}")
            if time.monotonic() > end:
                self.log.append("canceled: it took too long")
                self.slurm.run("scancel", *self.jobs)
                end += 30
            time.sleep(0.7)

    def finish(self) -> None:
        plan = self.plan
        records = cluster.sacct(self.slurm, self.jobs)
        (self.case / "sacct.txt").write_text(records)
        (self.case / "driver.log").write_text("\n".join(self.log))
        (folder,) = (self.case / "work/runs").glob("*-0001")
        cluster.report(self.slurm, self.case, [folder.name], self.case / "work")
        rows.write(self.case / "case.json", {"kind": plan["kind"], "plan": plan, "jobs": self.jobs})
        score(self.case)


def score(case: Path) -> None:
    """Compute truth.json from the recordings."""
    plan = json.loads((case / "case.json").read_text())["plan"]
    found = truth.rows(
        truth.allocations((case / "sacct.txt").read_text()), truth.processes(case / "truth"),
        nodes_used=plan["nodes"], hang_s=plan["hang_s"],
    )  # fmt: skip
    rows.write(case / "truth.json", found)


def run_all(
    kind: type[Run],
    wanted: Sequence[dict[str, Any]],
    folder: Path,
    at_once: int,
    title: Callable[[dict[str, Any]], str],
) -> int:
    """Start a cluster and run all plans on it, `at_once` at a time. Return how many failed; the others continue.

    kind: the class of the runs.
    title: what to print about a plan.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "HPCINIT_CLUSTER": "local"}
    failed = 0
    with cluster.cluster() as slurm, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        deaths = cluster.Deaths()

        def one(plan: Plan) -> str:
            run = kind(slurm, plan, folder / plan["name"])
            shutil.rmtree(run.case, ignore_errors=True)
            began = time.monotonic()
            run.submit()
            deaths.add(run.truth_folder)
            try:
                run.follow()
                time.sleep(1)
                run.finish()
            finally:
                deaths.remove(run.truth_folder)
            return f"{plan['name']}: {title(plan)}, {time.monotonic() - began:.0f} s"

        for future in concurrent.futures.as_completed([pool.submit(one, plan) for plan in wanted]):
            try:
                print(future.result(), flush=True)
            except Exception as error:
                failed += 1
                print(f"FAILED: {type(error).__name__}: {error}", flush=True)
    return failed


def main(folder: Path, seed: int, at_once: int, only: list[str]) -> int:
    """Run all plans that have no truth yet, `at_once` at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [plan for plan in plans.plans(seed) if not only or plan["name"] in only]
    rows.write(folder / "seed.json", {"seed": seed})
    new = [plan for plan in wanted if not (folder / plan["name"] / "truth.json").exists()]
    print(f"{len(wanted) - len(new)} of {len(wanted)} runs: done before", flush=True)
    return run_all(Run, new, folder, at_once, lambda plan: plan["kind"])
