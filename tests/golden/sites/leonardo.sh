#!/bin/bash

# Parameters
#SBATCH --account=proj01
#SBATCH --chdir=/shared/me/project
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --job-name=train_gpt
#SBATCH --mem=480G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --partition=boost_usr_prod
#SBATCH --qos=normal
#SBATCH --time=30

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
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 30))}" HPCINIT_JOB_LIMIT_S=1800

# command
export SUBMITIT_EXECUTOR=slurm
srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --export=ALL --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append --output=/shared/me/runs/x-0001/logs/rank-%t.log /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
