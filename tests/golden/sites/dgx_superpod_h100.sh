#!/bin/bash
# train_gpt: -m hpcinit.jobs.train_gpt --steps 60, 2 nodes x 8 ranks
# It needs the run folder that hpcinit submit creates, also for its log. A script without one: hpcinit export

# Parameters
#SBATCH --account=proj01
#SBATCH --chdir=/shared/me/project
#SBATCH --cpus-per-task=14
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --qos=normal
#SBATCH --time=00:30:00

# setup
# Stop unless sbatch started this script: outside of a job, srun would request one without the options above.
[ -n "${SLURM_JOB_ID:-}" ] || { echo "not in a Slurm job; start the script with: sbatch $(printf %q "$0")" >&2; exit 2; }
# A token for Slurm's commands, which sbatch passes to the job. Without it no rank can read it, and srun uses munge.
unset SLURM_JWT

# The run folder, and the files in it that this script uses. The ranks write into it as well.
export HPCINIT_RUN=/shared/me/runs/x-0001
hpcinit_exit="$HPCINIT_RUN/exit.json" # start and end of this attempt
hpcinit_log="$HPCINIT_RUN/logs/job.log" # what this script and srun print
hpcinit_stopped="$HPCINIT_RUN/stopped.txt" # why the ranks stopped early: job and reason
hpcinit_restarts="$HPCINIT_RUN/restarts.jsonl" # a line for each restart

# srun returns the highest status of all ranks. After a failure it terminates the others, and returns their 143 or 137.
# Its messages show which rank failed first, and no other code reads them:
#   srun: error: n2: task 3: Killed                  srun: error: n[1-2]: tasks 2-3: Exited with exit code 1
hpcinit_log_lines() { # how many lines the log has now
  wc -l < "$hpcinit_log"
}
hpcinit_failures() { # print 'HOW NODE STATUS' for each failure after line $1; HOW: exited, signal or terminated
  tail -n "+$(($1 + 1))" "$hpcinit_log" | sed -En '
    s/^srun: error: ([^:]*): tasks? [^:]*: Exited with exit code ([0-9]+)$/exited \1 \2/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Terminated.*/terminated \1 143/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Aborted.*/signal \1 134/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Killed.*/signal \1 137/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Segmentation fault.*/signal \1 139/p; t
    s/^srun: error: ([^:]*): tasks? .*/signal \1 1/p; t
    s/.*(CANCELLED AT|Job step aborted|forcing job termination).*/terminated - 143/p'
}
hpcinit_own_status() { # srun ended with status $1; return the status of the rank that failed first
  local how status
  [ "$1" -ne 0 ] && read -r how _ status < <(hpcinit_failures "$hpcinit_from") || return "$1"
  # During the grace time of a preemption, only the ranks get SIGTERM.
  [ "$how" != terminated ] && ! hpcinit_preempted || return "$1"
  return "$status"
}
hpcinit_from=$(hpcinit_log_lines)

# Record the start and the end of this attempt, before the modules, so that a failure there is recorded too.
# bash runs the EXIT trap with status 0 if SIGTERM ended it, hence the trap for TERM.
hpcinit_job="${SLURM_JOB_ID:-$$}" # as squeue names it; without Slurm: the process ID of this script

hpcinit_record() { # that this attempt $1 (began or ended), its exit status $2, and lines of modules and cluster.setup
  printf '{"job": "%s", "pid": %d, "restart": %d, "%s": %d%s%s%s}\n' \
    "$hpcinit_job" "$$" "${SLURM_RESTART_COUNT:-0}" "$1" "$(date +%s)" "${2:+, \"exit_status\": $2}" \
    "${hpcinit_line:+, \"line\": \"$hpcinit_line\"}" "${hpcinit_failed:+, \"failed\": \"$hpcinit_failed\"}" \
    > "$hpcinit_exit.tmp" && mv "$hpcinit_exit.tmp" "$hpcinit_exit"
  [ "$1" = ended ] || { HPCINIT_ALLOCATED=$(date +%s.%N); export HPCINIT_ALLOCATED; }
}
hpcinit_line=""; hpcinit_failed=""
rm -f "$hpcinit_exit"
hpcinit_record began
trap 'exit 143' TERM
trap 'hpcinit_record ended $?' EXIT
HPCINIT_ALLOCATED="${SLURM_JOB_START_TIME:-$HPCINIT_ALLOCATED}" # for hpcinit report

# Slurm stores when it decided to preempt a job, and keeps that over a requeue: it counts if it is not before the start.
hpcinit_preempted() { # whether Slurm preempts this attempt
  local job start=''
  job=$(scontrol --oneliner show job "$hpcinit_job" 2>/dev/null)
  [[ $job =~ ' StartTime='([0-9T:-]+) ]] && start=${BASH_REMATCH[1]}
  [[ $job =~ ' PreemptTime='([0-9][0-9T:-]+) && ! ${BASH_REMATCH[1]} < $start ]]
}

# Slurm, or scontrol requeue, started this job again: record it, and mark the start of this attempt in the log.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  printf '{"job": "%s", "restart": %d, "time": %d, "reason": "slurm"}\n' \
    "$hpcinit_job" "$SLURM_RESTART_COUNT" "$(date +%s)" >> "$hpcinit_restarts"
  echo "hpcinit: new attempt: restart $SLURM_RESTART_COUNT of job $hpcinit_job starts on $SLURM_JOB_NODELIST"
  rm -f "$hpcinit_stopped"
fi

# When the job reaches its time limit. No rank waits longer for the others at the start.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 30))}" HPCINIT_JOB_LIMIT_S=1800

# command
# Start the ranks. hpcinit prepares each one as in spec.json, and runs: -m hpcinit.jobs.train_gpt --steps 60
srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=14 --export=ALL --mpi=none \
    --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append \
    --output=/shared/me/runs/x-0001/logs/rank-%t.log \
    '--container-image=nvcr.io#nvidia/pytorch:25.01-py3' \
    --container-mounts=/shared/me/project:/shared/me/project,/shared/me/runs/x-0001:/shared/me/runs/x-0001 \
    python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
hpcinit_own_status $?
