"""Detect secrets: by parts of a name, and by the prefixes of tokens of well-known services."""

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
# Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Slack, NVIDIA, JWT, Google.
VALUE = re.compile(
    r"hf_[A-Za-z]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}|glpat-[\w-]{20,}|sk-[\w-]{30,}|A[KS]IA[A-Z0-9]{16}"
    r"|xox[abpr]-[\w-]{20,}|nvapi-[\w-]{40,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|AIza[\w-]{35}"
)
HARMLESS = re.compile(r"|true|false|none|null|auto|-?[\d.]+|<.*>|\[.*\]|\$.*", re.IGNORECASE | re.DOTALL)
HIDDEN = "***"


def named(name: str, patterns: Sequence[str] = ()) -> bool:
    """Return whether a variable, key or option of this name contains a secret.

    patterns: additional names (MY_*), or exceptions with '-' in front. The last match counts.
    """
    plain = name.lstrip("-").replace("-", "_").upper()
    secret = bool(SECRET.search(plain)) and not ONLY_WHERE.search(plain) and not OF_TEXT.search(plain)
    for pattern in patterns:
        none = pattern.startswith("-")
        if fnmatchcase(plain, pattern.removeprefix("-").replace("-", "_").upper()):
            secret = not none
    return secret


def is_secret(name: str, value: str, patterns: Sequence[str] = ()) -> bool:
    """Return whether `value` under this name is a secret: by the name, or as a token of a well-known service."""
    plain = name.lstrip("-").replace("-", "_").upper()
    if any(p.startswith("-") and fnmatchcase(plain, p[1:].replace("-", "_").upper()) for p in patterns):
        return named(name, patterns)
    return VALUE.search(value) is not None or (named(name, patterns) and not HARMLESS.fullmatch(value))


def in_arguments(arguments: Sequence[str], patterns: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield (index, name) of each argument with a secret, as in --api-key X, --api-key=X, job.env.HF_TOKEN=X."""
    for at, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        before = arguments[at - 1] if at else ""
        if equals and is_secret(option.rpartition(".")[2].lstrip("-+"), value, patterns):
            # The value is the path of a file: secrets.HF_TOKEN=~/.hf_token
            if not option.lstrip("+").startswith("secrets."):
                yield at, option
        elif before.startswith("-") and "=" not in before and not argument.startswith("-"):
            if is_secret(before, argument, patterns):
                yield at, before
        elif is_secret("", argument, patterns):
            yield at, HIDDEN


def masked(arguments: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """Return the command line with *** instead of each secret."""
    shown = list(arguments)
    for at, _ in in_arguments(arguments, patterns):
        option, equals, _ = arguments[at].partition("=")
        shown[at] = f"{option}={HIDDEN}" if equals else HIDDEN
    return shown
