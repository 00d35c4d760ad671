"""Run `hpcinit why`, or another command, over the corpus and print a table.

    python -m tests.corpus --command 'tool {path}'

The command above judges the text of another tool. `--help` lists the options.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.corpus.judge import Answer, Case, Result, cases, judge, read_json, share

MOST_S, MOST_BYTES = 60, 8 * 2**30  # limits of one question
COLUMNS = ("cases", "right", "half", "unknown", "wrong", "wrong with certainty")


def _in_child(place: Path, arguments: list[str], output: Path) -> None:
    """Run hpcinit in this forked process with its output in a file, and end the process."""
    from hpcinit.cli.main import entry

    status = 1
    text = io.StringIO()
    os.chdir(place)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also inside a long call
    signal.alarm(MOST_S)
    try:
        with redirect_stdout(text), redirect_stderr(text):
            sys.argv = ["hpcinit", *arguments]
            status = entry()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        text.write(f"{type(error).__name__}: {error}")
    output.write_text(text.getvalue(), errors="surrogateescape")
    os._exit(status)


def _fork(place: Path, arguments: list[str]) -> tuple[str, str]:
    """Return the output of `hpcinit ARGUMENTS` in a forked process, and why it failed, if it did."""
    output = place / "output.txt"
    output.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            _in_child(place, arguments, output)
        finally:
            os._exit(70)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = output.read_text(errors="replace") if output.exists() else ""
    if status == -signal.SIGALRM:
        return text, f"took more than {MOST_S} s"
    return text, f"exit status {status}: {text[-120:]}" if status else ""


def ask(case: Case, place: Path, command: str = "") -> Answer:
    """Return the answer of hpcinit, or of `command`, to a case. `place` is an empty folder."""
    work = place / "work"
    work.mkdir()
    path = case.build(place / case.name)
    if command:
        words = [word.replace("{path}", str(path)) for word in shlex.split(command)]
        try:
            done = subprocess.run(
                words, cwd=work, capture_output=True, text=True, errors="replace", timeout=MOST_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Answer("", None, f"took more than {MOST_S} s")
        answer = Answer(done.stdout, read_json(done.stdout))
    else:
        text, failed = _fork(work, ["why", str(path)])
        if text.startswith("hpcinit: error:"):  # a refusal with a message: it names no cause and no rank
            answer = Answer(text, {"kind": "unknown", "verdict": text.splitlines()[0]})
            return Answer("", None, "ran code of a pickle") if (work / "ran").exists() else answer
        if failed:
            return Answer(text, None, failed)
        document, failed = _fork(work, ["why", str(path), "--json"])
        fields = read_json(document)
        answer = Answer(text, fields, failed or ("" if fields else "--json printed no JSON object"))
    if (work / "ran").exists():
        return Answer("", None, "ran code of a pickle")
    return answer


def table(title: str, rows: dict[str, list[Result]]) -> list[str]:
    """Return a Markdown table with a row for each key."""
    lines = [f"| {title} | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * len(COLUMNS)]
    for name, results in sorted(rows.items(), key=lambda row: (-len(row[1]), row[0])):
        lines.append(f"| {name} | {len(results)} | {' | '.join(map(str, share(results)))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus")
    parser.add_argument("--command", default="", help="another command; {path} is the case's file or folder")
    parser.add_argument("--list", default="", help="print the cases with this result, and why; never those apart")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    options = parser.parse_args()
    sets: dict[str, list[Result]] = defaultdict(list)
    shapes: dict[str, list[Result]] = defaultdict(list)
    kinds: dict[str, list[Result]] = defaultdict(list)
    listed, slow = [], []
    started = time.monotonic()
    import hpcinit.cli.main  # noqa: F401  # imported once, before the forks

    for case in cases():
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            answer = ask(case, Path(folder), options.command)
            taken = time.monotonic() - begun
        result = judge(case.truth, answer)
        sets["apart" if case.apart else "public"].append(result)
        if not case.apart:
            shapes[case.truth["shape"].split(",")[0]].append(result)
            kinds[case.truth["kind"]].append(result)
            if result.value == options.list:
                first = (answer.text.strip().splitlines() or [""])[0]
                listed.append(f"{case.name}: {result.why}\n    {first[:150]!r}")
        if taken > 5 and not case.apart:
            slow.append(f"{case.name} {taken:.0f} s")
    for title, rows in (("set", sets), ("source", shapes), ("kind of failure", kinds)):
        print("\n".join(table(title, rows)), end="\n\n")
    print(
        f"{sum(map(len, sets.values()))} cases in {time.monotonic() - started:.0f} s"
        + (f"; slow: {', '.join(slow)}" if slow else "")
    )
    print("\n".join(listed))


if __name__ == "__main__":
    main()
