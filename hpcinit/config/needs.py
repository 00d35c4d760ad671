"""What a site wants of every user, and nobody else can know: whom to charge, which queue they may use."""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.config.schema import Config

# The keys that can be needed, with what to call a value and where a user finds one.
#   sbatch without an account at such a site: "Batch job submission failed: Invalid account or account/partition
#   combination specified", or "Job violates accounting/QOS policy" after the queue
KEYS = {
    "account": ("an account (a project's budget)", "sacctmgr show associations user=$USER format=account,qos"),
    "qos": ("a QOS", "sacctmgr show associations user=$USER format=account,qos"),
    "partition": ("a partition", "sinfo -s"),
}


def problems(config: Config) -> Iterator[str]:
    """One message for each key that the cluster needs and nobody has set."""
    cluster = config.cluster
    for name in dict.fromkeys(cluster.needs):
        if name not in KEYS:
            yield f"cluster.needs has {name!r}, expected keys out of: {', '.join(KEYS)}"
        elif getattr(config, name) is None:
            what, command = KEYS[name]
            yield (
                f"{name} is not set, and cluster {cluster.name} needs {what}: {name}=..., or keep it in a cluster file "
                f"of your own with `defaults: [{cluster.name}]`; yours are listed by: {command}"
            )
