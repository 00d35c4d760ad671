"""run.wrap with torch's own wrappers on 2 real ranks: where gradients lie."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.test_wrap import on_two_ranks


def test_ddp_gradients_lie_in_its_buckets(tmp_path: Path) -> None:
    """From the first step on, in each pass of an accumulation, DDP's gradients are the buckets that are sent and take
    4 bytes a parameter together."""
    lines = on_two_ranks(
        """
made, seen = wrapped(accumulation=2), []
for _ in range(6):
    made.backward(made(x).square().mean())
    grads = [p.grad for p in made.model.parameters()]
    held = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in grads}
    seen.append([len(held), sum(held.values()) - 4 * sum(grad.numel() for grad in grads)])
    made.step()
print(json.dumps(seen))
""",
        tmp_path,
    )
    for seen in map(json.loads, lines):
        # The first pass is before DDP has sent anything: a gradient for itself each. One bucket holds this model.
        assert seen == [[6, 0]] + [[1, 0]] * 5
