# shellcheck shell=bash disable=SC2154 # variables of run_folder.sh
# What srun and Slurm printed about failed ranks. No other code reads their messages, for example:
#   srun: error: n2: task 3: Killed                  srun: error: n[1-2]: tasks 2-3: Exited with exit code 1
#   srun: error: Node failure on n2                  *** JOB 15 ON n1 CANCELLED AT ... DUE TO NODE FAILURE ***
hpcinit_log_lines() { # how many lines the log has now
  wc -l < "$hpcinit_log"
}
hpcinit_node_failed() { # whether a message after line $1 of the log reports a lost node
  tail -n "+$(($1 + 1))" "$hpcinit_log" | grep -qi 'node failure'
}
hpcinit_failures() { # print 'HOW NODE' for each failure after line $1; HOW: an exit status, 'signal' or 'terminated'
  local line how node
  tail -n "+$(($1 + 1))" "$hpcinit_log" |
    grep '^srun: error: .*: tasks\? \|CANCELLED AT\|Job step aborted\|forcing job termination' |
    while read -r line; do
      node=-
      case $line in
        'srun: error: '*': task'*) node=${line#srun: error: } node=${node%%:*} ;;
      esac
      case $line in
        'srun: error: '*': Exited with exit code '*) how=${line##* } ;;
        'srun: error: '*': Terminated' | *'CANCELLED AT'* | *'Job step'* | *forcing*) how=terminated ;;
        *) how=signal ;;
      esac
      echo "$how $node"
    done
}
