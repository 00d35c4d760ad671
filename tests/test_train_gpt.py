"""The demo learns on one rank and on several, and reports it if it does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.config import job_spec
from hpcinit.config.compose import compose
from hpcinit.config.folders import folder as package_folder
from tests.runtime.spawned import Rank

SMALL = ["--steps=8", "--micro-batch=4", "--context=32", "--width=32", "--heads=2", "--layers=1"]
ONES = ["--steps=3", "--micro-batch=4", "--context=32", "--width=32", "--heads=4", "--layers=1", "--eval-every=1"]
# One import per node of torch, of what its optimizers and DeepSpeed import later, and of DeepSpeed.
FORK = ("launch=fork", "launch.preload=[torch,torch._inductor.compile_fx,deepspeed]")
TORCH = ("launch=fork", "launch.preload=[torch,torch._dynamo,torch.distributed.tensor.parallel]")
RESULT = re.compile(r"loss (\S+) -> (\S+) in (\d+) steps, held-out (\S+)")


def python(folder: Path, *words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, with a thread per rank, as a process outside any job."""
    foreign = ("SLURM", "TORCHELASTIC", "OMPI", "HPCINIT")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=outside | {"OMP_NUM_THREADS": "1"}, timeout=timeout_s,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def submit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "hpcinit.submit", "cluster=local", "wait=true", *words, timeout_s=300)


def test_the_loss_goes_down_on_two_nodes(tmp_path: Path) -> None:
    """Submitted to 2 nodes x 2 ranks it learns, prints the losses, and exits with 0."""
    done = submit(tmp_path, "nodes=2", "ranks_per_node=2", "job=train_gpt", f"job.args={SMALL}")
    assert done.returncode == 0, done.stdout + done.stderr
    first, last, steps, _ = RESULT.findall(done.stdout)[-1]
    assert steps == "8"
    assert 4.3 < float(first) < 4.9, "ln 96 = 4.6 is the loss of guessing"
    assert float(last) < float(first) - 0.1


# Each file of conf/parallel, and two combinations of keys. The number: how many shares of the data 4 ranks make.
WAYS = {file.stem: ([f"parallel={file.stem}"], 4) for file in sorted((package_folder() / "parallel").glob("*.yaml"))}
WAYS |= {"tp": (["parallel=tp"], 2), "ulysses": (["parallel=ulysses"], 2)}
WAYS["both"] = (["parallel=ulysses", "parallel.tp=2", "activation_checkpointing=full"], 1)
WAYS["accumulated"] = (["parallel=zero3", "batch.accumulation=2", "gradient_clip=1"], 8)
# Each rank runs the demo as the job of each run folder, one after the other.
IN_TURN = """
import os, sys
from hpcinit.jobs import train_gpt
finish = train_gpt.finish
def shown(run, *rest):
    print(run.training, run.layout)
    finish(run, *rest)
train_gpt.finish = shown
folders, sys.argv[1:] = sys.argv[1].split(","), sys.argv[2:]
for folder in folders:
    os.environ["HPCINIT_RUN"] = folder
    print("--- run", folder.rpartition("/")[2])
    train_gpt.main()
"""


@pytest.mark.more
@pytest.mark.timeout(600)
def test_every_parallelism_trains_alike(tmp_path: Path) -> None:
    """By config alone, 2 nodes x 2 ranks learn with each parallelism, and equal shares of the data give equal losses."""
    shape = ("nodes=2", "ranks_per_node=2")
    applied = {}
    for way, (words, _) in WAYS.items():
        config = compose(("cluster=local", *shape, "job=train_gpt", *words))
        (tmp_path / way / "logs").mkdir(parents=True)
        spec = job_spec.make(config, str(tmp_path), "train_gpt")
        (tmp_path / way / "spec.json").write_text(spec.to_json())
        applied[way] = f"{spec.training} {spec.layout}"
    (tmp_path / "in_turn.py").write_text(IN_TURN)
    folders = ",".join(str(tmp_path / way) for way in WAYS)
    done = submit(tmp_path, *shape, *FORK, "name=all", "--", "in_turn.py", folders, *ONES)
    assert done.returncode == 0, done.stdout + done.stderr
    _, *logs = (tmp_path / "runs/all-0001/logs/rank-0.log").read_text().split("--- run ")
    losses: dict[int, dict[str, list[tuple[float, ...]]]] = {1: {}, 2: {}, 4: {}, 8: {}}
    for (way, (_, shares)), log in zip(WAYS.items(), logs, strict=True):
        assert applied[way] in log, "the session used this spec"
        assert log.startswith(f"{way}\n")
        losses[shares][way] = [tuple(map(float, pair)) for pair in re.findall(r"loss (\S+)  held-out (\S+)", log)]
    assert [len(alike) for alike in losses.values()] == [1, 2, 7, 1]
    assert len({tuple(next(iter(alike.values()))) for alike in losses.values()}) == 4, "other shares, other losses"
    for alike in losses.values():
        expected = next(iter(alike.values()))
        assert len(expected) == 3 and expected[2][0] < expected[0][0] - 0.1, "it learns"
        for way, found in alike.items():
            assert found == [pytest.approx(pair, abs=0.0011) for pair in expected], way  # three digits are printed


