"""Find every error message of hpcinit in its source, for the page of all messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base import errors

PACKAGE = Path(errors.__file__).parent.parent
KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
CHECKS = ("checks.", "config.", "records.wrappers")  # modules that yield problems of a config
SHORTEST = 12  # letters; a shorter text is not a message


@dataclass(frozen=True)
class Message:
    """template: the text with <inserted values>. about: the docstring of the function that raises it.

    module: such as 'checks.values'.
    """

    template: str
    kind: str
    exit_status: int
    module: str
    about: str


def all_messages() -> list[Message]:
    """Return the messages in the order of modules and lines, each text once per module."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        for message in _of(tree, module):
            found.setdefault((module, message.template), message)
    return list(found.values())


def about_module(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    path = PACKAGE.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return re.split(r"(?<!\.)\.(?: |$)", _first_line(ast.parse(file.read_text())), maxsplit=1)[0]


def _of(tree: ast.Module, module: str) -> Iterator[Message]:
    about = _first_line(tree)
    returned = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for function, node in _statements(tree):
        kind, texts = _raised(node, module)
        for text in texts:
            purpose = (_first_line(function) if function else "") or about
            for template in _templates(text, returned):
                if sum(letter.isalpha() for letter in template) >= SHORTEST and " " in template:
                    yield Message(template, kind, KINDS[kind].exit_status, module, purpose)


def _statements(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | None, ast.stmt | ast.expr]]:
    """Yield each raise and yield with the function that contains it."""

    def below(node: ast.AST, function: ast.FunctionDef | None) -> Iterator[tuple[ast.FunctionDef | None, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inside = child if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Raise | ast.Yield):
                yield inside, child
            yield from below(child, inside)

    yield from below(tree, None)  # type: ignore[misc]


def _raised(node: ast.AST, module: str) -> tuple[str, list[ast.expr]]:
    """Return the name of the error and its messages. Problems of a config are yielded, and raised together later."""
    if isinstance(node, ast.Yield):
        return "ConfigError", [node.value] if module.startswith(CHECKS) and node.value else []
    call = node.exc if isinstance(node, ast.Raise) else None
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
    return (name, list(call.args)) if name in KINDS and isinstance(call, ast.Call) else ("", [])


def _templates(text: ast.expr, functions: dict[str, ast.FunctionDef]) -> list[str]:
    """Return the texts that an expression can have; for a call of a function of the module, what it returns."""
    if isinstance(text, ast.Call) and isinstance(text.func, ast.Name) and text.func.id in functions:
        ends = [node.value for node in ast.walk(functions[text.func.id]) if isinstance(node, ast.Return)]
        rest = {name: node for name, node in functions.items() if name != text.func.id}
        return [template for end in ends if end for template in _templates(end, rest)]
    if isinstance(text, ast.IfExp):
        return _templates(text.body, functions) + _templates(text.orelse, functions)
    found = _text(text)
    return [] if found is None else [" ".join(found.split())]


def _text(text: ast.expr) -> str | None:
    """Return the text of an expression, or None if it has none."""
    if isinstance(text, ast.Constant):
        return text.value if isinstance(text.value, str) else None
    if isinstance(text, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"<{_name(part.value)}>"  # type: ignore[attr-defined]
            for part in text.values
        )
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
        sides = [_text(side) for side in (text.left, text.right)]
        return None if sides == [None, None] else "".join(side or "<...>" for side in sides)
    return None


def _name(value: ast.expr) -> str:
    """Return a name for an inserted value: 'nodes' for config.nodes, '...' for an expression."""
    if isinstance(value, ast.Attribute):
        return value.attr
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and len(value.args) == 1:
        return _name(value.args[0])
    if isinstance(value, ast.Subscript):
        return _name(value.value)
    return "..."


def _first_line(node: ast.Module | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
