"""The environment that a submission passes on: the user's, without another job's variables and without secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base.text import expanded
from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.records import secret_names
from hpcinit.records.spec import Spec
from hpcinit.slurm import slurm_client
from hpcinit.submit import code_snapshot

# SBATCH_* beats #SBATCH lines; SLURM_* of a surrounding job binds the new one's steps to the wrong cores
# (https://github.com/goodfire-ai/spd/issues/955) or memory; the others make a rank believe in another world.
# Held against sbatch(1) and srun(1), INPUT ENVIRONMENT VARIABLES: tests/submit/test_environment.py.
FOREIGN = (
    "HPCINIT_NONCE",  # of the script that this shell runs in
    "SBATCH_",
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SALLOC_",
    "_SLURM_",  # _SLURM_SPANK_OPTION_pyxis_container_image: options of a step's plugins
    "SPANK_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "PALS_",  # HPE Cray
    "ALPS_APP_",
    "JSM_NAMESPACE_",
    "FLUX_TASK_",
    "HOROVOD_",
    "HYDI_",
    "MPI_LOCAL",
    # What MVAPICH's and Intel MPI's launchers set for a rank; MV2_* and I_MPI_* that tune stay, as NCCL_* does.
    "MV2_COMM_WORLD_",
    "I_MPI_PIN_INFO",
    "TORCHELASTIC_",
    "HPCINIT_AGENT",
    "HPCINIT_ALLOCATED",
    "HPCINIT_ENGINE",
    "HPCINIT_RUN",
    "HPCINIT_WORLD",
)
RANKS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# Numbers of the GPUs of this machine or of the surrounding job. Slurm sets them anew only in a job that asks for GPUs.
DEVICES = {
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
}
# How clients find Slurm at all: without SLURM_CONF, sbatch looks in DNS
# (https://github.com/facebookincubator/submitit/issues/1814).
KEPT = {"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}
# What people set on purpose in a profile, and the key that says the same.
INSTEAD = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "+cluster.sbatch.reservation",
    "SBATCH_CONSTRAINT": "+cluster.sbatch.constraint",
}


@dataclass(frozen=True)
class DroppedVariables:
    """Sorted names of what does not reach the job. instead: overrides that say what some of them said."""

    foreign: Sequence[str] = ()
    secrets: Sequence[str] = ()
    instead: Sequence[str] = ()

    def __str__(self) -> str:
        """One line for the user; '' if nothing was dropped."""
        parts = [", ".join([*self.foreign, *self.secrets])]
        if self.instead:
            parts.append(f"meant for this job? {' '.join(self.instead)}")
        if self.secrets:
            name = self.secrets[0]
            parts.append(
                f"{name} looks like a secret, and Slurm stores a job's environment: put it in a file with mode 0600 "
                f"and name it: '+secrets.{name}=FILE'; if it is none: 'secret_names=[-{name}]'"
            )
        return "; ".join(parts) if parts[0] else ""


def clean_environment(env: Mapping[str, str], devices: bool = False) -> tuple[dict[str, str], list[str]]:
    """Return `env` without variables of other jobs, and the sorted names of what was dropped.

    devices: those that number GPUs too. How the user likes squeue's output is dropped without a name: the batch script
    asks squeue and sinfo, too.
    """
    others = RANKS | (DEVICES if devices else set())
    dropped = sorted(k for k in env if k not in KEPT and (k in others or k.startswith(FOREIGN)))
    return {k: v for k, v in slurm_client.environment(env).items() if k not in dropped}, dropped


def job_environment(
    env: Mapping[str, str], secrets: Mapping[str, str], patterns: Sequence[str], devices: bool
) -> tuple[dict[str, str], DroppedVariables]:
    """What sbatch is started with: without other jobs' variables and without secrets.

    secrets: those that the job reads from files itself. patterns: further names of secrets.
    """
    kept, foreign = clean_environment(env, devices)
    found = sorted(k for k in kept if k in secrets or (k not in KEPT and secret_names.held(k, env[k], patterns)))
    instead = [f"{key}={env[name]}" for name, key in INSTEAD.items() if name in foreign]
    kept = {k: v for k, v in kept.items() if k not in found}
    return kept, DroppedVariables(foreign, [k for k in found if k not in secrets], instead)


# The Spec of a run with its paths, and where it runs.


def make_spec(
    config: Config, workdir: Path, code: code_snapshot.SnapshotPlan | None = None, path: Path | None = None
) -> Spec:
    """Return what the job needs of a config that has passed its checks.

    code: with a snapshot, from which the run in the folder `path` runs.
    """
    target = getattr(config.job, job_spec.program_kind(config))
    if code and path:
        workdir, target = code.place(path), code.target(path, target)
    return job_spec.make(config, str(workdir), target)


def workdir_of(config: Config) -> Path:
    return expanded(config.job.workdir or ".").absolute()


def runs_dir_of(config: Config) -> Path:
    return expanded(config.runs_dir).absolute()
