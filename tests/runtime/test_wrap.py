"""run.wrap on 2 real ranks: its refusals, and each rank's state. test_equivalence checks its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import Layout
from hpcinit.train.wrap import blocks, sequence
from tests.runtime.spawned import ranks

BEGIN = """
import json, sys, torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
import hpcinit
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Precision, Training
from hpcinit.runtime import mesh
from hpcinit.train.wrap import wrap

class Attention(nn.Module):
    def __init__(self, heads=2, mask=None):
        super().__init__()
        self.layer, self.heads, self.mask = nn.Linear(8, 8), heads, mask
    def forward(self, x):
        x = self.layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)

def layers():
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))

def wrapped(model=None, layout=Layout(dp_replicate=2), training=Training(), accumulation=1, **more):
    more = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **more}
    return wrap(model or layers(), mesh=mesh.build_mesh(layout, run.device), layout=layout, device=run.device,
                batch=Batch(1, accumulation, layout.data_parallel), training=training, **more)

cp, tp, x = Layout(dp_replicate=1, cp=2), Layout(dp_replicate=1, tp=2), torch.ones(1, 4, 8)
"""

REFUSALS = {
    "wrapped(layout=Layout(pp=2, dp_replicate=1))": "parallel.pp is 2, but run.wrap supports no pipeline or expert",
    "wrapped(layout=Layout(dp_replicate=2, ep=2))": "parallel.ep is 2, but run.wrap supports no pipeline or expert",
    "wrapped(training=Training('none'))": "parallel.wrap is none with 2 ranks: their gradients would not be combined",
    "wrapped(training=Training('fsdp'))": "parallel.wrap is fsdp with dp_replicate 2 and dp_shard 1",
    "wrapped(training=Training('deepspeed'), tp_plan={})": "with deepspeed, AutoTP shards the model automatically",
    "wrapped(layout=tp)": "parallel.tp is 2, but run.wrap got no tp_plan",
    "wrapped(layout=tp, tp_plan={'0.*.up': ColwiseParallel()})": "tp_plan names '0.*.up', but no module has this name; the modules",
    "wrapped(training=Training(precision=Precision('fp16')))": "precision.param=fp16 does not work on a CPU",
    "wrapped(training=Training(precision=Precision(reduce='bf16')))": "precision.reduce=bf16 does not work with parallel.wrap=ddp on a CPU",
    "wrapped(nn.Linear(8, 8), training=Training(compile=True))": "compile applies to a model's repeated blocks, and hpcinit found none in Linear",
    "wrapped(blocks=[nn.Linear(8, 8)])": "blocks contains a Linear that is not part of Sequential",
    "wrapped(nn.Linear(8, 8, device='meta'))": "weight is on the meta device and has no data",
    "wrapped(layout=Layout(dp_replicate=1, cp=2, cp_kind='ring'))": "parallel.cp_kind=ring does not work on a CPU",
    "wrapped(layout=cp, training=Training(compile=True))": "compile=true does not work with parallel.cp > 1",
    "wrapped(layout=cp)(x)": "Sequential did not call F.scaled_dot_product_attention, but parallel.cp > 1",
    "wrapped(Attention(heads=1), layout=cp)(x)": "1 attention heads per rank cannot be divided among 2",
    "wrapped(Attention(mask=torch.ones(4, 4)), layout=cp)(x)": "attn_mask does not work with parallel.cp > 1",
    "wrapped().step()": "step() was called without a backward() before it",
    "[each.backward(each(x).sum()) for each in [wrapped()] * 2]": "backward() was called twice without step()",
    "wrapped(optimizer=None).step()": "step() needs an optimizer",
}


def on_two_ranks(code: str, folder: Path, **init: object) -> list[str]:
    """Return the last line of each rank."""
    program = f"{BEGIN}\nwith hpcinit.session(**{init!r}) as run:\n" + "".join(
        f"    {line}\n" for line in code.strip().splitlines()
    )
    with ranks(program, 2, folder) as found:
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], ends
    return [output.splitlines()[-1] for _, output in ends]


@pytest.mark.deepspeed
def test_refusals_name_the_key_to_change(tmp_path: Path) -> None:
    """For each invalid combination every rank raises a RequestError with the key to change."""
    lines = on_two_ranks(
        f"""
message = {{}}
for expression in {list(REFUSALS)!r}:
    try:
        eval(expression)
    except hpcinit.HpcinitError as error:
        message[expression] = str(error)
print(json.dumps(message))
""",
        tmp_path,
    )
    for message in map(json.loads, lines):
        assert {
            name: message.get(name, "nothing") for name, text in REFUSALS.items() if text not in message.get(name, "")
        } == {}


def test_ranks_have_equal_weights(tmp_path: Path) -> None:
    """With another seed on each rank, DDP, FSDP and tensor parallelism train rank 0's weights, in bf16 as well."""
    lines = on_two_ranks(
        """
bf16, found = Precision("bf16", "bf16"), {}
for name, layout, training, plan in (
    ("ddp", Layout(dp_replicate=2), Training(precision=Precision("bf16")), None),
    ("fsdp", Layout(dp_replicate=1, dp_shard=2), Training("fsdp", bf16, "full", gradient_clip=1.0), None),
    ("tp", tp, Training(gradient_clip=1.0), {"0.0": ColwiseParallel(output_layouts=Replicate())}),
):
    model = layers()
    first = model[0][0].weight.detach().clone()
    torch.distributed.broadcast(first, src=0)
    made = wrapped(model, layout, training, accumulation=2, tp_plan=plan)
    whole = lambda: [p.full_tensor() if hasattr(p, "full_tensor") else p for p in made.model.parameters()]
    same = any(torch.equal(first, p) for p in whole())
    steps, losses = [], []
    for _ in range(6):
        out = made(x)
        losses.append(out.square().mean())
        made.backward(losses[-1])
        steps.append(made.step())
    found[name] = [same, str(out.dtype), steps, bool(losses[-1] < losses[0]), float(sum(p.double().sum() for p in whole()))]
print(json.dumps(found))
""",
        tmp_path,
        seed_by="rank",
    )
    first, second = map(json.loads, lines)
    assert first == second
    for name, (same, dtype, steps, falls, _) in first.items():
        assert (same, dtype, steps, falls) == (True, "torch.float32", [False, True] * 3, True), name


def test_repeated_blocks_are_found() -> None:
    """Blocks are the children of the outermost list with children of one class, not of a list inside a block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    model.head = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    assert blocks.found(model) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(("kind", "orders"), [("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("ring", [[0, 1, 6, 7], [2, 3, 4, 5]])])  # fmt: skip
def test_each_rank_has_its_part_of_a_sequence(kind: str, orders: list[list[int]]) -> None:
    """Ulysses uses consecutive pieces; a ring uses one piece from the front and one from the back, as in torch."""
    layout = Layout(dp_replicate=2, cp=2, cp_kind=kind)
    whole = torch.arange(8).expand(3, 8)
    for rank in range(4):
        (part,) = sequence.shard(layout, rank, whole)
        assert part.tolist() == [orders[rank % 2]] * 3
    assert sequence.shard(Layout(dp_replicate=2), 1, whole)[0].equal(whole)


def test_an_indivisible_length_is_refused() -> None:
    """The error names the nearest lengths, and how to exclude padding from the loss."""
    with pytest.raises(
        RequestError, match=r"a sequence of length 31 cannot .* 2 equal pieces .* 30 or 32, .* \(wrapped.mean\)"
    ):
        sequence.shard(Layout(dp_replicate=1, cp=2), 0, torch.zeros(1, 31))
