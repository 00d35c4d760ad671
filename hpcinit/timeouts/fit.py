"""`hpcinit timeouts fit RUN...`: propose this cluster's start-up timeout from how long past starts took.

The rule: every number of nodes that was seen gets at least `factor` times its longest start.

    base_s      factor x the longest start on the fewest nodes, at least 60 s
    per_node_s  the least that keeps the rule for all other numbers of nodes; the default if there is no other
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hpcinit.base import console, json_output
from hpcinit.base.errors import RequestError, SpecError
from hpcinit.base.text import counted
from hpcinit.config import folders
from hpcinit.discover import cluster_file
from hpcinit.observe import find_runs
from hpcinit.records import run_folder, spec, timeline
from hpcinit.records.startup_timeout import StartupTimeout

FACTOR = 2.0  # a timeout that is too short costs more than one that is too long
LEAST_BASE_S = 60.0  # one node's kernels alone took 55 s to load (docs/reference/timeout-details.md)


@dataclass(frozen=True)
class History:
    """What past runs recorded.

    starts: by number of nodes, fewest first, the longest seconds that a rank of each complete start was under its
    timeout. unfinished: how many starts did not complete. without: runs that have no timeline. cluster: of all of them.
    max_s: the longest maximum that was in force.
    """

    starts: dict[int, list[float]]
    unfinished: int
    without: tuple[str, ...]
    cluster: str
    max_s: float


def main(argv: Sequence[str]) -> int:
    """Run the command. Raise RequestError."""
    options = console.parse_arguments(parser(), list(argv))
    seen = read(find_runs.matching_runs(options.runs, options.runs_dir))
    formula = fit(seen, options.factor)
    if options.json:
        print(json_output.line("timeouts fit", _document(seen, formula, options.factor)))
    else:
        print("\n".join([*([] if options.quiet else _comments(seen, formula, options.factor)), *_yaml(formula)]))
    if options.write:
        console.note(_write(seen, formula, options.factor))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit timeouts fit", description="Propose a cluster's start-up timeout from how long past starts took."
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folder, name or job id; none, or 'all': every run there is"
    )
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--factor", type=float, default=FACTOR, help=f"times the longest start seen (default: {FACTOR:g})"
    )
    parser.add_argument("--write", action="store_true", help="put it into the cluster's YAML")
    return console.add_verbosity_options(parser)


def read(runs: Iterable[Path]) -> History:
    """Read the starts of `runs`. Raises RequestError for runs of several clusters: each has its own timeout."""
    starts: dict[int, list[float]] = {}
    without: list[str] = []
    clusters: dict[str, str] = {}
    unfinished, longest_s = 0, 0.0
    for run in runs:
        attempts = timeline.read(run)
        try:
            made = spec.load(run / run_folder.SPEC, to_run=False) if attempts else None
        except SpecError:
            made = None
        if made is None:
            without.append(run.name)
            continue
        clusters.setdefault(made.cluster, run.name)
        longest_s = max(longest_s, made.comm.timeout.max_s)
        for attempt in attempts:
            if attempt.complete and attempt.waited_s is not None:
                starts.setdefault(attempt.nodes, []).append(attempt.waited_s)
            else:
                unfinished += 1
    if len(clusters) > 1:
        each = ", ".join(f"{cluster} ({run})" for cluster, run in clusters.items())
        raise RequestError(f"these runs are of several clusters: {each}; name the runs of one cluster")
    return History(dict(sorted(starts.items())), unfinished, tuple(without), next(iter(clusters), ""), longest_s)


def fit(seen: History, factor: float) -> StartupTimeout:
    """Apply the rule. Raises RequestError for a factor below 1 and for a history without a complete start."""
    if factor < 1:
        raise RequestError(f"--factor is {factor:g}, expected 1 or more: it multiplies the longest start seen")
    if not seen.starts:
        lacking = f"no timeline in {', '.join(seen.without[:5])}" if seen.without else "no start that completed"
        raise RequestError(
            f"{lacking}: runs write one (timeline/ in the run folder) if their ranks call hpcinit.init(), "
            "`hpcinit why RUN` explains a start that failed"
        )
    (_, first), *others = ((nodes, factor * max(waited)) for nodes, waited in seen.starts.items())
    base = max(LEAST_BASE_S, float(math.ceil(first)))
    slopes = [max(0.0, seconds - base) / nodes for nodes, seconds in others]
    slope = math.ceil(max(slopes) * 100) / 100 if slopes else StartupTimeout.per_node_s
    return StartupTimeout(base_s=base, per_node_s=slope, max_s=seen.max_s)


def _comments(seen: History, formula: StartupTimeout, factor: float) -> list[str]:
    """Return the table of starts and what was not counted, as comments of YAML."""
    lines = [f"{'nodes':>7} {'starts':>7} {'median s':>9} {'longest s':>10} {'timeout s':>10}"]
    for nodes, waited in seen.starts.items():
        timeout = formula.start_up(nodes).total_seconds()
        lines.append(f"{nodes:7} {len(waited):7} {median(waited):9.1f} {max(waited):10.1f} {timeout:10g}")
    if seen.unfinished:
        lines.append(f"not counted: {seen.unfinished} starts that did not complete; `hpcinit why RUN` explains them")
    if seen.without:
        lines.append(f"without a timeline: {', '.join(seen.without[:5])}{', ...' if len(seen.without) > 5 else ''}")
    if len(seen.starts) == 1:
        lines.append("seen on one number of nodes only: timeout_per_node_s is the default")
    lines.append(f"for cluster={seen.cluster}: {factor:g} x the longest start, and {LEAST_BASE_S:g} s or more")
    return [f"# {line}" for line in lines]


def _values(formula: StartupTimeout) -> dict[str, float]:
    return {"timeout_base_s": formula.base_s, "timeout_per_node_s": formula.per_node_s}


def _yaml(formula: StartupTimeout) -> list[str]:
    return [f"{key}: {value:g}" for key, value in _values(formula).items()]


def _document(seen: History, formula: StartupTimeout, factor: float) -> dict[str, object]:
    return {
        "cluster": seen.cluster,
        "starts": [{"nodes": nodes, "waited_s": each} for nodes, waited in seen.starts.items() for each in waited],
        "unfinished": seen.unfinished,
        "without_timeline": list(seen.without),
        "factor": factor,
        "proposed": _values(formula),
    }


def _write(seen: History, formula: StartupTimeout, factor: float) -> str:
    """Write the values into their own part of the user's file and keep the rest unchanged. Return a line about it."""
    path = Path(folders.find(f"cluster/{seen.cluster}"))
    if path.absolute().is_relative_to(folders.folder().absolute()):
        raise RequestError(
            f"cluster={seen.cluster} is {path}, which ships with hpcinit: copy it to "
            f"{cluster_file.cluster_file_path(seen.cluster)} and try again"
        )
    text = cluster_file.read_cluster_file(path)
    if text is None:
        raise RequestError(
            f"no {path} in {', '.join(map(str, folders.user_folders())) or 'conf'}: create one with `hpcinit discover`"
        )
    entries = [cluster_file.Entry(key, value, f"{key}: {value}\n") for key, value in _values(formula).items()]
    starts, today = sum(map(len, seen.starts.values())), datetime.date.today().isoformat()
    nodes = f"{', '.join(map(str, seen.starts))} node{'s' * (list(seen.starts) != [1])}"
    heading = f"{counted(starts, 'start')} on {nodes} until {today}: {factor:g} x the longest"
    try:
        before = cluster_file.parse_document(text, cluster_file.TIMEOUTS)
        cluster_file.write_cluster_file(path, cluster_file.render_document(before, entries, heading))
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    own = [entry.key for entry in entries if entry.key in before.own]
    return f"wrote {path}" + (f"; kept your own {', '.join(own)}" if own else "")
