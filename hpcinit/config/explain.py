"""Turns errors of Hydra and OmegaConf into one sentence: the key, the value, what was expected, what to type.

An error is recognized by the name of its class: OmegaConf's error about a file is only text inside Hydra's error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hpcinit.config import default_cluster, folders, keys, slurm_options

NOT_READABLE = (
    "expected key=value; a value with spaces, commas, quotes or brackets needs quotes inside the shell's quotes: "
    "'comment=\"it is, well: special\"'"
)
OTHER_TYPE = {"ValidationError", "InterpolationValidationError", "ConfigTypeError", "ValueError", "AssertionError"}
NO_KEY = {"ConfigKeyError", "ConfigAttributeError"}


@dataclass(frozen=True)
class _Parsed:
    """The parts of an error. file: as in 'cluster/mini'. key: the full key. Parts that the error lacks are ''."""

    kind: str
    text: str
    file: str
    key: str


def sentence(error: Exception, override: str = "") -> str:
    """Return one line about `error`. override: the argument that caused it; '' if unknown."""
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError, RecursionError)):
        return _where(override, _unreadable_file(error))
    missing: str | None = getattr(error, "missing_cfg_file", None)
    if missing is not None:
        return _no_such_choice(missing, override)
    parsed = _take_apart(error)
    if (
        parsed.kind == "OverrideParseException"
        or "LexerNoViableAlt" in parsed.text
        or "Unknown function" in parsed.text
    ):
        return _not_readable(override or parsed.text)
    if "@" in override.partition("=")[0]:
        return f"{_shown(override)}: expected a key without '@'"
    if parsed.file and (what := _not_a_mapping(parsed.file)):
        return _where(override, what)
    return (_about_override(override, parsed) if override and not parsed.file else "") or _about_key(override, parsed)


def unset(names: Sequence[str], chosen: Mapping[str, str]) -> list[str]:
    """Return a message for each mandatory key that has no value, such as cluster.name. chosen: {'cluster': 'mine'}."""
    found = []
    for name in names:
        group, _, last = name.partition(".")
        file = folders.find(f"{group}/{chosen[group]}") if group in chosen else folders.find("hpcinit")
        found.append(f"{name} is not set, expected {keys.expected(name)}: add `{last or name}: ...` to {file}")
    return found


def not_ours(config: str) -> str:
    """Return the message for a primary config that does not include hpcinit's schema."""
    return (
        f"{folders.find(config)} does not include hpcinit's config: its defaults list must start with hpcinit_schema, "
        "or with hpcinit if the file has another name (--config-name)"
    )


def reference(key: str, raw: str, error: Exception) -> str:
    """Return the message for an interpolation that cannot be resolved: `key` is set to `raw`."""
    parsed = _take_apart(error)
    if found := re.search(r"Interpolation key '(.*)' not found", parsed.text):
        last = found[1].rpartition(".")[2]
        return f"{key}={_shown(raw)}: no such key {found[1]!r}{keys.guess(last, keys.beside(found[1]))}"
    if found := re.search(r"Environment variable '(.*)' not found", parsed.text):
        return f"{key}={_shown(raw)}: the environment variable {found[1]} is not set; export it, or set {key}"
    if "Recursive" in parsed.text:
        return f"{key}={_shown(raw)}: refers to itself, directly or through another key; set one of them to a value"
    if found := re.search(r"Unsupported interpolation type (.*)", parsed.text):
        return f"{key}={_shown(raw)}: no resolver {found[1]}, expected a key or oc.env, as in ${{oc.env:HOME}}"
    if parsed.kind in OTHER_TYPE:
        found = re.search(r"Value '(.*?)' ", parsed.text)
        what = f"is {found[1]!r}" if found else "is a table or a list"
        return f"{key}={_shown(raw)}: {what}, expected {keys.expected(key) or 'another type'}"
    return f"{key}={_shown(raw)}: {parsed.text}"


def of_combinations(found: Mapping[str, Sequence[str]], total: int) -> list[str]:
    """Return each problem of a sweep once. found: problem -> the combinations that have it."""
    lines = []
    for problem, combinations in found.items():
        more = len(combinations) - 1
        others = f" and {more} more combination{'s' * (more > 1)}" if more else ""
        plain = len(combinations) == total or problem.startswith(f"{combinations[0]}: ")
        lines.append(problem if plain else f"with {combinations[0]}{others}: {problem}")
    return lines


