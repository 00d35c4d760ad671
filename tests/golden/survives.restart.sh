# shellcheck shell=bash
# Written by hpcinit, and read by the batch script.
hpcinit_exit="$HPCINIT_RUN/exit.json" # start and end of this attempt
hpcinit_log="$HPCINIT_RUN/logs/job.log" # what this script and srun print
hpcinit_chain="$HPCINIT_RUN/chain.txt" # job; from: lines of the log before it; status: absent until the job ended
hpcinit_stopped="$HPCINIT_RUN/stopped.txt" # why the ranks stopped early: job and reason
hpcinit_progress="$HPCINIT_RUN/step.txt" # step: the last one that rank 0 reported
hpcinit_restart="$HPCINIT_RUN/restart.txt" # the last restart: job, restart, step, without_progress
hpcinit_restarts="$HPCINIT_RUN/restarts.jsonl" # a line for each restart
hpcinit_errors="$HPCINIT_RUN/errors" # error records of the ranks
hpcinit_unusable="$HPCINIT_RUN/unusable" # JOB.RESTART.NODE for each node that failed its check
hpcinit_hang="$HPCINIT_RUN/hang" # JOB/report.txt for each hang, and JOB/node.txt with the node at fault

# The ranks and this script exchange plain files with a line 'KEY VALUE' for each fact.
hpcinit_fact() { # print the value of the key $2 in the file $1; nothing without such a file or key
  local key value
  [ -r "$1" ] || return 0
  while read -r key value; do
    [ "$key" != "$2" ] || echo "$value"
  done < "$1"
}

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

# This job is part of a chain, and the record of the previous job decides whether it runs. It runs
# - if that record has no status: the job was killed, or its first node was lost;
# - after 143 (128 + SIGTERM): Slurm or scancel ended the job;
# - after 0, if the ranks recorded a stop: rank 0 removes that record when the program is done;
# - after any other status, if a node was lost: the ranks on the other nodes then fail as well.
# A requeued job finds its own record, and runs.
hpcinit_node_failed() { # whether a message after line $1 of the log reports a lost node: 'srun: error: Node failure on n2'
  tail -n "+$(($1 + 1))" "$hpcinit_log" | grep -qi 'node failure'
}
hpcinit_check_chain() {
  local job from status
  job=$(hpcinit_fact "$hpcinit_chain" job)
  from=$(hpcinit_fact "$hpcinit_chain" from)
  status=$(hpcinit_fact "$hpcinit_chain" status)
  case $job:$status in
    "$SLURM_JOB_ID":* | *: | *:143) return ;;
    *:0)
      if [ -e "$hpcinit_stopped" ]; then
        [ "$(hpcinit_fact "$hpcinit_stopped" reason)" != not_recorded ] ||
          echo "hpcinit: warning: job $job of this chain stopped without recording why; was the disk full?"
        return
      fi
      echo "hpcinit: job $job of this chain completed, so job $SLURM_JOB_ID has nothing to do" ;;
    *)
      ! hpcinit_node_failed "${from:-0}" || return 0
      echo "hpcinit: job $job of this chain failed with exit status $status, so job $SLURM_JOB_ID runs nothing" ;;
  esac
  echo "hpcinit: to run the script again manually, remove $hpcinit_chain"
  exit "$status"
}
hpcinit_check_chain
rm -f "$hpcinit_chain"
echo "hpcinit: new attempt: job $SLURM_JOB_ID of a chain starts"

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

# Record this job for the next one of the chain, with its status once it ended.
hpcinit_record_link() { # the exit status $1
  printf '%s\n' "job $SLURM_JOB_ID" "from $hpcinit_chain_from" ${1:+"status $1"} > "$hpcinit_chain.tmp" &&
    mv "$hpcinit_chain.tmp" "$hpcinit_chain"
}
hpcinit_end_link() { # this job ends with status $1
  hpcinit_record ended "$1"
  hpcinit_record_link "$1"
}
rm -f "$hpcinit_stopped"
hpcinit_chain_from=$hpcinit_from
hpcinit_record_link ''
trap 'hpcinit_end_link $?' EXIT

# Count the restarts of this job, and those in a row without progress. Slurm also requeues without asking this script,
# after a preemption or a lost node, so each attempt checks the budget at its start as well.
hpcinit_max_restarts=2 # restart.max_restarts
hpcinit_without_progress=2 # restart.without_progress

