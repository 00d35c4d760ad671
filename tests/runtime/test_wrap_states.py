"""Offload and reload of states on 2 real ranks, by DeepSpeed's engine and for torch's optimizers.

On a machine without a GPU both places are the same memory. The tests show that states are moved into other tensors and
back, and that training continues unchanged.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.runtime.test_wrap import on_two_ranks

pytestmark = pytest.mark.deepspeed

MOVES = """
def zero(stage, **more):
    return Training("deepspeed", Precision("bf16"), deepspeed={"zero_stage": stage, **more})

def addresses(made):
    zero = getattr(made.optimizer, "single_partition_of_fp32_groups", None)
    tensors = [made.optimizer.lp_param_buffer] if hasattr(made.optimizer, "lp_param_buffer") else zero
    if tensors is None:
        return [getattr(v, "_local_tensor", v).untyped_storage().nbytes() for s in made.optimizer.state.values() for v in s.values() if v.dim()]
    return [tensor.data_ptr() for tensor in tensors]

def train(training, layout, include, move, **options):
    torch.manual_seed(3)
    made = wrapped(layers(), layout, training, optimizer=lambda p: torch.optim.AdamW(p, lr=0.03))
    losses, reported, mine = [], [], (x * (1 + run.rank)).to(next(made.model.parameters()).dtype)
    for step in range(6):
        if move and step in (2, 4):
            before = addresses(made)
            made.offload_states(include, **options)
            now = [sorted(made.offloaded), [now != then for now, then in zip(addresses(made), before)]]
            for wrong in (lambda: made.backward(x.sum()), made.step, lambda: made(mine)) if made.offloaded else ():
                try:
                    wrong()
                except hpcinit.HpcinitError as error:
                    now.append(str(error))
            made.reload_states()
            reported = reported or [*now, sorted(made.offloaded)]  # of the first time: ZeRO 3 keeps its buffers for the next
        loss = made(mine).square().mean()
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses, reported
"""
OLD = version("deepspeed").startswith("0.18.")  # in stage 3 it moves only states of FusedAdam, which needs a GPU
IN_3 = ["lp_params", "lp_grads", "contiguous_grad_buffer"]


def test_training_continues_after_reload(tmp_path: Path) -> None:
    """With states offloaded and reloaded twice, DDP, FSDP and ZeRO 1 to 3 have the losses of a run without; while they
    are offloaded, nothing can be trained."""
    lines = on_two_ranks(
        f"""
{MOVES}
sharded, copied, found = Layout(dp_replicate=1, dp_shard=2), Layout(dp_replicate=2), {{}}
for name, training, layout, include in (
    ("ddp", Training(), copied, None),
    ("fsdp", Training("fsdp"), sharded, ["optim_states"]),
    ("zero 1", zero(1), copied, None),
    ("zero 2", zero(2), copied, None),
    ("zero 2, some", zero(2), copied, ["hp_params", "optim_states"]),
    ("zero 2, optimizer offloaded", zero(2, offload_optimizer="cpu"), copied, ["lp_params", "hp_params"]),
    ("zero 1, optimizer offloaded", zero(1, offload_optimizer="cpu"), copied, ["optim_states"]),
    ("zero 3, optimizer offloaded", zero(3, offload_optimizer="cpu"), copied, None),
    ("zero 3, parameters offloaded", zero(3, offload_optimizer="cpu", offload_param="cpu"), copied, None),
    *([] if {OLD} else [("zero 3", zero(3), copied, {IN_3})]),
):
    still, _ = train(training, layout, include, move=False)
    moved, reported = train(training, layout, include, move=True)
    found[name] = [moved == still and still[-1] < 0.8 * still[0], *reported]
