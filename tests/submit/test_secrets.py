"""Secrets reach the program, but no file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of, printed

SECRET = "s3cr3t-of-this-test"
SHOW = ["--", "sh", "-c", 'echo "${#HF_TOKEN} ${HF_TOKEN}" | tr s X']  # logs have it with X for s


def keep(folder: Path, mode: int = 0o600, text: str = SECRET + "\n") -> Path:
    path = folder / "a token file"
    path.write_text(text)
    path.chmod(mode)
    return path


def everything_written(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def given(path: Path) -> str:
    return f'+secrets.HF_TOKEN="{path}"'


def test_a_job_reads_its_secret_from_the_file(hpcinit: Run, tmp_path: Path) -> None:
    """The program has the secret in its environment.

    No file of the run contains it, although the script traces itself.
    """
    path = keep(tmp_path)
    setup = "cluster.setup=['set -x']"
    done = hpcinit("submit", given(path), setup, "wait=true", *SHOW, env={"SHELLOPTS": "xtrace"})
    assert done.returncode == 0, done.stdout + done.stderr
    folder = folder_of(done)
    assert printed(folder, 0) == f"{len(SECRET)} {SECRET.replace('s', 'X')}\n"
    assert "+ export HPCINIT_RUN" in (folder / "logs/job.log").read_text()
    assert SECRET not in everything_written(folder) + done.stdout + done.stderr


@pytest.mark.slurm
def test_no_secret_in_slurms_state(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """On the cluster, Slurm's own state contains neither the secret of the file nor that of the shell."""
    path = keep(tmp_path)
    env = {"WANDB_API_KEY": SECRET, "MY_LOGIN": SECRET, **slurm.env}
    words = ["cluster=mini", "cluster.gpu_flag=null", "ranks_per_node=1", given(path), "secret_names=[MY_*]"]
    program = ["--", "sh", "-c", "echo ${#HF_TOKEN} ${WANDB_API_KEY:-none} ${MY_LOGIN:-none}"]
    held = hpcinit("submit", *words, "+cluster.sbatch.hold=true", *program, env=env)
    assert "not passed on to the job: MY_LOGIN, WANDB_API_KEY; MY_LOGIN looks like a secret" in held.stderr
    assert "pass '+secrets.MY_LOGIN=FILE'; if it is not a secret: 'secret_names=[-MY_LOGIN]'" in held.stderr
    state = {}
    for path in (slurm.directory / "state").rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # the controller replaces its files
            state[path] = path.read_bytes()
    assert any(path.name.startswith("environment") for path in state)
    assert not any(SECRET.encode() in content for content in state.values())
    slurm.cancel_all()
    done = hpcinit("submit", *words, "wait=true", *program, env=env)
    assert printed(folder_of(done), 0) == f"{len(SECRET)} none none\n"
    assert SECRET not in everything_written(folder_of(done)) + done.stdout + done.stderr


def test_quiet_output_names_secrets_that_are_not_passed_on(hpcinit: Run) -> None:
    """With -q the line is printed as well, without the variables of a surrounding job."""
    done = hpcinit("submit", "-q", "wait=true", *SHOW, env={"HF_TOKEN": SECRET, "SLURM_CPU_BIND": "none"})
    assert done.stderr.startswith("not passed on to the job: HF_TOKEN; HF_TOKEN looks like a secret"), done.stderr
    assert "pass '+secrets.HF_TOKEN=FILE'" in done.stderr and "CPU_BIND" not in done.stderr


def test_a_name_that_is_no_secret_is_passed_on(hpcinit: Run) -> None:
    """secret_names with a minus passes a variable on. There is no note about a secret that the job reads itself."""
    done = hpcinit("submit", "secret_names=[-HF_TOKEN]", "wait=true", *SHOW, env={"HF_TOKEN": "public"})
    assert printed(folder_of(done), 0) == "6 public\n"
    assert "not passed on" not in done.stderr


