"""Builds the environment of a job from the user's environment, without other jobs' variables and without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.checks.checkout import SnapshotPlan
from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.records import secret_names
from hpcinit.records.spec import Spec
from hpcinit.slurm import slurm_client

# Variables that the job must not get. SBATCH_* would override #SBATCH lines. SLURM_* of a surrounding job would bind
# the new job's steps to the wrong cores (https://github.com/goodfire-ai/spd/issues/955) or memory. The others describe
# the ranks of another job.
# tests/submit/test_environment.py compares the list with sbatch(1) and srun(1), INPUT ENVIRONMENT VARIABLES.
FOREIGN = (
    "HPCINIT_NONCE",  # the batch script of a job sets it
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
    # The launchers of MVAPICH and Intel MPI set these for a rank. Other MV2_* and I_MPI_* are tuning options and stay.
    "MV2_COMM_WORLD_",
    "I_MPI_PIN_INFO",
    "TORCHELASTIC_",
    "HPCINIT_AGENT",
    "HPCINIT_ALLOCATED",
    "HPCINIT_ENGINE",
    "HPCINIT_ROUND",
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
# GPU numbers of this machine or of the surrounding job. Slurm replaces them only in a job that requests GPUs.
DEVICES = {
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
}
# Clients need these to find Slurm: without SLURM_CONF, sbatch looks in DNS
# (https://github.com/facebookincubator/submitit/issues/1814).
KEPT = {"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"}
# A proxy's URL may contain a user's name and password. Without the variable, the job could not reach the network.
PROXY = re.compile(r"(https?|ftp|all)_proxy", re.IGNORECASE)
# Variables that people set on purpose in a profile, and the equivalent keys.
INSTEAD = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "+cluster.sbatch.reservation",
    "SBATCH_CONSTRAINT": "+cluster.sbatch.constraint",
}


@dataclass(frozen=True)
class DroppedVariables:
    """The sorted names of the user's variables that are not passed to the job.

    foreign: variables that belong to other jobs.
    secrets: variables that look like secrets.
    instead: key=value settings that replace some of the variables in `foreign`.
    """

    foreign: Sequence[str] = ()
    secrets: Sequence[str] = ()
    instead: Sequence[str] = ()

    def __str__(self) -> str:
        """Return one line for the user that lists the dropped variables, or '' if none was dropped."""
        parts = [", ".join([*self.foreign, *self.secrets])]
        if self.instead:
            parts.append(f"if they are meant for this job, use {' '.join(self.instead)}")
        if self.secrets:
            name = self.secrets[0]
            parts.append(
                f"{name} looks like a secret, and Slurm stores a job's environment: put it in a file with mode 0600 "
                f"and pass '+secrets.{name}=FILE'; {secret_names.unless(name)}"
            )
        return "; ".join(parts) if parts[0] else ""


def clean_environment(env: Mapping[str, str], devices: bool = False) -> tuple[dict[str, str], list[str]]:
    """Return `env` without other jobs' variables, and the sorted names of the dropped variables.

    Variables that set squeue's output format are dropped too, because the batch script reads squeue's output. They are
    not listed.

    devices: whether to also drop the variables that select GPUs.
    """
    others = RANKS | (DEVICES if devices else set())
    dropped = sorted(k for k in env if k not in KEPT and (k in others or k.startswith(FOREIGN)))
    return {k: v for k, v in slurm_client.environment(env).items() if k not in dropped}, dropped


def job_environment(env: Mapping[str, str], config: Config) -> tuple[dict[str, str], DroppedVariables]:
    """Return the environment for sbatch, and which variables the job does not get.

    The job gets neither other jobs' variables nor secrets. A proxy setting is passed on even if it contains a password,
    unless config.secret_names lists the variable.
    """
    secrets, patterns = config.secrets, config.secret_names
    kept, foreign = clean_environment(env, devices=config.engine.other_machines)
    passed = {k for k in kept if k in KEPT or (PROXY.fullmatch(k) and not secret_names.named(k, patterns))}
    hidden = {k for k in kept if k not in passed and secret_names.is_secret(k, env[k], patterns)}
    found = sorted(k for k in kept if k in secrets or k in hidden)
    instead = [f"{key}={env[name]}" for name, key in INSTEAD.items() if name in foreign]
    kept = {k: v for k, v in kept.items() if k not in found}
    return kept, DroppedVariables(foreign, [k for k in found if k not in secrets], instead)


# The Spec of a run, with its paths.


def make_spec(config: Config, workdir: Path, code: SnapshotPlan | None = None, path: Path | None = None) -> Spec:
    """Return the Spec, which contains the settings that the job reads. The config must have passed its checks.

    code, path: the code snapshot and the run folder that contains it, if the run starts from a snapshot.
    """
    target = getattr(config.job, job_spec.program_kind(config))
    if code and path:
        workdir, target = code.place(path), code.target(path, target)
    return job_spec.make(config, str(workdir), target)
