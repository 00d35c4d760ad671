"""Options without effect are reported for programs that do not use hpcinit, or only a part of it. The real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcinit.checks import all_checks, unused_settings
from hpcinit.config.compose import compose
from hpcinit.records import program_use
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

OPTIONS = ("parallel=zero3", "batch.micro=8", "compile=true", "gradient_clip=1", "seed=7")
WITHOUT_INIT = "the program did not use hpcinit: parallel, batch, compile, gradient_clip, seed had no effect"
WITHOUT_WRAP = "the program did not call run.wrap: compile, gradient_clip had no effect"
NO_INIT = "import os\nprint('rank', os.environ['RANK'])\n"
NO_WRAP = "import hpcinit\nwith hpcinit.session(backend='gloo', deepspeed=False) as run:\n    print('rank', run.rank)\n"
FORK = "launch=fork"  # imports torch once per node
OUT_OF_MEMORY = "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"


def run(hpcinit: Run, slurm: MiniSlurm, code: str, *words: str, fails: bool = False) -> tuple[Path, str, str]:
    """Submit the program to 2 nodes x 2 ranks; return the run folder, the output of `status` and of `why`."""
    Path("train.py").write_text(code)
    program = () if "--" in words else ("--", "train.py")
    common = ("nodes=2", "ranks_per_node=2", "wait=true")
    done = submit(hpcinit, slurm, *common, *words, *program, timeout=240)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    folder = folder_of(done)
    shown, why = (hpcinit(command, str(folder), env=slurm.env).stdout for command in ("status", "why"))
    return folder, shown, why


def logs(folder: Path) -> list[str]:
    return [(folder / f"logs/rank-{rank}.log").read_text() for rank in range(4)]


@pytest.mark.parametrize(
    "launch", ["srun", *(pytest.param(launch, marks=pytest.mark.more) for launch in ("fork", "torchrun"))]
)
def test_a_program_without_init(hpcinit: Run, idle_slurm: MiniSlurm, launch: str) -> None:
    """Rank 0's log, status and why name each option that was set, once, with every launcher."""
    folder, shown, why = run(hpcinit, idle_slurm, NO_INIT, *OPTIONS, f"launch={launch}")
    assert [log.count(WITHOUT_INIT) for log in logs(folder)] == [1, 0, 0, 0], logs(folder)[0]
    assert WITHOUT_INIT in shown, shown
    assert WITHOUT_INIT in why and "call hpcinit.init() and run.wrap() in the program" in why, why


def test_the_submission_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The submission warns about such settings, unless the script or a module beside it mentions hpcinit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, pkg.inner\nfrom helper import f\n")
    (tmp_path / "helper.py").write_text("from . import other\nf = 1\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/inner.py").write_text("x = 1\n")
    words = ["job=program", "job.script=train.py", "parallel=zero3", "seed=7"]

    def found(*more: str) -> list[str]:
        unused_settings._may_use_hpcinit.cache_clear()
        return [one for one in all_checks.warnings(compose([*words, *more])) if "no effect" in one]

    [text] = found()
    assert text.startswith(
        "train.py and the modules beside it do not import hpcinit: parallel, seed will have no effect"
    )
    [text] = found("job.args=[--seed,'7']")
    assert "hpcinit: parallel will have no effect" in text
    for name in ("train.py", "other.py", "pkg/inner.py", "pkg/deep.py"):
        path = tmp_path / name
        before = path.read_text() if path.exists() else ""
        path.write_text(before + "import hpcinit\n")
        assert found() == [], name
        path.write_text(before)
    words[2:] = ["nodes=2"]
    assert found() == []


PLAIN_SCRIPTS = (
    "python train.py\n",
    '#!/bin/bash\nset -eu\n# starts: my_tool\n. venv/bin/activate\nexec python -u ./train.py --lr 1 "$@" > out 2>&1\n',
    "export OMP_NUM_THREADS=4\nmkdir -p out\nif [ -f x ]; then python prepare.py; fi\nX=1 python3 \\\n  train.py | cat\n",
    "module load cuda && python -m train &\nwait\n",
    "for i in 1 2; do\n  ./train.py $i\ndone\n",
)
UNCLEAR_SCRIPTS = (
    "python own.py\n",  # imports hpcinit
    "python train.py\npython own.py\n",
    "python train.py\nmy_tool\n",
    "python $HERE/train.py\n",
    'python "$@"\n',
    "python absent.py\n",
    "cd elsewhere\npython train.py\n",
    "python train.py\npython -m pytest\n",
    "python train.py\npython -c 'import own'\n",
    "python train.py\npython <<END\nimport own\nEND\n",
    "python train.py <(my_tool)\n",
    "export PYTHONPATH=src\npython train.py\n",
    "python train.py --run $HPCINIT_RUN\n",
    ". ./settings.sh\npython train.py\n",
    "x=$(my_tool)\npython train.py\n",
    'x="$(my_tool)"\npython train.py\n',
    "echo 'a\nb'\npython train.py\n",
    "echo nothing\n",
)


