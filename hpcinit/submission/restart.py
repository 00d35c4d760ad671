"""Requeue and continue: the batch script itself, on the host and outside of any container, sends its job back.

Why so: docs/decisions/0018-requeue-from-the-batch-shell.md.
"""

from __future__ import annotations

from hpcinit.config.schema import Config
from hpcinit.facts import hangs, runfolder
from hpcinit.facts.elastic import ASIDE
from hpcinit.facts.restarts import FAILURE, HANG, NODE_FAIL, PREEMPTED, SLURM, TIME_LIMIT
from hpcinit.facts.stopping import NOT_RECORDED, Reason

# Whether one more restart is left, and whether the last ones have brought the run further. Slurm requeues by itself too
# (preemption, a lost node), without asking anybody: so it is looked at when an attempt begins as well. A restart's line
# is written before the job is sent back, with the furthest step that was told until then.
BUDGET = """\
hpcinit_furthest() { # of steps told by this attempt, into $hpcinit_step; the restarts before are read from their record
  local last told
  hpcinit_step=null hpcinit_idle=0
  last=$(tail -n 1 "@RESTARTS@" 2>/dev/null) && [[ $last =~ '"step": '([0-9]+) ]] && hpcinit_step=${BASH_REMATCH[1]}
  [[ $last =~ '"without_progress": '([0-9]+) ]] && hpcinit_idle=${BASH_REMATCH[1]}
  told=$(cat "@PROGRESS@" 2>/dev/null) && [[ $told =~ '"step": '([0-9]+) ]] || return 0
  if [ "$hpcinit_step" = null ] || [ "${BASH_REMATCH[1]}" -gt "$hpcinit_step" ]; then
    hpcinit_step=${BASH_REMATCH[1]} hpcinit_idle=0
  else
    hpcinit_idle=$((hpcinit_idle + 1))
  fi
}
hpcinit_restart() { # one more, number $1, for the reason $2; 1 if there may be none
  hpcinit_furthest
  if [ "$1" -gt @BUDGET@ ]; then
    echo "hpcinit: restart $1 ($2) is not begun: restart.budget is @BUDGET@; furthest step: $hpcinit_step"; return 1
  elif [ "$hpcinit_idle" -ge @IDLE@ ]; then
    echo "hpcinit: restart $1 ($2) is not begun: $hpcinit_idle in a row have come no further than step $hpcinit_step" \\
      "(restart.without_progress)"; return 1
  fi
  # A full disk must not end the job: the budget counts SLURM_RESTART_COUNT, and not these lines.
  { [ ! -e "@RESTARTS@" ] || cat "@RESTARTS@"; } > "@RESTARTS@.tmp" &&
    printf '{"job": "%s", "restart": %d, "time": %d, "reason": "%s", "step": %s, %s}\\n' \\
      "$hpcinit_job" "$1" "$(date +%s)" "$2" "$hpcinit_step" \\
      "\\"without_progress\\": $hpcinit_idle, \\"budget\\": @BUDGET@" >> "@RESTARTS@.tmp" &&
    mv "@RESTARTS@.tmp" "@RESTARTS@" ||
    echo "hpcinit: warning: restart $1 ($2) is not in @RESTARTS@, which cannot be written" >&2
  return 0
}
hpcinit_attempt=${SLURM_RESTART_COUNT:-0}
if [ "$hpcinit_attempt" -gt 0 ]; then
  tail -n 1 "@RESTARTS@" 2>/dev/null | grep -qF "{\\"job\\": \\"$hpcinit_job\\", \\"restart\\": $hpcinit_attempt," ||
    hpcinit_restart "$hpcinit_attempt" @SLURM@ || exit 1
  echo "hpcinit: restart $hpcinit_attempt of at most @BUDGET@ of job $hpcinit_job begins on $SLURM_JOB_NODELIST"
fi
rm -f "@STOPPED@"
"""

# Without restart.budget Slurm requeues as the site has it, and scontrol requeue does: what the attempts before have
# said stays in the logs, above this line.
BEGINS = """\
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  printf '{"job": "%s", "restart": %d, "time": %d, "reason": "@SLURM@"}\\n' \\
    "$hpcinit_job" "$SLURM_RESTART_COUNT" "$(date +%s)" >> "@RESTARTS@"
  echo "hpcinit: restart $SLURM_RESTART_COUNT of job $hpcinit_job begins on $SLURM_JOB_NODELIST"
  rm -f "@STOPPED@"
fi
"""

