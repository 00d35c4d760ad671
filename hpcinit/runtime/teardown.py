"""Taking the group down: in a bounded time, whatever its peers do."""

from __future__ import annotations

import atexit
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from hpcinit.facts.errors import BringUpError
from hpcinit.facts.saying import say
from hpcinit.runtime.process_state import state
from hpcinit.runtime.watchdog import end_hard


def destroy(timeout: timedelta, device: torch.device | None = None) -> None:
    """torch's groups, all of them. If that takes longer than `timeout`, say so and go on without it.

    The process is then no use for another group, and ends hard where the interpreter would: its last steps wait for
    threads that are inside the group (https://github.com/pytorch/pytorch/issues/119250).
    """
    if state.stuck_group or not dist.is_initialized():
        return
    raised: list[BaseException] = []
    thread = threading.Thread(target=_destroy, args=(device, raised), name="hpcinit-shutdown", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        state.stuck_group = (
            f"the process group did not go down in {timeout.total_seconds():g} s: a peer that died or hangs holds it "
            "up; look for the rank that failed first"
        )
        say(f"warning: {state.stuck_group}. This process goes on without it, and will end with exit status 1")
    elif raised:
        raise raised[0]


def refuse_if_stuck() -> None:
    """Raises BringUpError if a group of this process never went down."""
    if state.stuck_group:
        raise BringUpError(f"no second process group in this process: {state.stuck_group}")


def _destroy(device: torch.device | None, raised: list[BaseException]) -> None:
    try:
        if device is not None and device.type != "cpu":
            torch.accelerator.set_device_index(device.index)  # each thread has its own
        dist.destroy_process_group()
    except BaseException as error:
        raised.append(error)


@atexit.register
def _end_if_stuck() -> None:
    # Registered when this module is imported, so that it runs after what the program registered later.
    if state.stuck_group:
        end_hard(state.stuck_group)
