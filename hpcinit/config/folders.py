"""The folders with YAML, first match wins: ./conf, $HPCINIT_CONF, ~/.config/hpcinit, the package's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from hpcinit.base import quoting, safe_files
from hpcinit.base.errors import ConfigError
from hpcinit.base.text import home

MOST_PROBLEMS = 3  # further ones are counted
SETTINGS = "settings"  # settings.yaml, which is no config: default_cluster.py


def folder() -> Path:
    """Return the package's own conf/: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent.parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent / "conf"


def user_folders() -> list[Path]:
    """Return the folders with the user's own YAML that exist, first match first. Raise ConfigError."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted: cd to a folder that exists") from None
    named = os.environ.get("HPCINIT_CONF")
    places = [Path("conf"), Path(named) if named else None, home() / ".config/hpcinit"]
    found = [place.absolute() for place in places if place is not None and place.is_dir()]
    if named and not Path(named).is_dir():
        raise ConfigError(f"HPCINIT_CONF is {named!r}, expected a folder that exists")
    chosen = Path(named).absolute() if named else None
    if problems := [
        problem for place in found for problem in _problems(place, chosen is not None and place.samefile(chosen))
    ]:
        raise ConfigError(*problems)
    return found


@cache
def _problems(place: Path, named: bool) -> tuple[str, ...]:
    """Return why the YAML in `place` cannot be trusted. Its cluster.setup is shell that the job runs as this user.

    named: HPCINIT_CONF names the folder. Its owner and group are then trusted, because a site's folder often belongs
    to a software account.
    """
    if place.samefile(folder()):  # its Python code is already running
        return ()
    owners = (place.stat().st_uid,) if named else ()
    advice = f"if you trust them: HPCINIT_CONF={quoting.shell(str(place))}"
    found = []
    for path in _below(place):
        with suppress(OSError):  # a broken link
            found.append(safe_files.path_ownership_problems(path, advice, owners=owners, named=named))
    first, *more = [problem for problem in found if problem] or [""]
    if len(more) > MOST_PROBLEMS:
        rest = f"and {len(more) - MOST_PROBLEMS} more in {place}: chmod -R go-w {quoting.shell(str(place))}; {advice}"
        more = [*more[:MOST_PROBLEMS], rest]
    return tuple(problem for problem in (first, *more) if problem)


def _below(place: Path) -> Iterator[Path]:
    """Yield the folder `place` and the folders and YAML files below it. Follow links, as Hydra does."""
    seen = set()
    for top, names, files in os.walk(place, followlinks=True):
        real = os.path.realpath(top)
        if real in seen:
            names.clear()
            continue
        seen.add(real)
        yield Path(top)
        yield from (Path(top, file) for file in files if file.endswith((".yaml", ".yml")))


def choices(group: str) -> list[str]:
    """Return the names of the YAML files of a group without .yaml; for '' those of the primary configs."""
    found = {path.stem for place in [*user_folders(), folder()] for path in (place / group).glob("*.yaml")}
    return sorted(found - {SETTINGS} if not group else found)


def find(config: str) -> str:
    """Return the path of the file for 'cluster/mini', relative if possible; 'cluster/mini.yaml' if there is none."""
    for place in [*user_folders(), folder()]:
        if (path := place / f"{config}.yaml").is_file():
            return shown(path)
    return f"{config}.yaml"


def shown(path: str | Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here) if Path(path).is_relative_to(here) else path)
