"""Synthetic start-ups of many ranks: random numbers, in the files that real ranks write.

`python -m tests.observe.synthetic FOLDER NODES RANKS_PER_NODE` creates a run folder for `hpcinit report`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from hpcinit.records import timeline
from hpcinit.slurm import nodelist

START = 1_790_000_000.0


def run(folder: Path, nodes: int, per_node: int, slow: str = "", absent: int = -1, restart: int = 0) -> Path:
    """Create a run folder whose ranks started at START.

    slow: a node whose imports take three times as long. absent: a rank that does not start.
    """
    chance = random.Random(7 + restart)
    hosts = [f"n{number:04d}" for number in range(1, nodes + 1)]
    job, size = f"43.0.{restart}", nodes * per_node
    start = START + 400 * restart
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    record = {"job_id": "43", "engine": "slurm", "cluster": "mini", "submitted": START - 180}
    (folder / "submission.json").write_text(json.dumps(record))
    (folder / "job.sh").write_text("#!/bin/bash\n")
    found: dict[int, dict[str, float]] = {}
    for rank in range(size):
        node = rank // per_node
        started = start + 0.6 + 0.002 * node + chance.expovariate(20)
        interpreter = started + 0.15 + chance.expovariate(30)
        met = interpreter + 0.2 + chance.expovariate(10)
        weight = 3.0 if hosts[node] == slow else 1.0
        imported = met + weight * (6 + chance.gauss(0, 0.3) + (node % 37) * 0.02) + chance.expovariate(3)
        device = imported + 0.4 + chance.expovariate(8)
        found[rank] = {
            "started": started,
            "interpreter": interpreter,
            "met": met,
            "imported": imported,
            "device": device,
        }
    if absent < 0:
        all_there = max(events["device"] for events in found.values())
        for events in found.values():
            events["store"] = all_there + 0.01 + chance.expovariate(200)
            events["joined"] = all_there + 0.4 + chance.expovariate(50)
            events["collective"] = all_there + 0.9 + chance.expovariate(100)
            events["up"] = events["collective"] + 0.1 + chance.expovariate(40)
    for rank, events in found.items():
        if rank == absent:
            continue
        writer = timeline.Writer(timeline.path(folder, job, hosts[rank // per_node]))
        about = {"job": job, "launcher": "slurm", "world_size": size, "nodes": nodes, "local_rank": rank % per_node}
        more: dict[str, object] = {"hosts": nodelist.compress(hosts)} if rank % per_node == 0 else {}
        if rank == 0:
            limit = min(3600, 300 + 3.5 * nodes)
            more |= {"timeout_s": limit, "formula": f"min(3600, 300 + 3.5 x {nodes} nodes) = {limit:g} s"}
        writer.write(rank, {**about, **more, "allocated": start, **events})
        writer.close()
        (folder / f"logs/rank-{rank}.log").touch()
    return folder


if __name__ == "__main__":
    made = run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), slow="n0002")
    print(f"hpcinit report {made}")
