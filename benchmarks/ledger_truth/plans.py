"""Random plans for the runs: their shape, what they do at each step, what fails, and what they survive."""

from __future__ import annotations

import random
from typing import Any

PREEMPTED, WITH_GRACE, SAFE = "low", "grace", "safe"  # partitions of the cluster
EVERY_REASON = "restart.on=[preempted,node_fail,hang,failure,time_limit]"
KINDS = (
    ["healthy"] * 7 + ["fatal"] * 10 + ["silent hang"] * 2 + ["requeue"] * 9 + ["preemption"] * 6 + ["time limit"] * 4
    + ["chain"] * 3 + ["spare"] * 4 + ["warm"] * 5
)  # fmt: skip


def plans(seed: int) -> list[dict[str, Any]]:
    """Return the plan of each run, in the order in which they run."""
    drawn = random.Random(seed)
    kinds = drawn.sample(KINDS, len(KINDS))
    return [_plan(number, kind, drawn) for number, kind in enumerate(kinds)]


def _plan(number: int, kind: str, drawn: random.Random) -> dict[str, Any]:
    nodes, per_node = drawn.choice([(1, 1), (1, 2), (2, 1), (2, 2), (1, 2), (2, 1)])
    if kind in ("spare", "silent hang") and nodes * per_node == 1:
        nodes = 2
    step_s = round(drawn.uniform(0.1, 0.3), 3)
    budget_s = drawn.uniform(14, 30) if kind != "time limit" else drawn.uniform(70, 85)
    save = drawn.choice(["run", "run", "run", "async", "own", "none"] if kind in ("healthy", "fatal") else
                        ["run", "run", "run", "async", "own"])  # fmt: skip
    total = int(budget_s / step_s)
    plan: dict[str, Any] = {
        "name": f"run-{number:02}", "kind": kind, "nodes": nodes, "ranks_per_node": per_node, "spare": 0,
        "launch": "srun", "partition": SAFE, "gpus": 0, "words": [], "hang_s": 240.0, "total": total, "step_s": step_s,
        "save": save, "save_s": drawn.choice([0.0, 0.2, 0.8, 1.5]), "save_every": max(5, total // drawn.randint(3, 9)),
        "wrap": save in ("run", "async") or drawn.random() < 0.3, "build_s": drawn.choice([0.0, 0.5, 2.0]),
        "import_s": drawn.choice([0.0, 0.5, 2.0]), "first_step_s": drawn.choice([0.0, 1.0, 3.0]),
        "phase_every": drawn.choice([0, 0, total // 3, total // 5]), "phase_s": drawn.choice([0.5, 1.5, 3.0]),
        "should_stop": drawn.random() < 0.6, "tail_s": drawn.choice([0.0, 0.0, 1.0, 3.0]), "faults": [],
    }  # fmt: skip
    _SHAPES[kind](plan, drawn)
    return plan


def _faults(plan: dict[str, Any], drawn: random.Random, count: int, kinds: list[str], by: str = "program") -> None:
    """Draw faults at increasing steps. A hang needs another rank, which waits."""
    world = plan["nodes"] * plan["ranks_per_node"]
    kinds = [kind for kind in kinds if kind != "hang" or world > 1]
    steps = sorted(drawn.sample(range(6, max(8, plan["total"] - 2)), count))
    for step in steps:
        kind = drawn.choice(kinds)
        own = "program" if kind in ("kill", "raise", "hang") else by
        plan["faults"].append({"kind": kind, "step": step, "rank": drawn.randrange(world), "by": own})
    if any(fault["kind"] == "hang" for fault in plan["faults"]):
        plan["hang_s"] = 5.0


def _healthy(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["launch"] = drawn.choice(["srun", "srun", "torchrun", "fork"])


def _fatal(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["launch"] = drawn.choice(["srun", "srun", "torchrun", "fork"])
    _faults(plan, drawn, 1, ["kill", "kill", "raise", "hang", "scancel"], "driver")
    if plan["faults"][0]["kind"] == "hang":
        if drawn.random() < 0.5:
            plan["words"].append("hang.action=end")
        else:
            plan["cancel_hang_s"] = 12.0


def _silent_hang(plan: dict[str, Any], drawn: random.Random) -> None:
    _faults(plan, drawn, 1, ["hang"])
    plan["hang_s"], plan["cancel_hang_s"] = 240.0, 68.0


def _requeue(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["words"] += ["restart.max_restarts=5", EVERY_REASON, "hang.action=end"]
    plan["launch"] = drawn.choice(["srun", "srun", "torchrun"])
    _faults(plan, drawn, drawn.randint(1, 2), ["kill", "raise", "hang", "requeue"], "driver")


def _preemption(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["partition"] = drawn.choice([PREEMPTED, WITH_GRACE])
    plan["gpus"], plan["ranks_per_node"] = 8, 1
    plan["should_stop"] = plan["should_stop"] or plan["partition"] == WITH_GRACE
    plan["words"] += ["restart.max_restarts=5", EVERY_REASON]
    _faults(plan, drawn, drawn.randint(1, 2), ["preempt"], "driver")


def _time_limit(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["words"] += ["time_min=1", "chain=2"]
    plan["save_every"] = max(5, plan["total"] // 8)


def _chain(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["words"] += ["chain=3"]
    _faults(plan, drawn, drawn.randint(1, 2), ["kill", "scancel"], "driver")


def _spare(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["spare"] = 1
    plan["words"] += ["spare_nodes=1", "restart.on=[node_fail,hang,failure]", "hang.action=end"]
    _faults(plan, drawn, 1, ["kill", "raise", "hang"])


def _warm(plan: dict[str, Any], drawn: random.Random) -> None:
    plan["launch"] = "fork"
    plan["words"] += ["restart.warm=true", "hang.action=end", "restart.without_progress=null"]
    _faults(plan, drawn, drawn.randint(1, 3), ["kill", "kill", "raise", "hang"])


_SHAPES = {
    "healthy": _healthy, "fatal": _fatal, "silent hang": _silent_hang, "requeue": _requeue, "preemption": _preemption,
    "time limit": _time_limit, "chain": _chain, "spare": _spare, "warm": _warm,
}  # fmt: skip
