"""The environment variables that Slurm sets, for virtual nodes on loopback addresses.

A test compares them with the variables of a real Slurm, recorded in tests/data/slurm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def nodelist(nodes: int) -> str:
    """Return '127.0.0.[1-4]': names that resolve everywhere, because they are addresses."""
    return "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"


def counts(per_node: int, nodes: int) -> str:
    """Return SLURM_TASKS_PER_NODE: '2(x4)' for 2 tasks on each of 4 nodes, '2' for one node."""
    return str(per_node) if nodes == 1 else f"{per_node}(x{nodes})"


def batch(job_id: int, name: str, nodes: int, per_node: int, workdir: str) -> dict[str, str]:
    """Return the variables of the batch script."""
    hosts, tasks = nodelist(nodes), counts(per_node, nodes)
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_NAME": name,
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NPROCS": str(nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_SUBMIT_DIR": workdir,
        "SLURM_SUBMIT_HOST": "127.0.0.1",
        "SLURMD_NODENAME": "127.0.0.1",
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
    }


def task(job: Mapping[str, str], nodes: int, per_node: int, rank: int, step: int = 0) -> dict[str, str]:
    """Return the variables of one task, in addition to those of the job. Ranks are distributed by block."""
    node = rank // per_node
    hosts, tasks = nodelist(nodes), counts(per_node, nodes)
    gtids = range(node * per_node, (node + 1) * per_node)
    return {
        # A step that was started manually has no job: its process id is the job id.
        "SLURM_JOB_ID": job.get("SLURM_JOB_ID", str(os.getpid())),
        "SLURM_JOB_NODELIST": job.get("SLURM_JOB_NODELIST", hosts),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEPID": str(step),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NPROCS": str(nodes * per_node),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_DISTRIBUTION": "block",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - node * per_node),
        "SLURM_GTIDS": ",".join(map(str, gtids)),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURMD_NODENAME": f"127.0.0.{node + 1}",
        "SLURM_SUBMIT_DIR": job.get("SLURM_SUBMIT_DIR", ""),
    }
