"""`hpcinit plan cluster=x nodes=8 parallel=zero3 model.params=7e9`: what a rank will hold, and whether it fits.

Exit status: 0 if it fits, 1 if it does not, 2 for a wrong request or where the cluster's GPU memory is not known.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcinit.config import checks, compose, job_spec
from hpcinit.config.compose import Request
from hpcinit.config.schema import Config
from hpcinit.facts import memory, telling
from hpcinit.facts.errors import ConfigError, RequestError
from hpcinit.submission import estimate
from hpcinit.submission.estimate import Estimate
from hpcinit.submission.remedies import remedies

GB = 10**9
PLACES = {memory.GPU: "GPU, per rank", memory.CPU: "CPU, per node", memory.NVME: "NVMe, per node"}
VERDICTS = {True: "fits", False: "does not fit", None: "unknown"}
STYLES = {True: "green", False: "bold red", None: "yellow"}
STATUS = {True: 0, False: 1, None: 2}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit plan",
        usage="hpcinit plan [KEY=VALUE ...] [--json] [-q | -v]",
        description=__doc__,
        epilog="KEY=VALUE and flags such as --multirun as for hpcinit submit, whose --help shows every key.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return telling.options(parser)


def main(argv: Sequence[str]) -> int:
    """argv: as for `hpcinit submit`, and --json. Raises RequestError."""
    if "--" in argv:
        raise RequestError("-- and a program: plan runs none, leave it out; hpcinit submit takes it")
    options, words = telling.parsed_beside(parser(), list(argv))
    return compose.main(words, _check, lambda requests: _show_all(requests, options.json))


def _check(request: Request) -> None:
    if problems := checks.problems(request.config, to_submit=False):
        raise ConfigError(*problems)
    estimate.of(request.config)  # all of a sweep before the first table


def _show_all(requests: Sequence[Request], as_json: bool) -> int:
    status = 0
    for request in requests:
        found = estimate.of(request.config)
        ways = remedies(request.config) if found.fits is False else []
        if as_json:
            print(json.dumps({"combination": request.combination, **_document(request.config, found, ways)}))
        elif telling.quiet():
            print(verdict(found))
        else:
            _show(request, found, ways)
        status = max(status, STATUS[found.fits])
    return status


def equations(config: Config) -> list[str]:
    """How the ranks are divided, and the batch. Raises RequestError."""
    per_node = checks.ranks_per_node(config)
    world_size = config.nodes * per_node
    layout = job_spec.layout(config).over(world_size, per_node)
    product = " x ".join(f"{name} {degree}" for name, degree in layout.degrees().items() if degree > 1) or "1"
    batch = job_spec.samples(config).over(layout.dp_replicate * layout.dp_shard)
    return [
        f"nodes {config.nodes} x ranks per node {per_node} = {world_size} ranks = {product}",
        f"{batch.equation()} samples a step",
    ]


def _document(config: Config, found: Estimate, ways: Sequence[str]) -> dict[str, Any]:
    return {
        "equations": equations(config),
        "parts": [vars(part) for part in found.parts],
        "bytes": found.totals,
        "limits": found.limits,
        "margin": found.margin,
        "verdict": VERDICTS[found.fits],
        "unknown": found.unknown,
        "would_fit": list(ways),
    }


def _show(request: Request, found: Estimate, ways: Sequence[str]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    for line in [request.combination, *equations(request.config)]:
        if line:
            out.print(line, markup=False)
    out.print(_table(found))
    out.print(verdict(found), markup=False, style=STYLES[found.fits])
    for line in found.unknown:
        out.print(f"not counted: {line}", markup=False)
    if found.fits is False:
        out.print("would fit, one change at a time:" if ways else "no single change that we tried makes it fit")
    for way in ways:
        out.print(f"  {way}", markup=False)


def _table(found: Estimate) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("where", "what", "when", "how"):
        table.add_column(name, overflow="fold")
    table.add_column("GB", justify="right", no_wrap=True)
    for place, title in PLACES.items():
        here = [part for part in found.parts if part.place == place]
        times = 1 if place == memory.GPU else found.ranks_per_node
        for part in here:
            how = part.how + (f" x {times} ranks" if times > 1 else "")
            table.add_row(title, part.name, part.during, how, f"{part.bytes * times / GB:.2f}")
        if here:
            table.add_row(title, "at most", "", "always + the larger of pass, step", f"{found.totals[place] / GB:.2f}")
    return table


def verdict(found: Estimate) -> str:
    """'does not fit: GPU, per rank needs 112.0 GB of 74.0 GB (80 GB - 6.0 GB for ...)'"""
    said = []
    for place, title in PLACES.items():
        limit, needs = found.limits.get(place), found.totals[place]
        if limit is None:
            continue
        margin = (
            f" ({limit / GB:.0f} GB - {found.margin / GB:.1f} GB for CUDA, NCCL and fragmentation: "
            f"{math.floor(100 * estimate.FRAGMENTS)} % + {estimate.CONTEXT / GB:.0f} GB, an assumption)"
        )
        usable = limit - (found.margin if place == memory.GPU else 0)
        said.append(
            f"{title} needs {needs / GB:.1f} GB of {usable / GB:.1f} GB" + (margin if place == memory.GPU else "")
        )
    if found.fits is None:
        said.append(found.why_unknown)
    counted = " as far as it is counted" if found.fits and found.unknown else ""
    return f"{VERDICTS[found.fits]}{counted}: {'; '.join(said)}"
