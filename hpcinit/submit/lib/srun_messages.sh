# shellcheck shell=bash disable=SC2154 # variables of run_folder.sh
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
