"""Turns an error of Hydra or OmegaConf into one line: the argument or the file, Hydra's text, and what was expected.

Hydra's text is replaced only if it is misleading or gives no hint: for a key, a choice or a file that does not exist,
for a value of the wrong type, and for an argument that Hydra cannot parse. Errors are recognized by the names of
their classes, because Hydra's error may contain OmegaConf's error only as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.config import folders, hydra_setup, keys

NOT_READABLE = (
    "expected key=value; a value with spaces, commas, quotes, brackets or letters such as ü needs quotes inside the "
    "shell's quotes: 'comment=\"it is, well: special\"'"
)
OTHER_TYPE = {"ValidationError", "InterpolationValidationError", "ConfigTypeError"}
NO_KEY = {"ConfigKeyError", "ConfigAttributeError"}
# Lines that OmegaConf and Hydra add for their own developers.
OMITTED = re.compile(r"\s*(full_key:|object_type=|reference_type=|See https).*")


@dataclass(frozen=True)
class _Parsed:
    """The parts of an error. A part that is missing is ''.

    text: the text from Hydra.
    file: the config, such as 'cluster/mini'.
    key: the full key.
    """

    kind: str
    text: str
    file: str
    key: str


def sentence(error: Exception, override: str = "") -> str:
    """Return a one-line message about `error`.

    override: the argument that caused it, or '' if that is unknown.
    """
    missing: str | None = getattr(error, "missing_cfg_file", None)
    if missing is not None:
        return _no_such_choice(missing, override)
    parsed, key = _take_apart(error), override.lstrip("+~").partition("=")[0]
    if parsed.kind == "OverrideParseException" or (override and not key):
        return f"{_shown(override or parsed.text)}: {NOT_READABLE}"
    if "must specify 'cluster'" in parsed.text and (refusal := folders.no_cluster_refusal()):
        return refusal
    if override and not parsed.file and (what := _about_override(override, key, parsed)):
        return f"{_shown(override)}: {_shown(what)}"
    where = [_shown(override)] if override else []
    if isinstance(error, RecursionError):
        where.append(folders.shown(hydra_setup.ReadFiles.read[-1]))
        text = f"includes itself, directly or through another file: its defaults list has {Path(where[-1]).stem!r}"
        return f"{': '.join(where)} {text}. Give one of the files another name"
    if isinstance(error, UnicodeDecodeError):
        where.append(folders.shown(hydra_setup.ReadFiles.read[-1]))
    elif parsed.file:
        where.append(folders.find(parsed.file))
    return ": ".join([*where, _what(parsed, key, override)])


def unset(names: Sequence[str], chosen: Mapping[str, str]) -> list[str]:
    """Return a message for each mandatory key, such as cluster.name, that has no value.

    chosen: the choice for each group, as in {'cluster': 'mine'}.
    """
    found = []
    for name in names:
        group, _, last = name.partition(".")
        file = folders.find(f"{group}/{chosen[group]}") if group in chosen else folders.find("hpcinit")
        found.append(f"{name} is not set, expected {keys.expected(name)}: add `{last or name}: ...` to {file}")
    return found


def not_ours(config: str) -> str:
    """Return the message for a primary config that does not include hpcinit's schema (its list of keys).

    config: the name of the primary config.
    """
    return (
        f"{folders.find(config)} does not include hpcinit's config: its defaults list must start with hpcinit (with "
        "hpcinit_schema if the file is named hpcinit.yaml)"
    )


def reference(key: str, raw: str, error: Exception) -> str:
    """Return the message for an interpolation that can't be resolved.

    key: the key whose value contains the interpolation.
    raw: that value.
    """
    return f"{key}={_shown(raw)}: {_what(_take_apart(error), key, '')}"


def once_each(found: Mapping[str, Sequence[str]], total: int) -> list[str]:
    """Return each problem of a sweep once, even if many combinations have it.

    found: the combinations that have each problem.
    total: the number of all combinations.
    """
    lines = []
    for problem, combinations in found.items():
        more = len(combinations) - 1
        others = f" and {more} more combination{'s' * (more > 1)}" if more else ""
        plain = len(combinations) == total or problem.startswith(f"{combinations[0]}: ")
        lines.append(problem if plain else f"with {combinations[0]}{others}: {problem}")
    return lines


def _take_apart(error: Exception) -> _Parsed:
    r"""Return the parts of an error.

    Hydra wraps OmegaConf's error in its own. If an override is wrong, OmegaConf's error is the cause of Hydra's. If a
    file is wrong, Hydra's text quotes OmegaConf's:

        "In 'cluster/x': ConfigKeyError raised while composing config:\nKey 'y' not in 'Cluster'\n  full_key: cluster.y"
    """
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text, kind = str(cause), type(cause).__name__
    in_file = re.match(r"In '([^']+)': (\w+) raised while composing config:\n", text)
    if in_file:
        text, kind = text[in_file.end() :], in_file[2]
    full_key = re.search(r"full_key: (.+)", text)
    if kind in NO_KEY and cause is not error:
        text = str(error)  # Hydra's own text suggests +key=value to add a key
    plain = " ".join(line.strip() for line in text.splitlines() if not OMITTED.fullmatch(line))
    return _Parsed(kind, plain, in_file[1] if in_file else "", full_key[1] if full_key else "")


def _no_such_choice(missing: str, override: str) -> str:
    """Return the message for a config file that does not exist.

    missing: its name without .yaml, such as 'cluster/nope'.
    """
    key, _, value = override.lstrip("+").partition("=")
    if not (override and missing.startswith(f"{key}/")):
        key, _, value = missing.rpartition("/")
    known = folders.choices(key) or ["basic"]  # one of Hydra's own groups, such as hydra/launcher
    expected = f"expected one of: {', '.join(known)}"
    near = keys.guess(Path(value).name.removesuffix(".yaml"), known)  # cluster=conf/cluster/mine.yaml
    if not key:
        return f"--config-name {value}: no file {value}.yaml, {expected}{near}"
    name, source = folders.default_cluster()
    if key == "cluster" and not override and value == name:
        return f"{source} sets the default cluster {name!r}, {expected}{near}"
    return f"{key}={_shown(value)}: no such {key}, {expected}{near}"


def _about_override(override: str, key: str, parsed: _Parsed) -> str:
    """Return what is wrong with a key=value if Hydra's text would be misleading, otherwise ''."""
    if "Multiple values for" in parsed.text:
        return f"{key} exists already; remove the plus"
    if keys.is_group(key) and (
        parsed.kind == "ValueError" or "Parent traversal" in parsed.text
    ):  # Hydra 1.3, 1.4: ../x
        return f"no such {key}, expected one of: {', '.join(folders.choices(key))}"
    if key.startswith("cluster.partitions") and (override.startswith("+") or parsed.kind in NO_KEY):
        return f"partitions are set in the cluster's file; see {folders.find('cluster/example')}"
    expected = keys.expected(key) if parsed.kind in OTHER_TYPE else ""
    return expected and f"expected {expected}"


