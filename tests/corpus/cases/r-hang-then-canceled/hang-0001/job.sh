#!/bin/bash
# hang: hang.py, 1 node x 3 ranks
# Written by hpcinit 0.1.1.dev777+g46a47bfb7.d20261125 for root on 2026-11-25. Config: /home/user/projects/runs/hang-0001/config.yaml
# Command: hpcinit submit cluster=local nodes=1 ranks_per_node=3 job.name=hang hang.after_s=12 wait=true -- hang.py
# It needs the run folder that hpcinit submit creates, also for its log. A script without one: hpcinit export
#SBATCH --chdir=/home/user/projects
#SBATCH --job-name=hang
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=3
#SBATCH --open-mode=append
#SBATCH --output=/home/user/projects/runs/hang-0001/logs/job.log
#SBATCH --time=01:00:00

# A token for Slurm's commands, which sbatch passes to the job. Without it no rank can read it, and srun uses munge.
unset SLURM_JWT

# The run folder, and the files in it that this script uses. The ranks write into it as well.
export HPCINIT_RUN=/home/user/projects/runs/hang-0001
hpcinit_exit="$HPCINIT_RUN/exit.json" # start and end of this attempt

# Record the start and the end of this attempt, before the modules, so that a failure there is recorded too.
# bash runs the EXIT trap with status 0 if SIGTERM ended it, hence the trap for TERM.
hpcinit_job="${SLURM_JOB_ID:-$$}" # as squeue names it; without Slurm: the process ID of this script

hpcinit_record() { # that this attempt $1 (began or ended), and its exit status $2
  printf '{"job": "%s", "pid": %d, "restart": %d, "%s": %d%s}\n' \
    "$hpcinit_job" "$$" "${SLURM_RESTART_COUNT:-0}" "$1" "$(date +%s)" "${2:+, \"exit_status\": $2}" \
    > "$hpcinit_exit.tmp" && mv "$hpcinit_exit.tmp" "$hpcinit_exit"
  [ "$1" = ended ] || { HPCINIT_ALLOCATED=$(date +%s.%N); export HPCINIT_ALLOCATED; }
}
rm -f "$hpcinit_exit"
hpcinit_record began
trap 'exit 143' TERM
trap 'hpcinit_record ended $?' EXIT
HPCINIT_ALLOCATED="${SLURM_JOB_START_TIME:-$HPCINIT_ALLOCATED}" # for hpcinit report

# When the job reaches its time limit. No rank waits longer for the others at the start.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 60))}" HPCINIT_JOB_LIMIT_S=3600

# Variables of cluster.env and job.env.
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1

# Start the ranks. hpcinit prepares each one as in spec.json, and runs: hang.py
/home/user/hpcin/.venv/bin/python -m hpcinit.local.step --nodes=1 --ntasks=3 --ntasks-per-node=3 \
    --export=ALL --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append \
    --output=/home/user/projects/runs/hang-0001/logs/rank-%t.log \
    /home/user/hpcin/.venv/bin/python -u -m hpcinit.run /home/user/projects/runs/hang-0001/spec.json
