"""run.wrap with DeepSpeed's engine on 2 real ranks: corrections of the engine's own behavior."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base.versions import installed
from tests.runtime.test_wrap import on_two_ranks
from tests.skip_or_fail import needs_torchs_compiler


def test_zero_0_starts_like_the_other_stages(tmp_path: Path) -> None:
    """In bf16 with AdamW, whose first steps depend on the step count, ZeRO 0 has the losses of ZeRO 1; with DeepSpeed's
    extra step before the first one they differ by over 1 %."""
    lines = on_two_ranks(
        """
from hpcinit.train.wrap import deepspeed_engine
def losses(stage):
    torch.manual_seed(3)
    training = Training("deepspeed", Precision("bf16"), deepspeed={"zero_stage": stage})
    made = wrapped(layers(), training=training, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=1.0))
    found = []
    for _ in range(6):
        loss = made(x.bfloat16()).square().mean()
        made.backward(loss)
        made.step()
        found.append(loss.item())
    return found
found = [losses(1), losses(0)]
deepspeed_engine.undo_first_step = lambda engine: None
print(json.dumps([*found, losses(0)]))
""",
        tmp_path,
        deepspeed=True,
    )
    for one, zero, untouched in map(json.loads, lines):
        assert one[-1] < one[0] / 2, "it learns"
        assert off(zero, one) < 5e-3, (zero, one)
        assert off(untouched, one) > 1e-2, (untouched, one)


def off(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


def test_a_model_that_autotp_cannot_divide(tmp_path: Path) -> None:
    """For a model without an AutoTP policy the error names the key to change, where DeepSpeed has a bare assertion; other
    assertions of DeepSpeed are unchanged."""
    lines = on_two_ranks(
        """
training, message = Training("deepspeed", Precision("bf16"), deepspeed={"zero_stage": 1}), []
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
class PlainModel(Plain):
    pass
for model in (layers(), Plain(), PlainModel()):
    try:
        wrapped(model, tp, training)
    except hpcinit.HpcinitError as error:
        message.append(str(error))
from deepspeed.runtime import engine
def assertion(self):
    assert False, "another"
engine.DeepSpeedEngine._configure_distributed_model = lambda self, model: assertion(self)
try:
    wrapped(layers(), training=training)
except AssertionError as error:
    message.append(str(error))
print(json.dumps(message))
""",
        tmp_path,
        deepspeed=True,
    )
    for *refusals, other in map(json.loads, lines):
        for name, refusal in zip(("Sequential", "Plain", "PlainModel"), refusals, strict=True):
            said = f"parallel.tp is 2 with deepspeed.autotp, but DeepSpeed's AutoTP cannot divide {name} ("
            assert refusal.startswith(said), refusal
            assert "parallel.wrap=fsdp with a tp_plan, use parallel.tp=1, or" in refusal
        assert other == "another"


@pytest.mark.more
def test_a_tied_head_is_refused_with_autotp(tmp_path: Path) -> None:
    """AutoTP would compute wrong logits of a model whose head shares the embedding's weight. The error names both, and
    what to do; the same model without the tie is divided."""
    lines = on_two_ranks(
        """
from transformers import LlamaConfig, LlamaForCausalLM
training, message = Training("deepspeed", Precision("bf16"), deepspeed={"zero_stage": 1}), []
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, tie_word_embeddings=True)
tokens = torch.arange(24).view(2, 12)
try:
    wrapped(LlamaForCausalLM(config), tp, training)
except hpcinit.HpcinitError as error:
    message.append(str(error))
config.tie_word_embeddings = False
torch.manual_seed(3)
model = LlamaForCausalLM(config).bfloat16()
expected = model(input_ids=tokens).logits.float()
found = wrapped(model, tp, training)(input_ids=tokens).logits
message.append(float((found - expected).detach().abs().max() / expected.detach().abs().max()))
print(json.dumps(message))
""",
        tmp_path,
        deepspeed=True,
    )
    for refusal, off in map(json.loads, lines):
        assert refusal.startswith(
            "lm_head.weight is tied to model.embed_tokens.weight, and DeepSpeed's AutoTP would compute wrong logits ("
        )
        assert "tie_word_embeddings=False), use parallel.tp=1, or use parallel.wrap=fsdp with a" in refusal
        assert off < 0.05


@pytest.mark.more
def test_deepcompile_compiles_the_trained_model_only(tmp_path: Path) -> None:
    """deepspeed.deepcompile=true compiles the engine that trains, which DeepSpeed does not do alone, and not the
    engine of a model without an optimizer. (Fake: DeepSpeed's answer that there is a GPU, and its compile(), whose op
    exists for a GPU only.) On a CPU a line reports that it has no effect."""
    lines = on_two_ranks(
        """
