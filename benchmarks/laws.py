"""Which law do the measurements of benchmarks.store follow, and what does it say for more ranks?

python -m benchmarks.laws FILE.json --plot docs/store.svg      (matplotlib: pip install -e '.[bench]')
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SHAPES: Mapping[str, Callable[[float], float]] = {
    "n": lambda n: n,
    "n log2 n": lambda n: n * math.log2(n),
    "n^2": lambda n: n * n,
}
# Nodes, and ranks on each.
ASKED = ((4096, 1), (16_384, 1), (4096, 8), (16_384, 8))


class Law(NamedTuple):
    """a + b * shape(n). off: the mean distance of the points from it, as a part of their values."""

    shape: str
    a: float
    b: float
    off: float

    def at(self, n: float) -> float:
        return self.a + self.b * SHAPES[self.shape](n)


def fit(points: Mapping[int, float], shape: str) -> Law:
    """Least squares of the relative distances: 64 ranks count as much as 16,384."""
    rows = [(1 / value, SHAPES[shape](n) / value) for n, value in points.items()]
    saa, sab, sbb = (sum(x * y for x, y in pairs) for pairs in (
        [(one, one) for one, _ in rows], list(rows), [(many, many) for _, many in rows]
    ))  # fmt: skip
    sa, sb = sum(one for one, _ in rows), sum(many for _, many in rows)
    determinant = saa * sbb - sab * sab
    a, b = (sa * sbb - sb * sab) / determinant, (sb * saa - sa * sab) / determinant
    off = sum(abs(a * one + b * many - 1) for one, many in rows) / len(rows)
    return Law(shape, a, b, off)


def best(points: Mapping[int, float]) -> Law:
    """Of the laws that do not begin below zero, the nearest."""
    laws = [fit(points, shape) for shape in SHAPES]
    return min((law for law in laws if law.a >= 0 and law.b > 0), key=lambda law: law.off, default=laws[0])


def medians(
    found: Sequence[Mapping[str, Any]], way: str, value: Callable[[Mapping[str, Any]], float]
) -> dict[int, float]:
    by_ranks: dict[int, list[float]] = {}
    for each in found:
        if each["way"] == way:
            by_ranks.setdefault(each["ranks"], []).append(value(each))
    return {ranks: median(values) for ranks, values in sorted(by_ranks.items())}


def seconds(each: Mapping[str, Any]) -> float:
    return float(each["marks"].get("up", each["marks"].get("told")))


def cpu(each: Mapping[str, Any]) -> float:
    return float(each["cpu_s"])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    heads = [f"{nodes:,} nodes x {ranks}" for nodes, ranks in ASKED]
    lines = [f"| way | | law, n ranks | off by | {' | '.join(heads)} |", "|---|---|---|--:|" + "--:|" * len(ASKED)]
    for way in dict.fromkeys(each["way"] for each in found):
        for name, value in (("seconds", seconds), ("rank 0's CPU s", cpu)):
            points = medians(found, way, value)
            if len(points) < 3:
                continue
            law = best(points)
            cells = " | ".join(f"{law.at(nodes * ranks):.1f}" for nodes, ranks in ASKED)
            per = {"n": 1e3, "n log2 n": 1e3, "n^2": 1e6}[law.shape]
            unit = "us" if law.shape == "n^2" else "ms"
            shown = f"{law.a:.3f} s + {law.b * per:.3g} {unit} x {law.shape}"
            lines.append(f"| {way} | {name} | {shown} | {law.off:.0%} | {cells} |")
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
            points, colour = medians(found, way, value), f"C{number}"
            law, least = best(points), min(points)
            line = [least * 2 ** (step / 4) for step in range(4 * round(math.log2(131_072 / least)) + 1)]
            panel.plot(line, [law.at(n) for n in line], "--", color=colour, linewidth=1)
            panel.plot(
                list(points),
                list(points.values()),
                "o",
                color=colour,
                label=f"{way}: {law.a:.2g} + {law.b:.2g} {law.shape}",
            )
        panel.set(xscale="log", yscale="log", xlabel="ranks (n)", title=name)
        panel.set_xticks(
            [64, 256, 1024, 4096, 16_384, 131_072], ["64", "256", "1,024", "4,096", "16,384", "131,072"], fontsize=8
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle("Dots: medians. Dashed: the fitted law, beyond the last dot what it says", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.laws", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="of python -m benchmarks.store --json FILE")
    parser.add_argument("--plot", type=Path, help="an .svg or .png to write")
    options = parser.parse_args(arguments)
    found = json.loads(options.file.read_text())
    print(table(found))
    if options.plot:
        plot(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
