"""Which names the program's own code uses, without running it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from hpcinit.records.hang_report import is_user_code


def uses(name: str) -> bool:
    """Return whether code of the program uses this name: a caller of this function, or a function of a loaded module.

    Code of packages in site-packages, of the standard library and of hpcinit does not count.
    """
    frame, codes = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        codes.append(frame.f_code)
    if any(_is_in(name, code) for code in codes if is_user_code(code.co_filename)):
        return True
    own = [module for module in list(sys.modules.values()) if _is_of_the_program(module)]
    return any(_is_in(name, code) for module in own for code in _codes(module))


def _is_of_the_program(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_user_code(file)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of the module's functions and of the methods of its classes."""
    for value in list(vars(module).values()):
        members = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        yield from (one.__code__ for one in list(members) if isinstance(one, FunctionType))


def _is_in(name: str, code: CodeType) -> bool:
    """Return whether the code, or a function defined in it, uses the name."""
    return name in code.co_names or any(_is_in(name, one) for one in code.co_consts if isinstance(one, CodeType))
