# shellcheck shell=bash
# The run folder. The ranks write into it as well.
export HPCINIT_RUN=''
