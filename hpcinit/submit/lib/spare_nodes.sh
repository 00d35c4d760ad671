# shellcheck shell=bash disable=SC2154 # variables of other blocks
# Spare nodes: if a node is at fault, restart the ranks in this job on the other nodes.
hpcinit_nodes='' # number of nodes that the ranks need
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
