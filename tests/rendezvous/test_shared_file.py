"""Ranks that know rank 0's host from the shared run folder alone, on a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, submit
from tests.test_faults import python_that

PROGRAM = """
import hpcinit, torch
run = hpcinit.init()
value = torch.ones(1) * run.world.rank
torch.distributed.all_reduce(value)
print(run.world.master_known, value.item(), flush=True)
torch.distributed.barrier()
"""
# No node resolves any other node's name, nor its own, and has no scontrol, as in some containers.
BLIND = f"""exec unshare -m bash -c '
    echo 127.0.0.1 localhost > "$TMPDIR/hosts-$SLURM_PROCID"; mount --bind "$TMPDIR/hosts-$SLURM_PROCID" /etc/hosts
    export PATH=/nowhere; exec "$0" "$@"
' "{sys.executable}" "$@"
"""


@pytest.mark.slurm
@pytest.mark.timeout(240)
def test_arbitrary_order_without_names(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """With --distribution=arbitrary no variable has rank 0's host. Its name does not resolve, and there is no scontrol:
    the others connect to the address that rank 0 writes into the run folder."""
    (tmp_path / "train.py").write_text(PROGRAM)
    order = ["+cluster.srun.distribution=arbitrary", "+cluster.srun.nodelist='n3,n1,n2'"]
    done = submit(
        hpcinit, idle_slurm, "nodes=3", "ranks_per_node=1", "wait=true", "comm.timeout_base_s=40", *order,
        python_that(tmp_path, BLIND), f"+cluster.env.TMPDIR={tmp_path}", "--", "train.py",
    )  # fmt: skip
    logs = [(folder_of(done) / f"logs/rank-{rank}.log").read_text() for rank in range(3)]
    assert done.returncode == 0, "\n".join(logs)
    for rank in range(3):
        assert "False 3.0" in printed(folder_of(done), rank)
    address = idle_slurm.address("n3")
    assert f"rank 0 listens at {address}" in logs[0] and "n3 does not resolve on n3" in logs[0]
