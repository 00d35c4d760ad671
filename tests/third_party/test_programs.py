"""Programs of other libraries, most of them from docs/recipes.md, as hpcinit starts them: 2 nodes x 2 ranks of a real Slurm.

Models are made from a config and data from torch: nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of, submit
from tests.test_recipes import PROGRAMS as RECIPES
from tests.test_recipes import stop_and_continue

pytestmark = pytest.mark.more
PROGRAMS = Path(__file__).parent / "programs"
# One process per node imports the library for its ranks.
LIGHTNING = ["launch=fork", "launch.preload=[torch,lightning]"]
TRANSFORMERS = ["launch=fork", "launch.preload=[torch,transformers.trainer,torch._dynamo]"]
# Before a recipe: note the samples and gradients of this rank, for every library in the same way.
PROBE = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
seen, gradients, parameters = [], [], []
def note_sample(module, inputs):
    if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and len(inputs[0]) == 1 and module.weight.requires_grad:
        if len(seen) == len(gradients):
            seen.append(int(inputs[0].flatten()[0]))
def note_gradients(optimizer, *_):
    parameters[:] = [p for group in optimizer.param_groups for p in group["params"]]
    gradients.append([p.grad.double().sum().item() for p in parameters if p.grad is not None])
torch.nn.modules.module.register_module_forward_pre_hook(note_sample)
register_optimizer_step_post_hook(note_gradients)
"""
# After it.
REPORT = """
import json, os
report = {key: int(os.environ[key.upper()]) for key in ("rank", "local_rank")}
report |= {"world": WORLD, "seen": seen, "gradient": gradients, "weights": [p.double().sum().item() for p in parameters]}
os.write(1, (json.dumps(report) + "\\n").encode())
"""
WORLDS = {
    "accelerate_loop": "accelerator.num_processes",
    "lightning_fit": "trainer.world_size",
    "hf_trainer": "args.world_size",
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning", "accelerate", "transformers"):
        if not importlib.util.find_spec(package):
            skip_or_fail(f"{package} is not installed: pip install 'hpcinit[test]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def reports(texts: Iterable[str]) -> list[dict]:
    """Return what the ranks printed as JSON, in rank order."""
    lines = [line for text in texts for line in text.splitlines() if line.startswith('{"')]
    return sorted((json.loads(line) for line in lines), key=lambda report: report["rank"])


def with_report(name: str) -> str:
    """Return a recipe that also reports its samples, gradients and weights."""
    return PROBE + RECIPES[f"{name}.py"] + REPORT.replace("WORLD", WORLDS[name])


def logs(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("logs/*.log"))]


def assert_one_world_of_4(found: list[dict], samples: Iterable[int]) -> None:
    """Assert that each sample was used by one rank only, and that all ranks have equal gradients and weights."""
    assert [(r["rank"], r["local_rank"], r["world"]) for r in found] == [(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)]
    assert sorted(sample for r in found for sample in r["seen"]) == sorted(samples)
    assert len({len(r["seen"]) for r in found}) == 1
    for report in found[1:]:
        assert report["gradient"] == found[0]["gradient"]
        assert report["weights"] == found[0]["weights"]
    assert found[0]["gradient"]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("name", "epochs", "setting"),
    [
        ("lightning_fit", 3, []),  # by srun, because Lightning reads the variables of Slurm's tasks
        # By srun: with launch=fork the ranks hung at their end. end_training() has destroyed the group; the destructor of
        # torch's gloo group then waits, with Python's lock, for a thread that waits for this lock.
        ("accelerate_loop", 1, []),
        ("hf_trainer", 2, TRANSFORMERS),
    ],
)
def test_trains_as_one_world(
    hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, name: str, epochs: int, setting: list[str]
) -> None:
    """The recipe, without any call of hpcinit, divides its data and averages its gradients over all 4 ranks."""
    (tmp_path / f"{name}.py").write_text(with_report(name))
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "wait=true", *setting, "--", f"{name}.py")
    folder = folder_of(done)
    assert done.returncode == 0, logs(folder)
    assert_one_world_of_4(reports(logs(folder)), [*range(8)] * epochs)


