# shellcheck shell=bash
# Read files of the run folder only if no other user could have written them. The open file is checked, so it cannot be
# replaced in between. The rule is that of hpcinit/base/safe_files.py, but a private group counts as other users.
hpcinit_source() { # read the file $1 into this shell, or end the job
  local fd
  exec {fd}< "$1" || { echo "hpcinit: error: $1 cannot be read on $(hostname)" >&2; exit 1; }
  # '1000:600' is the owner and the mode in octal. 2, 3, 6 and 7 for the group or others include the right to write.
  [[ $(stat -Lc %u:%a "/dev/fd/$fd") =~ ^($EUID|0):[0-7]*[0145][0145]$ ]] || {
    echo "hpcinit: error: another user can write $1 ($(stat -c 'owner %U, mode %a' "$1"))," \
      "expected only you: submit again" >&2
    exit 1
  }
  # shellcheck source=/dev/null
  . "/dev/fd/$fd"
  exec {fd}<&-
}
