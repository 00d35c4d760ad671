"""run.wrap with torch's wrappers on real ranks: compiled blocks, and the memory of gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.spawned import ranks
from tests.runtime.test_wrap import BEGIN, on_two_ranks
from tests.skip_or_fail import needs_torchs_compiler

COMPILED = """
from torch._dynamo.utils import counters

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return x + torch.tanh(self.layer(x))

with hpcinit.session() as run:
    found = []
    for compile in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 8))
        training = Training("none", compile=compile, activation_checkpointing=CHECKPOINTING)
        made = wrapped(model, Layout(dp_replicate=1), training)
        for _ in range(2):
            loss = made(x).square().mean()
            made.backward(loss)
            made.step()
            found.append(loss.item())
    print(json.dumps([found, counters["stats"]["unique_graphs"], counters["aot_autograd"]["ok"]]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiling takes most of a test's time, so the tests share a cache."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


@pytest.mark.more
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@needs_torchs_compiler
def test_compiled_blocks_have_the_same_losses(tmp_path: Path, compiled: dict[str, str], checkpointing: str) -> None:
    """compile=true compiles the blocks (with torch's inductor and gcc), whose losses equal those of uncompiled blocks;
    also with activation_checkpointing=full."""
    code = COMPILED.replace("CHECKPOINTING", repr(checkpointing))
    with ranks(BEGIN + code, 1, tmp_path, **compiled, fresh=True) as (rank,):
        status, output = rank.end()
    assert status == 0, output
    (*plain, first, second), graphs, ok = json.loads(output.splitlines()[-1])
    assert plain[1] < plain[0] and graphs > 0 and ok > 0, (plain, graphs, ok)
    assert all(abs(a - b) < 1e-5 * b for a, b in zip((first, second), plain, strict=True)), (plain, first, second)


BARE = """
from torch._dynamo.utils import counters

with hpcinit.session() as run:
    found = []
    for compile in (False, True):
        torch.manual_seed(3)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        made = wrapped(nn.Sequential(nn.Sequential(*layers)), Layout(dp_replicate=1), Training('none', compile=compile))
        for _ in range(2):
            loss = made(x + torch.arange(8)).square().mean()
            made.backward(loss)
            made.step()
            found.append(loss.item())
        names = sorted(made.model.state_dict())
    print(json.dumps([found, counters["stats"]["unique_graphs"], names == sorted(nn.Sequential(nn.Sequential(*layers)).state_dict())]))
"""


@needs_torchs_compiler
def test_torchs_own_modules_are_compiled(tmp_path: Path) -> None:
    """A bare nn.TransformerEncoderLayer, whose compile() compiles nothing, is compiled and trains as before."""
    code = "import torch._dynamo\ntorch.compile = __import__('functools').partial(torch.compile, backend='eager')\n"
    with ranks(code + BEGIN + BARE, 1, tmp_path, fresh=True) as (rank,):
        status, output = rank.end()
    assert status == 0, output
    (*plain, first, second), graphs, same_names = json.loads(output.splitlines()[-1])
    assert graphs > 0 and same_names and plain[1] < plain[0]
    assert [first, second] == plain, "the eager backend does the same sums"


def test_ddp_gradients_are_in_its_buckets(tmp_path: Path) -> None:
    """From the first step on, in each pass of an accumulation, DDP's gradients are views of its buckets and use 4 bytes
    per parameter in total."""
    lines = on_two_ranks(
        """
made, seen = wrapped(accumulation=2), []
for _ in range(6):
    made.backward(made(x).square().mean())
    grads = [p.grad for p in made.model.parameters()]
    allocated = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in grads}
    seen.append([len(allocated), sum(allocated.values()) - 4 * sum(grad.numel() for grad in grads)])
    made.step()
print(json.dumps(seen))
""",
        tmp_path,
    )
    for seen in map(json.loads, lines):
        # Before DDP's first reduction each gradient has separate memory. One bucket contains this model.
        assert seen == [[6, 0]] + [[1, 0]] * 5


def test_a_broken_tie_is_refused(tmp_path: Path) -> None:
    """If fully_shard or a tp_plan would separate a parameter that two modules share, the error names both. A tie within
    a block, or outside all blocks, trains as one parameter."""
    lines = on_two_ranks(
        """
class Tied(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        one, other = {"rest": (self.embed, self.head), "block": self.blocks[0], "block and rest": (self.blocks[1][0], self.head),
                      "two blocks": (self.blocks[0][0], self.blocks[1][0])}[where]
        other.weight = one.weight
    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))

sharded, message = Layout(dp_replicate=1, dp_shard=2), {}
for where in ("rest", "block", "block and rest", "two blocks"):
    try:
        made = wrapped(Tied(where), sharded, Training("fsdp"))
        made.backward(made(x).square().mean())
        made.step()
        weights = [p.full_tensor() for p in made.model.parameters()]
        state = made.model.state_dict()
        same = {"rest": ("embed.weight", "head.weight"), "block": ("blocks.0.0.weight", "blocks.0.1.weight")}[where]
        message[where] = [len(weights), torch.equal(*(state[name].full_tensor() for name in same))]
    except hpcinit.HpcinitError as error:
        message[where] = str(error)
try:
    wrapped(Tied("rest"), tp, Training(), tp_plan={"head": ColwiseParallel(output_layouts=Replicate())})
except hpcinit.HpcinitError as error:
    message["tp_plan"] = str(error)
print(json.dumps(message))
""",
        tmp_path,
    )
    for found in map(json.loads, lines):
        assert found["rest"] == found["block"] == [9, True], found
        for where, names in (
            ("block and rest", "head.weight and blocks.1.0.weight"),
            ("two blocks", "blocks.0.0.weight and blocks.1.0.weight"),
            ("tp_plan", "embed.weight and head.weight"),
        ):
            assert found[where].startswith(f"{names} are one tied parameter, but parallel.wrap or the tp_plan"), found
            assert "put all of them in one block or in none" in found[where]
