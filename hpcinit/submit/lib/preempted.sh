# shellcheck shell=bash disable=SC2154 # hpcinit_job: record.sh
# Slurm stores when it decided to preempt a job, and keeps that over a requeue: it counts if it is not before the start.
hpcinit_preempted() { # whether Slurm preempts this attempt
  local job start=''
  job=$(scontrol --oneliner show job "$hpcinit_job" 2>/dev/null)
  [[ $job =~ ' StartTime='([0-9T:-]+) ]] && start=${BASH_REMATCH[1]}
  [[ $job =~ ' PreemptTime='([0-9][0-9T:-]+) && ! ${BASH_REMATCH[1]} < $start ]]
}
