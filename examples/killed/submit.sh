#!/bin/sh
# A training run on this machine, without Slurm. Kill a rank, and watch it continue: kill -9 PID.
cd "$(dirname "$0")" || exit
hpcinit submit cluster=local nodes=1 ranks_per_node=2 parallel=ddp name=killed launch=fork restart.warm=true wait=true "$@" -- train.py
