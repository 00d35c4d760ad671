"""What differs between Hydra 1.3, which needs OmegaConf 2.3, and Hydra 1.4, which needs OmegaConf 2.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import OmegaConf

try:
    from omegaconf._yaml import get_yaml_loader  # type: ignore[import-not-found]
except ImportError:
    from omegaconf._utils import get_yaml_loader

IS_1_3 = hydra.__version__.startswith("1.3.")
# For hydra.main and initialize_config_dir. 1.3 warns without version_base, and 1.4 warns with it.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}

yaml_loader: Callable[[], Any] = get_yaml_loader  # returns OmegaConf's class


def register_resolver(name: str, resolver: Callable[[], str]) -> None:
    """Make ${name:} the result of `resolver`, also if there is such a resolver already."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, replace=True)
