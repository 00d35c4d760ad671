"""Values that Slurm's own options would change reach the ranks unchanged, and host names follow cluster.host_template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed

pytestmark = pytest.mark.slurm

# sbatch --export splits its value at commas and expands NAME=VALUE; hpcinit passes the whole environment instead.
VALUES = {
    "WITH_COMMAS": "a,b,ALL,NONE",
    "WITH_ASSIGNMENT": "x=1,PATH=/nowhere,y",
    "WITH_QUOTES": 'it\'s "so" $HOME `id` \\n',
    "WITH_SPACES": "  two  spaces ",
}
PROGRAM = """
import json, os, hpcinit
from hpcinit.runtime.process_state import state
run = hpcinit.init()
print(json.dumps([dict(os.environ), state.rendezvous.address if state.rendezvous else ""]))
"""


def test_values_and_host_names(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Values with commas and quotes, from the shell, job.env and cluster.env, are the same on both ranks. The ranks
    connect to the address of n1-ib0, which cluster.host_template makes of n1. spec.json has mode 0600."""
    (tmp_path / "train.py").write_text(PROGRAM)
    fast = "198.51.100.1"
    hosts = idle_slurm.directory / "etc/hosts"
    before = hosts.read_text()
    for node, address in (("n1", fast), ("n2", "198.51.100.2")):
        subprocess.run(
            idle_slurm.inside(node, ["ip", "address", "add", f"{address}/24", "dev", "eth0"]), check=True, timeout=60
        )
    try:
        with hosts.open("a") as file:  # every node has this file as its /etc/hosts
            file.write(f"{fast} n1-ib0\n198.51.100.2 n2-ib0\n")
        words = [f"+job.env.JOB_{name}={json.dumps(value)}" for name, value in VALUES.items() if '"' not in value]
        words += [f"+cluster.env.SITE_{name}={json.dumps(value)}" for name, value in VALUES.items() if '"' not in value]
        done = hpcinit(
            "submit", "cluster=mini", "nodes=2", "ranks_per_node=1", "wait=true", "cluster.host_template='{host}-ib0'",
            *words, "--", sys.executable, "train.py", env=idle_slurm.env | VALUES,
        )  # fmt: skip
    finally:
        hosts.write_text(before)
        for node, address in (("n1", fast), ("n2", "198.51.100.2")):
            subprocess.run(
                idle_slurm.inside(node, ["ip", "address", "del", f"{address}/24", "dev", "eth0"]), check=True
            )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = folder_of(done)
    for rank in (0, 1):
        env, address = json.loads(printed(folder, rank).splitlines()[-1])
        assert {name: env.get(name) for name in VALUES} == VALUES
        for name, value in VALUES.items():
            if '"' not in value:
                assert (env[f"JOB_{name}"], env[f"SITE_{name}"]) == (value, value)
        assert address == fast
    assert (folder / "spec.json").stat().st_mode & 0o777 == 0o600
