"""Where Hydra finds configs: the user's folders, then the package's own, and two configs that are made here.

`hpcinit_schema` is the schema, `hpcinit_default_cluster` chooses the cluster of a request that does not choose one. The
source Made makes them when Hydra reads them: Hydra's ConfigStore would copy the schema several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, OmegaConf

from hpcinit.config import default_cluster
from hpcinit.config.folders import folder, user_folders
from hpcinit.config.hydra_versions import VERSION_BASE
from hpcinit.config.schema import Config


class Folders(SearchPathPlugin):
    """Adds the folders in which Hydra looks for YAML, first match wins: the user's, the package's, --config-dir."""

    last: Path | None = None
    used = False  # Hydra keeps the plugin in a process whose own program may use Hydra for its own configs

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not self.used:
            return
        for place in reversed([p for p in user_folders() if p != folder().absolute()]):
            search_path.prepend("user", f"file://{place}")
        if self.last is not None:
            search_path.append("command-line", f"file://{self.last}")
        search_path.append("hpcinit", f"{Made.scheme()}://")


class Files(FileConfigSource):
    """Reads YAML files as Hydra does. read: the files of the last composition."""

    read: ClassVar[list[str]] = []

    def load_config(self, config_path: str) -> ConfigResult:
        self.read.append(str(Path(self.path, self._normalize_file_name(config_path))))
        return super().load_config(config_path)


class Made(ConfigSource):
    """Makes the schema and the choice of the default cluster. cluster_required: as in compose.main."""

    cluster_required = False

    @staticmethod
    def scheme() -> str:
        return "hpcinit"

    def load_config(self, config_path: str) -> ConfigResult:
        return ConfigResult(self.provider, self.full_path(), CONFIGS[config_path](), header={"package": None})

    def is_config(self, config_path: str) -> bool:
        return config_path in CONFIGS

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _schema() -> Container:
    # Without the flag, OmegaConf copies each table once for every table around it, which takes as long as the rest.
    made: Container = OmegaConf.structured(Config, flags={"no_deepcopy_set_nodes": True})
    return made


def _default_cluster() -> Container:
    return OmegaConf.create({"defaults": [{"cluster": default_cluster.choice(Made.cluster_required)}]})


CONFIGS: dict[str, Callable[[], Container]] = {
    "hpcinit_schema": _schema,
    "hpcinit_default_cluster": _default_cluster,
}


def register(config_dir: str | None = None, cluster_required: bool = False) -> None:
    """Register the search path with Hydra. config_dir: a last folder. cluster_required: as in compose.main."""
    Folders.last = Path(config_dir).absolute() if config_dir else None
    Made.cluster_required = cluster_required
    for plugin in (Folders, Made):
        Plugins.instance().register(plugin)


@contextmanager
def used() -> Iterator[None]:
    """Make Hydra use this search path for what it initializes in the context."""
    sources = SourcesRegistry.instance().types
    hydras = sources[Files.scheme()]
    Folders.used, sources[Files.scheme()] = True, Files
    Files.read.clear()
    try:
        yield
    finally:
        Folders.used, sources[Files.scheme()] = False, hydras


@contextmanager
def initialized(job_name: str) -> Iterator[None]:
    """Initialize Hydra with this search path. job_name: for ${hydra:job.name}."""
    with used(), hydra.initialize_config_dir(str(folder()), job_name, **VERSION_BASE):
        yield