@pytest.mark.parametrize("how", ["bash r.sh", "./r.sh", "bash -c"])
def test_the_submission_warns_about_a_shell_script(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns if the script runs only plain commands and Python files, and none of these files mentions hpcinit."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("train.py", "import os\n"), ("prepare.py", "x = 1\n"), ("own.py", "import hpcinit\n")):
        (tmp_path / name).write_text(text)

    def found(script: str) -> list[str]:
        path = tmp_path / "r.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        words = ["bash", "-c", script] if how == "bash -c" else how.split()
        config = compose(["job=program", "parallel=zero3"])
        config.job.command, config.job.args = words[0], words[1:]
        return [one for one in all_checks.warnings(config) if "no effect" in one]

    for script in PLAIN_SCRIPTS:
        [text] = found(script)
        assert "train.py (started by " in text and "do not import hpcinit: parallel will have no effect" in text
    for script in UNCLEAR_SCRIPTS:
        assert found(script) == [], script


@pytest.mark.more
def test_a_program_without_wrap(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """After init without run.wrap only the options of run.wrap are named; a program that reads them itself uses them."""
    options = ("compile=true", "gradient_clip=1", "seed=7", "batch.micro=8")
    folder, shown, why = run(hpcinit, idle_slurm, NO_WRAP, *options, FORK)
    assert [log.count(WITHOUT_WRAP) for log in logs(folder)] == [1, 0, 0, 0], logs(folder)[0]
    assert WITHOUT_WRAP in shown and WITHOUT_WRAP in why
    folder, shown, why = run(
        hpcinit, idle_slurm, NO_WRAP + "    run.training.gradient_clip\n", *options, FORK, "again=true"
    )
    assert "had no effect" not in shown + why + "".join(logs(folder))


@pytest.mark.more
def test_a_command_is_reported_too(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A command replaces the rank's process: status and why report it, and not if a Python below it calls init."""
    _, shown, why = run(hpcinit, idle_slurm, NO_INIT, *OPTIONS, "--", "bash", "-c", "true")
    assert WITHOUT_INIT in shown and WITHOUT_INIT in why, why
    inner = ("--", "bash", "-c", f"'{sys.executable}' train.py")
    _, shown, why = run(hpcinit, idle_slurm, NO_WRAP, "seed=7", *inner)
    assert "had no effect" not in shown + why, why


def test_nothing_to_report(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A program without hpcinit and without such options gets no note; neither does one that fails."""
    folder, shown, why = run(hpcinit, idle_slurm, NO_INIT)
    assert "had no effect" not in shown + why + "".join(logs(folder))
    folder, shown, why = run(hpcinit, idle_slurm, "raise ValueError('bad sample')\n", *OPTIONS, fails=True)
    assert "had no effect" not in shown + why + "".join(logs(folder))


@pytest.mark.more
def test_advice_on_memory_names_no_option_without_effect(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """For CUDA out of memory (a fake error) the advice names hpcinit's options only to programs that use them."""
    _, _, why = run(hpcinit, idle_slurm, OUT_OF_MEMORY, fails=True)
    assert "lower the program's own batch size" in why, why
    assert not any(option in why for option in ("batch.micro", "activation_checkpointing=", "parallel="))
    wraps = NO_WRAP + "    import torch\n    run.wrap(torch.nn.Linear(1, 1))\n    " + OUT_OF_MEMORY
    _, _, why = run(hpcinit, idle_slurm, wraps, FORK, fails=True)
    assert "batch.micro" in why, why


def test_records_of_other_versions(tmp_path: Path) -> None:
    """A missing or invalid record is None, and unknown fields are ignored."""
    path = tmp_path / "program_use.json"
    assert program_use.read(tmp_path) is None
    for text in ("", "[]", '{"uses": "all"}', '{"no_effect": []}', '{"uses": "init", "no_effect": 3}'):
        path.write_text(text)
        assert program_use.read(tmp_path) is None, text
    path.write_text(json.dumps({"uses": "nothing", "no_effect": ["seed"], "more": 1}))
    assert program_use.read(tmp_path) == program_use.ProgramUse("nothing", ("seed",))
