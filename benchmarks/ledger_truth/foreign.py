"""Real jobs on a real Slurm that hpcinit did not submit: sbatch with srun or torchrun, programs without hpcinit."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.ledger_truth import cluster, plans, rows, truth
from benchmarks.ledger_truth.formats import FORMATS
from benchmarks.ledger_truth.runs import Run, run_all

NEVER = 1e9  # no launcher reports a hang
ENDS = ("completed", "completed", "kill", "raise", "hang", "scancel", "requeue", "requeue", "preempt", "time limit")


def foreign_plans(seed: int, count: int = 20) -> list[dict[str, Any]]:
    """Return the plan of each job."""
    drawn = random.Random(f"foreign {seed}")
    return [_plan(number, drawn) for number in range(count)]


def _plan(number: int, drawn: random.Random) -> dict[str, Any]:
    real = ["huggingface", "lightning"][number % 2] if number % 20 >= 14 else ""
    end = drawn.choice(ENDS)
    nodes, per_node = drawn.choice([(1, 1), (1, 2), (2, 1)])
    if end == "hang" and nodes * per_node == 1:
        per_node = 2
    step_s = round(drawn.uniform(0.1, 0.3), 3)
    total = int((drawn.uniform(18, 40) if end != "time limit" else 90) / step_s)
    plan: dict[str, Any] = {
        "name": f"job-{number:02}", "kind": end, "nodes": nodes, "ranks_per_node": per_node, "trainer": real,
        "format": FORMATS[number % len(FORMATS)].name, "launch": drawn.choice(["srun", "torchrun"]), "total": total,
        "step_s": step_s, "log_every": drawn.choice([1, 5, 10]), "save_s": drawn.choice([0.2, 1.0, 3.0]),
        "save_every": max(5, total // drawn.randint(2, 6)), "load_s": drawn.choice([0.3, 2.0]),
        "import_s": drawn.choice([0.0, 2.0]), "build_s": drawn.choice([0.0, 2.0]),
        "first_step_s": drawn.choice([0.0, 3.0]), "phase_every": drawn.choice([0, max(5, total // 3)]),
        "phase_s": drawn.choice([1.0, 3.0]), "tail_s": drawn.choice([0.0, 2.0]), "faults": [],
        "partition": plans.PREEMPTED if end == "preempt" else plans.SAFE, "gpus": 8 if end == "preempt" else 0,
        "open_mode": drawn.choice(["append", "truncate"]), "ask": drawn.choice(["job", "folder"]),
    }  # fmt: skip
    if real == "huggingface" or plan["launch"] == "torchrun":
        plan["launch"] = "torchrun"
    if end in ("kill", "raise", "hang", "scancel", "requeue", "preempt"):
        own = "program" if end in ("kill", "raise", "hang") else "driver"
        step = drawn.randrange(total // 3, total - 3)
        rank = drawn.randrange(nodes * per_node)
        plan["faults"] = [{"kind": end, "step": step, "rank": rank, "by": own}]
    if end == "hang":
        plan["cancel_hang_s"] = drawn.choice([20.0, 66.0])
    return plan


class Job(Run):
    """A job of sbatch. What follows it is the same as for a run of hpcinit."""

    def submit(self) -> None:
        work, plan = self.case / "work", self.plan
        work.mkdir(parents=True)
        self.truth_folder.mkdir()
        sources = [*cluster.PROGRAMS.glob("*.py"), Path(__file__).with_name("formats.py")]
        (programs := self.case / "programs").mkdir()
        for path in sources:
            if path.name != "sitecustomize.py":
                shutil.copy(path, programs)
        (self.case / "python").mkdir()
        shutil.copy(cluster.PROGRAMS / "sitecustomize.py", self.case / "python")
        (self.case / "plan.json").write_text(json.dumps(plan))
        program = f"{programs}/{'trainer' if plan['trainer'] else 'foreign'}.py {self.case}/plan.json"
        port = 20000 + int(plan["name"].rpartition("-")[2]) * 7
        head = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1) MASTER_PORT=" + str(port)
        if plan["launch"] == "torchrun":
            tasks = 1
            command = (f"srun {sys.executable} -m torch.distributed.run --nnodes={plan['nodes']} "
                       f"--nproc-per-node={plan['ranks_per_node']} --rdzv-backend=c10d "
                       f"--rdzv-endpoint=$MASTER_ADDR:{port} --rdzv-id=$SLURM_JOB_ID {program}")  # fmt: skip
        else:
            tasks = plan["ranks_per_node"]
            command = f"srun --kill-on-bad-exit=1 {sys.executable} {program}"
        lines = [
            "#!/bin/bash", f"#SBATCH --nodes={plan['nodes']}", f"#SBATCH --ntasks-per-node={tasks}",
            f"#SBATCH --partition={plan['partition']}", f"#SBATCH --job-name={plan['name']}", "#SBATCH --requeue",
            f"#SBATCH --open-mode={plan['open_mode']}", f"#SBATCH --time={1 if plan['kind'] == 'time limit' else 10}",
            *(["#SBATCH --gpus-per-node=1"] if plan["gpus"] else []),
            f"export LEDGER_TRUTH={self.truth_folder} PYTHONPATH={self.case}/python OMP_NUM_THREADS=1", head, command,
        ]  # fmt: skip
        (work / "train.sh").write_text("\n".join(lines) + "\n")
        printed = self.slurm.run("sbatch", "--parsable", f"--chdir={work}", str(work / "train.sh"))
        self.jobs = [printed.strip()]

    def finish(self) -> None:
        records = cluster.sacct(self.slurm, self.jobs)
        (self.case / "sacct.txt").write_text(records)
        (self.case / "driver.log").write_text("\n".join(self.log))
        by_job = self.plan["ask"] == "job"
        words = self.jobs if by_job else ["work"]
        cluster.report(self.slurm, self.case, words, self.case / "work" if by_job else self.case)
        rows.write(self.case / "case.json", {"kind": self.plan["kind"], "plan": self.plan, "jobs": self.jobs})
        score(self.case)


def score(case: Path) -> None:
    plan = json.loads((case / "case.json").read_text())["plan"]
    found = truth.rows(
        truth.allocations((case / "sacct.txt").read_text()), truth.processes(case / "truth"),
        nodes_used=plan["nodes"], hang_s=NEVER,
    )  # fmt: skip
    rows.write(case / "truth.json", found)


def main(folder: Path, seed: int, at_once: int, only: list[str]) -> int:
    """Run all jobs, `at_once` at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    rows.write(folder / "seed.json", {"seed": seed})
    wanted = [plan for plan in foreign_plans(seed) if not only or plan["name"] in only]
    return run_all(Job, wanted, folder, at_once, lambda plan: f"{plan['trainer'] or plan['format']}, {plan['kind']}")
