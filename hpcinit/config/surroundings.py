"""Whether what the ranks run in fits together: modules and an environment, or an image."""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.config.schema import Config
from hpcinit.facts import quoting

RUNTIMES = ("pyxis", "apptainer", "singularity", None)
INSTEAD = {"image": "container.image", "mounts": "container.mounts", "bind": "container.mounts", "pwd": "job.workdir"}


def problems(config: Config) -> Iterator[str]:
    cluster, image = config.cluster, config.container.image
    if cluster.venv and cluster.conda:
        yield (
            f"cluster.venv is {cluster.venv!r} and cluster.conda is {cluster.conda!r}, expected one of them: "
            "cluster.venv=null or cluster.conda=null"
        )
    if image and cluster.container.runtime is None:
        names = ", ".join(name for name in RUNTIMES if name)
        yield (
            f"container.image is {image!r}, but how cluster {cluster.name} runs containers is not known: "
            f"cluster.container.runtime=... expects one of: {names}"
        )
    if image and cluster.container.runtime == "pyxis" and cluster.engine == "local":
        yield f"cluster.container.runtime is pyxis, an option of srun, and cluster {cluster.name} has none: apptainer"
    yield from _mounts(config)
    yield from _options(config)


def _mounts(config: Config) -> Iterator[str]:
    for key, mounts in (
        ("cluster.container.mounts", config.cluster.container.mounts),
        ("container.mounts", config.container.mounts),
    ):
        for mount in mounts:
            parts = str(mount).split(":")
            if not 2 <= len(parts) <= 3 or not all(part.startswith("/") for part in parts[:2]) or "," in str(mount):
                yield f"{key} has {mount!r}, expected SRC:DST or SRC:DST:ro with two absolute paths and no comma"


def _options(config: Config) -> Iterator[str]:
    for key, options in (
        ("cluster.container.options", config.cluster.container.options),
        ("container.options", config.container.options),
    ):
        for name, value in options.items():
            if name in INSTEAD:
                yield f"{key}.{name}: use {INSTEAD[name]} instead"
            elif not quoting.OPTION_NAME.fullmatch(str(name)):
                yield f"{key} has {name!r}, expected the long name of an option without its dashes, as in rocm"
            elif isinstance(value, (list, dict)):
                yield f"{key}.{name} is {value!r}, expected one value"
