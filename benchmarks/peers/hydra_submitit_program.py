"""The config of hpcinit, composed by Hydra and submitted by submitit, with neither checks nor records."""

import sys

import hydra
import submitit
from hydra.core.config_store import ConfigStore

from hpcinit.config.folders import folder
from hpcinit.config.schema import Config

ConfigStore.instance().store(name="hpcinit_schema", node=Config)
ConfigStore.instance().store(name="hpcinit_default_cluster", node={"defaults": [{"cluster": "local"}]})
with hydra.initialize_config_dir(str(folder()), version_base="1.3"):
    config = hydra.compose("hpcinit", sys.argv[1:])
executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(
    job_name=config.name, nodes=config.nodes, ntasks_per_node=config.ranks_per_node,
    partition=config.partition, time=config.time_min,
)  # fmt: skip
print(executor.submit(submitit.helpers.CommandFunction(["true"])).job_id)
