"""One object has the state of a process as a rank, and one hook drops the parent's part of it in a forked child."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hpcinit
from hpcinit.records import timeline
from hpcinit.runtime.lifecycle.signal_watch import Watch
from hpcinit.runtime.process_state import ProcessState, state

PACKAGE = Path(hpcinit.__file__).parent
PLACES = (PACKAGE / "runtime", PACKAGE / "run.py", PACKAGE / "fork.py", PACKAGE / "elastic.py")


def changing(path: Path) -> Iterator[str]:
    """Return 'file:line' of each `global` statement, and of each lowercase variable of the module that is assigned."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}"
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if (
                name.startswith("_")
                and not name.startswith("__")
                and name.islower()
                and not isinstance(node.value, ast.Attribute | ast.Constant)
            ):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}"


def in_child(work: Callable[[], str]) -> str:
    """Return what `work` returns in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, work().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        seen = stream.read()
    os.waitpid(pid, 0)
    return seen


def test_no_module_of_the_job_has_global_variables() -> None:
    """All changing state is in a field of the one ProcessState."""
    files = [file for place in PLACES for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    found = [line for file in files for line in changing(file)]
    assert found == []


def test_a_forked_child_drops_what_is_the_parents(tmp_path: Path) -> None:
    """The child has no runtime, no open timeline and no signal watch, but keeps the phase; the parent keeps everything."""
    before = signal.getsignal(signal.SIGUSR2)
    watch = Watch({signal.SIGUSR2}, lambda number: None)
    try:
        state.timeline.writer, state.timeline.opened = timeline.Writer(tmp_path / "node.jsonl"), True
        state.early_signals.add(signal.SIGUSR2)
        state.phase.name = "saving"
        seen = in_child(
            lambda: (
                f"{state.timeline.writer} {state.timeline.opened} {len(state.watches)} {state.early_signals} "
                f"{state.phase.name} {signal.getsignal(signal.SIGUSR2) == before}"
            )
        )
        assert seen == "None True 0 set() saving True"
        assert state.timeline.writer is not None
        assert state.watches == {watch}
    finally:
        watch.close()
        state.timeline.close()
        state.reset()
    assert state == ProcessState()


def test_reset_sets_every_field_to_its_first_value() -> None:
    """State that a test changed does not reach the next test."""
    state.agent_store_rounds, state.stuck_group = 3, "stuck"
    state.claimed.add((Path("/a"), "token"))
    state.loader_workers.numbers = frozenset({1})
    assert state != ProcessState()
    state.reset()
    assert state == ProcessState()
