"""Offload and reload of states on 2 real ranks, by DeepSpeed's engine and for torch's optimizers.

On a machine without a GPU both places are the same memory: what is shown is that states go into other tensors and come
back, and that training goes on as if they had not.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.test_wrap import on_two_ranks

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
    losses, told, mine = [], [], (x * (1 + run.rank)).to(next(made.model.parameters()).dtype)
    for step in range(6):
        if move and step in (2, 4):
            before = addresses(made)
            made.offload_states(include, **options)
            now = [sorted(made.offloaded), [now != then for now, then in zip(addresses(made), before)]]
            for wrong in (lambda: made.backward(x.sum()), made.step, lambda: made(mine)):
                try:
                    wrong()
                except hpcinit.HpcinitError as error:
                    now.append(str(error))
            made.reload_states()
            told = told or [*now, sorted(made.offloaded)]  # of the first time: ZeRO 3 keeps its buffers for the next
        loss = made(mine).square().mean()
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses, told
"""
IN_3 = ["lp_params", "lp_grads", "contiguous_grad_buffer"]


def test_training_goes_on_as_if_states_had_not_moved(tmp_path: Path) -> None:
    """With states offloaded and reloaded twice, DDP, FSDP and ZeRO 1 to 3 have the losses of a run without; meanwhile
    nothing is trained."""
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
    ("zero 2, optimizer offloaded", zero(2, offload_optimizer="cpu"), copied, ["lp_params"]),
    ("zero 3", zero(3), copied, {IN_3}),
):
    still, _ = train(training, layout, include, move=False)
    moved, told = train(training, layout, include, move=True)
    found[name] = [moved == still and still[-1] < 0.8 * still[0], *told]
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
        "zero 2, optimizer offloaded": ["lp_params"],
        "zero 3": sorted(IN_3),
    }
    assert set(first) == set(away)
    for name, (same, offloaded, elsewhere, *refused, at_last) in first.items():
        assert (same, offloaded, at_last) == (True, away[name], []), (name, first[name])
        assert all(elsewhere) or "optimizer offloaded" in name, (name, elsewhere)
        expected = ["backward()", "step()"] + ["a forward pass"] * ("lp_params" in offloaded)
        words = f"while {', '.join(offloaded)} are offloaded: reload_states() first"
        assert refused == [f"{what} {words}" for what in expected], name


REFUSALS = {
    "offloaded(zero(0))": "offload_states() with deepspeed.zero_stage 0: stages 1 to 3 can",
    "offloaded(zero(2), ['weights'])": "offload_states() has 'weights', expected some of: optim_states, hp_params, lp_",
    "offloaded(zero(2), device='nvme')": "offload_states(device='nvme'), expected 'cpu'",
    "offloaded(zero(3))": "deepspeed.zero_stage 3 and SGD: there DeepSpeed moves its FusedAdam's only; deepspeed.optim",
    "offloaded(zero(3), ['hp_params'])": "name the others: include=['lp_params', 'lp_grads', 'contiguous_grad_buffer']",
    "offloaded(zero(3, offload_optimizer='cpu', offload_param='cpu'))": "offload_states() with deepspeed.offload_param: ",
    "offloaded(zero(1, offload_optimizer='cpu'), ['hp_params'])": "hp_params, which deepspeed.offload_optimizer keeps",
    "offloaded(zero(1, ds_config=IN_FP32))": "DeepSpeed's BF16_Optimizer cannot; deepspeed.zero_stage=2, or take data",
    "offloaded(zero(3), optimizer=None)": "offload_states() without an optimizer, of which DeepSpeed and torch have",
    "offloaded(Training(), ['lp_params'])": "lp_params with parallel.wrap=ddp or fsdp, whose optim_states alone can go",
    "[offloaded(Training()), hpcinit.runtime.checkpoint.save(made[-1], '.', 1, layout=None, seed=1)]": "save() while opt",
    "[offloaded(Training()), hpcinit.runtime.checkpoint.load(made[-1], '.', layout=None)]": "load() while optim_states",
    "[begun := wrapped(accumulation=2), begun.backward(begun(x).sum()), begun.step(), begun.offload_states()]": (
        "offload_states() within an accumulation: after a step() that is True"
    ),
    # A DeepSpeed that is not installed here: only its number.
    "offloaded(zero(2), version='0.17.5')": "zero_stage 2: DeepSpeed 0.17.5 is installed, it needs 0.17.6 or later",
}


def test_what_cannot_move_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Each state that cannot go is a RequestError with the key to change, where DeepSpeed has assertions or silence."""
    lines = on_two_ranks(
        f"""
{MOVES}
import hpcinit.runtime.checkpoint
from hpcinit.runtime.wrap import deepspeed_engine as engines
IN_FP32 = {{"data_types": {{"grad_accum_dtype": "fp32"}}}}
made, installed = [], engines.starting.deepspeed_version
def offloaded(training, include=None, device="cpu", version=None, **more):
    made.append(wrapped(training=training, **more))
    engines.starting.deepspeed_version = (lambda: version) if version else installed
    try:
        made[-1].offload_states(include, device=device)
    finally:
        engines.starting.deepspeed_version = installed
said = {{}}
for expression in {list(REFUSALS)!r}:
    try:
        eval(expression)
    except hpcinit.HpcinitError as error:
        said[expression] = str(error)
print(json.dumps(said))
""",
        tmp_path,
        deepspeed=True,
    )
    for said in map(json.loads, lines):
        assert {
            name: said.get(name, "nothing") for name, text in REFUSALS.items() if text not in said.get(name, "")
        } == {}
