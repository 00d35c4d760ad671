"""Which names and values are secrets: by the words in a name, and by how the tokens of well-known services begin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

# HF_TOKEN, MYSECRETS, PGPASSWORD, WANDB_API_KEY, AWS_ACCESS_KEY_ID, GITHUB_PAT. Not TOKENIZERS_PARALLELISM, MAX_TOKENS
# and PWD; and not what only says where something is: HF_TOKEN_PATH, AWS_SHARED_CREDENTIALS_FILE, AWS_REGION.
SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|(^|_)(TOKEN|CREDENTIALS?|JWT)(_|$)|_(PAT|PWD)$"
    r"|(ACCESS|PRIVATE|AUTH|ACCOUNT|ENCRYPTION|SIGNING|SSH|KAGGLE|LICENSE|MASTER)_?KEY(_ID)?$"
)
ONLY_WHERE = re.compile(r"_(FILE|PATH|DIR|URL|NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$|^SLURM_JWT$")
# What language models call tokens: EOS_TOKEN, image_token, tokens_per_sample, token_drop.
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
    """Whether a variable, key or option of this name holds a secret.

    patterns: further ones, as in MY_*; with a - in front, those that are none after all. The last that matches counts.
    """
    plain = name.lstrip("-").replace("-", "_").upper()
    secret = bool(SECRET.search(plain)) and not ONLY_WHERE.search(plain) and not OF_TEXT.search(plain)
    for pattern in patterns:
        none = pattern.startswith("-")
        if fnmatchcase(plain, pattern.removeprefix("-").replace("-", "_").upper()):
            secret = not none
    return secret


def held(name: str, value: str, patterns: Sequence[str] = ()) -> bool:
    """Whether `value` under this name is a secret: by the name, or as a token of a well-known service."""
    plain = name.lstrip("-").replace("-", "_").upper()
    if any(p.startswith("-") and fnmatchcase(plain, p[1:].replace("-", "_").upper()) for p in patterns):
        return named(name, patterns)
    return VALUE.search(value) is not None or (named(name, patterns) and not HARMLESS.fullmatch(value))


def in_words(words: Sequence[str], patterns: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """(index, name) of each word that holds a secret, as in --api-key X, --api-key=X, job.env.HF_TOKEN=X."""
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        before = words[at - 1] if at else ""
        if equals and held(option.rpartition(".")[2].lstrip("-+"), value, patterns):
            # The path of a file: secrets.HF_TOKEN=~/.hf_token
            if not option.lstrip("+").startswith("secrets."):
                yield at, option
        elif before.startswith("-") and "=" not in before and not word.startswith("-"):
            if held(before, word, patterns):
                yield at, before
        elif held("", word, patterns):
            yield at, HIDDEN


def masked(words: Sequence[str], patterns: Sequence[str] = ()) -> list[str]:
    """The command line with *** in the place of each secret."""
    shown = list(words)
    for at, _ in in_words(words, patterns):
        option, equals, _ = words[at].partition("=")
        shown[at] = f"{option}={HIDDEN}" if equals else HIDDEN
    return shown
