"""An import hook that replaces the sentences in hpcinit's functions by random text, to show that no code reads them."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import random
import re
import string
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import hpcinit

PACKAGE = Path(hpcinit.__file__).parent
# Two lower-case terms in a row: a sentence, not an option, path, pattern or Slurm's 'TIME LIMIT'.
SENTENCE = re.compile(r"\b[a-z]{2,} [a-z]{2,}\b")
WORD = re.compile(r"[A-Za-z]{2,}")
# Sentences of Slurm, which hpcinit prints in the same form when it starts ranks instead of srun.
OF_SLURM = {"records/job_log.py"}


def install(seed: int) -> None:
    """Rewrite every module of hpcinit that is imported from now on. Equal seeds give equal text."""
    # Compiled files of the plain sources are not read, and those of rewritten sources are not written.
    sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True
    for name in [name for name in sys.modules if name.partition(".")[0] == "hpcinit"]:
        del sys.modules[name]
    assert all((PACKAGE / name).exists() for name in OF_SLURM)
    compiled = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> CodeType:
        place = Path(str(path))
        if PACKAGE not in place.parents or place.relative_to(PACKAGE).as_posix() in OF_SLURM:
            return compiled(self, data, path, **options)
        tree = Rewriter(random.Random(f"{seed} {place.name}")).visit(ast.parse(data))
        code: CodeType = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        return code

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


class Rewriter(ast.NodeTransformer):
    """Replaces each sentence in a function. Keys of dictionaries, docstrings and constants of modules do not change: they
    are names, documentation, and patterns of other programs' output."""

    def __init__(self, words: random.Random) -> None:
        self._words = words
        self._depth = 0
        self.rewritten = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._depth += 1
        docstring = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
        node.body = [*docstring, *(self.visit(one) for one in node.body[len(docstring) :])]
        self._depth -= 1
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.values = [self.visit(value) for value in node.values]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self._depth and isinstance(node.value, str) and SENTENCE.search(node.value):
            return ast.copy_location(ast.Constant(self._other(node.value)), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        text = "x".join(part.value for part in node.values if isinstance(part, ast.Constant))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
            elif self._depth and isinstance(part, ast.Constant) and SENTENCE.search(text):
                part.value = self._other(part.value)
        return node

    def _other(self, text: str) -> str:
        self.rewritten += 1
        return WORD.sub(lambda found: "".join(self._words.choices(string.ascii_lowercase, k=len(found[0]) + 1)), text)
