"""Four Ray actors train with DeepSpeed: `make test-ray`. The program sets torch's variables, as OpenRLHF's does.

It is not in the daily run, because Ray is a large package that no other test needs.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

ACTORS = 4


@ray.remote(num_cpus=1)
class Trainer:
    """A rank."""

    def address(self) -> tuple[str, int]:
        """Return this actor's host and a free port."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            return "127.0.0.1", int(server.getsockname()[1])

    def train(self, rank: int, address: tuple[str, int]) -> dict[str, Any]:
        """Make three steps with ZeRO 2, and return the losses."""
        where = {
            "RANK": rank,
            "WORLD_SIZE": ACTORS,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
        }
        os.environ.update({name: str(value) for name, value in where.items()})
        import torch

        import hpcinit
        from hpcinit.records.spec import Training

        torch.manual_seed(3)
        model, x = torch.nn.Linear(8, 8), torch.full((2, 8), float(rank + 1))
        training = Training("deepspeed", deepspeed={"zero_stage": 2})
        with hpcinit.session(training=training) as run:
            wrapped = run.wrap(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
            losses = []
            for _ in range(3):
                loss = wrapped(x).square().mean()
                wrapped.backward(loss)
                wrapped.step()
                losses.append(loss.item())
            weights = [float(p.detach().sum()) for p in wrapped.model.parameters()]
            return {"rank": run.rank, "launcher": run.world.launcher, "losses": losses, "weights": weights}


if __name__ == "__main__":
    ray.init(num_cpus=ACTORS, include_dashboard=False, log_to_driver=False)
    actors = [Trainer.remote() for _ in range(ACTORS)]
    first = ray.get(actors[0].address.remote())
    found = ray.get([actor.train.remote(rank, first) for rank, actor in enumerate(actors)])
    ray.shutdown()
    assert [(each["rank"], each["launcher"]) for each in found] == [(rank, "env") for rank in range(ACTORS)], found
    assert all(each["weights"] == found[0]["weights"] for each in found), "every rank has the same weights"
    assert all(each["losses"][-1] < each["losses"][0] for each in found), "every rank learns"
    print(f"{ACTORS} Ray actors trained with DeepSpeed")
