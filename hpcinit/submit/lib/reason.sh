# shellcheck shell=bash disable=SC2154,SC2034 # variables of other blocks
# Find out why the ranks ended: from their record of a stop, from Slurm, from a hang report, or from the exit status.
hpcinit_hung='' # exit status of a rank that ended because it hung
hpcinit_on='' # restart.on

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
