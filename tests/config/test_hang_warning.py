"""A timeout of collectives that is shorter than the hang detection is a warning before the job is queued."""

from __future__ import annotations

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose


def test_collectives_that_time_out_before_a_hang_is_detected() -> None:
    """The default has no warning; hang.after_s=0 and the start-up timeout (null) are no reason for one."""
    [warning] = all_checks.warnings(compose(["comm.collective_timeout_s=60"]))
    assert warning == (
        "comm.collective_timeout_s is 60 and hang.after_s is 240: a collective times out before hpcinit detects the "
        "hang, and the error of a timeout does not name the missing rank; set hang.after_s below 60, or increase "
        "comm.collective_timeout_s"
    )
    for right in (["hang.after_s=0"], ["hang.after_s=30"], ["comm.collective_timeout_s=null"]):
        assert all_checks.warnings(compose(["comm.collective_timeout_s=60", *right])) == []
    assert all_checks.warnings(compose([])) == []
