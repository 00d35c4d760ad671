#!/bin/bash

# Parameters
#SBATCH --chdir=/shared/me/project
#SBATCH --job-name=smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --time=60

# setup
unset SLURM_JWT
export HPCINIT_RUN=/shared/me/runs/x-0001
hpcinit_job="${SLURM_JOB_ID:-$$}"
hpcinit_record() {
  printf '{"job": "%s", "pid": %d, "restart": %d, "%s": %d%s}\n' \
    "$hpcinit_job" "$$" "${SLURM_RESTART_COUNT:-0}" "$1" "$(date +%s)" "${2:-}" \
    > "$HPCINIT_RUN/exit.json.tmp" && mv "$HPCINIT_RUN/exit.json.tmp" "$HPCINIT_RUN/exit.json"
  [ "$1" = ended ] || { HPCINIT_ALLOCATED=$(date +%s.%N); export HPCINIT_ALLOCATED; }
}
rm -f "$HPCINIT_RUN/exit.json"; hpcinit_record began; trap 'exit 143' TERM
HPCINIT_ALLOCATED="${SLURM_JOB_START_TIME:-$HPCINIT_ALLOCATED}"
trap 'hpcinit_record ended ", \"exit_status\": $?"' EXIT
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 60))}" HPCINIT_JOB_LIMIT_S=3600
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1

# command
export SUBMITIT_EXECUTOR=slurm
/shared/me/venv/bin/python -m hpcinit.local.step --nodes=2 --ntasks=4 --ntasks-per-node=2 --export=ALL --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append --output=/shared/me/runs/x-0001/logs/rank-%t.log /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