def test_a_proxy_with_a_password_reaches_the_job(hpcinit: Run) -> None:
    """The job gets the shell's proxy, and no file of the run has its password. secret_names=[http_proxy] keeps it back."""
    env, password = {"http_proxy": "http://me:correct-horse@proxy:3128"}, "correct-horse"
    program = ["--", "sh", "-c", 'printf "%s" "${http_proxy#http://me:}" | sha256sum']
    done = hpcinit("submit", "wait=true", *program, env=env)
    expected = hashlib.sha256(f"{password}@proxy:3128".encode()).hexdigest()
    assert expected in printed(folder_of(done), 0) and password not in done.stdout + done.stderr
    held = hpcinit("submit", "wait=true", "secret_names=[http_proxy]", *program, env=env)
    assert "not passed on to the job: http_proxy; " in held.stderr
    assert expected not in printed(folder_of(held), 0)
    for path in Path("runs").rglob("*"):
        assert not path.is_file() or password.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["+job.env.HF_TOKEN=s3cr3t-of-this-test"], "job.env.HF_TOKEN"),
        (["+cluster.env.MY_SECRET=s3cr3t-of-this-test"], "cluster.env.MY_SECRET"),
        (["+wandb.api_key=s3cr3t-of-this-test"], "wandb.api_key"),
        (["secret_names=[SITE_*]", "+job.env.SITE_X=s3cr3t-of-this-test"], "job.env.SITE_X"),
        (["cluster.setup=['export A_TOKEN=s3cr3t-of-this-test']"], "cluster.setup sets A_TOKEN"),
        (["--", "true", "--api-key", SECRET], "the program's argument api-key"),
        (["--", "true", f"password={SECRET}"], "the program's argument password"),
        (["--", "true", f"postgres://me:{SECRET}@host/db"], "argument 1 of the program"),
        (["+job.env.DATABASE_URL='postgres://me:s3cr3t-of-this-test@host/db'"], "job.env.DATABASE_URL"),
        (["+job.env.HF_TOKEN='s3cr3t-of-this-test\t'"], "job.env.HF_TOKEN"),
    ],
)
def test_a_secret_in_the_request(hpcinit: Run, tmp_path: Path, words: list[str], key: str) -> None:
    """A secret in the config or in the arguments is refused without printing it, with advice. No file is written."""
    at = words.index("--") if "--" in words else len(words)
    for dry in ("dry_run=true", "dry_run=false"):
        done = hpcinit("submit", *words[:at], dry, *words[at:])
        assert done.returncode == 2 and f"{key}" in done.stderr and "looks like a secret" in done.stderr
        assert 'and pass it with "+secrets.' in done.stderr and SECRET not in done.stderr + done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_looks_for_secrets(hpcinit: Run) -> None:
    """A command that only mentions names of secrets is submitted, and one argument overrules a wrong refusal."""
    look = ["sh", "-c", 'env | grep -cE "SECRET|PAT=" || true']
    assert hpcinit("submit", "dry_run=true", "--", *look).returncode == 0
    url = ["true", "postgres://me:public@host/db"]
    assert "'secret_names=[-args]'" in hpcinit("submit", "dry_run=true", "--", *url).stderr
    assert hpcinit("submit", "dry_run=true", "secret_names=[-args]", "--", *url).returncode == 0


def test_replaced_overrides_are_masked(hpcinit: Run) -> None:
    """A secret in an override that a later one replaces is not recorded either."""
    words = ["+job.env.HF_TOKEN=s3cr3t-of-this-test", "job.env.HF_TOKEN=''"]
    done = hpcinit("submit", *words, "--", "true")
    assert done.returncode == 0, done.stderr
    text = everything_written(folder_of(done))
    assert SECRET not in text and '"+job.env.HF_TOKEN=***"' in text


FILES = [
    (lambda folder: folder / "nowhere", "nowhere', expected a file that you can read: No such file"),
    (lambda folder: folder, "expected a file that you can read: Is a directory"),
    (lambda folder: keep(folder, 0o640), "with mode 0640, expected 0600: other users can read it; chmod 600 '"),
    (lambda folder: keep(folder, text=""), "which is empty"),
    (lambda folder: Path("/dev/zero"), "expected a plain file"),
]


@pytest.mark.parametrize(("make", "said"), FILES)
def test_an_unsuitable_secret_file(hpcinit: Run, tmp_path: Path, make, said: str) -> None:
    """A file that is missing, readable by others, empty or not a file is refused with advice."""
    done = hpcinit("submit", given(make(tmp_path)), "--", "true")
    assert done.returncode == 2 and "secrets.HF_TOKEN is '" in done.stderr and said in done.stderr


def test_another_users_file(hpcinit: Run, tmp_path: Path) -> None:
    """A file of another user is refused."""
    if os.geteuid() != 0:
        skip_or_fail("only root can give a file away")
    path = keep(tmp_path)
    os.chown(path, 1234, 1234)
    done = hpcinit("submit", given(path), "--", "true")
    assert done.returncode == 2 and "which belongs to user 1234, expected your own file" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+secrets.A-B=/x"], "secrets has 'A-B', expected a name of letters"),
        (
            ["+secrets.A=/etc/hostname", "+job.env.A=1"],
            "secrets.A and job.env.A (or cluster.env) both set A: remove one",
        ),
    ],
)
def test_names_of_secrets(hpcinit: Run, words: list[str], said: str) -> None:
    """An invalid variable name, or one that is set twice, is refused."""
    done = hpcinit("submit", *words, "--", "true")
    assert done.returncode == 2 and said in done.stderr


def test_a_file_that_is_gone_when_the_job_starts(hpcinit: Run, tmp_path: Path) -> None:
    """The job ends at once and names the secret that it cannot read."""
    path = keep(tmp_path)
    done = hpcinit("submit", given(path), "--", "true")
    path.unlink()
    ended = subprocess.run(["bash", folder_of(done) / "job.sh"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and f"secrets.HF_TOKEN: cannot read {path} on this node" in ended.stderr
