"""What hpcinit expects of the libraries of torch's CUDA build: variables that they read, and the flight recorder's format."""

from __future__ import annotations

import mmap
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

import hpcinit
from hpcinit.why import flight_recorder

ROOT = Path(hpcinit.__file__).parents[1]
# Each pattern starts with literal text, so that Python searches a gigabyte in seconds, not minutes.
NAMES = [r"TORCH_(?:NCCL|FR|DISTRIBUTED|CPP|GLOO)_[A-Z0-9_]*[A-Z0-9]", r"NCCL_[A-Z0-9_]*[A-Z0-9]",
         r"GLOO_[A-Z0-9_]*[A-Z0-9]", r"PYTORCH_NVML_[A-Z0-9_]*[A-Z0-9]"]  # fmt: skip
# Variables that torch 2.14.1 and its NCCL do not read, each with the reason why hpcinit has it.
NOT_READ: dict[str, str] = {}
FORMATS = {"2.10"}  # of flight recorders whose dumps the reader was tried with, in this build


def packages() -> Path:
    return Path(torch.__file__).parents[1]


def libraries() -> list[Path]:
    return [*(packages() / "torch/lib").glob("*.so*"), *packages().glob("nvidia/nccl/lib/libnccl.so*")]


def named() -> set[str]:
    """Return the variables of torch, NCCL and gloo that hpcinit, its clusters and its batch scripts name."""
    paths = [*(ROOT / "hpcinit").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "sbatch").glob("*.sbatch")]
    return {name for path in paths for name in _names(path.read_bytes())}


def _names(data: bytes | mmap.mmap) -> Iterator[str]:
    for pattern in NAMES:
        for match in re.finditer(pattern.encode(), data):
            before = data[max(0, match.start() - 1) : match.start()]
            if not re.match(rb"\w", before):  # otherwise it is the end of another name
                yield match[0].decode()


def read() -> set[str]:
    """Return the variables that torch's and NCCL's libraries and torch's Python files contain as text."""
    found: set[str] = set()
    for path in libraries():
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found.update(_names(data))
    for path in (packages() / "torch").rglob("*.py"):
        found.update(_names(path.read_bytes()))
    return found


def test_the_libraries_read_every_variable() -> None:
    """torch's CUDA build or its NCCL reads each variable that hpcinit sets or names, but for the listed ones."""
    known = read()
    assert {"NCCL_DEBUG", "TORCH_NCCL_DUMP_ON_TIMEOUT"} <= known  # otherwise the search is broken
    assert named() - known == set(NOT_READ)
    assert "NCCL_MADE_UP" not in known


RECORDS = """
import pickle, sys, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3, 4))
dist.broadcast(torch.ones(2), 0)
sys.stdout.buffer.write(c10d._dump_fr_trace())
"""


@pytest.fixture(scope="module")
def dump() -> bytes:
    """A dump of this build's recorder, by gloo: NCCL's recorder is the same class, and needs a GPU for an entry."""
    env = {"TORCH_FR_BUFFER_SIZE": "2000", "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", RECORDS], env=env, capture_output=True, check=True, timeout=200).stdout


def test_the_recorders_format_is_the_readers(dump: bytes) -> None:
    """The reader finds the last collective in a dump of this build, whose format is one that it was tried with."""
    document = flight_recorder.load(dump)
    assert document["version"] in FORMATS
    recording = flight_recorder.recordings({0: document})[0]
    [(group, number)] = recording.last.items()
    assert (str(group), number) == ("group default_pg (0)", 2)
    call = recording.call((group, number))
    assert call is not None
    assert (call.name, call.input_sizes) == ("broadcast", (((2,),),))


def test_nccls_recorder_has_the_same_format(dump: bytes) -> None:
    """NCCL's recorder, empty without a GPU, writes the same version and fields as gloo's, and the reader accepts it."""
    nccl = flight_recorder.load(c10d._dump_nccl_trace())
    assert (nccl["version"], nccl.keys()) == (flight_recorder.load(dump)["version"], flight_recorder.load(dump).keys())


def test_another_format_is_seen(dump: bytes) -> None:
    """A dump without the fields that the reader counts by has no last collective."""
    document = pickle.loads(dump)
    document["pg_status"] = {}
    for entry in document["entries"]:
        del entry["collective_seq_id"]
    assert flight_recorder.recordings({0: flight_recorder.load(pickle.dumps(document, protocol=2))})[0].last == {}


def test_the_build_has_cuda() -> None:
    """This is torch's CUDA build, with NCCL."""
    assert torch.version.cuda and torch.distributed.is_nccl_available()
