"""Keeps the state of Hydra in a process whose own program uses Hydra too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase


@contextmanager
def kept() -> Iterator[None]:
    """Restore what composing changes for the whole process.

    That is Hydra itself, which can be initialized only once, the config of ${hydra:...}, the job's name, and
    version_base.
    """
    hydra, ours, base, job = (
        GlobalHydra.instance(),
        HydraConfig.instance(),
        VersionBase.instance(),
        JobRuntime.instance(),
    )
    before = (hydra.hydra, ours.cfg, base.version_base, job.get("name"))
    hydra.hydra = None
    try:
        yield
    finally:
        hydra.hydra, ours.cfg, base.version_base, name = before
        job.set("name", name)
