"""submitit as in its manual: an AutoExecutor that submits a function."""

import submitit

executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
executor.update_parameters(name="bench", nodes=2, tasks_per_node=1, timeout_min=10, slurm_partition="main")
print(executor.submit(submitit.helpers.CommandFunction(["true"])).job_id)
