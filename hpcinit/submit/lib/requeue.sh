# shellcheck shell=bash disable=SC2154 # variables of record.sh, reason.sh and restarts.sh
# Requeue the job after its ranks ended, for the reasons in restart.on. SIGTERM to this script (scancel, the time limit,
# Slurm's own requeue) ends it before.
hpcinit_requeue() { # the ranks ended with status $1; return it, or 1 for 0, if the job is not requeued
  local reason try next=$((hpcinit_attempt + 1))
  reason=$(hpcinit_reason "$1")
  [ -n "$reason" ] && [[ " $hpcinit_on " == *" $reason "* ]] || return "$1"
  hpcinit_still_runs || return "$1"
  hpcinit_count_restart "$next" "$reason" || return "$(($1 ? $1 : 1))"
  echo "hpcinit: job $hpcinit_job is requeued ($reason): restart $next of at most $hpcinit_max_restarts"
  for try in 1 2 3 4 5 6; do
    scontrol requeue "$hpcinit_job" && { sleep 60 & wait; return "$1"; } # Slurm ends this script
    echo "hpcinit: scontrol requeue failed ($try of 6)"
    sleep 10
  done
  return "$(($1 ? $1 : 1))"
}
