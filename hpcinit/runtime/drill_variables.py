"""Reads the program's variables for `hpcinit drill`, so that it can name those that a resume did not restore.

It reads numbers and copies of the weights, in local variables of the running functions, in modules, and in attributes
of objects. It skips functions that call locals(), because reading their variables would change what locals() returns
(before Python 3.13).
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from hpcinit.records import drill_records

DEEPEST, MOST_OBJECTS, MOST_NUMBERS, MOST_ITEMS = 4, 2000, 300, 32
NOT_STATE = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType, FrameType)


class Variables:
    """Reads the variables of a program.

    folder: the folder with the program's source files.
    total: a function that returns the sum of the absolute values of tensors.
    """

    def __init__(self, torch: Any, folder: str, total: Any) -> None:
        self.torch, self.folder, self.total = torch, folder, total

    def read(self, weights: Sequence[Any]) -> dict[str, float]:
        """Return a name and a number for each variable: its value, its length, or the sum of its tensors.

        The names of copies of the weights start with drill_records.COPY.

        weights: the trained parameters.
        """
        found: dict[str, float] = {}
        trained, shapes = {id(one) for one in weights}, {one.shape for one in weights}
        waiting, seen = deque[Any]((name, one, 0) for name, one in self._roots()), set[int]()
        while waiting and len(seen) < MOST_OBJECTS and len(found) < MOST_NUMBERS:
            name, one, depth = waiting.popleft()
            if isinstance(one, int | float):
                found.setdefault(name, float(one))
            elif isinstance(one, self.torch.Tensor):
                if depth and not one.requires_grad and one.is_floating_point():
                    found.setdefault(name, self.total([one]))
            elif id(one) not in seen:
                seen.add(id(one))
                tensors = self._tensors(one)
                is_copy = tensors and shapes.issuperset(tensor.shape for tensor in tensors)
                if is_copy and trained.isdisjoint(id(tensor) for tensor in tensors):
                    found.setdefault(f"{drill_records.COPY}{name}", self.total(tensors))
                elif depth < DEEPEST and (not tensors or isinstance(one, self.torch.nn.Module)):
                    if isinstance(one, list | deque):
                        found.setdefault(f"len({name})", float(len(one)))
                    waiting.extend((inner, value, depth + 1) for inner, value in self._inside(name, one))
        return found

    def _tensors(self, one: Any) -> list[Any]:
        """Return the parameters of a module, or the tensors of a list or dict that has only tensors."""
        if isinstance(one, self.torch.nn.Module):
            return [*one.parameters()]
        values = [*one.values()] if type(one) is dict else one if isinstance(one, list | tuple) else []
        if len(values) < 2 or not all(isinstance(value, self.torch.Tensor) for value in values):
            return []
        return [value for value in values if value.is_floating_point() and not value.requires_grad]

    def _roots(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each variable of the program's functions and modules."""
        frame: FrameType | None = sys._getframe()
        modules = set[int]()
        while frame:
            code = frame.f_code
            if code.co_filename.startswith(self.folder):
                if code.co_flags & inspect.CO_OPTIMIZED and not {"locals", "vars"} & {*code.co_names}:
                    variables = frame.f_locals
                    yield from [*variables.items()]
                    if type(variables) is dict:  # before Python 3.13, the frame keeps this dict and its objects alive
                        variables.clear()
                if id(frame.f_globals) not in modules:
                    modules.add(id(frame.f_globals))
                    yield from [one for one in frame.f_globals.items() if one[0][:1].isalpha()]
            frame = frame.f_back

    def _inside(self, name: str, one: Any) -> list[tuple[str, Any]]:
        """Return the name and the value of each attribute, or of each item if there are at most MOST_ITEMS."""
        if isinstance(one, (*NOT_STATE, self.torch.optim.Optimizer)):
            return []
        if type(one) is dict:
            items = [(f"{name}[{key!r}]", value) for key, value in one.items() if isinstance(key, str | int)]
        elif isinstance(one, list | tuple):
            items = [(f"{name}[{number}]", value) for number, value in enumerate(one)]
        else:
            return [(f"{name}.{key}", value) for key, value in self._attributes(one)]
        return items if len(items) <= MOST_ITEMS else []

    def _attributes(self, one: Any) -> list[tuple[str, Any]]:
        try:
            attributes = [*vars(one).items()]
        except TypeError:
            return []
        if not isinstance(one, self.torch.nn.Module):
            return attributes
        # A module has its tensors and submodules in private attributes. Skip a ModuleList, which has too many layers.
        submodules = [] if isinstance(one, self.torch.nn.ModuleList) else [*one.named_children()]
        return [(key, value) for key, value in attributes if key[:1].isalpha()] + submodules