import deepspeed
from deepspeed.compile import util
training = Training("deepspeed", Precision("bf16"), deepspeed={"zero_stage": 3, "deepcompile": True})
plain = Training("deepspeed", Precision("bf16"), deepspeed={"zero_stage": 3})
compiled, found = [], []
deepspeed.DeepSpeedEngine.compile = lambda engine: compiled.append(engine)
for gpu in (False, True):
    util.is_deepcompile_supported = lambda: gpu
    made = [wrapped(training=training), wrapped(training=training, optimizer=None), wrapped(training=plain)]
    found.append([each.engine in compiled for each in made])
print(json.dumps(found))
""",
        tmp_path,
        deepspeed=True,
    )
    assert [json.loads(line) for line in lines] == [[[False, False, False], [True, False, False]]] * 2
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [text.count("deepspeed.deepcompile has no effect here: DeepCompile needs a GPU") for text in said] == [1, 0]


@pytest.mark.more
@needs_torchs_compiler
def test_muon_trains(tmp_path: Path) -> None:
    """deepspeed.optimizer=muon trains matrices with Muon and the rest with Adam, in ZeRO 1 to 3, and resumes exactly."""
    lines = on_two_ranks(
        """
import hpcinit.train.checkpoint as checkpoint
found = []
for stage in (1, 2, 3):
    options = {"zero_stage": stage, "optimizer": "muon", "optimizer_params": {"lr": 0.02, "torch_adam": True}}
    def made():
        torch.manual_seed(3)
        return wrapped(training=Training("deepspeed", Precision("bf16"), deepspeed=options), optimizer=None)
    def train(made, steps):
        losses = []
        for _ in range(steps):
            loss = made(x.bfloat16() + run.rank).square().mean()
            made.backward(loss)
            made.step()
            losses.append(loss.item())
        return losses
    first = made()
    before = train(first, 4)
    used = {group.get("use_muon") for group in first.optimizer.optimizer.param_groups}
    folder = Path("checkpoint", str(stage))
    checkpoint.save(first, folder, 4, layout=Layout(dp_replicate=2), seed=1)
    after = train(first, 2)
    second = made()
    checkpoint.load(second, folder, layout=Layout(dp_replicate=2))
    found.append([type(first.optimizer.optimizer).__name__, sorted(used), before, after, train(second, 2)])
print(json.dumps(found))
""".replace("import hpcinit.train", "from pathlib import Path\nimport hpcinit.train", 1).replace(
            'Path("checkpoint"', f"Path({str(tmp_path)!r}"
        ),
        tmp_path,
        deepspeed=True,
    )
    for line in lines:
        for name, used, before, after, resumed in json.loads(line):
            assert (name, used) == ("MuonWithAuxAdam", [False, True])
            assert before[-1] < 0.9 * before[0] and after == resumed


@pytest.fixture(scope="module")
def built_cpu_adam() -> str:
    """Build DeepSpeed's CPUAdam into a folder of this Python environment, which takes minutes the first time only."""
    cache = Path(sys.prefix, "ops", f"deepspeed{installed('deepspeed')}")
    words = [sys.executable, "-m", "hpcinit", "build-ops", "--ops", "cpu_adam", "--into", str(cache)]
    env = os.environ | {"CXX": str(Path(__file__).with_name("quick_c++.sh"))}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(cache)


