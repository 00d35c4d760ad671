#!/bin/bash

# Parameters
#SBATCH --account=proj-1
#SBATCH --chdir=/shared/me/project
#SBATCH --comment='two words, a # and $HOME'
#SBATCH --cpus-per-task=7
#SBATCH --exclusive
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=smoke
#SBATCH --mail-type=NONE
#SBATCH --mem=512M
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=90

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
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 90))}" HPCINIT_JOB_LIMIT_S=5400
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
type module > /dev/null 2>&1 || . /etc/profile
module purge
module load gcc cuda || { echo 'hpcinit: error: cluster.modules: `module load` failed' "on $(hostname)" >&2; exit 1; }
export NCCL_DEBUG=WARN
export GREETING='hello world'
# cluster.setup, shell by design:
ulimit -c 0

# command
export SUBMITIT_EXECUTOR=slurm
srun --nodes=3 --ntasks=6 --ntasks-per-node=2 --cpus-per-task=7 --export=ALL --mpi=none --kill-on-bad-exit=0 --cpu-bind=cores --gpu-bind=closest --unbuffered --open-mode=append --output=/shared/me/runs/x-0001/logs/rank-%t.log /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
