"""Seeds all random number generators, and enables deterministic algorithms."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import MutableMapping

import torch

from hpcinit.base.errors import RequestError
from hpcinit.records.spec import SEED_BY, one_of

# 2**32 / golden ratio. It is odd, so number * WEYL mod 2**32 differs for all numbers below 2**32.
WEYL = 0x9E3779B9


def checked(seed: int) -> int:
    """Return `seed`. Raise RequestError if it is not 0 to 2**63 - 1, the range that Python, NumPy and torch accept."""
    if not 0 <= seed < 2**63:
        raise RequestError(f"seed is {seed}, expected 0 to 2**63 - 1")
    return seed


def of(seed: int, by: str, rank: int, data_rank: int) -> int:
    """Return this rank's seed, 0 to 2**63 - 1, derived from the seed of the run.

    by: how the ranks' seeds differ:
        'same': every rank gets `seed` itself, so weights and dropout are equal.
        'rank': every rank gets a different seed.
        'data': every data_rank (Layout.data_rank) gets a different seed. Seeds are equal within a tensor, pipeline or
            context parallel group.

    Different seeds also differ in their low 32 bits, because torch's CPU generator uses only these bits. The run's
    seed is hashed, so rank 1 of a run with seed 1 does not get the seed of rank 0 of a run with seed 2.

    Raise RequestError for another `by`, or for a seed outside of 0 to 2**63 - 1.
    """
    one_of("seed_by", by, SEED_BY)
    checked(seed)
    return seed if by == "same" else _mixed(str(seed), rank if by == "rank" else data_rank)


def at_step(seed: int, step: int) -> int:
    """Return a seed for the generators at this step, 0 to 2**63 - 1. Each step gets a different seed."""
    return _mixed(f"{seed}/step", step)


def _mixed(text: str, number: int) -> int:
    """Derive a 63-bit number from both arguments.

    The upper 31 bits are a hash. For the same `text`, different numbers have different lower 32 bits.
    """
    high = hashlib.sha256(f"{text}/{number}".encode()).digest()
    low = hashlib.sha256(text.encode()).digest()
    return (int.from_bytes(high[:4], "big") >> 1) << 32 | (int.from_bytes(low[:4], "big") + number * WEYL) % 2**32


def seed_all(seed: int) -> None:
    """Seed the random number generators of Python, NumPy (if installed) and torch, including all accelerators.

    `numpy.random.default_rng()` is not affected, because without an argument it gets a random seed from the kernel. Use
    `default_rng(torch.initial_seed())`.

    seed: 0 to 2**63 - 1. Raise RequestError for any other value.
    """
    random.seed(checked(seed))
    torch.manual_seed(seed)
    try:
        import numpy  # noqa: PLC0415 - optional

        # NumPy takes 32 bits, or a list of 32-bit numbers for a longer seed.
        numpy.random.seed(seed if seed < 2**32 else [seed % 2**32, seed >> 32])
    except ImportError:
        return


def loader_options(seed: int, data_rank: int, epoch: int = 0) -> dict[str, torch.Generator]:
    """Return options that seed a data loader: `DataLoader(dataset, **loader_options(run.seed, data_rank))`.

    The result is {'generator': torch.Generator}. The workers' random numbers then depend only on seed, data_rank, epoch
    and worker. Without these options, torch derives the workers' seeds from its default generator. With
    seed_by='same', that generator has the same seed on all ranks, so all ranks would augment their different data in
    the same way.

    No worker_init_fn is needed: in each worker torch seeds Python, NumPy's global generator and its own generator
    (torch/utils/data/_utils/worker.py). torch does not seed a `numpy.random.Generator`. Create it in the worker with
    `default_rng(torch.initial_seed())`. Otherwise, its numbers are the same in all workers, or are not reproducible.

    epoch: the number of the epoch. One loader draws different numbers in each epoch. To get the same numbers after a
        restart, create a loader per epoch, or save `generator.get_state()` in the checkpoint.

    With `shuffle=True`, the generator also shuffles: each data_rank gets its own order of the whole data set. To divide
    the data set among ranks, pass a DistributedSampler, which has its own seed.
    """
    return {"generator": torch.Generator().manual_seed(_mixed(f"{seed}/loader/{epoch}", data_rank))}


# Maps each variable to the value that hpcinit sets, and to all values that are deterministic.
DETERMINISTIC = {
    # Without it, cuBLAS operations raise an error: https://docs.pytorch.org/docs/stable/notes/randomness.html
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", {":4096:8", ":16:8"}),
    # NVLS sums in the NVLink switch, so results differ from call to call (https://github.com/NVIDIA/nccl/issues/1497).
    # The order of a ring is fixed by the topology. Megatron-Core uses the same values in its deterministic mode.
    "NCCL_ALGO": ("Ring", {"Ring", "CollnetDirect", "CollnetChain", "^NVLS"}),
}


def make_deterministic(environ: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Make torch and its libraries use deterministic algorithms, which are slower. Return notes for the log line.

    The same program on the same machines then computes the same numbers. A different number of ranks, a different GPU
    or a different version of a library can still change the numbers. Extensions (flash-attn, DeepSpeed, Transformer
    Engine) are not covered. Operations that have no deterministic implementation raise a RuntimeError from now on.

    Call this before anything runs on a GPU, because cuBLAS and NCCL read their variables only once. A variable that the
    user has set is not changed. If such a value may not be deterministic, a note names the variable. PYTHONHASHSEED
    determines the order of sets of strings, but only has an effect if it is set before Python starts.
    """
    torch.use_deterministic_algorithms(True)  # also makes Inductor deterministic, and fills new memory before its use
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # it would choose the algorithm by a timing, which varies
    words = ["deterministic algorithms", "cudnn.benchmark off"]
    for name, (value, fine) in DETERMINISTIC.items():
        if name not in environ:
            environ[name] = value
            words.append(f"{name}={value}")
        elif not set(environ[name].split(",")) <= fine:
            words.append(f"{name}={environ[name]} (set by you) may not be deterministic; {value} is")
    if environ.get("PYTHONHASHSEED", "random") == "random":
        words.append("PYTHONHASHSEED is not set: the order of sets of strings differs between ranks and runs")
    return tuple(words)
