"""The first barrier of a group uses the rank's own device."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from tests.gpu import starting
from tests.gpu.findings import MISSING, NOT_SHOWN, Findings
from tests.gpu.starting import Job

# torch's warnings if a barrier has to guess the device: up to about 2.7, and later.
WARNINGS = ("devices used by this process are currently unknown", "using the device under current context")
OTHER = "tests.runtime.test_first_barrier"


def main(found: Findings, folder: Path) -> None:
    done = starting.run(Job("tests.gpu.check_barrier:bring_up"), folder / "barrier")
    if not found.claim("init creates a group", done.ok, "" if done.ok else done.tail()):
        return
    one = done.first
    found.claim("the first barrier names the rank's device", one["ids"] == [one["index"]], str(one["ids"]), device=True)
    guessed = [text for text in WARNINGS if text in done.output]
    found.claim("torch does not guess the device of a barrier", not guessed, "; ".join(guessed), device=True)
    _others(found, folder)


def _others(found: Findings, folder: Path) -> None:
    """Run the test of every layout recorded from Slurm with this build of torch. The devices are fakes."""
    name = "every recorded layout names its device in the first barrier (fake devices)"
    if importlib.util.find_spec(OTHER) is None:
        return found.add(name, NOT_SHOWN, f"there is no {OTHER}")
    if importlib.util.find_spec("pytest") is None:
        return found.add(name, MISSING, "pytest is not installed in this Python, and the test uses it")
    done = starting.run(Job("tests.gpu.check_barrier:of_the_other_test"), folder / "other")
    detail = f"{done.first['layouts']} layouts; {done.first['wrong'] or 'none wrong'}" if done.ok else done.tail()
    found.claim(name, done.ok and not done.first["wrong"], detail)
    return None


# In the rank:


def bring_up() -> dict[str, Any]:
    """Return the device_ids of the first barrier of init."""
    import torch.distributed as dist

    import hpcinit

    called: list[Any] = []
    barrier = dist.barrier

    def recorded(*args: Any, **kwargs: Any) -> Any:
        called.append(kwargs.get("device_ids"))
        return barrier(*args, **kwargs)

    dist.barrier = recorded
    run = hpcinit.init()
    found = {"ids": called[0] if called else None, "index": run.device.index}
    hpcinit.shutdown()
    return found


def of_the_other_test() -> dict[str, Any]:
    """Run it without pytest's collection. wrong: a line for each rank whose barrier names another device."""
    import pytest

    other = importlib.import_module(OTHER)
    wrong = []
    for shape in other.STEPS:
        with pytest.MonkeyPatch.context() as patch:
            wrong += other.wrong_devices(patch, shape)
    return {"layouts": len(other.STEPS), "wrong": wrong}
