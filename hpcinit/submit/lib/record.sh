# shellcheck shell=bash
# Record the start and the end of this attempt. This precedes the modules, so that a failure there is recorded too.
# If SIGTERM ends bash, its EXIT trap runs with status 0, hence the trap for TERM.
hpcinit_job='' # as squeue names it; without Slurm: the process ID of this script
hpcinit_exit="$HPCINIT_RUN/exit.json"

hpcinit_record() { # write to exit.json: the event $1 (began or ended), the exit status $2, and the lines of the set-up
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
