"""Warns about settings that need a call of hpcinit, if the program's source shows no hpcinit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from hpcinit.base.text import expanded
from hpcinit.config import job_spec, program_source
from hpcinit.config.schema import Config
from hpcinit.records import program_use

MOST_FILES = 500  # of the program's own modules; with more of them there is no warning


def warnings(config: Config) -> Iterator[str]:
    """Yield a warning that names the settings without effect.

    The program may still call hpcinit through an installed package, so this is no error.
    """
    path = program_source.source(config)
    workdir = expanded(config.job.workdir or ".").absolute()
    if path is None or _may_use_hpcinit(path, workdir):
        return
    spec = job_spec.make(config, str(workdir), path.name)
    settings = [*program_use.of_spec(spec, program_use.NOTHING).no_effect]
    if "seed" in settings and str(config.seed) in config.job.args:  # -- train.py --seed '${seed}'
        settings.remove("seed")
    if settings:
        yield (
            f"{path.name} and the modules beside it do not import hpcinit: {', '.join(settings)} will have no effect. "
            "Call hpcinit.init() and run.wrap() in the program (docs/your-script.md), or omit these settings"
        )


@cache
def _may_use_hpcinit(script: Path, workdir: Path) -> bool:
    """Return whether the script, or a module beside it that it imports, mentions hpcinit; True if it cannot be read."""
    seen, new = set[Path](), {script}
    while new and len(seen) <= MOST_FILES:
        path = new.pop()
        seen.add(path)
        try:
            content = path.read_bytes()
            if b"hpcinit" in content:
                return True
            names = _imported(ast.parse(content))
        except (OSError, SyntaxError, ValueError):
            return True
        for folder in {script.parent, workdir, path.parent}:
            for name in names:
                new |= {folder / f"{name}.py", *islice((folder / name).rglob("*.py"), MOST_FILES)} - seen
        new = {each for each in new if each.is_file()}
    return bool(new)


def _imported(tree: ast.AST) -> set[str]:
    """Return the first part of the name of each imported module: 'a' for `import a.b` and `from .a import c`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {name.partition(".")[0] for name in names}
    return found
