# shellcheck shell=bash
# The ranks and this script exchange plain files with a line 'KEY VALUE' for each fact.
hpcinit_fact() { # print the value of the key $2 in the file $1; nothing without such a file or key
  local key value
  [ -r "$1" ] || return 0
  while read -r key value; do
    [ "$key" != "$2" ] || echo "$value"
  done < "$1"
}
