"""Detects secrets in variables and arguments: by the form of the value, or by the name. The user can override both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

# HF_TOKEN, MYSECRETS, PGPASSWORD, WANDB_API_KEY, AWS_ACCESS_KEY_ID, GITHUB_PAT. Not TOKENIZERS_PARALLELISM, MAX_TOKENS
# and PWD, and not names of locations: HF_TOKEN_PATH, AWS_SHARED_CREDENTIALS_FILE, AWS_REGION.
SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|(^|_)(TOKEN|CREDENTIALS?|JWT)(_|$)|_(PAT|PWD)$"
    r"|(ACCESS|PRIVATE|AUTH|ACCOUNT|ENCRYPTION|SIGNING|SSH|KAGGLE|LICENSE|MASTER)_?KEY(_ID)?$"
)
ONLY_WHERE = re.compile(r"_(FILE|PATH|DIR|URL|NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$|^SLURM_JWT$")
# Tokens of language models: EOS_TOKEN, image_token, tokens_per_sample, token_drop.
OF_TEXT = re.compile(
    r"(^|_)(EOS|BOS|PAD|UNK|MASK|SEP|CLS|IMAGE|VIDEO|AUDIO|SPECIAL|STOP|START|END|MAX|MIN|NUM|N|PER|NEW|NEXT|LAST|FIRST"
    r"|EACH|CONTEXT|MULTI|PREFIX|MIDDLE|SUFFIX|TRIGGER|FAKE|THINK)_TOKEN(_|$)"
    r"|TOKEN_(ID|IDS|INDEX|LEN|LENGTH|LIMIT|COUNT|BUDGET|DROP|DROPOUT|TYPE|LEVEL|SIZE|DIM|EMBED\w*|MIXING|MERGING|LOSS)(_|$)"
)
# Names that are secrets only with a random value: OPENAI_KEY=8c1f..., but not --sort-key image_2.
OFTEN = re.compile(r"(^|_)(KEY|PASS|AUTH|PW|PSK|BEARER)$")
# Values that are secrets under any name. The first match counts.
FORMS = {
    # Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Slack, NVIDIA, JWT, Google. Not task-... and risk-...
    "a token of a well-known service": re.compile(
        r"(?<![\w-])(hf_[A-Za-z]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}|glpat-[\w-]{20,}"
        r"|sk-(?=[\w-]*\d)[\w-]{16,}|A[KS]IA[A-Z0-9]{16}|xox[abpr]-[\w-]{20,}|nvapi-[\w-]{40,}"
        r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|AIza[\w-]{35})"
    ),
    # postgres://me:pw@host/db, redis://:pw@host. Not ssh://git@host:22, and not https://me:$PW@host or me:***@host.
    "a URL with a password": re.compile(r"\b[A-Za-z][\w+.-]*://[^\s/:@]*:(?![$*<{])[^\s/@]+@"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
HARMLESS = re.compile(r"|true|false|none|null|auto|-?[\d.]+|<.*>|\[.*\]|\$.*|\s.*", re.IGNORECASE | re.DOTALL)
PATH = re.compile(r"(~|\.{1,2})?/\S*|https?://\S*")
OPTION = re.compile(r"[-+]*[\w./@-]+")
# NAME=value within a line of shell code
ASSIGNED = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)")
ARGUMENT = "args"  # used as the name of an argument that belongs to no option
HIDDEN = "***"


def named(name: str, patterns: Sequence[str] = ()) -> bool:
    """Return whether a variable, key or option with this name contains a secret.

    patterns: the user's list `secret_names`, such as MY_* for more secrets, or -MY_* for names that are no secrets. The
        last pattern that matches counts.
    """
    plain = _plain(name)
    secret = bool(SECRET.search(plain)) and not ONLY_WHERE.search(plain) and not OF_TEXT.search(plain)
    for pattern in patterns:
        if fnmatchcase(plain, _plain(pattern)):
            secret = not pattern.startswith("-")
    return secret


def reason(name: str, value: str, patterns: Sequence[str] = ()) -> str:
    """Return why `value` under this name is a secret, such as 'a URL with a password', or '' if it is not a secret.

    patterns: the user's list, as in named(). If a pattern such as -MY_* matches the name, the value is not examined.
    """
    plain = _plain(name)
    if any(p.startswith("-") and fnmatchcase(plain, _plain(p)) for p in patterns):
        return "because of its name" if named(name, patterns) else ""
    for form, pattern in FORMS.items():
        if pattern.search(value):
            return form
    if HARMLESS.fullmatch(value) or (PATH.fullmatch(value) and not _random(value)):
        return ""
    if named(name, patterns):
        return "because of its name"
    often = OFTEN.search(plain) and not OF_TEXT.search(plain)
    return "because of its name and its random value" if often and (value.startswith("sk-") or _random(value)) else ""


def is_secret(name: str, value: str, patterns: Sequence[str] = ()) -> bool:
    """Return whether `value` under this name is a secret."""
    return bool(reason(name, value, patterns))


def unless(name: str) -> str:
    """Return what to type if the value is not a secret, for an error message."""
    return f"if it is not a secret: 'secret_names=[-{name}]'"


def in_shell(line: str, patterns: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each secret that a line of shell code assigns to a variable."""
    for name, value in ASSIGNED.findall(line):
        if why := reason(name, value.strip("'\""), patterns):
            yield name, why


def in_arguments(arguments: Sequence[str], patterns: Sequence[str] = ()) -> Iterator[tuple[int, str, str]]:
    """Yield (index, name, reason) for each command-line argument that contains a secret.

    Examples of such arguments are --api-key X, --api-key=X and job.env.HF_TOKEN=X. If the argument belongs to no
    option, the name is ARGUMENT.
    """
    for at, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        before = arguments[at - 1] if at else ""
        if equals and OPTION.fullmatch(option):
            # The value is the path of a file: secrets.HF_TOKEN=~/.hf_token
            if option.lstrip("+").startswith("secrets."):
                continue
            name = option.rpartition(".")[2].lstrip("-+")
        elif before.startswith("-") and "=" not in before and not argument.startswith("-"):
            name, value = before.lstrip("-") or ARGUMENT, argument
        else:
            name, value = ARGUMENT, argument
        if why := reason(name, value, patterns):
            yield at, name, why
        elif re.search(r"\s", value):  # bash -c 'PGPASSWORD=X psql'. In Python code, token=x is not a shell variable.
            for variable, why in in_shell(value, patterns):
                if variable.isupper():
                    yield at, variable, why
                    break


def masked(arguments: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """Return the command line with *** instead of each secret."""
    shown = list(arguments)
    for at, _, _ in in_arguments(arguments, patterns):
        option, equals, _ = arguments[at].partition("=")
        shown[at] = f"{option}={HIDDEN}" if equals and OPTION.fullmatch(option) else HIDDEN
    return shown


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").upper()


def _random(value: str) -> bool:
    """Return whether the value has at least 16 characters with letters and digits mixed, as in a key."""
    for run in re.findall(r"[A-Za-z0-9+_-]{16,}", value):
        if len(re.findall(r"[A-Za-z](?=\d)|\d(?=[A-Za-z])", run)) > 2 and len(set(run)) > 7:
            return True
    return False
