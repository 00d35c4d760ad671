"""What Hydra and OmegaConf say, in one sentence: the key, the value, what was expected, what to do.

Their errors are known by the names of their classes: about a file, OmegaConf's arrives as text inside of Hydra's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hpcinit.config import folders, keys, slurm_options

NOT_READABLE = (
    "expected key=value; a value with blanks, commas, quotes or brackets needs quotes of its own inside the shell's: "
    "'comment=\"it is, well: special\"'"
)
OTHER_TYPE = {"ValidationError", "InterpolationValidationError", "ConfigTypeError", "ValueError", "AssertionError"}
NO_KEY = {"ConfigKeyError", "ConfigAttributeError"}


@dataclass(frozen=True)
class _Said:
    """An error taken apart. file: 'cluster/mini'; key: the full one; all '' where it does not say."""

    kind: str
    text: str
    file: str
    key: str


def sentence(error: Exception, override: str = "") -> str:
    """One line about `error`. override: the word of the command line that brought it about; '' if not known."""
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError, RecursionError)):
        return _where(override, _unreadable_file(error))
    missing: str | None = getattr(error, "missing_cfg_file", None)
    if missing is not None:
        return _no_such_choice(missing, override)
    said = _take_apart(error)
    if said.kind == "OverrideParseException" or "LexerNoViableAlt" in said.text or "Unknown function" in said.text:
        return _not_readable(override or said.text)
    if "@" in override.partition("=")[0]:
        return f"{_shown(override)}: expected a key without '@'"
    if said.file and (what := _not_a_mapping(said.file)):
        return _where(override, what)
    return (_about_override(override, said) if override and not said.file else "") or _about_key(override, said)


def unset(names: Sequence[str], chosen: Mapping[str, str]) -> list[str]:
    """Mandatory keys that nothing gives, such as cluster.name. chosen: {'cluster': 'mine'}."""
    found = []
    for name in names:
        group, _, last = name.partition(".")
        file = folders.find(f"{group}/{chosen[group]}") if group in chosen else folders.find("hpcinit")
        found.append(f"{name} is not set, expected {keys.expected(name)}: add `{last or name}: ...` to {file}")
    return found


def not_ours(config: str) -> str:
    """A primary config that hpcinit's schema is no part of."""
    return (
        f"{folders.find(config)} does not build on hpcinit's own: its defaults list must begin with hpcinit, and the "
        "file have another name (--config-name), or with hpcinit_schema"
    )


def reference(key: str, raw: str, error: Exception) -> str:
    """An interpolation that cannot be resolved: `raw` is what `key` is set to."""
    said = _take_apart(error)
    if found := re.search(r"Interpolation key '(.*)' not found", said.text):
        last = found[1].rpartition(".")[2]
        return f"{key}={_shown(raw)}: there is no key {found[1]!r}{keys.guess(last, keys.beside(found[1]))}"
    if found := re.search(r"Environment variable '(.*)' not found", said.text):
        return f"{key}={_shown(raw)}: the environment variable {found[1]} is not set; export it, or set {key}"
    if "Recursive" in said.text:
        return f"{key}={_shown(raw)}: refers to itself, directly or through another key; give one of them a value"
    if found := re.search(r"Unsupported interpolation type (.*)", said.text):
        return f"{key}={_shown(raw)}: nothing is called {found[1]}, expected a key or oc.env, as in ${{oc.env:HOME}}"
    if said.kind in OTHER_TYPE:
        found = re.search(r"Value '(.*?)' ", said.text)
        stands = f"stands for {found[1]!r}" if found else "stands for a table or a list"
        return f"{key}={_shown(raw)}: {stands}, expected {keys.expected(key) or 'another type'}"
    return f"{key}={_shown(raw)}: {said.text}"


def of_combinations(found: Mapping[str, Sequence[str]], total: int) -> list[str]:
    """The problems of a sweep, each once. found: problem -> the combinations that have it."""
    lines = []
    for problem, combinations in found.items():
        more = len(combinations) - 1
        others = f" and {more} more combination{'s' * (more > 1)}" if more else ""
        plain = len(combinations) == total or problem.startswith(f"{combinations[0]}: ")
        lines.append(problem if plain else f"with {combinations[0]}{others}: {problem}")
    return lines