def _take_apart(error: Exception) -> _Parsed:
    """Return the parts of an error. Hydra wraps OmegaConf's: as its cause for an override, as text for a file:

    "In 'cluster/x': ConfigKeyError raised while composing config:\\nKey 'y' not in 'Cluster'\\n  full_key: cluster.y"
    """
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text, kind = str(cause), type(cause).__name__
    in_file = re.match(r"In '([^']+)': (\w+) raised while composing config:\n", text)
    if in_file:
        text, kind = text[in_file.end() :], in_file[2]
    full_key = re.search(r"full_key: (.+)", text)
    return _Parsed(kind, text.partition("\n")[0], in_file[1] if in_file else "", full_key[1] if full_key else "")


def _no_such_choice(missing: str, override: str) -> str:
    """Return the message for a file that does not exist. missing: its name without .yaml, as in 'cluster/nope'."""
    key, _, value = override.lstrip("+").partition("=")
    if not (override and missing.startswith(f"{key}/")):
        key, _, value = missing.rpartition("/")
    if not key:
        known = folders.choices("")
        return (
            f"--config-name {value}: no file {value}.yaml, expected one of: {', '.join(known)}"
            f"{keys.guess(value, known)}"
        )
    known = folders.choices(key) or ["basic"]  # one of Hydra's own groups, such as hydra/launcher
    near = keys.guess(Path(value).name.removesuffix(".yaml"), known)  # cluster=conf/cluster/mine.yaml
    near = _further_up(key, value) or near
    name, source = default_cluster.choose()
    if key == "cluster" and not override and value == name:
        return f"{source} sets the default cluster {name!r}, expected one of: {', '.join(known)}{near}"
    return f"{key}={_shown(value)}: no such {key}, expected one of: {', '.join(known)}{near}"


def _further_up(key: str, value: str) -> str:
    """Return a hint if the file exists in the conf/ of a parent folder: the user is in a subfolder of the project."""
    for folder in Path.cwd().parents if re.fullmatch(r"[\w.-]{1,99}", value) else ():
        if (path := folder / "conf" / key / f"{value}.yaml").is_file():
            return f"; {path} exists: cd {folder}, or set HPCINIT_CONF={folder / 'conf'}"
    return ""


def _about_override(override: str, parsed: _Parsed) -> str:
    """Return the message for a key=value that Hydra could parse; '' if none of these cases applies."""
    key, _, value = override.lstrip("+~").partition("=")
    plus = f"add it with a plus: +{key}={value}"
    what = ""
    if not key:
        return _not_readable(override)
    if "Ambiguous value" in parsed.text or "requires --multirun" in parsed.text:
        what = f"has several values; add --multirun for one job each, or quote the value: \"{key}='{value}'\""
    elif "An item is already at" in parsed.text or "Multiple values for" in parsed.text:
        what = f"{key} exists already; remove the plus: {key}={value}"
    elif override.startswith("~"):
        what = f"there is no {key} to remove"
    elif keys.is_group(key):
        what = f"no such {key}, expected one of: {', '.join(folders.choices(key))}"
    elif key.startswith("cluster.partitions") and (override.startswith("+") or parsed.kind in NO_KEY):
        what = f"partitions are set in the cluster's file; see {folders.find('cluster/example')}"
    elif parsed.kind in NO_KEY and keys.is_table(table := key.rpartition(".")[0]):
        what = f"{table} has no {key.rpartition('.')[2]!r} yet, {plus}"
    elif parsed.kind in NO_KEY and keys.is_table(key):
        what = f"{key} has no such entry yet, {plus}"
    elif parsed.kind == "AttributeError":
        what = "cannot be set on the command line; set it in a config file"
    elif parsed.kind in OTHER_TYPE and (expected := keys.expected(key)):
        what = f"expected {expected}"
    return what and f"{_shown(override)}: {_shown(what)}"


