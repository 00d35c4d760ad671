#!/bin/bash
#SBATCH --job-name=bench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=10
srun true
