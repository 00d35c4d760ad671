"""python -m benchmarks.ledger_truth histories | runs | foreign | score FOLDER"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import ledger_truth
from benchmarks.ledger_truth import foreign, histories, rows, runs


def _cases(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/truth.json"))


def _check(case: Path) -> list[str]:
    """Return the violated requirements on a run of hpcinit."""
    truth = json.loads((case / "truth.json").read_text())
    report = json.loads((case / "report.json").read_text())
    if "rows" not in report:
        return [f"no report: {str(report)[:300]}"]
    found = [
        f"attempt {name}: sacct {elapsed:.0f} s, report {seconds:.2f} s"
        for name, elapsed, seconds in rows.attempt_errors(case)
        if abs(elapsed - seconds) > rows.CHARGED_S
    ]
    charged = truth["charged_s"]
    total = sum(row["seconds"] for row in report["rows"] if row["name"] != "queue")
    for what, value in (("sum of the rows", total), ("charged_s", report["charged_s"])):
        if abs(value - charged) > rows.CHARGED_SHARE * charged:
            found.append(f"{what} {value:.2f} s, sacct {charged:.2f} s")
    unknown = sum(row["seconds"] for row in report["rows"] if row["name"] == "unknown")
    if unknown > rows.UNKNOWN_SHARE * charged:
        found.append(f"unknown {unknown:.1f} s of {charged:.0f} s")
    return found


def _score(folder: Path, hpcinit_runs: bool) -> int:
    """Print tables of all, of the public cases and of those kept apart; details only of the public ones."""
    cases = _cases(folder)
    seed = json.loads((folder / "seed.json").read_text())["seed"]
    apart = rows.held_apart([case.name for case in cases], seed)
    for title, chosen in (
        ("all", cases), ("public", [case for case in cases if case.name not in apart]),
        ("kept apart", [case for case in cases if case.name in apart]),
    ):  # fmt: skip
        found = {case: rows.differences(case) for case in chosen}
        everything = [each for rows_of_case in found.values() for each in rows_of_case]
        bad = {case: _check(case) for case in chosen}
        missed = sum(any(not each.holds for each in found[case]) for case in chosen)
        limits = f"off by more than {rows.POINTS:g} points and outside of its range"
        print(f"\n== {title}: {len(chosen)} cases; {missed} with a row that is {limits}")
        if not hpcinit_runs:
            known = [any(not each.holds for each in found[case] if each.row != "unknown") for case in chosen]
            one = [any(not each.holds for each in rows.merged(found[case])) for case in chosen]
            print(f"   without the row unknown: {sum(known)}; with the start-up as one row, too: {sum(one)}")
        if hpcinit_runs:
            texts = [text for each in bad.values() for text in each]
            for start in ("attempt", "sum", "charged_s", "unknown", "no report"):
                print(f"   {start}: {sum(text.startswith(start) for text in texts)} violations")
        print(*rows.summary(everything), sep="\n")
        print(*rows.summary(each for case in chosen for each in rows.merged(found[case]))[1:2], sep="\n")
        if title != "public":
            continue
        for case in chosen:
            kind = json.loads((case / "case.json").read_text())
            label = " ".join(str(kind[key]) for key in ("format", "kind", "ask", "log", "ends") if key in kind)
            lines = [*(bad[case] if hpcinit_runs else ())]
            lines += [
                f"{each.row}: truth {each.truth:.1f}, reported {each.reported:.1f} [{each.low:.1f}, {each.high:.1f}] s"
                f" of {each.charged:.0f}, {each.points:+.1f} points"
                for each in found[case] if (abs(each.points) > 2 if hpcinit_runs else not each.holds)
            ]  # fmt: skip
            if lines:
                print(f"{case.name} ({label})", *(f"    {line}" for line in lines), sep="\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger_truth", description=ledger_truth.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", choices=["histories", "runs", "foreign", "score"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=20261127)
    parser.add_argument("--count", type=int, default=200, help="histories (default: 200)")
    parser.add_argument("--at-once", type=int, default=4, help="runs or jobs at a time (default: 4)")
    parser.add_argument("--only", action="append", default=[], help="only the run or job of this name")
    parser.add_argument("--again", action="store_true", help="score: compute the truth from the recordings again")
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    if options.what == "histories":
        return histories.main(folder, options.seed, options.count)
    if options.what == "runs":
        return runs.main(folder, options.seed, options.at_once, options.only)
    if options.what == "foreign":
        return foreign.main(folder, options.seed, options.at_once, options.only)
    cases = [path.parent for path in folder.glob("*/case.json")]
    hpcinit_runs = any(case.name.startswith("run-") for case in cases)
    if options.again:
        for case in cases:
            (runs if hpcinit_runs else foreign).score(case)
    return _score(folder, hpcinit_runs)


if __name__ == "__main__":
    sys.exit(main())
