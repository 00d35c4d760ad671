"""Whether Slurm preempts this very attempt, as the batch script asks. Ranks ask too: runtime/lifecycle/stopping.py."""

# Slurm notes when it decided to preempt, and keeps it over the requeue: it counts if it is later than the start.
LINES = """\
hpcinit_preempted() {
  local job start=''
  job=$(scontrol --oneliner show job "$hpcinit_job" 2>/dev/null)
  [[ $job =~ ' StartTime='([0-9T:-]+) ]] && start=${BASH_REMATCH[1]}
  [[ $job =~ ' PreemptTime='([0-9][0-9T:-]+) && ! ${BASH_REMATCH[1]} < $start ]]
}
""".splitlines()
