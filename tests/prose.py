"""Lint of English: find phrases that docs/development/style.md rejects, long sentences and long lines of prose.

    python -m tests.prose [FILE ...]   print each finding as FILE:LINE; exit with status 1 if there are any
    python -m tests.prose --count      print the number of findings per file

It reads Markdown pages, the comments of YAML, TOML and shell files, and the comments, docstrings and strings of Python.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXCEPTIONS = ROOT / "tests/prose_exceptions.txt"
MOST_WORDS, MOST_CHARACTERS = 30, 160
# A phrase (case is ignored) and what to write instead.
PHRASES = {
    r"tells?|told|telling": "report, show, print, log",
    r"says?|said|saying": "report, print, is",
    r"com(?:es?|ing)|came": "start, arrive, connect, ship with",
    r"(?:is|are|was|were|be|been|being) asked(?: for)?|asked": "query, request",
    r"(?<!in other )words?(?! boundar)(?! of memory)": "option, argument, message",
    r"(?:left|leav(?:es?|ing)) (?:\w+ ){0,2}out": "exclude, skip, omit",
    r"stands?|stood|standing|lies|lay": "is, is in",
    r"of (?:one's|my|your|our|its|their|his|her) own|of (?:ours|yours|theirs|mine|hpcinit's own)": "your own X, our X",
    r"begins?|began|begun|beginning|begins anew": "start, restart",
    r"holds?(?! (?:the |a |its |that |this )?(?:\w+ )?(?:lock|GIL))": "contain; memory per rank",
    r"held(?! (?:by|lock))": "contained, kept",
    r"mend(?:s|ed|ing)?|heed(?:s|ed|ing)?|ails?|ailing|ill|all (?:is )?well|is well|are well": "fix, honor, faulty, healthy",
    r"laws?": "formula, policy",
    r"doors?|knock(?:s|ed|ing)?|guests?|meetings?|visits?|visitors?|roll(?! back| out)|mourn\w*": "rendezvous, connect, peer, roster",
    r"once more|anew": "again",
    r"in the place of|in (?:its|their|whose) place": "instead of",
    r"by hand": "manually",
    r"for ever": "forever",
    r"nobody|somebody|no one|whoever": "no process, another process, the user",
    r"by itself|by themselves|on its own|by its own": "automatically, alone",
    r"(?:go|goes|going|gone|went) on": "continue",
    r"(?:is|are|was) (?:not )?known": "unknown; X knows",
    r"shall|whereupon|thereof|lest|aught|naught": "plain English",
    r"a training(?! (?:run|job|script|step|loop|process|program|rank|code|set|state|data))|trainings": "training run",
    r"behaviou?rs|behaviour|colours?|coloured|honours?|honoured|neighbours?|neighbouring|favours?": "American spelling",
    r"(?:initial|synchron|recogn|normal|serial|optim|organ)is(?:e|ed|es|ing|ation)": "American spelling",
    r"so many|came to nothing|to blame|good for nothing|full stop": "plain English",
}
FOUND = re.compile(
    "|".join(rf"(?<![\w`'/.-])(?P<p{at}>{phrase})(?![\w`/=-]|\.\w|')" for at, phrase in enumerate(PHRASES)), re.I
)
INSTEAD = list(PHRASES.values())
CODE = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]*`|\]\([^)]*\)|<[^>\n]+>|https?://\S+", re.S)
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s)|\|")
CHECKED = (
    "*.md",
    "hpcinit/*.py",
    "conf/*.yaml",
    "conf/**/*.yaml",
    "hpcinit/submit/lib/*.sh",
    "sbatch/*",
    "examples/*",
    "tests/*.py",
    "benchmarks/*.py",
    "docs/*.py",
    "Makefile",
    "pyproject.toml",
    "mkdocs.yml",
)


def exceptions() -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return pairs of path and line patterns, from lines 'PATH-REGEX<tab>LINE-REGEX'; '#' starts a comment."""
    lines = [line for line in EXCEPTIONS.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [(re.compile(path), re.compile(text)) for path, _, text in (line.partition("\t") for line in lines)]


def of_python(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number, text, is prose) of each comment, docstring and string that has a space."""
    comment: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            start = start if comment else token.start[0]
            comment.append(token.string.lstrip("#! "))
        elif comment and token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield start, "\n".join(comment), True
            comment = []
    if comment:
        yield start, "\n".join(comment), True
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    pieces: set[int] = set()  # of f-strings, whose text is checked as one
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts)), False
            pieces |= {id(part) for part in node.values}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in pieces
        ):
            yield node.lineno, node.value, id(node) in docs


def of_comments(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line number, text, True) of each block of lines that start with '#', and of comments after code."""
    block: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        code, mark, comment = line.partition("#")
        if mark and not code.strip() and not comment.startswith(("!", "SBATCH")):
            start = start if block else number
            block.append(comment.strip())
            continue
        if block:
            yield start, "\n".join(block), True
            block = []
        if mark and code.endswith(" "):
            yield number, comment.strip(), True


def parts(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the pieces of English text of a file, with the number of their first line."""
    text = path.read_text()
    if path.suffix == ".md":
        yield 1, text, True
    elif path.suffix == ".py":
        yield from of_python(text)
    else:
        yield from of_comments(text)


def findings(path: Path, skipped: list[tuple[re.Pattern[str], re.Pattern[str]]]) -> Iterator[tuple[int, str]]:
    """Yield (line number, what is wrong) for each finding in the file."""
    name = str(path.relative_to(ROOT))
    mine = [line for place, line in skipped if place.search(name)]
    for first, text, prose in parts(path):
        plain = CODE.sub(lambda found: re.sub(r"[^\n]", "`", found.group()), text)
        whole = text.splitlines()
        for found in FOUND.finditer(plain):
            line = plain.count("\n", 0, found.start())
            if not any(pattern.search(whole[line]) for pattern in mine):
                at = next(int(key[1:]) for key, value in found.groupdict().items() if value)
                yield first + line, f"'{found.group()}' -> {INSTEAD[at]}"
        if not prose:
            continue
        at = 0
        for sentence in SENTENCE_END.split(plain):
            at = plain.find(sentence, at)
            words = re.findall(r"[A-Za-z][A-Za-z'-]*", sentence)
            line = plain.count("\n", 0, at + len(sentence) - len(sentence.lstrip()))
            if len(words) > MOST_WORDS and not any(pattern.search(whole[line]) for pattern in mine):
                yield first + line, f"a sentence of {len(words)} words: '{' '.join(words[:6])} ...'"
        if path.suffix == ".md":
            for line, content in enumerate(plain.splitlines()):
                if content.startswith(("<<<<<<< ", ">>>>>>> ")):
                    yield first + line, "a conflict that git could not merge"
                table_or_code = content.lstrip().startswith(("|", "`", "http"))
                excepted = any(pattern.search(content) for pattern in mine)
                if len(content) > MOST_CHARACTERS and not table_or_code and not excepted:
                    yield first + line, f"a line of {len(content)} characters"


def checked() -> list[Path]:
    """Return the files that git knows and that the lint reads."""
    listed = subprocess.run(["git", "ls-files", *CHECKED], cwd=ROOT, capture_output=True, text=True, check=True)
    ends = {".md", ".py", ".yaml", ".toml", ".yml", ".sh", ".sbatch", ""}
    files = [ROOT / name for name in listed.stdout.splitlines()]
    return [path for path in files if path.suffix in ends and path.is_file()]


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there are any."""
    given = [Path(name).resolve() for name in arguments if not name.startswith("-")]
    files = (
        [
            file
            for path in given
            for file in (
                checked()
                if path == ROOT
                else [path]
                if path.is_file()
                else [one for one in checked() if path in one.parents]
            )
        ]
        if given
        else checked()
    )
    skipped = exceptions()
    counts: Counter[str] = Counter()
    for path in files:
        for line, message in findings(path, skipped):
            name = str(path.relative_to(ROOT))
            counts[name] += 1
            if "--count" not in arguments:
                print(f"{name}:{line}: {message}")
    if "--count" in arguments:
        for name, count in counts.most_common():
            print(f"{count:6} {name}")
    if counts:
        print(f"{sum(counts.values())} findings in {len(counts)} of {len(files)} files", file=sys.stderr)
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