@pytest.mark.parametrize(
    ("name", "callback", "steps", "limit", "settings"),
    [
        ("lightning_fit", "lightning_callback", "max_epochs=3", "max_epochs=-1, max_steps={}", LIGHTNING),
        ("hf_trainer", "trainer_callback", "max_steps=4", "max_steps={}", TRANSFORMERS),
    ],
)
def test_a_callback_stops_the_library(
    hpcinit: Run, tmp_path: Path, name: str, callback: str, steps: str, limit: str, settings: list[str]
) -> None:
    """With the page's callback, the recipe saves and stops when requested. The next run continues at the next step."""
    (tmp_path / f"{callback}.py").write_text(RECIPES[f"{callback}.py"])
    program = f"from {callback} import InTime\n{with_report(name)}"
    for before in ("callbacks=[", steps):
        assert program.count(before) == 1
    program = program.replace("callbacks=[", "callbacks=[InTime(), ")
    stopped, done = stop_and_continue(
        hpcinit, tmp_path, f"{name}.py", lambda end: program.replace(steps, limit.format(end)), settings
    )
    for report in reports(logs(folder_of(done))):
        assert len(report["gradient"]) == 4, (stopped, report)


@pytest.mark.slurm
def test_accelerate_alone_makes_worlds_of_one_on_cpu(slurm: MiniSlurm, tmp_path: Path) -> None:
    """`Accelerator()` ignores the ranks if there is no GPU, unless cpu=True or ACCELERATE_USE_CPU is set.

    Rank 0 then logs one line that names the setting. This is accelerate's behavior (the same under torchrun). The test shows when it changes, because
    docs/reference/compatibility.md describes it. It also covers the use without a submitter: `srun python -m hpcinit.run`.
    """
    rank = [sys.executable, "-m", "hpcinit.run", "alone.py"]
    (tmp_path / "alone.py").write_text(with_report("accelerate_loop").replace("cpu=not torch.cuda.is_available()", ""))
    printed = slurm.run("srun", "-N1", "-n2", f"--chdir={tmp_path}", "sh", "-c", f"exec {shlex.join(rank)} 2>&1")
    assert [(r["rank"], r["world"], len(r["seen"])) for r in reports([printed])] == [(0, 1, 8), (1, 1, 8)]
    assert (
        printed.count("accelerate found no GPU, so each of the 2 ranks was a separate training run; set +cluster") == 1
    )


def test_lightning_names_a_wrong_number_of_devices(hpcinit: Run, tmp_path: Path) -> None:
    """Lightning reads the step's variables: if devices do not match the ranks of a node, every rank exits with an error that names them."""
    program = tmp_path / "four_devices.py"
    right = 'devices=int(os.environ["LOCAL_WORLD_SIZE"])'
    text = RECIPES["lightning_fit.py"]
    assert right in text
    program.write_text(text.replace(right, "devices=4"))
    words = ["cluster=local", "nodes=1", "ranks_per_node=2", "wait=true", "launch.kill_on_bad_exit=false", *LIGHTNING]
    done = hpcinit("submit", *words, "--", str(program))
    assert done.returncode != 0
    for rank in (0, 1):
        record = json.loads((folder_of(done) / f"errors/rank-{rank}.json").read_text())
        assert "You set `devices=4` in Lightning" in record["error"] and "--ntasks-per-node=2" in record["error"]


@pytest.mark.slurm
def test_torchruns_elastic_restart(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """torchrun's agents, a task per node, connect at the address that hpcinit.run exports, and restart all after a failure.

    The second attempt starts where the first one's state ended. Its workers run under hpcinit.run too, because Python's
    exit may abort a successful rank (hpcinit/runtime/interpreter_exit.py). Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE a
    restarted gloo finds the addresses of the dead ranks in the agents' store
    (https://github.com/pytorch/pytorch/issues/135712), also with torch alone.
    """
    agent = [shlex.quote(sys.executable), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1",
             "--rdzv-backend=c10d", "--rdzv-id=test", '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"']  # fmt: skip
    line = " ".join(["exec", *agent, "-m", "hpcinit.run", shlex.quote(str(PROGRAMS / "elastic_ddp.py")), "--fail-once"])
    words = ["nodes=2", "ranks_per_node=1", "wait=true", '+cluster.env.TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"']
    done = submit(hpcinit, slurm, *words, "--", "bash", "-c", line)
    folder = folder_of(done)
    assert done.returncode == 0, logs(folder)
    assert sum(text.count("RuntimeError: a bad day for this rank") for text in logs(folder)) == 1
    assert_one_world_of_4(reports(logs(folder)), range(4, 8))
