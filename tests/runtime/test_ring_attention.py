"""torch's ring attention over hpcinit's groups, on real ranks with gloo. tests/gpu/ring_on_cpus.py names the CPU's kernel
to torch, whose ring otherwise accepts only kernels of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.records.layout import Layout
from hpcinit.records.spec import Training
from tests.gpu import check_wrap, starting
from tests.gpu.check_wrap import Row
from tests.gpu.starting import training
from tests.runtime.spawned import ranks

RING = Layout(dp_replicate=1, dp_shard=2, cp=2, cp_kind="ring")
RINGS = {
    "ddp": (training(), Layout(dp_replicate=2, cp=2, cp_kind="ring")),
    "ZeRO 2": (check_wrap.zero(2), RING),
    "ZeRO 3": (check_wrap.zero(3), RING),
}
NOISE = 1e-4  # sums in another order; attention to this rank's part alone differs by more than 0.01


def trained(how: Training, layout: Layout, ranks: int, folder: Path) -> list[float]:
    done = starting.run(check_wrap.job(Row("", how, ranks, layout=layout), cpu=True), folder)
    assert done.ok, done.output
    return list(done.first["losses"])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks with whole sequences."""
    return trained(training(), Layout(dp_replicate=2), 2, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.deepspeed
@pytest.mark.more
@pytest.mark.parametrize("name", RINGS)
def test_training_with_ring_attention(name: str, expected: list[float], tmp_path: Path) -> None:
    """With parallel.cp_kind=ring, two shares of the data x a ring of two have the losses of two ranks without a ring."""
    losses = trained(*RINGS[name], 4, tmp_path / "ring")
    assert losses[-1] < losses[0] - 0.5
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < NOISE, (losses, expected)


def test_a_ring_over_the_group_of_the_sequence(tmp_path: Path) -> None:
    """A ring attention of the program's own over `run.group("sp")`, with parts of `run.shard_sequence`, has the output and
    the gradients of attention on one rank."""
    code = """
        import torch, hpcinit, torch.nn.functional as F
        from tests.gpu.ring_on_cpus import KERNEL, KERNEL_BACKWARD, torchs
        run = hpcinit.init(layout=hpcinit.Layout(dp_replicate=1, cp=4, cp_kind="ring"))
        torch.manual_seed(3)
        whole = [torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
        expected, slope = F.scaled_dot_product_attention(*whole, is_causal=True), torch.randn(2, 3, 16, 8)
        expected.backward(slope)
        with torch.no_grad():
            parts = dict(zip(("query", "key", "value"), run.shard_sequence(*whole, dim=2)))
            out, logsumexp = torchs._templated_ring_attention(run.group("sp"), 2, KERNEL, **parts, is_causal=True)
            (grad,) = run.shard_sequence(slope, dim=2)
            grads = torchs._templated_ring_attention_backward(
                run.group("sp"), 2, KERNEL_BACKWARD, grad, "grad_out", **parts, out=out, logsumexp=logsumexp,
                is_causal=True, dropout_p=0.0)
            wanted = run.shard_sequence(expected, *(each.grad for each in whole), dim=2)
            for found, right in zip((out, *grads), wanted, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    """
    with ranks(code, 4, tmp_path, OMP_NUM_THREADS="1") as started:
        ended = [rank.end() for rank in started]
    assert [status for status, _ in ended] == [0] * 4, ended
