"""What a program's source shows before the queue: keys of hpcinit after --, syntax errors, a forgotten program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.checks import program_source
from tests.conftest import Run
from tests.submit.test_submit import fake_sbatch

READERS = {
    "hydra": "import hydra\n@hydra.main(config_path=None)\ndef main(config): pass\n",
    "from hydra": "from hydra import main\n",
    "omegaconf": "from omegaconf import OmegaConf\nconfig = OmegaConf.from_cli()\n",
    "sys.argv": "import sys\nprint(sys.argv[1:])\n",
    "argv": "from sys import argv\n",
    "argparse": "import argparse\nargparse.ArgumentParser().add_argument('overrides', nargs='*')\n",
}
IGNORES = "import argparse\nargparse.ArgumentParser().add_argument('--lr')\n"


def test_keys_after_the_dashes_are_refused_with_the_command(hpcinit: Run, tmp_path: Path) -> None:
    """`-- train.py nodes=2 dry_run=true` submits nothing and prints the command that was meant."""
    (tmp_path / "train.py").write_text(IGNORES)
    done = hpcinit("submit", "name=x", "--", "train.py", "--lr", "3", "nodes=2", "dry_run=true", "--set", "seed=1")
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert (
        "nodes=2 dry_run=true after -- are keys of hpcinit, but hpcinit reads only keys before --: "
        "hpcinit submit name=x nodes=2 dry_run=true -- train.py --lr 3 --set seed=1. If the program reads them: "
        "hpcinit submit name=x -- -- train.py --lr 3 nodes=2 dry_run=true --set seed=1" in done.stderr
    )


@pytest.mark.parametrize("reader", READERS)
def test_a_program_that_reads_them_gets_them(hpcinit: Run, tmp_path: Path, reader: str) -> None:
    """Hydra, OmegaConf, sys.argv and positional arguments in the script's source mean that nothing is refused."""
    (tmp_path / "train.py").write_text(READERS[reader])
    done = hpcinit("submit", "dry_run=true", "--", "train.py", "nodes=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "# train: train.py nodes=2, 1 node x 1 rank\n" in done.stdout


@pytest.mark.parametrize("program", [["--", "train.py", "nodes=2"], ["train.py", "--", "nodes=2"]])
def test_a_second_pair_of_dashes_passes_them(hpcinit: Run, tmp_path: Path, program: list[str]) -> None:
    """With -- given twice, hpcinit does not look at the program's arguments."""
    (tmp_path / "train.py").write_text(IGNORES)
    done = hpcinit("submit", "dry_run=true", "--", *program)
    assert done.returncode == 0, done.stderr
    assert f"# train: {' '.join(program).removeprefix('-- ')}, 1 node x 1 rank\n" in done.stdout


def test_keys_after_a_program_without_source_are_a_warning(hpcinit: Run) -> None:
    """hpcinit cannot know what a command reads, so it submits and warns."""
    done = hpcinit("submit", "dry_run=true", "--", "echo", "nodes=2")
    assert done.returncode == 0 and "nodes=2 after -- is a key of hpcinit" in done.stderr


def test_a_script_that_does_not_compile_is_refused(hpcinit: Run, tmp_path: Path) -> None:
    """A SyntaxError is reported with its line before the queue, and the script does not run."""
    (tmp_path / "train.py").write_text("open('ran', 'w')\nx = (1\n")
    done = hpcinit("submit", "--", "train.py")
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
    assert f"{sys.executable} cannot compile 'train.py': line 2: '(' was never closed" in done.stderr


@pytest.mark.parametrize("options", [["-u"], ["-W", "ignore", "-u"], []])
def test_the_script_after_the_options_of_python(hpcinit: Run, tmp_path: Path, options: list[str]) -> None:
    """In `python -u train.py`, the named Python compiles train.py; if it is found only on the nodes, there is a warning."""
    (tmp_path / "train.py").write_text("x = (1\n")
    done = hpcinit("submit", "--", sys.executable, *options, "train.py")
    assert done.returncode == 2 and f"{sys.executable} cannot compile 'train.py': line 1" in done.stderr
    done = hpcinit("submit", "dry_run=true", "--", "python3.9", *options, "train.py")
    assert done.returncode == 0 and "The ranks' Python, python3.9, may have another version" in done.stderr
    module = hpcinit("submit", "--", sys.executable, *options, "-m", "train")
    assert module.returncode == 2 and "cannot compile 'train.py': line 1" in module.stderr


def test_the_python_of_the_ranks_compiles(hpcinit: Run, tmp_path: Path) -> None:
    """Another Python compiles the script; if it cannot be started here, an error of this one is only a warning."""
    script, python = tmp_path / "train.py", tmp_path / "python"
    script.write_text("print 'of another version'\n")
    python.write_text("#!/bin/sh\necho started >> started.txt\n")  # it accepts the script
    python.chmod(0o755)
    done = hpcinit("submit", "dry_run=true", f"cluster.python={python}", "--", "train.py")
    assert done.returncode == 0 and "compile" not in done.stderr, done.stderr
    assert (tmp_path / "started.txt").read_text() == "started\n"
    python.write_text("#!/bin/sh\nexit 1\n")
    done = hpcinit("submit", "dry_run=true", f"cluster.python={python}", "--", "train.py")
    assert done.returncode == 0 and "warning: 'train.py' does not compile with Python 3." in done.stderr
    assert "could not be started here" in done.stderr


def test_a_python_of_this_version_is_not_started(hpcinit: Run, tmp_path: Path) -> None:
    """Submission starts no child process if the Python of the ranks is this one or of the same version."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    (tmp_path / "v/bin/python").unlink()
    (tmp_path / "v/bin/python").write_text("#!/bin/sh\necho started >> started.txt\n")
    (tmp_path / "v/bin/python").chmod(0o755)
    (tmp_path / "train.py").write_text("x = (1\n")
    done = hpcinit("submit", f"cluster.venv={tmp_path}/v", "--", "train.py")
    assert done.returncode == 2 and "cannot compile 'train.py': line 1" in done.stderr
    assert not (tmp_path / "started.txt").exists()


def test_a_slow_python_does_not_delay_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hpcinit: Run
) -> None:
    """The child process has a time limit, after which the result is unknown."""
    (tmp_path / "train.py").write_text("x = (1\n")
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(program_source, "COMPILE_TIMEOUT_S", 0.1)
    done = hpcinit("submit", "dry_run=true", f"cluster.python={tmp_path}/python", "--", "train.py")
    assert done.returncode == 0 and "could not be started here" in done.stderr


def test_a_submission_without_a_program_says_that_it_is_the_smoke_test(hpcinit: Run, tmp_path: Path) -> None:
    """The first line names the smoke test; it requests ten minutes, or the time that the user gives."""
    env = fake_sbatch(tmp_path, "echo 4242")
    done = hpcinit("submit", "cluster=mini", "cluster.time_min=60", "nodes=4", "validate=false", env=env)
    assert done.stderr.startswith(
        "no program after --, so this submits the smoke test (time limit: 10 min). To submit your program: "
        "hpcinit submit cluster=mini cluster.time_min=60 nodes=4 validate=false -- train.py\n"
    ), done.stderr
    assert "#SBATCH --time=00:10:00\n" in (tmp_path / "runs/smoke-0001/job.sh").read_text()
    script = hpcinit("submit", "cluster=mini", "time=00:30:00", "dry_run=true").stdout
    assert "#SBATCH --time=00:30:00\n" in script


def test_the_smoke_test_ends_if_a_link_does_not_answer() -> None:
    """A rank whose all-reduce hangs prints its stacks and exits within the limit."""
    code = (
        "import threading, hpcinit.jobs.smoke as smoke; smoke.LIMIT_S = 1.0; "
        "smoke.dist.all_reduce = lambda total: threading.Event().wait(); smoke.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "smoke.py" in done.stderr and "Timeout" in done.stderr, done.stderr
    assert smoke_limit_s() < 60


def smoke_limit_s() -> float:
    text = (Path(program_source.__file__).parents[1] / "jobs/smoke.py").read_text()
    return float(text.partition("LIMIT_S = ")[2].split()[0])
