"""Print the man page of hpcinit, made from the table of commands: python -m docs.generate.man > packaging/hpcinit.1."""

from __future__ import annotations

from collections.abc import Iterator

from hpcinit.cli.commands import ABOUT, COMMANDS, EXAMPLES, OPTIONS

# What the commands share: docs/reference/exit-codes.md and docs/configuration.md.
STATUS = {
    "0": "success",
    "1": "a correct request failed",
    "2": "the request is wrong, and nothing was started",
    "other": "of a job: the exit status of the rank that failed first",
}
FILES = {
    "conf/": "config files of the current folder",
    "$HPCINIT_CONF": "a folder of further ones",
    "~/.config/hpcinit/": "those of the user; settings.yaml has the default cluster",
    "runs/NAME-NUMBER/": "the folder of a run: its config, batch script, logs and records",
}


def page() -> str:
    """Return the man page."""
    lines = ['.TH HPCINIT 1 "" hpcinit', ".SH NAME", f"hpcinit \\- {_text(ABOUT)}", ".SH SYNOPSIS"]
    lines += [".B hpcinit", ".I COMMAND", "[\\fIargument\\fR ...]", ".SH COMMANDS"]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += [f'.SS "{_text(group[0].upper() + group[1:])}"']
        for name, command in COMMANDS.items():
            if command.group == group:
                lines += [".TP", f".B {_text(name)}", _text(command.about), *_examples(command.examples)]
    for title, rows in (("OPTIONS", OPTIONS), ("EXAMPLES", EXAMPLES), ("EXIT STATUS", STATUS), ("FILES", FILES)):
        lines += [f".SH {title}", *_rows(rows)]
    lines += [".SH SEE ALSO", ".BR sbatch (1),", ".BR srun (1)"]
    return "\n".join(lines) + "\n"


def _rows(rows: dict[str, str]) -> Iterator[str]:
    for term, about in rows.items():
        yield from (".TP", f".B {_text(term)}", _text(about))


def _examples(text: str) -> list[str]:
    """Return the examples of a command as lines that man does not fill."""
    found = text.strip("\n").splitlines()
    return [".RS", ".PP", ".nf", *(_text(line.removeprefix("  ")) for line in found), ".fi", ".RE"] if found else []


def _text(text: str) -> str:
    """Return `text` so that roff prints it unchanged."""
    plain = text.translate(str.maketrans({"\\": "\\e", "-": "\\-", "'": "\\(aq", "~": "\\(ti", "^": "\\(ha"}))
    return f"\\&{plain}" if plain.startswith(".") else plain


if __name__ == "__main__":
    print(page(), end="")
