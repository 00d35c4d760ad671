"""Where YAML is looked for, first match wins: ./conf, $HPCINIT_CONF, ~/.config/hpcinit, the package's own."""

from __future__ import annotations

import os
from pathlib import Path

from hpcinit.facts.errors import ConfigError
from hpcinit.facts.user_paths import home


def folder() -> Path:
    """The package's own conf/: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent.parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent / "conf"


def user_folders() -> list[Path]:
    """Where a user's own YAML lies, first match first; only folders that exist."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was deleted under this shell: cd to one that exists") from None
    named = os.environ.get("HPCINIT_CONF")
    places = [Path("conf"), Path(named) if named else None, home() / ".config/hpcinit"]
    found = [place.absolute() for place in places if place is not None and place.is_dir()]
    if named and not Path(named).is_dir():
        raise ConfigError(f"HPCINIT_CONF is {named!r}, expected a folder that exists")
    return found


def choices(group: str) -> list[str]:
    """The YAML files of a group, without their ending; of '' the primary configs."""
    return sorted({path.stem for place in [*user_folders(), folder()] for path in (place / group).glob("*.yaml")})


def find(config: str) -> str:
    """The file that 'cluster/mini' means, as one would type it here, or 'cluster/mini.yaml' where there is none."""
    for place in [*user_folders(), folder()]:
        if (path := place / f"{config}.yaml").is_file():
            here = Path.cwd()
            return str(path.relative_to(here) if path.is_relative_to(here) else path)
    return f"{config}.yaml"
