"""Extrapolate the measurements of benchmarks.store to more ranks, in proportion to the largest size measured.

python -m benchmarks.formulas FILE.json --plot docs/development/store.svg      (matplotlib: pip install -e '.[bench]')
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

# Nodes, and ranks per node.
SHAPES = ((4096, 1), (16_384, 1), (4096, 8), (16_384, 8))
TICKS = (64, 256, 1024, 4096, 16_384, 131_072)


def expected(points: Mapping[int, float], ranks: int) -> float:
    """Return the measured value of `ranks`, or else that of the largest size in proportion."""
    largest = max(points)
    return points.get(ranks, points[largest] * ranks / largest)


def medians(
    found: Sequence[Mapping[str, Any]], way: str, value: Callable[[Mapping[str, Any]], float]
) -> dict[int, float]:
    by_ranks: dict[int, list[float]] = {}
    for each in found:
        if each["way"] == way:
            by_ranks.setdefault(each["ranks"], []).append(value(each))
    return {ranks: median(values) for ranks, values in sorted(by_ranks.items())}


def seconds(each: Mapping[str, Any]) -> float:
    return float(each["marks"].get("up", each["marks"].get("reported")))


def cpu(each: Mapping[str, Any]) -> float:
    return float(each["cpu_s"])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    heads = [f"{nodes:,} nodes x {ranks}" for nodes, ranks in SHAPES]
    lines = [f"| way | | per rank | {' | '.join(heads)} |", "|---|---|---|" + "--:|" * len(SHAPES)]
    for way in dict.fromkeys(each["way"] for each in found):
        for name, value in (("seconds", seconds), ("rank 0's CPU s", cpu)):
            points = medians(found, way, value)
            largest = max(points)
            cells = " | ".join(f"{expected(points, nodes * ranks):.1f}" for nodes, ranks in SHAPES)
            lines.append(
                f"| {way} | {name} | {points[largest] / largest * 1e3:.3g} ms at {largest:,} ranks | {cells} |"
            )
    return "\n".join(lines)


def plot(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "hpcinit"
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharex=True)
    for panel, (name, value) in zip(
        panels, (("seconds until the last rank is up", seconds), ("CPU seconds of rank 0", cpu)), strict=True
    ):
        for number, way in enumerate(dict.fromkeys(each["way"] for each in found)):
            points, color = medians(found, way, value), f"C{number}"
            beyond = [max(points), TICKS[-1]]
            panel.plot(beyond, [expected(points, n) for n in beyond], "--", color=color, linewidth=1)
            panel.plot(list(points), list(points.values()), "o-", color=color, label=way)
        panel.set(xscale="log", yscale="log", xlabel="ranks", title=name)
        panel.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS], fontsize=8)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle("Dots: medians. Dashed: in proportion to the largest size measured", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formulas", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="written by python -m benchmarks.store --json FILE")
    parser.add_argument("--plot", type=Path, help="write the plot to this .svg or .png file")
    options = parser.parse_args(arguments)
    found = json.loads(options.file.read_text())
    print(table(found))
    if options.plot:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