hpcinit_furthest() { # set hpcinit_step, the furthest step so far, and hpcinit_idle, the restarts without progress
  local step
  hpcinit_step=$(hpcinit_fact "$hpcinit_restart" step)
  hpcinit_idle=$(hpcinit_fact "$hpcinit_restart" without_progress)
  : "${hpcinit_step:=null}" "${hpcinit_idle:=0}"
  step=$(hpcinit_fact "$hpcinit_progress" step)
  case $step in '' | *[!0-9]*) return ;; esac
  if [ "$hpcinit_step" = null ] || [ "$step" -gt "$hpcinit_step" ]; then
    hpcinit_step=$step hpcinit_idle=0
  else
    hpcinit_idle=$((hpcinit_idle + 1))
  fi
}
hpcinit_record_restart() { # record restart $1, for the reason $2, with the furthest step so far
  printf '%s\n' "job $hpcinit_job" "restart $1" "step $hpcinit_step" "without_progress $hpcinit_idle" \
    > "$hpcinit_restart.tmp" && mv "$hpcinit_restart.tmp" "$hpcinit_restart" &&
    { [ ! -e "$hpcinit_restarts" ] || cat "$hpcinit_restarts"; } > "$hpcinit_restarts.tmp" &&
    printf '{"job": "%s", "restart": %d, "time": %d, "reason": "%s", "step": %s, %s}\n' \
      "$hpcinit_job" "$1" "$(date +%s)" "$2" "$hpcinit_step" \
      "\"without_progress\": $hpcinit_idle, \"max_restarts\": $hpcinit_max_restarts" >> "$hpcinit_restarts.tmp" &&
    mv "$hpcinit_restarts.tmp" "$hpcinit_restarts"
}
hpcinit_count_restart() { # count restart $1, for the reason $2; return 1 if it is one too many
  hpcinit_furthest
  if [ "$1" -gt "$hpcinit_max_restarts" ]; then
    echo "hpcinit: no restart $1 ($2): restart.max_restarts is $hpcinit_max_restarts; furthest step: $hpcinit_step"
    return 1
  elif [ "$hpcinit_idle" -ge "$hpcinit_without_progress" ]; then
    echo "hpcinit: no restart $1 ($2): $hpcinit_idle restarts in a row made no progress beyond step $hpcinit_step" \
      "(restart.without_progress)"
    return 1
  fi
  # A full disk must not end the job: the budget counts SLURM_RESTART_COUNT, and not these records.
  hpcinit_record_restart "$1" "$2" ||
    echo "hpcinit: warning: cannot record restart $1 ($2) in $hpcinit_restarts" >&2
  return 0
}
hpcinit_attempt=${SLURM_RESTART_COUNT:-0}
if [ "$hpcinit_attempt" -gt 0 ]; then
  echo "hpcinit: new attempt: restart $hpcinit_attempt of job $hpcinit_job starts on $SLURM_JOB_NODELIST"
  [ "$(hpcinit_fact "$hpcinit_restart" job):$(hpcinit_fact "$hpcinit_restart" restart)" = "$hpcinit_job:$hpcinit_attempt" ] ||
    hpcinit_count_restart "$hpcinit_attempt" slurm || exit 1
fi
rm -f "$hpcinit_stopped"

# Find out why the ranks ended: from their record of a stop, from Slurm, from a hang report, or from the exit status.
hpcinit_hung=76 # exit status of a rank that ended because it hung
hpcinit_on='node_fail hang' # restart.on