# sinfo marks nodes that do not answer with '*'; without --all it omits nodes that are in hidden partitions only.
# srun's own status is the highest of all ranks, and ranks that were killed have higher ones than those that hung: the
# report of the hang tells, too.
REASON = """\
hpcinit_reason() { # why the ranks have ended with status $1; nothing if they are done
  local left
  left=$(cat "@STOPPED@" 2>/dev/null)
  case $left in *"\\"job\\": \\"$SLURM_JOB_ID\\""*) ;; *) left='' ;; esac
  [ "$1" -ne 0 ] || [ -n "$left" ] || return 0
  if [[ $left == *"@STOP_PREEMPTED@"* ]] || hpcinit_preempted; then echo @PREEMPTED@
  elif [[ $left == *"@STOP_TIME_LIMIT@"* ]] || { [ "$1" -eq 0 ] && [[ $left == *"@NOT_RECORDED@"* ]]; }; then
    echo @TIME_LIMIT@
  elif [ "$1" -eq 0 ]; then return 0
  elif [ -n "$(hpcinit_lost)" ]; then echo @NODE_FAIL@
  elif [ "$1" -eq @HUNG@ ] || [ -n "$(hpcinit_hang)" ]; then echo @HANG@
  elif [ "$1" -ne 2 ]; then echo @FAILURE@
  fi
}
hpcinit_lost() { # nodes of the job that are down or do not answer
  local node state
  sinfo --all --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T' 2>/dev/null | sort -u |
    while read -r node state; do
      case ",${hpcinit_out:-},:$state" in *",$node,"*) ;; *:down*|*:fail*|*[*]) echo "$node" ;; esac
    done
}
hpcinit_hang() { # the reports of hangs since the ranks began
  find "@RUN@/@HANG_FOLDER@" -path "*/$SLURM_JOB_ID.*/@HANG_REPORT@" -newer "@RUN@/@EXIT@" 2>/dev/null
}
"""

# SIGTERM to this shell (scancel, the time limit, Slurm's own requeue) ends it before it comes here, by its trap; the
# second waited is for one that comes after the ranks'. A job that Slurm is ending is not brought back.
AFTER = """\
hpcinit_after() { # the ranks have ended with status $1: once more, or not
  local reason try on=" @ON@ "
  reason=$(hpcinit_reason "$1")
  [ -n "$reason" ] && [[ $on == *" $reason "* ]] || return "$1"
  sleep 1
  [ "$(squeue --noheader --jobs="$hpcinit_job" --format=%T 2>/dev/null)" = RUNNING ] || return "$1"
  hpcinit_restart "$((hpcinit_attempt + 1))" "$reason" || return "$(($1 ? $1 : 1))"
  echo "hpcinit: job $hpcinit_job is requeued ($reason): restart $((hpcinit_attempt + 1)) of at most @BUDGET@"
  for try in 1 2 3 4 5 6; do
    scontrol requeue "$hpcinit_job" && { sleep 60 & wait; return "$1"; } # until Slurm ends this
    echo "hpcinit: scontrol requeue failed ($try of 6)"; sleep 10
  done
  return "$(($1 ? $1 : 1))"
}
"""


# srun says of the first rank to fail 'srun: error: n2: task 3: Killed'; of several nodes at a time 'n[1-2]: tasks 2-3',
# which names none. One that a signal ended comes before those that ended by themselves: their peer was gone. In a hang
# those who wait end first, and only the report, which does not name them 'on' a node, knows who is to blame.
SPARES = r"""
hpcinit_out='' # nodes that the ranks are kept from: n2,n3
hpcinit_spare() { # the ranks have ended with status $1: whether they can begin again here, without the node to blame
  local reason bad node told on=" @ON@ "
  reason=$(hpcinit_reason "$1")
  case $reason in @NODE_FAIL@|@HANG@|@FAILURE@) [[ $on == *" $reason "* ]] || return 1 ;; *) return 1 ;; esac
  sleep 1
  [ "$(squeue --noheader --jobs="$hpcinit_job" --format=%T 2>/dev/null)" = RUNNING ] || return 1
  bad=$(hpcinit_lost)
  [ -n "$bad" ] || bad=$(hpcinit_hang | while read -r node; do cat "$node"; done |
    sed -n 's/^rank [0-9]* on \([^ ]*\) .*/\1/p; s/^node \([^ ]*\) has said nothing for .*/\1/p' | head -n 1)
  told=$(tail -n "+$((hpcinit_from + 1))" "@JOB_LOG@" | grep '^srun: error: [^ :[]*: tasks\? ')
  [ -n "$bad" ] || [ "$reason" = @HANG@ ] ||
    bad=$({ grep -v ': \(Terminated\|Exited .*\)$' <<< "$told"; echo "$told"; } |
      sed -n 's/^srun: error: \([^:]*\):.*/\1/p' | head -n 1)
  [ -n "$bad" ] || return 1
  for node in $bad; do hpcinit_out+="${hpcinit_out:+,}$node"; done
  node=$(wc -w <<< "${hpcinit_out//,/ }")
  if [ $((SLURM_JOB_NUM_NODES - node)) -lt @NODES@ ]; then
    echo "hpcinit: $reason on ${bad//$'\n'/, }, and no spare node is left"; return 1
  fi
  echo "hpcinit: $reason on ${bad//$'\n'/, }: the ranks begin again in the same job, without $hpcinit_out"
  for told in "@RUN@/errors" "@RUN@/@HANG_FOLDER@"; do # what they left is no failure of those that come
    mkdir -p "$told/@ASIDE@$SLURM_JOB_ID"
    mv "$told"/rank-*.json "$told/$SLURM_JOB_ID."* "$told/@ASIDE@$SLURM_JOB_ID" 2>/dev/null
  done
  return 0
}
"""
# Slurm 22.05 counts what a step had that a lost node has ended as taken for ever ('unable to update job's core use
# information due to job resizing'): hence --overlap. exit.json of a begin is what the report of a hang is newer than.
LOOP = """\
while :; do
  hpcinit_from=$(wc -l < "@JOB_LOG@"); hpcinit_record began
  @STEP@
  hpcinit_status=$?
  hpcinit_spare "$hpcinit_status" || break
done
"""