def _take_apart(error: Exception) -> _Said:
    """Hydra wraps OmegaConf's error, as its cause for an override and as text for a file:

    "In 'cluster/x': ConfigKeyError raised while composing config:\\nKey 'y' not in 'Cluster'\\n  full_key: cluster.y"
    """
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text, kind = str(cause), type(cause).__name__
    in_file = re.match(r"In '([^']+)': (\w+) raised while composing config:\n", text)
    if in_file:
        text, kind = text[in_file.end() :], in_file[2]
    full_key = re.search(r"full_key: (.+)", text)
    return _Said(kind, text.partition("\n")[0], in_file[1] if in_file else "", full_key[1] if full_key else "")


def _no_such_choice(missing: str, override: str) -> str:
    """`missing` is the file that was looked for, without its ending: 'cluster/nope'."""
    key, _, value = override.lstrip("+").partition("=")
    if not (override and missing.startswith(f"{key}/")):
        key, _, value = missing.rpartition("/")
    if not key:
        known = folders.choices("")
        return f"--config-name {value}: no {value}.yaml, expected one of: {', '.join(known)}{keys.guess(value, known)}"
    known = folders.choices(key) or ["basic"]  # a group of Hydra's own, such as hydra/launcher
    near = keys.guess(Path(value).name.removesuffix(".yaml"), known)  # cluster=conf/cluster/mine.yaml
    near = _further_up(key, value) or near
    return f"{key}={_shown(value)}: no such {key}, expected one of: {', '.join(known)}{near}"


def _further_up(key: str, value: str) -> str:
    """Where one is in a folder of the project, and the project's conf/ is above."""
    for folder in Path.cwd().parents if re.fullmatch(r"[\w.-]{1,99}", value) else ():
        if (path := folder / "conf" / key / f"{value}.yaml").is_file():
            return f"; {path} is further up: cd {folder}, or HPCINIT_CONF={folder / 'conf'}"
    return ""


def _about_override(override: str, said: _Said) -> str:
    """What is wrong with a key=value that Hydra could read; '' for nothing special."""
    key, _, value = override.lstrip("+~").partition("=")
    plus = f"add it with a plus: +{key}={value}"
    what = ""
    if not key:
        return _not_readable(override)
    if "Ambiguous value" in said.text or "requires --multirun" in said.text:
        what = f"several values; add --multirun for one job each, or quote it: \"{key}='{value}'\""
    elif "An item is already at" in said.text or "Multiple values for" in said.text:
        what = f"{key} exists already; leave the plus away: {key}={value}"
    elif override.startswith("~"):
        what = f"there is no {key} to take away"
    elif keys.is_group(key):
        what = f"expected one of: {', '.join(folders.choices(key))}"
    elif key.startswith("cluster.partitions") and (override.startswith("+") or said.kind in NO_KEY):
        what = f"partitions are described in the cluster's file, see {folders.find('cluster/example')}"
    elif said.kind in NO_KEY and keys.is_table(table := key.rpartition(".")[0]):
        what = f"{table} has no {key.rpartition('.')[2]!r} yet, {plus}"
    elif said.kind in NO_KEY and keys.is_table(key):
        what = f"{key} has no such entry yet, {plus}"
    elif said.kind == "AttributeError":
        what = "cannot be set on the command line, but in a config file of yours"
    elif said.kind in OTHER_TYPE and (expected := keys.expected(key)):
        what = f"expected {expected}"
    return what and f"{_shown(override)}: {_shown(what)}"


def _about_key(override: str, said: _Said) -> str:
    where = f"{folders.find(said.file)}: " if said.file else ""
    if said.kind in NO_KEY or "Could not override" in said.text:
        key = said.key or override.lstrip("+~").partition("=")[0]
        return _where(override, f"{where}no such key {key!r}{_near(key, override)}")
    if said.kind in OTHER_TYPE and (expected := keys.expected(said.key)):
        found = re.search(r"Value '(.*?)' ", said.text)
        what = f"{said.key} is {found[1]!r}, expected" if found else f"{said.key}: expected"
        return _where(override, f"{where}{what} {expected}")
    detail = f"{said.key}: {said.text}" if said.key and said.key not in override else said.text
    return _where(override, where + detail)