hpcinit_reason() { # print why the ranks ended with status $1, as restart.on names it; nothing if they are done
  local stop=''
  [ "$(hpcinit_fact "$hpcinit_stopped" job)" != "$SLURM_JOB_ID" ] || stop=$(hpcinit_fact "$hpcinit_stopped" reason)
  [ "$1" -ne 0 ] || [ -n "$stop" ] || return 0
  if [ "$stop" = preempted ] || hpcinit_preempted; then echo preempted
  elif [ "$stop" = time_limit ] || [ "$1:$stop" = 0:not_recorded ]; then echo time_limit
  elif [ "$1" -eq 0 ]; then return 0
  elif [ -n "$(hpcinit_lost_nodes)$(hpcinit_unusable_nodes)" ]; then echo node_fail
  # srun returns the highest status of all ranks, and killed ranks have a higher one than those that hung.
  elif [ "$1" -eq "$hpcinit_hung" ] || [ -n "$(hpcinit_hang_reports)" ]; then echo hang
  elif [ "$1" -ne 2 ]; then echo failure # 2: a usage error, which a restart cannot fix
  fi
}
hpcinit_lost_nodes() { # print the nodes of the job that are down or do not respond, which sinfo marks with '*'
  local node state
  # Without --all, sinfo omits nodes that are in hidden partitions only.
  sinfo --all --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T' 2>/dev/null | sort -u |
    while read -r node state; do
      case ",${hpcinit_excluded:-},:$state" in *",$node,"*) ;; *:down* | *:fail* | *[*]) echo "$node" ;; esac
    done
}
hpcinit_unusable_nodes() { # print the nodes on which the check of this attempt refused to start the ranks
  local file
  for file in "$hpcinit_unusable/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}."*; do hpcinit_fact "$file" node; done
}
hpcinit_hang_reports() { # print the hang reports since the ranks started
  find "$hpcinit_hang" -path "*/$SLURM_JOB_ID.*/report.txt" -newer "$hpcinit_exit" 2>/dev/null
}
hpcinit_still_runs() { # whether Slurm is not ending the job
  sleep 1 # a SIGTERM for the job may reach this script later than the ranks
  [ "$(squeue --noheader --jobs="$hpcinit_job" --format=%T 2>/dev/null)" = RUNNING ]
}

# Spare nodes: if a node is at fault, restart the ranks in this job on the other nodes.
hpcinit_nodes=2 # number of nodes that the ranks need
hpcinit_excluded="" # nodes that the ranks no longer use: n2,n3

hpcinit_failed_node() { # print the node of the first rank that a signal ended, or else of the first that failed
  # A rank that a signal ended is the cause: the others fail because it is gone. 'n[1-2]' names no single node.
  local how node first=''
  while read -r how node _; do
    case $node in - | *'['*) continue ;; esac
    [ "$how" != signal ] || { echo "$node"; return; }
    first=${first:-$node}
  done < <(hpcinit_failures "$hpcinit_from")
  echo "$first"
}
hpcinit_hang_node() { # print the node at fault in a hang
  local report
  hpcinit_hang_reports | while read -r report; do hpcinit_fact "${report%/*}/node.txt" node; done | head -n 1
}
hpcinit_exclude_node() { # the ranks ended with status $1; exclude the node at fault, or return 1 if they cannot restart
  local reason bad node folder
  reason=$(hpcinit_reason "$1")
  case $reason in node_fail | hang | failure) [[ " $hpcinit_on " == *" $reason "* ]] || return 1 ;; *) return 1 ;; esac
  hpcinit_still_runs || return 1
  bad=$(hpcinit_lost_nodes; hpcinit_unusable_nodes)
  [ -n "$bad" ] || bad=$(hpcinit_hang_node)
  # In a hang, the ranks that wait for others end first, so srun's messages name the wrong node.
  [ -n "$bad" ] || [ "$reason" = hang ] || bad=$(hpcinit_failed_node)
  [ -n "$bad" ] || return 1
  for node in $bad; do hpcinit_excluded+="${hpcinit_excluded:+,}$node"; done
  bad=${bad//$'\n'/, }
  if [ $((SLURM_JOB_NUM_NODES - $(wc -w <<< "${hpcinit_excluded//,/ }"))) -lt "$hpcinit_nodes" ]; then
    echo "hpcinit: $reason on $bad, and no spare node is left"
    return 1
  fi
  echo "hpcinit: new attempt: $reason on $bad: restarting the ranks in the same job, without $hpcinit_excluded"
  for folder in "$hpcinit_errors" "$hpcinit_hang" "$hpcinit_unusable"; do # these records are not from the restarted ranks
    mkdir -p "$folder/before-$SLURM_JOB_ID"
    mv "$folder"/rank-*.json "$folder/$SLURM_JOB_ID."* "$folder/before-$SLURM_JOB_ID" 2>/dev/null
  done
  return 0
}
hpcinit_run_with_spare_nodes() { # start the ranks until they end for another reason, and return their status
  local status
  while :; do
    hpcinit_from=$(hpcinit_log_lines)
    hpcinit_record began # hang reports count if they are newer
    hpcinit_ranks
    status=$?
    hpcinit_exclude_node "$status" || return "$status"
  done
}

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
