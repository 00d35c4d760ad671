"""`hpcinit drill` on real programs: a correct one passes, and a planted bug is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcinit.base.errors import INTERRUPTED
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, printed, submit

PROGRAM = (Path(__file__).parent / "train.py").read_text()
TIMEOUT_S = 450


def drill(folder: Path, *words: str, program: str = PROGRAM, more: Mapping[str, str] = {}) -> tuple[int, str, str]:
    """Run a drill of `program` in `folder`, with a TMPDIR beside it. Return its status, stdout and stderr."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(program)
    (folder.parent / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(folder.parent / "tmp"), **more}
    command = [sys.executable, "-m", "hpcinit", "drill", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert not list((folder.parent / "tmp").iterdir()), "the drill left files"
    return done.returncode, done.stdout, done.stderr


def document(out: str) -> dict[str, Any]:
    """Return the one document of a drill with --json, compared with the page of documents."""
    (found,) = json_documents.parse(out, "drill")
    return found


@pytest.mark.more
@pytest.mark.ranks
def test_a_correct_program_passes(tmp_path: Path) -> None:
    """A program that resumes exactly passes each fault: from the step that it saved, with equal losses.

    The user's folder has the same files as before.
    """
    status, out, err = drill(tmp_path / "work", "--json", "--", "train.py")
    assert status == 0, out + err
    found = document(out)
    assert (found["steps"], found["deterministic"], found["saves"]) == (24, True, [6, 12, 18, 24])
    parts = {part["part"]: part for part in found["parts"]}
    assert {"preempted", "time limit", "all ranks killed", "killed while it saved", "full disk"} == parts.keys()
    preempted, killed = parts["preempted"], parts["all ranks killed"]
    assert preempted["saved"] >= preempted["step"] and preempted["resumed_from"] == [preempted["saved"]]
    assert killed["resumed_from"][0] % 6 == 0 and killed["step"] > killed["resumed_from"][0]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["train.py"]


OWN_CALLS = """
import time
import torch
import hpcinit

with hpcinit.session() as run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    wrapped = run.wrap(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    loaded = run.load(wrapped, "checkpoints")
    for step in range(loaded.step + 1 if loaded else 1, 25):
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = wrapped(inputs).pow(2).mean()
        wrapped.backward(loss)
        wrapped.step()
        time.sleep(0.03)
        run.progress(step, 24, loss=loss.item())
        stop = run.should_stop()
        if stop or step % 6 == 0:
            run.save(wrapped, "checkpoints", step, keep=2)
        if stop:
            break
"""


@pytest.mark.ranks
@pytest.mark.more
def test_a_program_with_hpcinits_own_calls_passes(tmp_path: Path) -> None:
    """It prints no steps, torch makes a step of the optimizer before it loads, and old checkpoints are removed."""
    status, out, err = drill(tmp_path / "work", "--json", "--", "train.py", program=OWN_CALLS)
    assert status == 0, out + err
    found = document(out)
    assert found["steps"] == 24
    parts = {part["part"]: part for part in found["parts"]}
    for name in ("preempted", "time limit"):
        assert parts[name]["resumed_from"] == [parts[name]["saved"]], out


@pytest.mark.ranks
@pytest.mark.more  # each takes two minutes
@pytest.mark.parametrize("same", [False, True])
def test_a_restart_on_fewer_ranks(tmp_path: Path, same: bool) -> None:
    """With --fewer-ranks a step of two ranks is loaded by one. A program that needs the same number fails there only."""
    check = "    assert not loaded or loaded.extra == run.world_size\n" if same else ""
    program = OWN_CALLS.replace("keep=2)\n        if stop:", "keep=2, extra=run.world_size)\n        if stop:")
    program = program.replace("    for step", f"{check}    for step")
    words = ["--json", "ranks_per_node=2", "--fewer-ranks", "1", "--", "train.py"]
    status, out, err = drill(tmp_path / "work", *words, program=program)
    assert status == same, out + err
    last = document(out)["parts"][-1]
    assert last["part"] == "fewer ranks" and last["causes"] == (["resume_fails"] if same else []), out
    assert same or last["resumed_from"][0] % 6 == 0 < last["resumed_from"][0]


# What is replaced in the program by what, and the cause that the drill names.
BUGS = {
    "no_optimizer": ('    optimizer.load_state_dict(state["optimizer"])\n', ""),
    "loads_nothing": ("Path(FOLDER).glob", "Path('elsewhere').glob"),
    "ignores_signal": ("stop.append(number)", "None"),
    # One short call of torch.save writes the file, which no kill would hit.
    "torn_checkpoint": ("/saving", "/step-{step:03}.pt"),
    "no_scheduler": ('    scheduler.load_state_dict(state["scheduler"])\n', ""),
    "no_random_state": ('    torch.set_rng_state(state["random"])\n', ""),
    "data_from_start": ("data[order[batch * 32 : batch * 32 + 32]]", "data[order[step0 * 32 : step0 * 32 + 32]]"),
    "wrong_file": ("found[-1]", "found[0]"),
    "node_local": ('"checkpoints"', "tempfile.gettempdir()"),
    "no_averages": ("", ""),  # AVERAGES
}
QUICK = {"no_optimizer"}


@pytest.mark.ranks
@pytest.mark.parametrize("cause", [pytest.param(one, marks=() if one in QUICK else pytest.mark.more) for one in BUGS])
def test_a_planted_bug_is_named(tmp_path: Path, cause: str) -> None:
    """The exit status is 1, and the first finding names the planted bug."""
    old, new = BUGS[cause]
    assert old in PROGRAM
    program = PROGRAM.replace(old, new)
    if cause == "no_averages":
        program = program.replace("scheduler =", "average = torch.optim.swa_utils.AveragedModel(model)\nscheduler =")
        program = program.replace("    step += 1\n", f"    step += 1\n{AVERAGES}")
    if cause == "no_scheduler":  # a schedule that counts; the optimizer's state contains the rate as well
        program = program.replace("ExponentialLR(optimizer, 0.95)", "LambdaLR(optimizer, lambda step: 0.95**step)")
    if cause == "data_from_start":
        program = program.replace(
            "    epoch, batch = divmod(step, 8)\n", "    step0 = step - first\n    epoch = step // 8\n"
        )
        program = program.replace("while step <", "first = step\nwhile step <").replace("step0 * 32", "step0 % 8 * 32")
        program = program.replace("step0 * 32 + 32", "step0 % 8 * 32 + 32")
    status, out, err = drill(tmp_path / "work", "--json", "--", "train.py", program=program)
    assert status == 1, out + err
    assert document(out)["findings"][0]["cause"] == cause, out


AVERAGES = """    average.update_parameters(model)
    if step % 2 == 0:
        with torch.no_grad():
            print("of the average:", average(inputs).sum().item())
"""


@pytest.mark.ranks
def test_files_elsewhere_are_refused_before_they_change(tmp_path: Path) -> None:
    """A program that overwrites a file outside of its folder ends the drill, and the file is unchanged."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "step-006.pt").write_text("of the user")
    (mine / "saving").write_text("of the user")
    status, out, err = drill(
        tmp_path / "work", "--", "train.py", program=PROGRAM.replace('"checkpoints"', repr(str(mine)))
    )
    assert (status, out) == (2, ""), out
    assert "outside of its working folder" in err and str(mine) in err
    assert {path.name: path.read_text() for path in mine.iterdir()} == dict.fromkeys(
        ("step-006.pt", "saving"), "of the user"
    )


@pytest.mark.ranks
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C ends the ranks, removes all folders, and exits with 130."""
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work/train.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(600)\n")
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "hpcinit", "drill", "--", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path / "work", env=env, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(tmp_path.glob("tmp/*/now/work/started")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        engines = [
            one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])
        ]
        assert engines
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED and "interrupted" in err
    assert not list((tmp_path / "tmp").iterdir()) and psutil.wait_procs(engines, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no program, expected one after --"),
        (["--steps", "2", "--", "train.py"], "expected at least 3"),
        (["cluster=mini", "--", "train.py"], "a drill sets this key itself"),
        (["drill.pattern=x", "--", "train.py"], "has no group 'step'"),
        (["--stepz", "--", "train.py"], "did you mean --steps"),
        (["--", "/elsewhere/train.py"], "is not in the current folder"),
        (["--", "missing.py"], "missing.py"),
    ],
)
def test_wrong_use(tmp_path: Path, words: list[str], message: str) -> None:
    """A wrong request exits with 2 and prints what was expected; nothing is left."""
    status, out, err = drill(tmp_path / "work", *words)
    assert (status, out) == (2, "") and message in err, err


@pytest.mark.slurm
@pytest.mark.ranks
@pytest.mark.more
def test_a_drill_as_a_small_job(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Submitted as in docs/drill.md, the drill runs on the job's node, apart from the job. Its exit status is the job's."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [str(Path(sys.executable).with_name("hpcinit")), "drill", "--", "train.py"]
    words = ["nodes=1", "ranks_per_node=1", "time_min=15", "wait=true", "--", *command]
    done = submit(hpcinit, idle_slurm, *words, timeout=TIMEOUT_S)
    log = printed(folder_of(done), 0)
    assert done.returncode == 0 and "the program resumes correctly" in log, done.stderr + log
