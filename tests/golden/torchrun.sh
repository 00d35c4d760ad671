#!/bin/bash

# Parameters
#SBATCH --chdir=/shared/me/project
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=8
#SBATCH --job-name=smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --partition=main
#SBATCH --time=10

# setup
[ -n "${SLURM_JOB_ID:-}" ] || { echo "$0 is not in a job; start it with: sbatch $(printf %q "$0")" >&2; exit 2; }
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
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  printf '{"job": "%s", "restart": %d, "time": %d, "reason": "slurm"}\n' \
    "$hpcinit_job" "$SLURM_RESTART_COUNT" "$(date +%s)" >> "$HPCINIT_RUN/restarts.jsonl"
  echo "hpcinit: restart $SLURM_RESTART_COUNT of job $hpcinit_job begins on $SLURM_JOB_NODELIST"
  rm -f "$HPCINIT_RUN/stopped.json"
fi
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 10))}" HPCINIT_JOB_LIMIT_S=600
export OMP_NUM_THREADS=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=16 --export=ALL --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append /shared/me/venv/bin/python -u -m hpcinit.elastic /shared/me/runs/x-0001/spec.json