print(json.dumps(found))
""",
        tmp_path,
        deepspeed=True,
    )
    first, second = map(json.loads, lines)
    assert first == second
    everything = ["hp_params", "lp_grads", "lp_params", "optim_states"]
    away = {
        "ddp": ["optim_states"],
        "fsdp": ["optim_states"],
        "zero 1": everything,
        "zero 2": everything,
        "zero 2, some": ["hp_params", "optim_states"],
        "zero 2, optimizer offloaded": [],
        "zero 1, optimizer offloaded": [],
        "zero 3, optimizer offloaded": [],
        "zero 3, parameters offloaded": [],
        **({} if OLD else {"zero 3": sorted(IN_3)}),
    }
    assert set(first) == set(away)
    for name, (same, offloaded, elsewhere, *refused, at_last) in first.items():
        assert (same, offloaded, at_last) == (True, away[name], []), (name, first[name])
        # DeepSpeed 0.18 cannot pin memory without a GPU, and an unpinned copy on the CPU is the same tensor.
        assert all(elsewhere) or OLD or "offloaded" in name, (name, elsewhere)
        expected = ["backward()", "step()"] * bool(offloaded) + ["the model"] * ("lp_params" in offloaded)
        words = f"while {', '.join(offloaded)} are offloaded; call reload_states() first"
        assert refused == [f"cannot call {what} {words}" for what in expected], name
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    for setting, times in (("offload_optimizer", 6), ("offload_param", 2)):
        line = f"offload_states() does nothing, because deepspeed.{setting} already keeps states off the device\n"
        assert [text.count(line) for text in said] == [times, 0]


REFUSALS = {
    "offloaded(zero(0))": "offload_states() does not work with deepspeed.zero_stage 0: use stage 1, 2 or 3",
    "offloaded(zero(2), ['weights'])": "offload_states() got an unknown state 'weights'; the states are: optim_states, hp_params, lp_",
    **(
        {
            "offloaded(zero(3), ['lp_params'])": "move the states of SGD: with deepspeed.zero_stage 3, DeepSpeed 0.18.5 moves"
        }
        if OLD
        else {
            "offloaded(zero(3))": "optim_states and hp_params of SGD: with deepspeed.zero_stage 3, DeepSpeed supports this",
            "offloaded(zero(3), ['hp_params'])": "the other states: include=['lp_params', 'lp_grads', 'contiguous_gra",
        }
    ),
    "offloaded(zero(1, ds_config=IN_FP32))": "DeepSpeed's BF16_Optimizer. Use deepspeed.zero_stage=2, or remove data",
    "offloaded(zero(3), optimizer=None)": "offload_states() works only with an optimizer: pass one",
    "offloaded(Training(), ['lp_params'])": "lp_params with parallel.wrap=ddp or fsdp, only optim_states",
    "[offloaded(Training()), hpcinit.train.checkpoint.save(made[-1], '.', 1, layout=None, seed=1)]": "save() while opt",
    "[offloaded(Training()), hpcinit.train.checkpoint.load(made[-1], '.', layout=None)]": "load() while optim_states",
    "[started := wrapped(accumulation=2), started.backward(started(x).sum()), started.step(), started.offload_states()]": (
        "offload_states() was called during gradient accumulation; call it after step() returned True"
    ),
}


def test_refusals_name_the_key_to_change(tmp_path: Path) -> None:
    """For each state that cannot be moved, a RequestError names the key to change."""
    lines = on_two_ranks(
        f"""
{MOVES}
import hpcinit.train.checkpoint
IN_FP32 = {{"data_types": {{"grad_accum_dtype": "fp32"}}}}
made = []
def offloaded(training, include=None, **more):
    made.append(wrapped(training=training, **more))
    made[-1].offload_states(include)
message = {{}}
for expression in {list(REFUSALS)!r}:
    try:
        eval(expression)
    except hpcinit.HpcinitError as error:
        message[expression] = str(error)
print(json.dumps(message))
""",
        tmp_path,
        deepspeed=True,
    )
    for message in map(json.loads, lines):
        assert {
            name: message.get(name, "nothing") for name, text in REFUSALS.items() if text not in message.get(name, "")
        } == {}
