"""Starts a command on the nodes of a run: with `srun --overlap` on Slurm, as a child process with cluster=local."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcinit.base.errors import Failure, RequestError
from hpcinit.engine import Engine
from hpcinit.observe import find_runs, stack_collector, state
from hpcinit.records import job_record, run_folder, spec, timeline
from hpcinit.records.components import node_of
from hpcinit.records.spec import Spec
from hpcinit.slurm import nodelist, queue, slurm_client
from hpcinit.slurm.slurm_client import Unreachable

# A sh script, because the nodes may have another Python. Its last arguments are the Pythons to try.
START = """code=$1 query=$2; shift 2
for python do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2> /dev/null || continue
  exec "$python" -I -S -c "$code" "$query"
done
echo "hpcinit: error: no Python 3.9 on $(hostname): tried $*" >&2
exit 127"""


@dataclass(frozen=True)
class RunningJob:
    """A run whose job is running.

    job_id: the job id that srun expects.
    components: the nodes of each component of the job, in Slurm's order. Only heterogeneous jobs have several
    components.
    """

    path: Path
    spec: Spec
    engine: Engine
    job_id: str
    components: tuple[tuple[str, ...], ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for component in self.components for node in component)

    def host(self, rank: int) -> str:
        """Return the node on which a rank runs, according to the record of its last start.

        If there is no record, return the node on which Slurm's block distribution starts the rank. Raise RequestError
        if the rank does not exist.
        """
        size = self.spec.world_size
        if not 0 <= rank < size:
            raise RequestError(f"rank {rank} does not exist: the run has the ranks 0 to {size - 1}")
        if not self.engine.other_machines:
            return self.nodes[0]
        for attempt in reversed(timeline.read(self.path)):
            for one in attempt.ranks:
                if one.rank == rank and one.host in self.nodes:
                    return one.host
        return self.nodes[min(node_of(self.spec.parts, rank), len(self.nodes) - 1)]


def running(word: str, runs_dir: Path) -> RunningJob:
    """Return the job of the run with the name or job id `word`. Raise RequestError or Failure if it is not running."""
    path = find_runs.find_run(word, runs_dir)
    if find_runs.is_sweep(path):
        tasks = ", ".join(f"{path.name}/{number}" for number in list(find_runs.combinations(path))[:3])
        raise RequestError(f"{path.name} is a sweep: name one of its tasks: {tasks}, ...")
    path, now = path.absolute(), state.read(path)
    if now.name == "UNKNOWN" and now.source == state.NO_REPLY:
        raise Failure(f"Slurm does not reply ({now.reason}), so the nodes of {path.name} are unknown; try again later")
    if now.over:
        raise RequestError(
            f"{path.name} has ended ({now.name}), so it has no ranks any more. To see what happened: hpcinit why "
            f"{path.name}"
        )
    if now.name not in ("RUNNING", "COMPLETING", "STOPPED", "SUSPENDED"):
        waits = f", because of {now.reason}" if now.reason else ""
        raise RequestError(
            f"{path.name} has not started: job {now.job_id} is {now.name}{waits}. To follow the job: "
            f"hpcinit watch {path.name}"
        )
    plan = spec.load(path / run_folder.SPEC, to_run=False)
    if not now.engine.other_machines:
        return RunningJob(path, plan, now.engine, now.job_id, ((os.uname().nodename,),))
    try:
        with slurm_client.on_cluster(job_record.clusters(path)):
            found = queue.allocation(now.job_id)
    except Unreachable as error:
        raise Failure(f"{error}, so the nodes of {path.name} are unknown; try again later") from None
    if found is None:
        raise Failure(
            f"Slurm lists no nodes for job {now.job_id} of {path.name}: has the job just ended? Check with: "
            f"hpcinit status {path.name}"
        )
    components = tuple(tuple(nodelist.expand(text)) for text in found.nodelists)
    return RunningJob(path, plan, now.engine, found.job_id, components)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a command that runs on the nodes of the ranks.

    If this shell runs in a Slurm job, the variables of this job are excluded. The variable MARK shows that the process
    is not a rank.
    """
    kept = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    kept.pop(run_folder.ENV_FOLDER, None)
    return {**kept, stack_collector.MARK: "1"}


def srun(job: RunningJob, nodes: Sequence[str], command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the srun command that runs `command` once on each of the nodes, beside the ranks.

    Without Slurm, return `command` itself.
    """
    if not job.engine.other_machines:
        return list(command)
    name = job_record.clusters(job.path)
    first = ["srun", *([f"--clusters={name}"] if name else [])]
    parts: list[str] = []
    for group, component in enumerate(job.components):
        if own := [node for node in nodes if node in component]:
            which = [f"--het-group={group}"] if len(job.components) > 1 else []
            parts += [*([":"] if parts else first), *_beside(job, own), *which, *options, *command]
    return parts


def _beside(job: RunningJob, nodes: Sequence[str]) -> list[str]:
    count = len(nodes)
    return [
        "--overlap",  # shares CPUs, memory and GPUs with the ranks' step
        f"--jobid={job.job_id}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={nodelist.compress(nodes)}",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
    ]


def collector(asked: Mapping[str, Any]) -> list[str]:
    """Return the command that sends the request `asked` to stack_collector.py on a node.

    The node needs Python 3.9 or later, but not hpcinit.
    """
    code = Path(stack_collector.__file__).read_text()
    return ["sh", "-c", START, "sh", code, json.dumps(asked), sys.executable, "python3", "python"]
