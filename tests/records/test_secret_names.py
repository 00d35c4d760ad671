"""Which names and values count as secrets."""

from __future__ import annotations

import pytest

from hpcinit.records import secret_names

HF = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"
SECRETS = """HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY GITHUB_PAT
AWS_SESSION_TOKEN MLFLOW_TRACKING_PASSWORD PGPASSWORD MYSQL_PWD MY_SECRET CLIENT_SECRET NGC_APIKEY SSH_PRIVATE_KEY KAGGLE_KEY
NEPTUNE_API_TOKEN AZURE_CREDENTIALS VAULT_TOKEN --api-key --hf-token auth_token"""
PLAIN = """TOKENIZERS_PARALLELISM MAX_TOKENS PWD OLDPWD PATH AWS_REGION AWS_PROFILE AWS_SHARED_CREDENTIALS_FILE HF_TOKEN_PATH
GOOGLE_APPLICATION_CREDENTIALS SSH_AUTH_SOCK NCCL_DEBUG KEYBOARD MONKEY EOS_TOKEN --eos-token tokens_per_sample image_token
NUM_TOKEN_TYPES SLURM_JWT PATTERN OMP_NUM_THREADS --token-dropout --token-type-ids WANDB_PROJECT HPCINIT_NONCE"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_a_secret_by_its_name(name: str) -> None:
    """Common names of tokens, keys and passwords are recognized."""
    assert secret_names.named(name)


@pytest.mark.parametrize("name", PLAIN.split())
def test_no_secret(name: str) -> None:
    """Settings of a tokenizer, tokens of a model and paths of files are not secrets."""
    assert not secret_names.named(name)


def test_patterns_add_and_take_away() -> None:
    """A pattern adds a secret, one with a minus removes it, and the last one counts."""
    assert secret_names.named("SITE_LOGIN", ["site_*"]) and not secret_names.named("HF_TOKEN", ["-HF_TOKEN"])
    assert secret_names.named("SITE_X", ["-SITE_*", "SITE_X"]) and not secret_names.is_secret("X", HF, ["-X"])


def test_a_token_under_any_name() -> None:
    """A value with the prefix of a well-known service's tokens is a secret under any name; true and 3 never are."""
    assert secret_names.is_secret("X", HF) and not secret_names.is_secret("X", "hf_short")
    assert not secret_names.is_secret("USE_TOKEN", "true") and not secret_names.is_secret("HF_TOKEN", "$HF_TOKEN")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("DATABASE_URL", "postgres://u:pw@h/db", "a URL with a password"),
        ("BROKER", "redis://:pw@h:6379/0", "a URL with a password"),
        ("OPENAI_KEY", "sk-proj-1a2b3c4d5e6f", "a token of a well-known service"),
        ("OPENAI_KEY", "sk-short", "because of its name and its random value"),
        ("SITE_KEY", "8c1f0ab37d5e42f19bb6", "because of its name and its random value"),
        ("X", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl", "a private key"),
        ("HF_TOKEN", "abc", "because of its name"),
        ("ORIGIN", "ssh://git@h:22/x", ""),
        ("DATABASE_URL", "postgres://u:$PW@h/db", ""),
        ("X", "task-0001-of-a-sweep-with-a-long-name-2", ""),
        ("SORT_KEY", "image_2_features", ""),
        ("HF_TOKEN", "/home/me/.hf", ""),
        ("X", "8c1f0ab37d5e42f19bb6", ""),
    ],
)
def test_the_form_of_a_value(name: str, value: str, why: str) -> None:
    """The form of a value counts first, the name second. One exception overrules both."""
    assert secret_names.reason(name, value) == why
    assert secret_names.reason(name, value, [f"-{name}"]) == ""


def test_a_command_that_mentions_secrets() -> None:
    """A command that only mentions names of secrets has none, and one that sets a variable to a secret has."""
    assert not [*secret_names.in_arguments(["-c", 'env | grep -E "SECRET|PAT="'])]
    assert not [*secret_names.in_arguments(["-c", "import x; x.login(token=tok, password=ask())"])]
    assert [*secret_names.in_arguments(["-c", "cd /x; PGPASSWORD=pw psql"])] == [
        (1, "PGPASSWORD", "because of its name")
    ]
    assert [*secret_names.in_arguments(["a", HF])] == [(1, "args", "a token of a well-known service")]
    assert not [*secret_names.in_arguments(["a", HF], ["-args"])]


def test_command_lines_are_masked() -> None:
    """Each way to write a secret on a command line is masked, and nothing else."""
    arguments = ["submit", "+job.env.HF_TOKEN=abc", "+secrets.HF_TOKEN=/home/me/.hf", "--", "t.py", "--api-key", "abc",
             "--password=abc", "--use-auth-token", "--lr", "3", f"x={HF}", HF, "--eos_token", "</s>",
                 "--db=postgres://u:pw@h/d?a=b", "postgres://u:pw@h/d?a=b"]  # fmt: skip
    hidden = ["submit", "+job.env.HF_TOKEN=***", "+secrets.HF_TOKEN=/home/me/.hf", "--", "t.py", "--api-key", "***",
              "--password=***", "--use-auth-token", "--lr", "3", "x=***", "***", "--eos_token", "</s>", "--db=***", "***"]  # fmt: skip
    assert secret_names.masked(arguments) == hidden
