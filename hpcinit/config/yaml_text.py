"""The text of single values in YAML files: 1.10 and 010, where YAML's values are 1.1 and 8.

Hydra's config has no text and no lines. So a file with an environment variable or an argument that is not text is
parsed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hpcinit.config import folders
from hpcinit.config.hydra_versions import yaml_loader
from hpcinit.config.request import Place, Rewritten, as_text


@dataclass(frozen=True)
class Scalar:
    """A value that is not text, what its file has for it, and the line, from 1."""

    value: object
    text: str
    line: int


@cache
def _loader() -> Any:
    loader: Any = yaml_loader()

    class Loader(loader):  # type: ignore[misc]
        """OmegaConf's own loader, which keeps the text of what is not text."""

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            value = super().construct_object(node, deep)
            is_text = isinstance(value, str) or not isinstance(node, yaml.ScalarNode)
            return value if is_text else Scalar(value, node.value, node.start_mark.line + 1)

    return Loader


def _scalars(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Scalar]]:
    if isinstance(tree, Scalar):
        yield place, tree
    elif isinstance(tree, (dict, list)):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _scalars(value, (*place, name))


class Files:
    """The YAML files of a config."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._contents: dict[str, str] = {}
        self._scalars: dict[str, list[tuple[Place, Scalar]]] = {}

    def text(self, place: Place, value: object) -> str | None:
        """Return the text of a value that is not text; Rewritten if it is not what a file has; None if no file has it.

        A file may be below any key of the config, so its own keys must be the last ones of `place`.
        """
        name = next(part for part in reversed(place) if isinstance(part, str))
        for path in self._paths:
            for at, scalar in self._found(path, name):
                if at != place[-len(at) :] or repr(scalar.value) != repr(value):
                    continue
                if value is None or scalar.text != as_text(value):
                    return Rewritten.at(f"{folders.shown(path)}, line {scalar.line}", scalar.text, value)
                return scalar.text
        return None

    def _found(self, path: str, name: str) -> list[tuple[Place, Scalar]]:
        if path not in self._contents:
            self._contents[path] = Path(path).read_text(encoding="utf-8")
        if name not in self._contents[path]:
            return []
        if path not in self._scalars:
            self._scalars[path] = list(_scalars(yaml.load(self._contents[path], Loader=_loader())))
        return self._scalars[path]
