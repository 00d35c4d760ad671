"""Keeps the state of Hydra in a process whose own program uses Hydra too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """Restore what composing changes for the whole process: the config of ${hydra:...}, and version_base."""
    if "hydra" not in sys.modules:
        yield
        return
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415 - only where the program has imported Hydra
    from hydra.version import VersionBase  # noqa: PLC0415

    ours, base = HydraConfig.instance(), VersionBase.instance()
    before = (ours.cfg, base.version_base)
    try:
        yield
    finally:
        ours.cfg, base.version_base = before
