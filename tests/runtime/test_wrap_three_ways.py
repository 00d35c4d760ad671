"""DeepSpeed on sequence x tensor x data parallel ranks, 2 x 2 x 2 real processes, compared with one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.spawned import ranks
from tests.runtime.test_wrap import BEGIN

# AutoTP needs bf16, whose rounding after 8 steps is the difference that remains. Gradients wrong by a factor of 2 differ
# more than ten times as much.
TOLERANCE = 0.01
PROGRAM = """
import deepspeed
from transformers import LlamaConfig, LlamaForCausalLM
from hpcinit.train.wrap import sequence

STEPS, SAMPLES, LENGTH, LR, CLIP = 8, 4, 16, 0.3, 5.0
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=4, tie_word_embeddings=False, attn_implementation="sdpa")
tokens = torch.randint(32, (STEPS, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
targets = (tokens * 7 + 3) % 32

def llama():
    torch.manual_seed(3)
    return LlamaForCausalLM(config)

def alone(lr):
    # The model computes in bf16, and SGD steps on a copy in fp32, as in DeepSpeed.
    model, losses = llama(), []
    masters = [p.detach().clone() for p in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.SGD(masters, lr=lr, momentum=0.9)
    for x, y in zip(tokens, targets):
        loss = F.cross_entropy(model(input_ids=x).logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        for master, p in zip(masters, model.parameters()):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
        losses.append(loss.item())
    return losses

def together(layout, stage):
    training = Training("deepspeed", Precision("bf16"), gradient_clip=CLIP, deepspeed={"zero_stage": stage})
    made = wrapped(llama(), layout, training, optimizer=lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9))
    losses, mine = [], slice(layout.data_rank(run.rank), None, layout.data_parallel)
    (positions,) = sequence.shard(layout, run.rank, torch.arange(LENGTH)[None])
    for x, y in zip(tokens, targets):
        x, y = sequence.shard(layout, run.rank, x[mine], y[mine])
        logits = made(input_ids=x, position_ids=positions.expand(len(x), -1), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        made.backward(loss)
        made.step()
        whole = loss.detach().clone()
        torch.distributed.all_reduce(whole)
        losses.append(whole.item() / run.world_size)
    return losses

with hpcinit.session(deepspeed=True) as run:
    found = {"alone": alone(LR), "alone, twice the rate": alone(2 * LR)}
    for stage in (1, 2, 3):
        found[f"sp 2 x tp 2 x dp 2, zero {stage}"] = together(Layout(dp_replicate=2, cp=2, tp=2), stage)
    print(json.dumps(found))
"""


@pytest.mark.more
@pytest.mark.timeout(900)
def test_sequence_tensor_and_data_parallel_together(tmp_path: Path) -> None:
    """Ulysses groups over AutoTP's mesh, in ZeRO 1 to 3: 8 steps of a small Llama have the losses of one rank."""
    with ranks(BEGIN + PROGRAM, 8, tmp_path) as found:
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0] * 8, ends[0]
    curves = json.loads(ends[0][1].splitlines()[-1])
    assert "train_batch_size 8 = global batch 2 x tp 2 x cp 2" in ends[0][1]
    one, twice = curves.pop("alone"), curves.pop("alone, twice the rate")
    assert one[-1] < 0.8 * one[0] and differs(twice, one) > 10 * TOLERANCE, (one, twice)
    assert len(curves) == 3
    assert {name: curve for name, curve in curves.items() if differs(curve, one) > TOLERANCE} == {}, one


def differs(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
