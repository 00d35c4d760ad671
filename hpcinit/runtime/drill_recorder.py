"""Records each optimizer step in a rank of `hpcinit drill`, and blocks changes to files outside of the drill's folder.

This module must not change what the program computes, so it never draws random numbers or changes tensors. But writing
a file outside of the drill's folder raises PermissionError. Files that compiled code writes directly are not blocked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from hpcinit.records import drill_records
from hpcinit.runtime.drill_variables import Variables

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that change files, and which of their arguments are paths.
CHANGES = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.symlink": (1,),
}
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
LONGEST_PAUSE_S = 5.0
MOST_ELEMENTS, MOST_TENSORS = 4096, 256


def install(folder: Path, rank: int) -> None:
    """Start to record this rank's steps in `folder`, and to block changes to files outside of the drill's folder.

    Call this before the program runs.
    """
    sys.dont_write_bytecode = True  # Python would write it outside of the drill's folder
    sys.addaudithook(_Guard(folder).on_event)
    with contextlib.suppress(ImportError):
        import torch  # noqa: PLC0415 - not every program has it

        _record_steps(torch, folder / f"rank-{rank}.jsonl")
        _guard_torch_save(torch)


class _Guard:
    """Refuses to change a file outside of the drill's folder, unless a rank of the drill created it."""

    def __init__(self, folder: Path) -> None:
        self.report = folder / drill_records.OUTSIDE
        # Caches are also allowed, because programs need them: see _look().
        self.allowed = (str(folder.parent.resolve()), "/proc", "/sys")
        self.home = str(Path.home().resolve())
        self.reported: set[str] = set()
        self.busy = False
        self.pause, self.announced, self.lock = folder / drill_records.PAUSE, 0, threading.RLock()

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy or (event != "open" and event not in CHANGES):
            return
        self._check(event, arguments)
        target = arguments[1 if event == "os.symlink" else 0]
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        changes = flags & WRITING if event == "open" else event in ("os.rename", "os.symlink")
        if changes and isinstance(target, str | bytes | os.PathLike) and self.pause.exists():
            self._wait(os.path.realpath(os.fsdecode(target)), torn=bool(flags & (os.O_TRUNC | os.O_EXCL)))

    def _wait(self, path: str, torn: bool) -> None:
        """Before this rank changes the file `path`, wait until the drill has copied the program's files.

        torn: whether the rank rewrites the whole file. If it is killed while it writes, the file is incomplete.
        """
        if not path.startswith(f"{self.report.parent.parent.resolve()}/now/"):
            return
        with self.lock:
            self.announced += 1
            seen = self.pause.with_name(f"{os.getpid()}-{self.announced}.seen")
            change = {"seen": seen.name, "path": path, "torn": torn}
            drill_records.append(self.pause.with_name(drill_records.CHANGES), change)
            deadline = time.monotonic() + LONGEST_PAUSE_S
            while self.pause.exists() and not seen.exists() and time.monotonic() < deadline:
                time.sleep(0.001)

    def _check(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.busy = True
        try:
            if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
                return
            for at in (0,) if event == "open" else CHANGES[event]:
                if isinstance(arguments[at], str | bytes | os.PathLike):
                    self._look(os.fsdecode(arguments[at]), event)
        finally:
            self.busy = False

    def _look(self, path: str, event: str) -> None:
        place = Path(path).parent.resolve() / Path(path).name
        real = str(place)
        if real.startswith(tuple(f"{one}/" for one in self.allowed)):
            return
        if real.startswith(f"{self.home}/.") or (real.startswith("/dev/") and not real.startswith("/dev/shm/")):
            return
        # The time of a file does not show who created it: another job may write into an old folder during the drill.
        exists = place.is_symlink() or place.exists()
        if not exists and event in ("os.remove", "os.rmdir"):
            return
        foreign = exists and real not in drill_records.created_outside(self.report.parent.parent)
        refused = foreign or not real.startswith(tuple(f"{one}/" for one in NODE_LOCAL))
        if real not in self.reported:
            self.reported.add(real)
            drill_records.append(self.report, {"path": real, "action": event, "refused": refused})
        if refused:
            raise PermissionError(f"hpcinit drill blocked a change of {real}, because it is outside the drill's folder")


def _guard_torch_save(torch: Any) -> None:
    """Make torch.save raise the audit event 'open', because torch.save opens files in C++, without an event."""
    save = torch.save

    def audited(obj: Any, f: Any, *arguments: Any, **keys: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            sys.audit("open", os.fspath(f), "wb", os.O_WRONLY | os.O_TRUNC)
        return save(obj, f, *arguments, **keys)

    torch.save = audited
    with contextlib.suppress(ImportError):  # not every program has it
        safetensors: Any = importlib.import_module("safetensors")
        serialize = safetensors.serialize_file

        def audited_serialize(data: Any, filename: Any, *arguments: Any, **keys: Any) -> Any:
            sys.audit("open", os.fspath(filename), "wb", os.O_WRONLY | os.O_TRUNC)
            return serialize(data, filename, *arguments, **keys)

        safetensors.serialize_file = audited_serialize


def _record_steps(torch: Any, path: Path) -> None:
    batch = [0, 0]  # checksum and number of inputs
    optimizers, pending = _Optimizers(path), list[dict[str, Any]]()  # pending: a step that may count
    before_forward: list[dict[str, Any]] = []  # the random states before the first forward pass of this step
    generators = _Generators(torch)
    loaders = _Loaders(generators)
    variables = Variables(torch, str(path.parent.parent.resolve()), lambda tensors: _sum(tensors[:MOST_TENSORS]))
    base = sys.modules["torch.optim.optimizer"].Optimizer
    create = base.__init__

    def created(self: Any, *arguments: Any, **keys: Any) -> None:
        create(self, *arguments, **keys)
        optimizers.known.append(weakref.ref(self))

    def random_states() -> dict[str, Any]:
        with contextlib.suppress(Exception):
            own = generators.states(loaders.passes)
            return {"rng": _random_states(torch) | loaders.uses | dict.fromkeys(own, 1), "generators": own}
        return {"rng": {}}

    def on_forward(module: Any, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            loaders.may_be_evaluation = False
            if not before_forward:
                before_forward.append(random_states())
            for tensor in inputs:
                # The inputs of the first modules are data; those of the others depend on parameters.
                if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:
                    batch[0] = zlib.crc32(
                        _sample(tensor).cpu().contiguous().view(torch.uint8).numpy().tobytes(), batch[0]
                    )
                    batch[1] += 1
        else:
            loaders.evaluates()

    def on_step(optimizer: Any, *_: Any) -> None:
        if _is_of_a_load():
            return
        counts = optimizers.counts(optimizer)
        inputs, batch[:] = tuple(batch), [0, 0]
        # Record the states before the forward pass: with other data, the pass may draw other random numbers.
        drawn = before_forward.pop() if before_forward else None
        if counts is False:
            return
        with contextlib.suppress(Exception), torch.no_grad():  # a failed record must not end the program
            parameters, states = _tensors(torch, [optimizer, *optimizers.in_use()])
            numbers: dict[str, float] = {}
            with contextlib.suppress(Exception):  # a property may raise any exception
                numbers = variables.read(parameters)
            record = {
                "at": os.fstat(1).st_size,
                "time": time.time(),
                "lr": [float(group.get("lr", 0)) for group in optimizer.param_groups],
                "weights": _sum(parameters),
                "state_sum": _sum(states),
                "states": len(states),
                "passes": loaders.passes,
                "batch": inputs[0],
                "inputs": inputs[1],
                "variables": numbers,
            } | (drawn or random_states())
            if counts is None:
                pending[:] = [record]
                return
            for one in [*pending, record] if optimizers.replaced else [record]:
                drill_records.append(path, one)
            pending.clear()

    base.__init__ = created
    torch.nn.modules.module.register_module_forward_pre_hook(on_forward)
    sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(on_step)


class _Optimizers:
    """Decides which steps count as training steps, if a program has several optimizers.

    Only one optimizer counts: at first, the one that made the first step of the drill. A program may create another one
    later, for example for the next fold of a cross-validation. Its steps count as soon as it makes two in a row. Then
    the old optimizer no longer counts.

    path: the file of this rank's steps.
    known: all optimizers, in the order in which the program created them.
    replaced: whether a new optimizer started to count at the last step.
    """

    def __init__(self, path: Path) -> None:
        self._kept = path.parent.parent / f"{path.stem}.optimizer"
        self.known: list[weakref.ref[Any]] = []
        self.replaced = False
        self._counted = self._waiting = -1  # positions in `known`; -1: none
        self._together = 0  # how many optimizers existed at the last step of the counted one
        self._old: set[int] = set()  # positions of the replaced optimizers

    def counts(self, optimizer: Any) -> bool | None:
        """Return whether this step of `optimizer` counts, or None if that depends on the next step."""
        number = next((number for number, one in enumerate(self.known) if one() is optimizer), 0)
        self.replaced = False
        if self._counted < 0:
            if not self._kept.exists():
                self._kept.write_text(str(number))
            self._counted = int(self._kept.read_text())
        if number == self._waiting:
            self._old.add(self._counted)
            self._counted, self.replaced = number, True
        if number == self._counted:
            self._waiting, self._together = -1, len(self.known)
            return True
        if number < self._together or self._waiting >= 0:
            return False
        self._waiting = number
        return None

    def in_use(self) -> list[Any]:
        """Return the optimizers that still exist and were not replaced."""
        old = self._old | ({self._counted} if self._waiting >= 0 else set[int]())
        return [
            one for number, one in enumerate(weak() for weak in self.known) if one is not None and number not in old
        ]


def _tensors(torch: Any, optimizers: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the parameters of all optimizers, each once, and the tensors of the optimizers' states."""
    parameters: dict[int, Any] = {}
    states: dict[int, Any] = {}
    for optimizer in optimizers:
        own = [p for group in optimizer.param_groups for p in group["params"]][:MOST_TENSORS]
        parameters |= {id(p): p for p in own}
        found = [t for p in own for t in optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor)]
        states |= {id(t): t for t in found}
    return list(parameters.values()), list(states.values())


def _is_of_a_load() -> bool:
    """Return whether this step of an optimizer is part of loading the optimizer's state.

    Before torch loads a state, it creates the state with a step with lr 0.
    """
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back
    return frame is not None


def _sample(tensor: Any) -> Any:
    """Return at most MOST_ELEMENTS elements of this rank's part of a tensor."""
    local = tensor.detach()
    local = (local.to_local() if hasattr(local, "to_local") else local).reshape(-1)
    return local[:: max(1, local.numel() // MOST_ELEMENTS)]


def _sum(tensors: Iterable[Any]) -> float:
    return sum(float(_sample(one).double().abs().sum()) for one in tensors)


def _random_states(torch: Any) -> dict[str, int]:
    found = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "python": zlib.crc32(repr(random.getstate()).encode()),
    }
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = zlib.crc32(numpy.random.get_state()[1].tobytes()) + int(numpy.random.get_state()[2])
    return found


class _Loaders:
    """Records which random generators the data loaders and samplers use, and counts passes over the training data."""

    def __init__(self, generators: _Generators) -> None:
        self.generators = generators
        self.uses: dict[str, int] = {}
        self.passes, self.may_be_evaluation = 0, False
        data = importlib.import_module("torch.utils.data")
        self._note(data.DataLoader, drill_records.LOADER)
        self._note(data.RandomSampler, drill_records.SHUFFLE)

    def _note(self, kind: Any, name: str) -> None:
        """At each iter() on an object of the class `kind`, record which random generator the object uses."""
        iterate = kind.__iter__

        def iterated(one: Any) -> Any:
            own = getattr(one, "generator", None)
            if own is None or own is self.generators.torch.default_generator:
                self.uses[name] = 1
            elif name == drill_records.SHUFFLE:  # skip a loader's generator, which only seeds its workers
                self.generators.add(own)
            if name == drill_records.LOADER:
                self.passes, self.may_be_evaluation = self.passes + 1, True
            return iterate(one)

        kind.__iter__ = iterated

    def evaluates(self) -> None:
        """Subtract the newest pass from the count: a forward pass ran without gradients, so it was an evaluation."""
        self.passes -= self.may_be_evaluation
        self.may_be_evaluation = False


class _Generators:
    """Finds the random generators that the program created itself, and records their states."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.found, self.next, self.steps = torch, dict[int, Any](), 0, 0
        self.passes = 0

    def kinds(self) -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        of_numpy = (numpy.random.Generator, numpy.random.RandomState) if numpy else ()
        return (random.Random, self.torch.Generator, *of_numpy)

    def add(self, generator: Any) -> None:
        if type(generator) in self.kinds() and all(generator is not one for one in self.found.values()):
            self.found[self.next] = generator
            self.next += 1

    def states(self, passes: int) -> dict[str, int]:
        """Return {checksum of its state: its number} for each generator that the program still uses.

        The search for new generators is slow, so it runs only after 1, 2, 4, 8, ... steps. A new pass over the data
        also starts a search, but a shorter one, which skips the attributes of objects.
        """
        self.steps += 1
        is_power = not self.steps & (self.steps - 1)
        if passes != self.passes or is_power:
            self.passes = passes
            for one in self._others(in_attributes=is_power):
                self.add(one)
        # Drop generators that only this table still refers to: the program no longer uses them.
        self.found = {number: self.found[number] for number in self.found if sys.getrefcount(self.found[number]) > 2}
        return {
            f"{drill_records.OWN}{zlib.crc32(self._text(one).encode())}": number for number, one in self.found.items()
        }

    def _others(self, in_attributes: bool) -> list[Any]:
        """Return the program's generators that are not in the table yet. Skip the default generators of libraries.

        in_attributes: also find each torch.Generator that is an attribute of an object. This takes 0.25 s instead of
            0.09 s in a program that has imported transformers.
        """
        shared = [self.torch.default_generator, getattr(random.random, "__self__", None)]
        if numpy := sys.modules.get("numpy"):
            shared.append(numpy.random.rand.__self__)
        known, kinds = {id(one) for one in [*shared, *self.found.values()]}, self.kinds()
        found = gc.get_objects()  # never contains a torch.Generator
        if in_attributes:
            found = gc.get_referents(*found)
        return [one for one in found if type(one) in kinds and id(one) not in known]

    def _text(self, generator: Any) -> str:
        if isinstance(generator, random.Random):
            return repr(generator.getstate())
        if isinstance(generator, self.torch.Generator):
            return str(zlib.crc32(generator.get_state().numpy().tobytes()))
        bits = getattr(generator, "bit_generator", None)
        state = bits.state if bits else generator.get_state(legacy=False)
        return json.dumps(state, default=lambda value: value.tolist())
