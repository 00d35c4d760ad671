"""What a job waits for, and how many jobs a run is: after, after_ok, singleton, chain and snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.config.schema import Config

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
    if config.snapshot_max_mb <= 0:
        yield f"snapshot_max_mb is {config.snapshot_max_mb:g}, expected more than 0"


def _words(key: str, value: object) -> Iterator[str]:
    if isinstance(value, (dict, bool)):
        yield f"{key} is {value!r}, expected a job id or a run, or a list of them, as in {key}=[4242,train-0001]"
        return
    for word in words(value):
        if not word.strip() or word == "None":
            yield f"{key} names {word!r}, expected a job id or a run: its folder, or the folder's name"
