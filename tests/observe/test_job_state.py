"""The precedence of the sources of a job's state, with one row per rule."""

from __future__ import annotations

import pytest

from hpcinit.engine.slurm_engine import NO_REPLY, SLURM, SOURCES, Known, State, state_of

NONE = State("UNKNOWN", "7", SLURM, "purged")
DONE = State("COMPLETED", "7", SLURM, "", 0, "exit.json", restart=1)
EARLY = State("FAILED", "7", SLURM, "", 143, "exit.json")
AWAY = "squeue: connect failure"


def slurm(name: str, source: str = "squeue") -> State:
    return State(name, "7", SLURM, "", None, source)


@pytest.mark.parametrize(
    ("known", "name", "status", "source", "reason"),
    [
        (Known(slurm("FAILED", "sacct"), NONE), "FAILED", None, "sacct", ""),
        (Known(slurm("FAILED"), DONE), "FAILED", 0, "squeue", ""),
        (Known(slurm("PREEMPTED"), DONE), "COMPLETED", 0, "squeue", ""),
        (Known(slurm("COMPLETING"), DONE), "COMPLETING", None, "squeue", ""),
        (Known(slurm("FROZEN_TOMORROW"), NONE), "FROZEN_TOMORROW", None, "squeue", ""),
        (Known(slurm("FROZEN_TOMORROW"), DONE), "COMPLETED", 0, "exit.json", "Slurm reports FROZEN_TOMORROW"),
        (Known(None, NONE, cancelled=lambda: True), "CANCELLED", None, "cancelled.json", ""),
        (Known(None, EARLY, cancelled=lambda: True), "CANCELLED", 143, "cancelled.json", ""),
        (Known(None, DONE, cancelled=lambda: True), "COMPLETED", 0, "exit.json", ""),
        (Known(slurm("RUNNING"), EARLY, cancelled=lambda: True), "RUNNING", None, "squeue", ""),
        (Known(slurm("RUNNING", "sacct"), DONE), "COMPLETED", 0, "exit.json", ""),
        (Known(None, EARLY), "FAILED", 143, "exit.json", ""),
        (Known(None, DONE, AWAY), "COMPLETED", 0, "exit.json", AWAY),
        (Known(slurm("RUNNING", "sacct"), EARLY, AWAY), "RUNNING", None, "sacct", f"from sacct; {AWAY}"),
        (Known(None, EARLY, AWAY, lambda: True), "UNKNOWN", None, NO_REPLY, AWAY),
        (Known(None, NONE, AWAY), "UNKNOWN", None, NO_REPLY, AWAY),
        (
            *(Known(slurm("RUNNING", "sacct"), NONE), "UNKNOWN", None, ""),
            "sacct reports RUNNING, but the controller does not know the job",
        ),
        (Known(None, NONE), "UNKNOWN", None, "", "purged"),
    ],
)
def test_the_first_source_that_has_a_state_decides(
    known: Known, name: str, status: int | None, source: str, reason: str
) -> None:
    """The state is that of the first source in the documented order that has one."""
    state = state_of(known)
    assert (state.name, state.exit_status, state.source, state.reason) == (name, status, source, reason)


def test_each_source_is_needed() -> None:
    """Each of the sources decides at least one of the cases above."""
    rows = test_the_first_source_that_has_a_state_decides.pytestmark[0].args[1]
    deciding = {next(source for source in SOURCES if source(row[0]) is not None) for row in rows}
    assert deciding == set(SOURCES)
