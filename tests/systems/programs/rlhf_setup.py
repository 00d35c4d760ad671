"""Like OpenRLHF's set-up: equal seeds, DeepSpeed with a timeout, a mesh of (dp, sp, tp), accumulation, a step of training.

python -m hpcinit.run rlhf_setup.py FOLDER, on 2 nodes x 4 ranks, with parallel.cp=2 parallel.tp=2 parallel.wrap=fsdp.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from saying import draws, numbers, refusal, say
from torch import Tensor

import hpcinit
from hpcinit import Layout, Samples, Training
from hpcinit.jobs.train_gpt import GPT, TENSOR_PARALLEL
from hpcinit.runtime import process_group

CONTEXT, LR = 8, 0.5


def model() -> GPT:
    torch.manual_seed(3)
    return GPT(context=CONTEXT, width=16, layers=1, heads=4)


def samples(total: int) -> Tensor:
    return torch.randint(96, (total, CONTEXT + 1), generator=torch.Generator().manual_seed(4))


def step(run: hpcinit.Runtime) -> dict[str, Any]:
    """Do one step of the global batch, each rank with its share."""
    made = model()
    wrapped = run.wrap(
        made,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
        tp_plan=TENSOR_PARALLEL if run.layout.tp > 1 else None,
    )
    mine = samples(run.batch.total)[run.data_rank :: run.layout.data_parallel].chunk(run.batch.accumulation)
    complete = []
    for piece in mine:
        tokens, targets = run.shard_sequence(piece[:, :-1], piece[:, 1:])
        (positions,) = run.shard_sequence(torch.arange(CONTEXT), dim=0)
        wrapped.backward(F.cross_entropy(wrapped(tokens, positions).flatten(0, 1), targets.flatten()))
        complete.append(wrapped.step())
    return {"complete": complete, "weights": numbers(made)}


def alone(total: int) -> list[float]:
    """Do the same step on one rank with plain torch."""
    gpt, batch = model(), samples(total)
    loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.optim.SGD(gpt.parameters(), lr=LR).step()
    return numbers(gpt)


def around(run: hpcinit.Runtime) -> dict[str, list[int]]:
    """Return the ranks that share each dimension with this one."""
    return {name: dist.get_process_group_ranks(run.group(name)) for name in ("dp", "cp", "tp")}


def main() -> None:
    with hpcinit.session(timeout=timedelta(seconds=240), collective_timeout=timedelta(seconds=77)) as run:
        found: dict[str, Any] = {"draws": draws(), "around": around(run), "before": numbers(model())}
        found["deepspeed"] = deepspeed.comm.is_initialized()
        found["timeouts"] = [run.timeout.total_seconds(), process_group.timeout_of(run.device).total_seconds()]
        found["batch"] = [run.batch.micro, run.batch.accumulation, run.batch.data_parallel]
        found |= {"fsdp": step(run), "alone": alone(run.batch.total)}
    found["floored"] = [refusal(hpcinit.init, batch=Samples(*each)) for each in ((3, None, 16), (16, None, 8))]
    # DeepSpeed with sequence parallelism only: it does not support AutoTP with it (deepspeed/deepspeed_config.py).
    zero = Training("deepspeed", deepspeed={"zero_stage": 2})
    with hpcinit.session(training=zero, layout=Layout(cp=2), batch=Samples(1, None, 8)) as run:
        found["zero"] = step(run)
        say(sys.argv[1], run, **found)


if __name__ == "__main__":
    main()