def _near(key: str, override: str) -> str:
    """The key that was probably meant; if none is close all that there are, of the many at the top where to read."""
    known = keys.beside(key)
    if "." not in key and (meant := slurm_options.meant(key.replace("_", "-"), override.partition("=")[2])):
        return f"; {meant}"
    if near := keys.guess(key.rpartition(".")[2], known):
        return f"; did you mean {keys.nearest(key)!r}?" if override else near
    if not known or key.startswith("hydra"):
        return ""
    if "." in key:
        return f", expected one of: {', '.join(known)}"
    behind = f"; your program's own arguments stand after it: -- train.py {override}" if override else ""
    return f"; hpcinit submit --help explains all there are{behind}"


def _includes_itself() -> str:
    """Name the user's files whose defaults list contains the file's own name; Hydra takes it for the file itself."""
    found = []
    for place in folders.user_folders():
        for path in sorted(place.rglob("*.yaml")):
            with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
                if isinstance(content, dict) and path.stem in (content.get("defaults") or ()):
                    found.append(folders.find(str(path.relative_to(place).with_suffix(""))))
    if not found:
        return "the defaults lists of config files include each other in a circle; remove one of the entries"
    name = Path(found[0]).stem
    do = f"Give it another name{', and choose it with --config-name' * (name in folders.choices(''))}"
    return (
        f"{' and '.join(found)} includes itself: '- {name}' in its defaults list is this file, not the one that comes "
        f"with hpcinit. {do}"
    )


def _not_ascii(override: str) -> str:
    """Name the first character that Hydra reads only in quotes; '' where there is none outside of them."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", override)
    bad = next((char for char in plain if not char.isascii()), "")
    key, _, value = override.partition("=")
    if not bad or bad in key:
        return bad and f"{_shown(override)}: {_shown(bad)!r} cannot be in a key; expected letters a to z, '_' and '.'"
    if key == "name":
        expected = "letters a to z, digits, '.', '_' and '-'"
        return f"{_shown(override)}: {_shown(bad)!r} cannot be in a name; expected {expected}"
    quoted = f": {key}='\"{_shown(value)}\"'" if not re.search(r"['\"\[{(]", value) else ""
    return f"{_shown(override)}: {_shown(bad)!r} has to be in quotes, inside the shell's{quoted}"


def _not_readable(override: str) -> str:
    if said := _not_ascii(override):
        return said
    found = re.fullmatch(r"\s*([\w.]+)\s*(?:=+|:|\s)\s*(\S*)\s*", override)
    if found and keys.kind(found[1]) is not None and override != f"{found[1]}={found[2]}":
        return f"{_shown(override)}: expected key=value: {found[1]}={found[2] or '...'}"
    if "=" not in override and (key := keys.nearest(override)):
        return f"{_shown(override)}: expected key=value, as in {key}={'true' if keys.kind(key) is bool else '...'}"
    if "=" not in override:
        return f"{_shown(override)}: expected key=value; what is to run stands after --: hpcinit submit -- train.py"
    return f"{_shown(override)}: {NOT_READABLE}"


def _unreadable_file(error: yaml.YAMLError | UnicodeDecodeError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return _includes_itself()
    if isinstance(error, UnicodeDecodeError):
        bad = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
        return f"{_not_utf8()} is not UTF-8 ({bad}); save it as UTF-8"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    name = Path(mark.name)
    shown = name.relative_to(Path.cwd()) if name.is_relative_to(Path.cwd()) else name
    advice = "; YAML wants blanks, no tabs" if "\\t" in problem else ""
    return f"{shown}, line {mark.line + 1}: {problem}{advice}"


def _not_utf8() -> str:
    """The file that cannot be decoded: the error does not say which."""
    for place in folders.user_folders():
        for path in sorted(place.rglob("*.yaml")):
            try:
                path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                return folders.find(str(path.relative_to(place).with_suffix("")))
            except OSError:
                continue
    return "a config file"


def _not_a_mapping(file: str) -> str:
    path = folders.find(file)
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    if content is None or isinstance(content, dict):
        return ""
    kind = "a list" if isinstance(content, list) else f"{_shown(str(content))!r}"
    return f"{path} holds {kind}, expected lines of key: value"


def _where(override: str, what: str) -> str:
    return f"{_shown(override)}: {what}" if override else what


def _shown(text: str) -> str:
    """On one line, and not longer than one."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain if len(plain) <= 120 else f"{plain[:100]}... ({len(text)} characters)"
