"""Which nodes are to blame for the end of a run, if any: from what Slurm, the driver and the heartbeats say.

A program's own failure is nobody's but the program's: only words that a program cannot bring about count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from hpcinit.facts import causes
from hpcinit.facts.evidence import Evidence
from hpcinit.facts.ranges import brief

NODE_FAIL, NO_BEATS, UNREACHABLE = "NODE_FAIL", "no beats", "slurmd unreachable"
# https://docs.nvidia.com/deploy/xid-errors: those where the GPU or its links are at fault. Not 13, 31, 43 and 45, which
# a program's own wrong address brings about, nor 63, a memory row that was replaced in time.
XIDS = {46, 48, 62, 64, 74, 79, 94, 95, 119, 120, 140}
_XID = re.compile(r"\bXid(?: ?\(PCI:[^)]*\))?[: ]+(\d{1,3})\b")  # NVRM: Xid (PCI:0000:10:1c): 79, pid=...; 'Xid 79'
_WORDS = (
    ("ECC", re.compile(r"[Uu]ncorrect(?:able|ed) (?:ECC|memory) error")),  # CUDA's 214 and HIP's 214
    ("NVLink", re.compile(r"[Uu]ncorrectable NVLink error")),  # CUDA's 220
    ("GPU lost", re.compile(r"fallen off the bus|GPU is lost")),  # NVML's 15
)


class Fault(NamedTuple):
    host: str
    kind: str
    about: str = ""


def named(evidence: Evidence) -> list[Fault]:
    """Each node with each kind of fault once. Nobody where the kernel had to kill for memory: nodes go with it."""
    found = [*_of_errors(evidence)]
    if not evidence.oom:
        found += _of_slurm(evidence)
    return list({(fault.host, fault.kind): fault for fault in found if _is_one(fault.host)}.values())


def _is_one(host: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host))  # srun also says 'n[1-2]: tasks 2-3'


def _of_slurm(evidence: Evidence) -> Iterator[Fault]:
    for host in dict.fromkeys((*evidence.log.lost, *evidence.nodes)):
        yield Fault(host, NODE_FAIL, evidence.nodes.get(host, ""))
    if len(evidence.log.unreachable) == 1:  # of several at a time: an image that starts nowhere looks the same
        yield Fault(evidence.log.unreachable[0], UNREACHABLE)
    for node in evidence.hang.silent_nodes if evidence.hang else ():
        if len(node.ranks) > 1:  # a single process may be stopped, or keep Python's lock: that is not the node
            yield Fault(node.host, NO_BEATS, str(node))


def _of_errors(evidence: Evidence) -> Iterator[Fault]:
    said = [(one.record.host, one.record.foreign) for one in evidence.found if not causes.is_secondary(one.record)]
    tails = evidence.tails
    said += [(end.host, tails[rank]) for end in evidence.log.ends for rank in end.ranks if rank in tails]
    for host, text in said:
        if kind := of_words(text):
            yield Fault(host, kind, brief(text))


def of_words(text: str) -> str:
    """'Xid 79', 'ECC', ... where the words are those of broken hardware, else ''."""
    for number in _XID.findall(text):
        if int(number) in XIDS:
            return f"Xid {number}"
    return next((kind for kind, pattern in _WORDS if pattern.search(text)), "")
