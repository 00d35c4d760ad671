"""Seeds of everything that draws random numbers, and full determinism."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import MutableMapping

import torch

from hpcinit.base.errors import RequestError

BY = ("same", "rank", "data")

# Odd, so that number * WEYL mod 2**32 is another for each number below 2**32; 2**32 / golden ratio spreads neighbours.
WEYL = 0x9E3779B9


def of(seed: int, by: str, rank: int, data_rank: int) -> int:
    """This rank's seed, at least 0 and below 2**63, from the run's.

    by: 'same' gives every rank `seed` itself: weights and dropout alike. 'rank' gives each rank its own. 'data' gives
    each data_rank (Layout.data_rank) its own: alike in a tensor, pipeline or context parallel group, different across
    data parallel ones.

    Own seeds are mixed, not added: seed 1 on rank 1 is not seed 2 on rank 0. Their low 32 bits differ from rank to rank
    for sure, since torch's CPU generator uses no more of them. Raises RequestError for another `by`.
    """
    if by not in BY:
        raise RequestError(f"seeds by {by!r}, expected one of: {', '.join(BY)}")
    return seed if by == "same" else _mixed(str(seed), rank if by == "rank" else data_rank)


def at_step(seed: int, step: int) -> int:
    """A seed in the place of the run's for what begins anew at this step; 0 to 2**63 - 1, another for each step."""
    return _mixed(f"{seed}/step", step)


def _mixed(text: str, number: int) -> int:
    """31 bits of SHA-256 of both, then 32 bits that no other number of the same text has."""
    high = hashlib.sha256(f"{text}/{number}".encode()).digest()
    low = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(high[:4], "big") >> 1) << 32 | (int.from_bytes(low[:4], "big") + number * WEYL) % 2**32


def seed_all(seed: int) -> None:
    """Seed Python, NumPy (if it is there) and torch with all its accelerators.

    seed: 0 to 2**63 - 1. `numpy.random.default_rng()` takes no part in this: it asks the kernel for a seed unless it is
    given one, so write `default_rng(torch.initial_seed())`.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy  # noqa: PLC0415 - optional

        # One word of 32 bits, or all of a longer seed as two of them.
        numpy.random.seed(seed if seed < 2**32 else [seed % 2**32, seed >> 32])
    except ImportError:
        return


def loader_options(seed: int, data_rank: int, epoch: int = 0) -> dict[str, torch.Generator]:
    """`DataLoader(dataset, **loader_options(run.seed, data_rank))`: workers that differ where the ranks' data do.

    Without it the workers' seeds come from torch's default generator. Ranks that are seeded alike, as they are for
    equal weights, then augment their different data alike. With it the draws of a worker depend on seed, data_rank and
    worker alone, and not on what the process drew before.

    No worker_init_fn is needed: in each worker torch seeds Python, NumPy's global generator and its own from this one
    (torch/utils/data/_utils/worker.py). It does not reach a `numpy.random.Generator`: one made before the workers is
    copied, so that all draw alike, and `default_rng()` is not reproducible. Make it in the worker,
    `default_rng(torch.initial_seed())`.

    epoch: a loader that lives on draws other numbers in each epoch by itself. For a restart to go on with those that an
    uninterrupted run would have had, make one loader an epoch, or keep `generator.get_state()` in the checkpoint.

    The generator also shuffles if the loader is given `shuffle=True`: each data_rank in its own order, over the whole
    data set. To divide it, pass a DistributedSampler, which has a seed of its own.
    """
    return {"generator": torch.Generator().manual_seed(_mixed(f"{seed}/loader/{epoch}", data_rank))}


# Variable -> what to set, and what is deterministic as well.
DETERMINISTIC = {
    # torch refuses cuBLAS without it: https://docs.pytorch.org/docs/stable/notes/randomness.html
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", {":4096:8", ":16:8"}),
    # NVLS, sums in the NVLink switch, differs from call to call (https://github.com/NVIDIA/nccl/issues/1497). The order
    # of a ring follows from the topology: what Megatron-Core sets and accepts in its deterministic mode.
    "NCCL_ALGO": ("Ring", {"Ring", "CollnetDirect", "CollnetChain", "^NVLS"}),
}


def make_deterministic(environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Ask for the same numbers from the same program on the same machines; slower. Returns a few words on each thing
    that it set, or could not set, for the log line.

    Call it before anything ran on a GPU: cuBLAS and NCCL read their variables once. A variable that the user has set
    stays, and is named if it stands in the way. Operations that torch has in no deterministic form raise a RuntimeError
    from here on; extensions (flash-attn, DeepSpeed's and Transformer Engine's own kernels) are not covered. Another
    number of ranks, another GPU or another version of a library gives other numbers all the same.

    PYTHONHASHSEED, which orders sets of strings, counts only if it was set before Python started.
    """
    torch.use_deterministic_algorithms(True)  # Inductor's too; new memory is then filled before its use
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # measures, and chooses what was fastest this time
    words = ["deterministic algorithms", "cudnn.benchmark off"]
    for name, (value, fine) in DETERMINISTIC.items():
        if name not in environ:
            environ[name] = value
            words.append(f"{name}={value}")
        elif not set(environ[name].split(",")) <= fine:
            words.append(f"{name} stays as you set it, which is not known to be deterministic ({value} is)")
    if environ.get("PYTHONHASHSEED", "random") == "random":
        words.append("PYTHONHASHSEED is not set: the order of sets of strings differs between ranks and runs")
    return tuple(words)
