"""The checks by name. Each is a module check_NAME with `main(found, folder)`, run in a separate process."""

from __future__ import annotations

from dataclasses import dataclass

PART_S = 590.0  # of a part on a GPU: a command on such a machine often ends after ten minutes
CPU_FACTOR = 4  # on CPUs the limits are this much longer: the machine may be small and busy


@dataclass(frozen=True)
class Check:
    """name: as in docs/development/gpu.md. part: the run it belongs to. limit_s: after it the check's processes are killed."""

    name: str
    part: int
    limit_s: float
    about: str

    @property
    def module(self) -> str:
        return f"tests.gpu.check_{self.name.replace('-', '_')}"


CHECKS = (
    Check("init", 1, 150, "hpcinit.init() with NCCL and one rank; timeouts; device_id; DeepSpeed; a second init"),
    Check("barrier", 1, 60, "the first barrier uses the rank's own device"),
    Check("doctor", 1, 100, "what the doctor reports of the device, and of another process that uses its memory"),
    Check(
        "flight-recorder", 1, 100, "dumps of a live NCCL group, on demand and at a timeout, and what is read from them"
    ),
    Check("same-gpu", 1, 75, "two ranks with NCCL on one GPU end with a message"),
    Check("shared-gpu", 1, 150, "two ranks with NCCL 2.30 on one GPU: hang, mismatch, killed rank, restart"),
    Check("groups", 1, 90, "a second group beside the training group; NCCL between two GPUs where there are two"),
    Check("monitoring", 1, 90, "progress, should_stop and the heartbeat cost less than 1 % of a 20 ms step"),
    Check("fork", 1, 240, "launch=fork with CUDA: memory of the fork server, contexts of the ranks, time to start"),
    Check("wrap", 2, 260, "20 steps of train_gpt under each wrapper, compared with a CPU"),
    Check("checkpoints", 2, 150, "a stop and a resume with the device's random numbers give the same losses"),
    Check("plan", 2, 240, "the memory that hpcinit plan predicts, and the memory that was measured"),
    Check("ops", 2, 240, "DeepSpeed's ops: built once, first use, a killed compile, an abandoned lock"),
)
