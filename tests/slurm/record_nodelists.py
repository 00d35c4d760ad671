"""Record how scontrol expands nodelists, for test_nodelist.py.

    python tests/slurm/record_nodelists.py [--scontrol PATH] [--conf slurm.conf]

Writes tests/data/nodelists-<version>.json. Needs Slurm's client, but no controller. The cases are made from a fixed seed,
so the same scontrol gives the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import tempfile
from pathlib import Path

SEED = 20
EXPANSIONS = 2000
COMPRESSIONS = 500
MOST_HOSTS = 40  # in one case, so that the file stays small
SUFFIX_SINCE = (23, 11)  # n[1-2]-ib: "Invalid hostlist" before

# scontrol needs a slurm.conf with these names, but no controller for `show hostnames`.
MINIMAL_CONF = "ClusterName=none\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=localhost\n"

LITERALS = ["n", "n", "gpu", "a-b", "x_", "n1", "10.0.", "node-0", "", "0", "r0.", "b9-", "N-a_b.c-"]

# Malformed texts are listed here, because no generator of valid text makes them. The results are scontrol's.
MALFORMED = [
    *(
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n1]",
        "[",
        "]",
        "n[1-2]]",
        "n[[1]]",
        "n[1-2,m[3]",
        "n[1-2]b[3",
        "n[1-2",
        "n1-2]",
    ),
    *("n[1-]", "n[-1]", "n[1,]", "n[,1]", "n[1,,2]", "n[1-2-3]", "n[1--3]", "n[1-x]", "n[a-c]", "n[x]"),
    *("n[3-1]", "n[10-9]", "n[02-01]", "n[ 1-2]", "n[1 -2]", "n[1- 2]", "n[+1-2]", "n[0x1-2]", "n[1-3:2]"),
    *("n[1-3/2]", "n[1.5]", "n[*]", "n[!1]", "n1,,n2", ",n1", "n1,", ",", "n[1-2],", "n[1-2],,m", "", " "),
    *("n1 n2", "n1, n2", "n1\tn2", "n1\nn2", "n1\n", " n1", "n1 ", "n1;n2", "n1:2", "n1\x07", "n\u00e9"),
    *(
        "(null)",
        "None assigned",
        "n$(id)",
        "n`id`",
        "n'",
        'n"',
        "n&",
        "n>x",
        "n(1-2)",
        "n{1-2}",
        "n*",
        "n\\1",
    ),
    *("-n1", "n1,-n2", "n[1-99999999]", "n[0-18446744073709551615]", "a[0-99999]b[0-99999]"),
]


def number(rnd: random.Random) -> str:
    value = rnd.choice([rnd.randrange(12), rnd.randrange(120), rnd.randrange(1200), 10 ** rnd.randrange(1, 5) - 1])
    return f"{value:0{rnd.choice([0, 0, 0, 2, 3, 4, 5])}d}"


def span(rnd: random.Random) -> str:
    low = number(rnd)
    high = int(low) + rnd.choice([0, 1, 2, 9, 30])
    return low if rnd.random() < 0.4 else f"{low}-{high:0{rnd.choice([0, 0, len(low), 5])}d}"


def bracket(rnd: random.Random) -> str:
    return "[" + ",".join(span(rnd) for _ in range(rnd.choice([1, 1, 2, 3]))) + "]"


def name(rnd: random.Random, *, suffix: bool) -> str:
    brackets = rnd.choice([0, 1, 1, 1, 2, 2, 3])
    text = rnd.choice(LITERALS) + (number(rnd) if not brackets else "")
    for index in range(brackets):
        tail = suffix or index < brackets - 1
        text += bracket(rnd) + (rnd.choice([*LITERALS, "-", "-ib"]) if tail else "")
    return text


def hosts(rnd: random.Random) -> list[str]:
    """Return hosts with adjacent numbers, so that some can be joined: n08 n09 n10 n10 n3 m."""
    found: list[str] = []
    for _ in range(rnd.choice([1, 2, 3, 5])):
        literal, start = rnd.choice(LITERALS), number(rnd)
        found += [f"{literal}{int(start) + i:0{len(start)}d}" for i in range(rnd.choice([1, 1, 2, 5]))]
        if literal and rnd.random() < 0.2:
            found.append(literal.strip("-."))
    return found


class Scontrol:
    def __init__(self, path: str, conf: str) -> None:
        self.path, self.env = path, {**os.environ, "SLURM_CONF": conf}
        version = subprocess.run([path, "--version"], env=self.env, capture_output=True, text=True, check=True)
        found = re.search(r"(\d+)\.(\d+)\.\d+", version.stdout)
        if not found:
            raise SystemExit(f"{path} --version printed {version.stdout!r}, expected a version")
        self.version = found[0]
        self.suffixes = (int(found[1]), int(found[2])) >= SUFFIX_SINCE

    def show(self, what: str, text: str) -> tuple[int, list[str], str]:
        """(exit status, lines, the first line of stderr)"""
        done = subprocess.run(
            [self.path, "show", what, text], env=self.env, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.splitlines(), done.stderr.partition("\n")[0]

    def valid(self, what: str, text: str) -> list[str]:
        status, lines, complaint = self.show(what, text)
        if status or complaint or not lines:
            raise SystemExit(f"scontrol refused a case meant to be valid: {text}: {status} {complaint}")
        return lines


def record(scontrol: Scontrol) -> dict[str, list[list[object]]]:
    rnd = random.Random(SEED)
    expansions: list[list[object]] = []
    while len(expansions) < EXPANSIONS:
        text = ",".join(name(rnd, suffix=scontrol.suffixes) for _ in range(rnd.choice([1, 1, 2, 3]))).lstrip("-")
        lines = scontrol.valid("hostnames", text) if text and ",," not in text else []
        if 0 < len(lines) <= MOST_HOSTS:
            expansions.append([text, " ".join(lines)])
    compressions: list[list[object]] = []
    for _ in range(COMPRESSIONS):
        case = hosts(rnd)
        compressions.append([" ".join(case), "".join(scontrol.valid("hostlist", ",".join(case)))])
    # The status is negative where a signal ended scontrol.
    malformed: list[list[object]] = [[text, *scontrol.show("hostnames", text)[:2]] for text in MALFORMED]
    return {"expansions": expansions, "compressions": compressions, "malformed": malformed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scontrol", default="scontrol")
    parser.add_argument("--conf", help="a slurm.conf; without it, a minimal one is made")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "slurm.conf")
        conf.write_text(MINIMAL_CONF)
        scontrol = Scontrol(given.scontrol, given.conf or str(conf))
        sections = record(scontrol)
    path = Path(__file__).parents[1] / "data" / f"nodelists-{scontrol.version}.json"
    path.parent.mkdir(exist_ok=True)
    body = [
        f" {json.dumps(key)}: [\n  " + ",\n  ".join(map(json.dumps, cases)) + "\n ]" for key, cases in sections.items()
    ]  # one case per line, for readable diffs
    head = f' "scontrol": {json.dumps(scontrol.version)},\n "seed": {SEED},\n'
    path.write_text("{\n" + head + ",\n".join(body) + "\n}\n")
    print(f"{path}: {', '.join(f'{len(cases)} {key}' for key, cases in sections.items())}")


if __name__ == "__main__":
    main()
