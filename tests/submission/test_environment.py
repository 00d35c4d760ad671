"""What of the submitting environment does not reach the job."""

from __future__ import annotations

from hpcinit.submission.environment import clean


def test_another_jobs_variables_are_dropped_and_named() -> None:
    """Variables of a surrounding job and of rank launchers are dropped; what finds Slurm stays."""
    foreign = {
        "SBATCH_PARTITION": "x",
        "SLURM_CPU_BIND": "x",
        "SRUN_DEBUG": "1",
        "PMIX_RANK": "0",
        "RANK": "7",
        "OMPI_COMM_WORLD_RANK": "1",
        "HPCINIT_ENGINE": "1",
    }
    own = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "RANKING": "1", "SLURM_JWT": "t"}
    assert clean({**foreign, **own}) == (own, sorted(foreign))
