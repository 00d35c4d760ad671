"""Each wrapper has one object, and only that object depends on the wrapper's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcinit
from hpcinit.checks import all_checks
from hpcinit.config import compose
from hpcinit.records import wrappers
from hpcinit.records.memory import Demand, Part
from hpcinit.records.spec import Training
from hpcinit.records.wrappers import WRAPPERS, Wrapper

PACKAGE = Path(hpcinit.__file__).parent
# Here "deepspeed" is the name of a Python package, not of a wrapper.
OF_PACKAGES = {"launch/preload.py"}


def compared(path: Path) -> Iterator[str]:
    """Return 'file:line' of each comparison with a wrapper's name. "none" is a value of many other options too."""
    names = set(WRAPPERS) - {"none"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Compare):
            continue
        of_wrap = any(
            isinstance(side, ast.Attribute) and side.attr == "wrap" for side in (node.left, *node.comparators)
        )
        texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        if texts & names or (of_wrap and "none" in texts):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_no_module_compares_with_the_name_of_a_wrapper() -> None:
    """Code that depends on the wrapper is a method of its object, so that a new wrapper needs no other change."""
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in compared(path)]
    assert [line for line in found if line.partition(":")[0] not in OF_PACKAGES] == []


def test_every_wrapper_has_a_torch_part_and_is_in_the_help() -> None:
    """The table in records, the table in runtime/wrap and the help of parallel.wrap have the same names."""
    from hpcinit.config.schema import Parallel
    from hpcinit.train.wrap import STRATEGIES

    assert STRATEGIES.keys() == WRAPPERS.keys()
    text = Parallel.__dataclass_fields__["wrap"].metadata["help"]
    assert all(name in text for name in WRAPPERS)


class Copies(Wrapper):
    """A stand-in for a wrapper that a later version may have."""

    name = "copies"

    def _parts(self, demand: Demand) -> Iterator[Part]:
        yield Part("copies", 3 * demand.own, "3 B x P")


def test_a_wrapper_that_is_added_to_the_table_is_accepted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config's checks, the spec and the memory estimate take their wrappers from the table."""
    config = compose.compose(["parallel.wrap=copies"])
    assert any("parallel.wrap is 'copies'" in problem for problem in all_checks.problems(config, to_submit=False))
    monkeypatch.setitem(WRAPPERS, "copies", Copies())
    assert all_checks.problems(config, to_submit=False) == []
    assert not Training("copies").wrapper.needs_deepspeed
    assert [part.bytes for part in wrappers.get("copies").memory(Demand(7))] == [21]