def wanted(config: Config) -> bool:
    return bool(config.restart.budget) and config.cluster.engine == "slurm"


def option(config: Config) -> dict[str, bool]:
    """For sbatch: whether the job may be requeued at all. As the site has it where nothing is asked."""
    spares = {"no-kill": True} if config.spares else {}  # the job goes on where a node is lost
    if config.restart.budget is None or config.cluster.engine != "slurm":
        return spares
    return {**spares, **({"requeue": True} if config.restart.budget else {"no-requeue": True})}


def asks(config: Config) -> bool:
    """Whether the batch script looks at why its ranks have ended."""
    return wanted(config) or (bool(config.spares) and config.cluster.engine == "slurm")


def lines(config: Config) -> list[str]:
    """What the batch script begins with, after it has noted its begin."""
    if config.cluster.engine != "slurm":
        return []
    parts = [BUDGET if wanted(config) else BEGINS] + [REASON] * asks(config)
    return _filled(
        "".join(parts + [SPARES.lstrip()] * bool(config.spares) + [AFTER] * wanted(config)), config
    ).splitlines()


def around(step: str, config: Config) -> str:
    """The line `step`, that runs the ranks, with what follows it."""
    if not config.spares:
        return f"{step}\nhpcinit_after $?" if wanted(config) else step
    launcher, _, rest = step.partition(" ")
    here = f'{launcher} ${{hpcinit_out:+--overlap --exclude="$hpcinit_out"}} {rest}'
    last = 'hpcinit_after "$hpcinit_status"' if wanted(config) else '(exit "$hpcinit_status")'
    return _filled(LOOP, config).replace("@STEP@", here) + last


def _filled(text: str, config: Config) -> str:
    run, asked = f"${runfolder.ENV_FOLDER}", config.restart
    values = {
        "RESTARTS": f"{run}/{runfolder.RESTARTS}",
        "PROGRESS": f"{run}/{runfolder.PROGRESS}",
        "STOPPED": f"{run}/{runfolder.STOPPED}",
        **{
            "RUN": run,
            "EXIT": runfolder.EXIT,
            "ASIDE": ASIDE,
            "HANG_FOLDER": hangs.FOLDER,
            "HANG_REPORT": hangs.REPORT,
        },
        **{"JOB_LOG": f"{run}/{runfolder.JOB_LOG}", "NODES": str(config.nodes)},
        "BUDGET": str(asked.budget),
        "IDLE": str(asked.without_progress or NEVER),
        "ON": " ".join(asked.on),
        "HUNG": str(hangs.HUNG),
        "STOP_PREEMPTED": str(Reason.PREEMPTED),
        "STOP_TIME_LIMIT": str(Reason.TIME_LIMIT),
        "NOT_RECORDED": NOT_RECORDED,
        **{"PREEMPTED": PREEMPTED, "TIME_LIMIT": TIME_LIMIT, "NODE_FAIL": NODE_FAIL, "HANG": HANG},
        **{"FAILURE": FAILURE, "SLURM": SLURM},
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


NEVER = 10**9  # restarts