def _what(parsed: _Parsed, key: str, override: str) -> str:
    """Return what is wrong: the key does not exist, or its value has the wrong type. Otherwise return Hydra's text."""
    wrong = parsed.key or key
    if parsed.kind in NO_KEY and not keys.is_table(wrong) and not keys.is_table(wrong.rpartition(".")[0]):
        return f"no such key {wrong!r}{_near(wrong, override)}"
    if parsed.kind in OTHER_TYPE and (expected := keys.expected(parsed.key)):
        found = re.search(r"Value '(.*?)' ", parsed.text)
        return f"{parsed.key} is {found[1]!r}, expected {expected}" if found else f"{parsed.key}: expected {expected}"
    return f"{parsed.text}{', expected lines of key: value' * bool(parsed.file and not parsed.key)}"


def _near(key: str, override: str) -> str:
    """Return a hint about an unknown key: a similar key, the keys of its table, or how to list all keys."""
    known = keys.beside(key)
    if near := keys.guess(key.rpartition(".")[2], known):
        return f"; did you mean {keys.nearest(key)!r}?" if override else near
    if not known or key.startswith("hydra"):
        return ""
    if "." in key:
        return f", expected one of: {', '.join(known)}"
    after = f"; arguments of your program go after it: -- train.py {override}" if override else ""
    return f"; {keys.ALL}{after}"


def _shown(text: str) -> str:
    """Return `text` on one line, shortened if it is long."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain if len(plain) <= 120 else f"{plain[:100]}... ({len(plain)} characters)"