def _about_key(override: str, parsed: _Parsed) -> str:
    if "must specify 'cluster'" in parsed.text and (refusal := default_cluster.refusal()):
        return refusal
    where = f"{folders.find(parsed.file)}: " if parsed.file else ""
    if parsed.kind in NO_KEY or "Could not override" in parsed.text:
        key = parsed.key or override.lstrip("+~").partition("=")[0]
        return _where(override, f"{where}no such key {key!r}{_near(key, override)}")
    if parsed.kind in OTHER_TYPE and (expected := keys.expected(parsed.key)):
        found = re.search(r"Value '(.*?)' ", parsed.text)
        what = f"{parsed.key} is {found[1]!r}, expected" if found else f"{parsed.key}: expected"
        return _where(override, f"{where}{what} {expected}")
    detail = f"{parsed.key}: {parsed.text}" if parsed.key and parsed.key not in override else parsed.text
    return _where(override, where + detail)


def _near(key: str, override: str) -> str:
    """Return the key that was probably meant, else the keys of the same table; at the top level, how to list them."""
    known = keys.beside(key)
    if "." not in key and (meant := slurm_options.meant(key.replace("_", "-"), override.partition("=")[2])):
        return f"; {meant}"
    if near := keys.guess(key.rpartition(".")[2], known):
        return f"; did you mean {keys.nearest(key)!r}?" if override else near
    if not known or key.startswith("hydra"):
        return ""
    if "." in key:
        return f", expected one of: {', '.join(known)}"
    after = f"; arguments of your program go after it: -- train.py {override}" if override else ""
    return f"; {keys.ALL}{after}"


def _includes_itself() -> str:
    """Return the message for a config that includes itself: its defaults list contains the name of the file."""
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
    advice = f"Give it another name{', and choose it with --config-name' * (name in folders.choices(''))}"
    return (
        f"{' and '.join(found)} includes itself: '- {name}' in its defaults list is this file, not the one that ships "
        f"with hpcinit. {advice}"
    )


def _not_ascii(override: str) -> str:
    """Return the message for a character that Hydra accepts only in quotes; '' if there is none outside quotes."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", override)
    bad = next((char for char in plain if not char.isascii()), "")
    key, _, value = override.partition("=")
    if not bad or bad in key:
        return bad and f"{_shown(override)}: {_shown(bad)!r} cannot be in a key; expected letters a to z, '_' and '.'"
    if key == "name":
        expected = "letters a to z, digits, '.', '_' and '-'"
        return f"{_shown(override)}: {_shown(bad)!r} cannot be in a name; expected {expected}"
    quoted = f": {key}='\"{_shown(value)}\"'" if not re.search(r"['\"\[{(]", value) else ""
    return f"{_shown(override)}: {_shown(bad)!r} must be in quotes inside the shell's quotes{quoted}"


def _not_readable(override: str) -> str:
    if message := _not_ascii(override):
        return message
    found = re.fullmatch(r"\s*([\w.]+)\s*(?:=+|:|\s)\s*(\S*)\s*", override)
    if found and keys.kind(found[1]) is not None and override != f"{found[1]}={found[2]}":
        return f"{_shown(override)}: expected key=value: {found[1]}={found[2] or '...'}"
    if "=" not in override and (key := keys.nearest(override)):
        return f"{_shown(override)}: expected key=value, as in {key}={'true' if keys.kind(key) is bool else '...'}"
    if "=" not in override:
        return f"{_shown(override)}: expected key=value; the program goes after --: hpcinit submit -- train.py"
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
    if _is_tab(name, mark):
        problem = "a tab where YAML expects a key or a value; indent YAML with spaces"
    return f"{shown}, line {mark.line + 1}: {problem}"


def _is_tab(path: Path, mark: yaml.Mark) -> bool:
    """Return whether the parser stopped at a tab. libyaml's parser, of OmegaConf 2.4, does not name the character."""
    try:
        return path.read_text(encoding="utf-8").splitlines()[mark.line][mark.column] == "\t"
    except (OSError, ValueError, IndexError):
        return False


def _not_utf8() -> str:
    """Return the file that cannot be decoded, which the error does not name."""
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
    return f"{path} contains {kind}, expected lines of key: value"


def _where(override: str, what: str) -> str:
    return f"{_shown(override)}: {what}" if override else what


def _shown(text: str) -> str:
    """Return `text` on one line of limited length."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain if len(plain) <= 120 else f"{plain[:100]}... ({len(text)} characters)"
