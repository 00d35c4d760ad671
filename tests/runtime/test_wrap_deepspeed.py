"""run.wrap with DeepSpeed's engine on 2 real ranks: corrections of the engine's own behavior."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.test_wrap import on_two_ranks


def test_zero_0_starts_like_the_other_stages(tmp_path: Path) -> None:
    """In bf16 with AdamW, whose first steps depend on the step count, ZeRO 0 has the losses of ZeRO 1; with DeepSpeed's
    extra step before the first one they differ by over 1 %."""
    lines = on_two_ranks(
        """
from hpcinit.runtime.wrap import deepspeed_engine
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
            assert refusal.startswith(f"DeepSpeed's AutoTP cannot divide {name} ("), refusal
            assert "but parallel.tp is 2 with deepspeed.autotp" in refusal
            assert "parallel.wrap=fsdp and pass run.wrap a tp_plan, use parallel.tp=1, or" in refusal
        assert other == "another"