OFFLOADED = """
import os
from pathlib import Path
import hpcinit.train.checkpoint as checkpoint
layout, folder = Layout(dp_replicate=2), Path("FOLDER")

def made(stage, **more):
    torch.manual_seed(3)
    options = {"zero_stage": stage, "offload_optimizer": "cpu", **more}
    optimizer = lambda p: torch.optim.AdamW([{"params": list(p), "lr": 0.02, "weight_decay": 0.1, "name": "all"}])
    return wrapped(training=Training("deepspeed", Precision("bf16"), deepspeed=options), optimizer=optimizer)

def train(made, steps):
    losses = []
    for _ in range(steps):
        loss = made((x + run.rank).bfloat16()).square().mean()
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses

def used(made):
    return type(made.optimizer.optimizer).__name__

found = []
for stage in (1, 2, 3):
    first, plain = made(stage), made(stage, ds_config={"zero_force_ds_cpu_optimizer": False})
    before = train(first, 4)
    checkpoint.save(first, folder / str(stage), 4, layout=layout, seed=1)
    after = train(first, 3)
    second = made(stage)
    checkpoint.load(second, folder / str(stage), layout=layout)
    found.append([used(first), used(plain), used(second), first.optimizer.param_groups[0]["name"],
                  before, train(plain, 4), after, train(second, 3)])
os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "empty")
found.append(used(made(2)))
print(json.dumps(found))
"""


@pytest.mark.timeout(3600)
@pytest.mark.more  # compiles the op, which takes minutes
@needs_torchs_compiler
def test_cpu_adam_is_used_for_an_offloaded_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_cpu_adam: str
) -> None:
    """With offload_optimizer and a built op, torch's AdamW is replaced by DeepSpeed's CPUAdam: in ZeRO 1 to 3 it has
    AdamW's losses and a checkpoint resumes exactly. One line reports it. A key, or a cache without the op, keeps
    torch's."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", built_cpu_adam)
    lines = on_two_ranks(OFFLOADED.replace("FOLDER", str(tmp_path)), tmp_path, deepspeed=True)
    for line in lines:
        *stages, unbuilt = json.loads(line)
        for used, kept, again, name, before, plain, after, resumed in stages:
            assert (used, kept, again, name) == ("DeepSpeedCPUAdam", "AdamW", "DeepSpeedCPUAdam", "all")
            assert before[-1] < 0.8 * before[0] and after == resumed, (before, after, resumed)
            assert off(before, plain) < 5e-3, (before, plain)
        assert len(stages) == 3 and unbuilt == "AdamW"
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    line = "the offloaded optimizer is DeepSpeed's CPUAdam instead of torch's AdamW (deepspeed.ds_config.zero_force_ds_cpu_"
    assert [text.count(line) for text in said] == [6, 0]
    assert (
        "the offloaded optimizer is torch's AdamW. For the faster CPUAdam, run: hpcinit build-ops --ops cpu_adam"
        in said[0]
    )


@pytest.mark.more
def test_a_checkpoint_loads_with_another_context_parallel_degree(tmp_path: Path) -> None:
    """DeepSpeed's checkpoint of ZeRO 2 with parallel.cp=2 loads with cp 1 on the same ranks, without a conversion."""
    lines = on_two_ranks(
        f"""
from pathlib import Path
import hpcinit.train.checkpoint as checkpoint
def made(layout):
    training = Training("deepspeed", Precision("bf16"), deepspeed={{"zero_stage": 2}})
    return wrapped(Attention(), layout, training, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
folder, one = Path({str(tmp_path)!r}, "checkpoints"), made(cp)
loss = one(x.bfloat16() * torch.arange(4)[:, None]).square().mean()
one.backward(loss)
one.step()
checkpoint.save(one, folder, 1, layout=cp, seed=1)
flat = lambda made: torch.cat([p.detach().float().flatten() for p in made.model.parameters()])
torch.manual_seed(7)
other = made(Layout(dp_replicate=2))
before = torch.equal(flat(one), flat(other))
checkpoint.load(other, folder, layout=Layout(dp_replicate=2))
moments = [[s["exp_avg"].tolist() for s in made.optimizer.optimizer.state.values()] for made in (one, other)]
print(json.dumps([before, torch.equal(flat(one), flat(other)), moments[0] == moments[1]]))
""",
        tmp_path,
        deepspeed=True,
    )
    assert [json.loads(line) for line in lines] == [[False, True, True]] * 2
