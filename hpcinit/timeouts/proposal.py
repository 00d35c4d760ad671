"""`hpcinit timeouts fit RUN...`: propose this cluster's law from how long its start-ups took, and write it."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hpcinit.config import folders
from hpcinit.discover import describe, document, place
from hpcinit.facts import telling
from hpcinit.facts.errors import RequestError
from hpcinit.facts.fitting import CONFIDENCE, MARGIN, Fit, fit, longest
from hpcinit.facts.timeouts import TimeoutLaw
from hpcinit.observe import find
from hpcinit.timeouts import history
from hpcinit.timeouts.history import History

BEYOND = 4  # times the most nodes that were seen: from there on a law is a guess


def main(argv: Sequence[str]) -> int:
    options = telling.parsed(parser(), list(argv))
    seen = history.read(find.meant(options.runs, options.runs_dir))
    if not seen.starts and seen.without and not seen.unfinished:
        raise RequestError(
            f"no timeline in {', '.join(seen.without[:5])}: runs keep one (timeline/ in the run folder) if their ranks "
            "call hpcinit.init(), since this version"
        )
    found = fit(seen.starts, seen.max_s or TimeoutLaw().max_s, options.margin)
    if options.json:
        print(json.dumps(_document(seen, found)))
    else:
        print("\n".join(_yaml(found.law) if options.quiet else _words(seen, found)))
    if options.write:
        said = _write(seen, found)
        if options.json:
            telling.note(said)
        elif not options.quiet:
            print(said)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit timeouts fit", description=__doc__)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folder, name or job id; none, or 'all': every run there is"
    )
    find.add_runs_dir(parser)
    parser.add_argument("--margin", type=float, default=MARGIN, help=f"times the line above all (default: {MARGIN:g})")
    parser.add_argument("--write", action="store_true", help="put it into the cluster's YAML")
    return telling.options(parser)


def _words(seen: History, found: Fit) -> list[str]:
    lines = [f"{'nodes':>7} {'starts':>7} {'median s':>9} {'longest s':>10} {'proposed s':>11}"]
    for nodes, most in longest(seen.starts).items():
        waited = [start.waited_s for start in seen.starts if start.nodes == nodes]
        proposed = found.law.start_up(nodes).total_seconds()
        lines.append(f"{nodes:7} {len(waited):7} {median(waited):9.1f} {most:10.1f} {proposed:11g}")
    lines += [
        "",
        f"above all of them: {found.base_s:.1f} + {found.per_node_s:.3g} x nodes seconds. {confidence(found)}",
    ]
    law = found.law
    lines += ["", f"proposed for cluster={seen.cluster}, {found.margin:g} times that line:", *_yaml(law)]
    most_nodes = max(found.nodes)
    beyond = law.start_up(BEYOND * most_nodes).total_seconds()
    lines.append(f"seen on up to {most_nodes} nodes: beyond {BEYOND * most_nodes} nodes ({beyond:g} s) it is a guess")
    if seen.unfinished:
        lines.append(
            f"left out: {seen.unfinished} starts that did not come to their end; `hpcinit why RUN` says what was wrong"
        )
    if seen.without:
        lines.append(f"without a timeline: {', '.join(seen.without[:5])}{', ...' if len(seen.without) > 5 else ''}")
    return lines


def confidence(found: Fit) -> str:
    return (
        f"With {CONFIDENCE:.0%} confidence at most {found.exceed:.1%} of start-ups like these {found.starts} take "
        "longer than that line (docs/timeouts.md says how that is known)."
    )


def _yaml(law: TimeoutLaw) -> list[str]:
    return [f"  timeout_base_s: {law.base_s:g}", f"  timeout_per_node_s: {law.per_node_s:g}"]


def _document(seen: History, found: Fit) -> dict[str, object]:
    return {
        "cluster": seen.cluster,
        "starts": [{"nodes": start.nodes, "waited_s": start.waited_s} for start in seen.starts],
        "unfinished": seen.unfinished,
        "without_timeline": list(seen.without),
        "line": {"base_s": found.base_s, "per_node_s": found.per_node_s},
        "confidence": CONFIDENCE,
        "at_most_exceed": found.exceed,
        "margin": found.margin,
        "proposed": {"timeout_base_s": found.law.base_s, "timeout_per_node_s": found.law.per_node_s},
    }


def _write(seen: History, found: Fit) -> str:
    """Into a part of its own of the user's file; the rest of it stays, byte for byte. What was done, in words."""
    path = Path(folders.find(f"cluster/{seen.cluster}"))
    if path.absolute().is_relative_to(folders.folder().absolute()):
        raise RequestError(
            f"cluster={seen.cluster} is hpcinit's own {path}: copy it to {place.named(seen.cluster)} and write again"
        )
    text = place.read(path)
    if text is None:
        raise RequestError(
            f"no {path} in {', '.join(map(str, folders.user_folders())) or 'conf'}: `hpcinit discover` makes one"
        )
    try:
        before = document.parse(text, document.TIMEOUTS)
        place.write(path, document.render(before, _entries(found), _heading(found)))
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    own = [entry.key for entry in _entries(found) if entry.key in before.own]
    return f"{path}: written" + (f"; yours stays: {', '.join(own)}" if own else "")


def _entries(found: Fit) -> list[describe.Entry]:
    values = {"timeout_base_s": found.law.base_s, "timeout_per_node_s": found.law.per_node_s}
    return [describe.Entry(key, value, f"{key}: {value}\n") for key, value in values.items()]


def _heading(found: Fit) -> str:
    nodes, today = ", ".join(map(str, found.nodes)), datetime.date.today().isoformat()
    return (
        f"{found.starts} starts on {nodes} nodes until {today}: at {CONFIDENCE:.0%} confidence at most "
        f"{found.exceed:.1%} exceed 1/{found.margin:g} of it"
    )
