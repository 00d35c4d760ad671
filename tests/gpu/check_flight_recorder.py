"""torch's flight recorder with a live group: dumps on demand and at the watchdog's timeout, and what hpcinit reads from them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcinit.records import safeguards
from hpcinit.why import flight_recorder, hang_verdict
from tests.gpu import starting
from tests.gpu.findings import Findings
from tests.gpu.starting import Job

TIMEOUT_S = 6.0
HANG_S = 60.0


def main(found: Findings, folder: Path) -> None:
    _on_demand(found, folder)
    _at_timeout(found, folder)


def _on_demand(found: Findings, folder: Path) -> None:
    """Dump a group while rank 0 waits in a collective that rank 1 has not entered.

    Two ranks with NCCL need two GPUs. On one GPU rank 1's dump is a fake: an earlier dump of rank 0, in a group of two.
    """
    ranks = 2 if found.cpu else 1
    done = starting.run(Job("tests.gpu.check_flight_recorder:dumps", ranks=ranks), folder / "demand")
    if not found.claim("dumps of a live group on demand", done.ok, "" if done.ok else done.tail()):
        return
    kind = done.first["kind"]
    found.claim("the recorder is NCCL's", kind == "nccl", kind, device=True)
    late_bytes, early_bytes = (bytes.fromhex(each) for each in (done.first["late"], done.results[-1]["early"]))
    found.measured("size of a dump", f"{len(late_bytes):,} bytes, {done.first['ms']:.1f} ms to make")
    recording = flight_recorder.recordings({0: flight_recorder.load(late_bytes)})[0]
    [(group, number)] = [(group, number) for group, number in recording.last.items() if "default_pg" in str(group)]
    late = recording.call((group, number))
    read = f"{late.name} of {late.input_sizes}, number {number}, {late.state}, {group}" if late else "nothing"
    right = late is not None and (late.name, late.input_sizes) == ("all_reduce", (((5,),),))
    found.claim("the last collective is read from the dump", right, read)
    pair = {rank: flight_recorder.load(data) for rank, data in enumerate((late_bytes, early_bytes))}
    for dump in pair.values() if ranks == 1 else ():
        for group_config in dump["pg_config"].values():
            group_config["ranks"] = "[0, 1]"
    verdict = hang_verdict.verdict(pair)
    named = [(culprit.rank, culprit.kind) for culprit in verdict.culprits] == [(1, "not-called")]
    found.claim("the rank that has not entered the collective is named", named, "; ".join(verdict.lines()) or "no line")


def _at_timeout(found: Findings, folder: Path) -> None:
    """One rank with NCCL: its collective waits for a kernel that outlives the timeout. On CPUs, gloo without a peer."""
    ranks = 2 if found.cpu else 1
    job = Job("tests.gpu.check_flight_recorder:hang", ranks=ranks, limit_s=HANG_S + 25)
    done = starting.run(job, folder / "timeout")
    seconds = time.time() - done.start_s
    lines = [line for line in done.output.splitlines() if "Watchdog caught" in line or "Timed out" in line]
    detail = f"status {done.status} after {seconds:.0f} s: {lines[0][-300:] if lines else done.tail(300)}"
    found.claim("a collective that hangs ends the rank", done.status not in {0, starting.STOPPED}, detail)
    dumps = sorted((done.folder / safeguards.FLIGHT).glob("*.rank_*"))
    written = f"{[path.name for path in dumps]}, of {[path.stat().st_size for path in dumps]} bytes"
    if (
        not found.claim("the watchdog writes a dump into the run folder", bool(dumps), written, device=True)
        or not dumps
    ):
        return
    job_id = dumps[0].name.partition(".")[0]
    read = flight_recorder.read_attempt(done.folder, job_id, None)
    recorded = flight_recorder.recordings(read).values()
    pending = [call for one in recorded for operation in one.pending if (call := one.call(operation))]
    hung = any((call.name, call.input_sizes) == ("all_reduce", (((9,),),)) for call in pending)
    found.claim("the dump names the collective that hung", hung, str(pending), device=True)


# In the rank:


def _dump() -> tuple[str, bytes]:
    """'nccl' or 'gloo', and the recorder's dump without stacks."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    kind = dist.get_backend()
    dump = getattr(c10d, "_dump_nccl_trace", None) if kind == "nccl" else getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        raise RuntimeError(f"this torch has no flight recorder for {kind}")
    return kind, dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)


def dumps() -> dict[str, Any]:
    """Return a dump between two collectives, and on rank 0 one during the second."""
    import torch
    import torch.distributed as dist

    import hpcinit

    late, kind, ms = b"", "", 0.0
    with hpcinit.session() as run:
        dist.all_reduce(torch.ones(3, device=run.device))
        kind, early = _dump()
        if run.rank == 0:
            if run.device.type == "cuda":
                torch.cuda._sleep(int(2e9))  # a second or more: the collective waits for this kernel
            work = dist.all_reduce(torch.ones(5, device=run.device), async_op=True)
            began = time.perf_counter()
            kind, late = _dump()
            ms = 1000 * (time.perf_counter() - began)
            work.wait()
        else:
            time.sleep(3.0)  # rank 0 makes its dump in this time
            dist.all_reduce(torch.ones(5, device=run.device))
    return {"kind": kind, "early": early.hex(), "late": late.hex(), "ms": ms}


def hang() -> bool:
    """Enter a collective that does not complete before its timeout."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import hpcinit

    run = hpcinit.init(collective_timeout=timedelta(seconds=TIMEOUT_S))
    if run.device.type == "cuda":
        torch.cuda._sleep(int(HANG_S * 1e9))  # at least half of HANG_S at up to 2 GHz
        dist.all_reduce(torch.ones(9, device=run.device))
        time.sleep(HANG_S)
    elif run.rank == 0:
        dist.all_reduce(torch.ones(9))
    else:
        time.sleep(2 * TIMEOUT_S)
    return True
