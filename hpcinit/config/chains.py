"""What a job waits for, and how many jobs a run is: after, after_ok, singleton, chain and snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.config.schema import Config
from hpcinit.facts import restarts

# Slurm's own default for the jobs of a user's that are in the queue is no limit; sites have one, mostly above this.
MOST_LINKS = 100


def words(value: object) -> list[str]:
    """The jobs and runs that `after` or `after_ok` names: one, or a list."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [str(item) for item in items]


def problems(config: Config) -> Iterator[str]:
    """One message for each key that is out of range, or that this cluster has nothing for."""
    if not 1 <= config.chain <= MOST_LINKS:
        yield f"chain is {config.chain}, expected 1 to {MOST_LINKS} jobs, one after the other"
    for key in ("after", "after_ok"):
        yield from _words(key, getattr(config, key))
    asked = [key for key in ("after", "after_ok", "singleton") if getattr(config, key)]
    asked += ["chain"] * (config.chain > 1)
    if asked and config.cluster.engine == "local":
        verb = "is" if len(asked) == 1 else "are"
        yield (
            f"{', '.join(asked)} {verb} given, but cluster {config.cluster.name} has no queue (engine: local): a job "
            "starts at once; run the first with wait=true, then the next, or choose a cluster with Slurm"
        )
    yield from _restarts(config)
    if config.snapshot_max_mb <= 0:
        yield f"snapshot_max_mb is {config.snapshot_max_mb:g}, expected more than 0"


def _restarts(config: Config) -> Iterator[str]:
    asked = config.restart
    if config.spares and config.cluster.engine == "local":
        yield f"spares is {config.spares}, but the nodes of cluster {config.cluster.name} are all this machine"
    if unknown := [word for word in asked.on if word not in restarts.REASONS]:
        yield f"restart.on has {', '.join(map(repr, unknown))}, expected some of: {', '.join(restarts.REASONS)}"
    if asked.budget is None:
        return
    for option in ("requeue", "no-requeue"):
        if option in config.cluster.sbatch:
            yield f"cluster.sbatch.{option} and restart.budget={asked.budget}: give one of them"
    if asked.budget and config.cluster.engine == "local":
        yield (
            f"restart.budget is {asked.budget}, but cluster {config.cluster.name} has no queue (engine: local) that "
            "could take a job back; choose a cluster with Slurm"
        )
    if restarts.TIME_LIMIT in asked.on and asked.budget and config.chain > 1:
        yield f"restart.on has time_limit, and so has chain={config.chain}, whose next job goes on: give one of them"


def _words(key: str, value: object) -> Iterator[str]:
    if isinstance(value, (dict, bool)):
        yield f"{key} is {value!r}, expected a job id or a run, or a list of them, as in {key}=[4242,train-0001]"
        return
    for word in words(value):
        if not word.strip() or word == "None":
            yield f"{key} names {word!r}, expected a job id or a run: its folder, or the folder's name"