@pytest.mark.more
def test_the_same_command_gives_the_same_losses(tmp_path: Path) -> None:
    """Two runs on 2 ranks print the same losses at every step."""
    args = f"job.args={[*SMALL, '--eval-every', '1']}"
    logs = []
    for number in (1, 2):
        done = submit(tmp_path, "nodes=1", "ranks_per_node=2", *TORCH, "job=train_gpt", args)
        assert done.returncode == 0, done.stdout + done.stderr
        log = (tmp_path / f"runs/train_gpt-000{number}/logs/rank-0.log").read_text()
        logs.append(re.sub(r"\S+ tokens/s|hpcinit: .*", "", log))
    assert len(re.findall("step .* loss .* held-out", logs[0])) == 8
    assert logs[0] == logs[1]


def test_ranks_compare_bits_and_texts(tmp_path: Path) -> None:
    """A difference of one bit in one parameter of one rank is detected, and so is a rank that reads another text."""
    (tmp_path / "compare.py").write_text(f"""
import pathlib, torch, hpcinit
from hpcinit.jobs import train_gpt
with hpcinit.session() as run:
    model = train_gpt.GPT(context=4, width=4, layers=1, heads=1)
    print("same:", train_gpt.same_on_all_ranks(train_gpt.checksum(model)))
    if run.rank == 1:
        model.head.weight.data.view(torch.int32)[0, 0] += 1
    print("same:", train_gpt.same_on_all_ranks(train_gpt.checksum(model)))
    folder = pathlib.Path({str(tmp_path)!r}, f"modules-{{run.rank}}")
    folder.mkdir()
    (folder / "a.py").write_text("x = " + "1" * run.rank)
    train_gpt.read_text(run, folder)
""")
    done = submit(tmp_path, "nodes=1", "ranks_per_node=2", "--", "compare.py")
    assert done.stdout.count("same: True") == 1
    assert done.stdout.count("same: False") == 1
    assert "the training text differs between the ranks: run the same Python version on all nodes" in done.stdout
    assert done.returncode != 0


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    """Started without submission it is one rank and learns."""
    done = python(tmp_path, "-m", "hpcinit.jobs.train_gpt", *SMALL)
    assert done.returncode == 0, done.stderr
    first, last, _, _ = RESULT.findall(done.stdout.splitlines()[-1])[0]
    assert float(last) < float(first)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--lr", "100"], 1, r"the loss did not go down: loss 4\.\d+ -> \S+ in 8 steps"),
        (["--lr", "1e30"], 1, r"the loss is (nan|inf) at step \d; try a smaller --lr than 1e\+30"),
        (["--steps", "1"], 2, r"--steps 1: expected at least 2, or the loss cannot go down"),
        (["--width", "30", "--heads", "4"], 2, r"--width 30 is not divisible by --heads 4"),
    ],
)
def test_it_fails_with_a_reason(tmp_path: Path, words: list[str], status: int, message: str) -> None:
    """A run that does not learn exits with 1, a wrong argument with 2, each with a line with the reason."""
    code = f"import sys; sys.argv[1:] = {[*SMALL, *words]}; from hpcinit.jobs import train_gpt; train_gpt.main()"
    ended, output = Rank(code, tmp_path / "log", {}).end()
    assert ended == status, output
    assert re.search(message, output), output


def test_the_text_is_the_modules_that_every_machine_has(tmp_path: Path) -> None:
    """Modules are read in alphabetical order, without a site's modules and without characters beyond ASCII."""
    from hpcinit.jobs.train_gpt import VOCABULARY, read_modules

    with pytest.raises(SystemExit, match=r"has no \.py files to train on: use a Python"):
        read_modules(tmp_path)
    for name, text in {"b": "B\té\n", "a": "A ~\n", "sitecustomize": "no", "_sysconfigdata_x": "no"}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert bytes(VOCABULARY[token] for token in read_modules(tmp_path)) == b"A ~\nB\n"
