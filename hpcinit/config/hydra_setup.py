"""Prepares Hydra: handles its versions, its state in a user's process, and the folders in which it finds configs.

Hydra 1.3 needs OmegaConf 2.3, and Hydra 1.4 needs OmegaConf 2.4.

Hydra looks for configs first in the user's folders, then in the package's own. Two more configs are not files:
`hpcinit_schema` is the schema, and `hpcinit_default_cluster` chooses the cluster if the request does not. Hydra gets
them from the class Made, because Hydra's ConfigStore would copy the schema several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.version import VersionBase
from omegaconf import Container, OmegaConf

from hpcinit.config import folders
from hpcinit.config.schema import Config

try:
    from omegaconf._yaml import get_yaml_loader  # type: ignore[import-not-found]
except ImportError:
    from omegaconf._utils import get_yaml_loader

IS_1_3 = hydra.__version__.startswith("1.3.")
# For hydra.main and initialize_config_dir. 1.3 warns without version_base, and 1.4 warns with it.
VERSION_BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}

# Values in these tables and lists are text: environment variables, arguments, and lines of the script.
TEXTS = ("env", "args", "modules", "setup")
TEXT_OR_NULL = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:null")


def register_resolver(name: str, resolver: Callable[[], str]) -> None:
    """Make ${name:} in a config mean the result of `resolver`. Replace an existing resolver of this name."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, replace=True)


@contextmanager
def state_kept() -> Iterator[None]:
    """Restore, after the `with` block, the global state that composing a config changes.

    The state has four parts: Hydra itself (which can be initialized only once), the config behind ${hydra:...}, the
    job's name, and version_base.
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


class Folders(SearchPathPlugin):
    """Adds the folders in which Hydra looks for YAML files: the user's, the package's, then --config-dir.

    If several contain the same file, the first folder wins.
    """

    last: Path | None = None
    used = False  # Hydra keeps the plugin, but the program in this process may use Hydra for its own configs

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not self.used:
            return
        for place in reversed([p for p in folders.user_folders() if p != folders.folder().absolute()]):
            search_path.prepend("user", f"file://{place}")
        if self.last is not None:
            search_path.append("command-line", f"file://{self.last}")
        search_path.append("hpcinit", f"{Made.scheme()}://")


class ReadFiles(FileConfigSource):
    """Reads YAML files as Hydra does, but keeps numbers and booleans in TEXTS exactly as they are written.

    read: the files that Hydra read for the last config that it composed.
    """

    read: ClassVar[list[str]] = []

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        self.read.append(str(path))
        result = super().load_config(config_path)
        text = path.read_text(encoding="utf-8")
        if any(f"{name}:" in text for name in TEXTS) and (node := yaml.compose(text, Loader=get_yaml_loader())):
            _keep_texts(result.config, node)
        return result


def _keep_texts(config: Any, node: Any, is_text: bool = False) -> None:
    """Replace numbers and booleans in TEXTS by what the file contains: '1.10' and '010' instead of 1.1 and 8.

    node: the YAML node from which `config` was made.
    is_text: whether `config` is one of the TEXTS.
    """
    is_list = isinstance(node, yaml.SequenceNode)
    for name, value in enumerate(node.value) if is_list else ((key.value, value) for key, value in node.value):
        if isinstance(value, yaml.ScalarNode):
            if is_text and value.tag not in TEXT_OR_NULL:
                config[name] = value.value
        elif is_list or name in config:
            _keep_texts(config[name], value, name in TEXTS)


class Made(ConfigSource):
    """Provides Hydra with two generated configs: the schema, and the choice of the default cluster.

    cluster_required: as for compose.main().
    """

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
    # Without the flag, OmegaConf copies each table once for each table that contains it. That doubles the time.
    made: Container = OmegaConf.structured(Config, flags={"no_deepcopy_set_nodes": True})
    return made


def _default_cluster() -> Container:
    return OmegaConf.create({"defaults": [{"cluster": folders.cluster_choice(Made.cluster_required)}]})


CONFIGS: dict[str, Callable[[], Container]] = {
    "hpcinit_schema": _schema,
    "hpcinit_default_cluster": _default_cluster,
}


def register(config_dir: str | None = None, cluster_required: bool = False) -> None:
    """Register with Hydra the folders in which it finds configs, and the two configs that hpcinit generates.

    config_dir: a folder to search last, or None.
    cluster_required: as for compose.main().
    """
    Folders.last = Path(config_dir).absolute() if config_dir else None
    Made.cluster_required = cluster_required
    for plugin in (Folders, Made):
        Plugins.instance().register(plugin)


@contextmanager
def used() -> Iterator[None]:
    """Make Hydra use the registered folders during the `with` block."""
    sources = SourcesRegistry.instance().types
    hydras = sources[ReadFiles.scheme()]
    Folders.used, sources[ReadFiles.scheme()] = True, ReadFiles
    ReadFiles.read.clear()
    try:
        yield
    finally:
        Folders.used, sources[ReadFiles.scheme()] = False, hydras


@contextmanager
def initialized(job_name: str) -> Iterator[None]:
    """Initialize Hydra with the registered folders for the `with` block.

    job_name: the value of ${hydra:job.name}.
    """
    with used(), hydra.initialize_config_dir(str(folders.folder()), job_name, **VERSION_BASE):
        yield
