"""launch.env_to_local in the batch script: the archive goes to every node's own disk, and the ranks run from there.

A step of its own, a keeper on each node (hpcinit.local_environment), holds the copy while the job runs and removes it
at the end. Where a node cannot take it, all ranks run from where the environment is, as without the key.
"""

from __future__ import annotations

from hpcinit.config import environments
from hpcinit.config.schema import Config
from hpcinit.facts import scratch
from hpcinit.facts.quoting import shell
from hpcinit.submission import trusted

PYTHON = '"$hpcinit_python"'  # in the place of the interpreter, in the line that starts the ranks
PATIENCE_S = 600  # for a node's word; 10 GB in 100,000 files are unpacked in less
# The keepers' words come through srun, not through files: a shared file system may show them a minute late. Their
# stdin is this shell's: at its end, however it comes, they go. --overlap and --mem=0 (no memory is counted as taken,
# srun(1)): the ranks' step gets what it would get.
# sed: a line of this srun must not be taken for one of the ranks', in which a failed node is looked for.
LINES = """\
hpcinit_python=@PYTHON@
hpcinit_to_local() { # send the environment to all nodes; the ranks' Python into $hpcinit_python
  local archive=@ARCHIVE@ old=@PREFIX@ new sent begin=$SECONDS
  { exec {hpcinit_fd}< "$archive"; } 2> /dev/null ||
    { hpcinit_not_local "$archive cannot be read: submitting again makes it anew"; return 0; }
  @OURS@ || { hpcinit_not_local "$archive @WHOSE@"; return 0; }
  touch -c "$archive" # in use
  coproc hpcinit_keeper { exec srun --overlap --no-kill --nodes="$SLURM_JOB_NUM_NODES" \\
    --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 --mem=0 --export=ALL --mpi=none \\
    --kill-on-bad-exit=0 --wait=0 @RUNS@ -m hpcinit.local_environment "$archive" "$old" \\
    2> >(sed -u 's/^/hpcinit: env_to_local: /' >&2); }
  hpcinit_keeper_pid=$! hpcinit_hears=${hpcinit_keeper[0]} hpcinit_tells=${hpcinit_keeper[1]}
  hpcinit_heard room || return 0
  new=$hpcinit_said/@ENVIRONMENT@
  sbcast "/dev/fd/$hpcinit_fd" "$hpcinit_said/@FILE@" || { hpcinit_not_local "sbcast failed with status $?"; return 0; }
  exec {hpcinit_fd}<&-; hpcinit_fd=''; sent=$((SECONDS - begin)); export @USED@=$hpcinit_said
  echo unpack >&"$hpcinit_tells"
  hpcinit_heard ready || return 0
  echo "hpcinit: env_to_local: $(($(stat -Lc %s "$archive") / 1000000)) MB on $SLURM_JOB_NUM_NODES node(s) in" \\
    "$((SECONDS - begin)) s, $sent of them until all was sent: $new"
  hpcinit_python=$new/@BIN@
  PATH=:$PATH:; PATH=${PATH//":$old/bin:"/":$new/bin:"}; PATH=${PATH#:}; PATH=${PATH%:}
  [ "${VIRTUAL_ENV:-}" != "$old" ] || VIRTUAL_ENV=$new
  [ "${CONDA_PREFIX:-}" != "$old" ] || CONDA_PREFIX=$new
}
hpcinit_heard() { # every node's word $1, into $hpcinit_said; they must all say the same of a folder
  local left=$SLURM_JOB_NUM_NODES word host said first=''
  for ((; left > 0; left--)); do
    read -r -t @PATIENCE@ -u "$hpcinit_hears" word host said ||
      { hpcinit_not_local "$left of $SLURM_JOB_NUM_NODES nodes did not answer"; return 1; }
    [ "$word" = "$1" ] || { hpcinit_not_local "$host: $said"; return 1; }
    [ "$1" != room ] || [ "$said" = "${first:=$said}" ] ||
      { hpcinit_not_local "$host has $said, another has $first: cluster.local_disk=FOLDER names one of all"; return 1; }
    hpcinit_said=$said
  done
}
hpcinit_not_local() { # for the reason $1
  echo "hpcinit: warning: env_to_local: $1; the ranks run from "@PREFIX@ >&2
  unset @USED@
  [ -z "${hpcinit_fd:-}" ] || exec {hpcinit_fd}<&-
  hpcinit_fd=''
  [ -z "${hpcinit_tells:-}" ] || eval "exec $hpcinit_tells>&-"
  hpcinit_tells=''
}
hpcinit_leave_local() { # the job ends with status $1
  [ -z "${hpcinit_tells:-}" ] || { eval "exec $hpcinit_tells>&-"; wait "$hpcinit_keeper_pid"; }
  return "$1"
}
"""


def lines(config: Config) -> list[str]:
    """What the batch script defines for it."""
    if not config.launch.env_to_local:
        return []
    from hpcinit.submission import packing  # noqa: PLC0415 - for those who want it

    interpreter = environments.packed(config)
    prefix = interpreter.parent.parent
    values = {
        "PYTHON": shell(environments.python(config)),
        "RUNS": shell(str(interpreter)),
        "ARCHIVE": shell(str(packing.archive(config))),
        "PREFIX": shell(str(prefix)),
        "BIN": shell(str(interpreter.relative_to(prefix))),
        **{"OURS": trusted.OURS, "WHOSE": trusted.WHOSE.format(path='"$archive"')},
        **{"USED": scratch.ENV_USED, "PATIENCE": str(PATIENCE_S)},
        **{"FILE": scratch.ARCHIVE, "ENVIRONMENT": scratch.ENVIRONMENT},
    }
    text = LINES
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text.splitlines()


def around(step: str, config: Config) -> str:
    """The lines `step`, that run the ranks, with what comes before and after them."""
    return f"hpcinit_to_local\n{step}\nhpcinit_leave_local $?" if config.launch.env_to_local else step
