"""The demo learns on one rank and on several, and reports it if it does not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["--steps=8", "--micro-batch=4", "--context=32", "--width=32", "--heads=2", "--layers=1"]
ONES = ["--steps=3", "--micro-batch=4", "--context=32", "--width=32", "--heads=4", "--layers=1", "--eval-every=1"]
# One import per node of torch, of what its optimizers and DeepSpeed import later, and of DeepSpeed where it is used.
FORK = ("launch=fork", "launch.preload=[torch,torch._inductor.compile_fx]")
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
    return python(folder, "-m", "hpcinit.submit", "cluster=local", "wait=true", *words)


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "hpcinit.jobs.train_gpt", *SMALL, *words)


def test_the_loss_goes_down_on_two_nodes(tmp_path: Path) -> None:
    """Submitted to 2 nodes x 2 ranks it learns, prints the losses, and exits with 0."""
    done = submit(tmp_path, "nodes=2", "ranks_per_node=2", "job=train_gpt", f"job.args={SMALL}")
    assert done.returncode == 0, done.stdout + done.stderr
    first, last, steps, _ = RESULT.findall(done.stdout)[-1]
    assert steps == "8"
    assert 4.3 < float(first) < 4.9, "ln 96 = 4.6 is the loss of guessing"
    assert float(last) < float(first) - 0.1


@pytest.mark.parametrize(
    "words",
    [
        ["ranks_per_node=4", "parallel=ulysses", "parallel.tp=2", "activation_checkpointing=full"],
        ["ranks_per_node=2", "parallel=zero3", "batch.accumulation=2", "gradient_clip=1"],
    ],
    ids=["sequence and tensor parallel", "deepspeed"],
)
def test_the_config_alone_makes_another_parallelism_of_it(tmp_path: Path, words: list[str]) -> None:
    """Sequence x tensor parallelism with FSDP, and ZeRO 3, learn without a change to the program."""
    done = submit(tmp_path, "nodes=1", *FORK, "job=train_gpt", f"job.args={[*SMALL, '--heads=4']}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last, steps, _ = RESULT.findall(done.stdout)[-1]
    assert steps == "8" and float(last) < float(first) - 0.1
    assert "--- it writes:\ndef " in done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "ways",
    [("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3_offload"), ("ulysses", "tp")],
    ids=["four shares of the data", "two"],
)
def test_every_parallelism_of_the_package_trains_alike(tmp_path: Path, ways: tuple[str, ...]) -> None:
    """Each conf/parallel/*.yaml gives the demo the same losses on 4 ranks, ddp and hsdp on two nodes."""
    losses = {}
    for way in ways:
        shape = (
            ("nodes=2", "ranks_per_node=2", *FORK) if way in ("ddp", "hsdp") else ("nodes=1", "ranks_per_node=4", *FORK)
        )
        words = (*shape, "job=train_gpt", f"job.args={ONES}", f"parallel={way}", f"name={way}")
        done = submit(tmp_path, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        log = (tmp_path / f"runs/{way}-0001/logs/rank-0.log").read_text()
        losses[way] = [tuple(map(float, pair)) for pair in re.findall(r"loss (\S+)  held-out (\S+)", log)]
    assert len(losses[ways[0]]) == 3 and losses[ways[0]][2][0] < losses[ways[0]][0][0] - 0.1, "it learns"
    for way, found in losses.items():
        assert found == [pytest.approx(pair, abs=0.0011) for pair in losses[ways[0]]], way  # three digits are printed


def test_the_same_command_gives_the_same_losses(tmp_path: Path) -> None:
    """Two runs on 2 ranks print the same losses at every step and the same text."""
    args = f"job.args={[*SMALL, '--eval-every', '1']}"
    logs = []
    for number in (1, 2):
        done = submit(tmp_path, "nodes=1", "ranks_per_node=2", *FORK, "job=train_gpt", args)
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
    assert "the ranks read different texts: run the same Python version on all nodes" in done.stdout
    assert done.returncode != 0


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    """Started without submission it is one rank and learns."""
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr
    first, last, _, _ = RESULT.findall(done.stdout.splitlines()[-1])[0]
    assert float(last) < float(first)
    assert "--- it writes:\ndef " in done.stdout


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
    done = train(tmp_path, *words)
    assert done.returncode == status, done.stdout
    assert re.search(message, done.stderr), done.stderr


def test_the_text_is_the_modules_that_every_machine_has(tmp_path: Path) -> None:
    """Modules are read in alphabetical order, without a site's modules and without characters beyond ASCII."""
    from hpcinit.jobs.train_gpt import VOCABULARY, read_modules

    with pytest.raises(SystemExit, match=r"no text: .* has no \.py files; is this Python stripped"):
        read_modules(tmp_path)
    for name, text in {"b": "B\té\n", "a": "A ~\n", "sitecustomize": "no", "_sysconfigdata_x": "no"}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert bytes(VOCABULARY[token] for token in read_modules(tmp_path)) == b"A ~\nB\n"
