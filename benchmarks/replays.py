"""How often does a replay prove the verdict on a hang, and how long does it take?

    python -m benchmarks.replays [--cases 200]

It simulates training runs that hang (tests/why/hang_dumps.py), in equal shares of each kind of cause, and replays their
dumps with gloo, one process per rank. `proven`: the replay blocked in exactly the calls that the dumps show as
unfinished, and finished when the call of the rank at fault was repaired. `wrong`: the same for a verdict that blames a
rank that only waits."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcinit.why import hang_verdict
from hpcinit.why.hang_verdict import NOT_CALLED
from hpcinit.why.replay import judge, run
from hpcinit.why.replay_program import NotReplayable, Program
from tests.why import hang_dumps

KINDS = (NOT_CALLED, hang_dumps.DEVICE_STUCK, hang_dumps.MISMATCH, hang_dumps.NO_DUMP, hang_dumps.PEER_LOST)
LIMIT_S = 3_600.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    options = parser.parse_args(arguments)
    print("| cause | hangs | ranks | calls | proven | wrong, tried | wrong, proven | s per replay |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for kind in KINDS:
        right, wrong = [], []
        for seed in range(options.cases // len(KINDS)):
            dumps = hang_dumps.dumps(hang_dumps.training(seed, kinds=[kind]))
            right.append(Program(hang_verdict.search(dumps)))
            wrong += _wrong(dumps, seed)
        start = time.monotonic()
        results = [_proven(right), _proven(wrong)]
        seconds = (time.monotonic() - start) / max(len(right) + len(wrong), 1)
        ranks = max(len(program.ranks) for program in right)
        calls = max(sum(map(len, program.document(repaired=False)["steps"])) for program in right)
        row = (
            kind,
            len(right),
            f"up to {ranks}",
            f"up to {calls}",
            results[0],
            len(wrong),
            results[1],
            f"{seconds:.1f}",
        )
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    return 0


def _wrong(dumps: Mapping[int, Mapping[str, Any]], seed: int) -> Iterator[Program]:
    """Yield the program for a verdict that blames a rank that only waits."""
    search = hang_verdict.search(dumps)
    verdict = search.verdict()
    if verdict.victims:
        victim = random.Random(seed).choice(verdict.victims)
        search.causes = {victim: search.causes[verdict.culprits[0].rank]}
        blamed = replace(verdict, culprits=(replace(verdict.culprits[0], rank=victim, kind=NOT_CALLED),))
        search.verdict = lambda: blamed  # type: ignore[method-assign]
        yield Program(search)


def _proven(programs: Sequence[Program]) -> int:
    """Return how many of the verdicts a replay proves."""
    documents = [one.document(repaired=repaired) for one in programs for repaired in (False, True)]
    results = run(documents, sys.executable, LIMIT_S) if documents else []
    proven = 0
    for place, program in enumerate(programs):
        try:
            found = judge(program, results[2 * place : 2 * place + 2])
        except NotReplayable as error:
            print(f"not replayed: {error}", file=sys.stderr)
            continue
        proven += bool(found.same_call and found.finished)
    return proven


if __name__ == "__main__":
    sys.exit(main())
