"""submitit's batch mode as in its manual: a thousand calls of a function in one job array."""

import sys

import submitit

executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
executor.update_parameters(name="bench", nodes=1, tasks_per_node=1, timeout_min=10, slurm_partition="main")
with executor.batch():
    jobs = [executor.submit(submitit.helpers.CommandFunction(["true"]), str(n)) for n in range(int(sys.argv[1]))]
print(jobs[-1].job_id)
