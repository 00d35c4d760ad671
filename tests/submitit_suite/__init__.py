"""submitit's own tests of executors and jobs, with its executor for Slurm replaced by hpcinit's: `make test-submitit`."""
