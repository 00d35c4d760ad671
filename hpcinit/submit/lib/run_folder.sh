# shellcheck shell=bash disable=SC2034 # other blocks use them
# The run folder, and the files in it that this script uses. The ranks write into it as well.
export HPCINIT_RUN=''
hpcinit_exit=''     # start and end of this attempt
hpcinit_log=''      # what this script and srun print
hpcinit_chain=''    # job; from: lines of the log before it; status: absent until the job ended
hpcinit_stopped=''  # why the ranks stopped early: job and reason
hpcinit_progress='' # step: the last one that rank 0 reported
hpcinit_restart=''  # the last restart: job, restart, step, without_progress
hpcinit_restarts='' # a line for each restart
hpcinit_errors=''   # error records of the ranks
hpcinit_unusable='' # JOB.RESTART.NODE for each node that failed its check
hpcinit_hang=''     # JOB/report.txt for each hang, and JOB/node.txt with the node at fault
