"""Defined: classes and functions of a record, where pickle looks for them.

A namespace of a record has the names that recorded code loads. Pickle asks a module for a class or
a function by the name under which it was defined, which no code need have loaded.
"""

from __future__ import annotations

import importlib.util
import sys
import types

from tripwire.recording.names import all_codes, module_of
from tripwire.recording.origin import is_library_file, is_library_module
from tripwire.values.classes import isinstance

_qualname_of_class = type.__dict__["__qualname__"].__get__


def define(made: list[type | types.FunctionType], modules: dict[str, types.ModuleType]) -> None:
    """Put each into its module, under its name, if nothing else has or misses that name."""
    asked: dict[int, set[str]] = {}  # by the id of a namespace: code asks for these, found or not
    for one in made:
        if isinstance(one, types.FunctionType):
            names = asked.setdefault(id(one.__globals__), set())
            names.update(name for code in all_codes(one.__code__) for name in code.co_names)
    for one in made:
        home, name = module_of(one), _qualname_of(one)
        if not home or not name.isidentifier() or _is_librarys(home):
            continue
        module = modules.setdefault(home, types.ModuleType(home))
        if name not in asked.get(id(vars(module)), ()):
            vars(module).setdefault(name, one)


def _qualname_of(one: type | types.FunctionType) -> str:
    """Asked of no metaclass."""
    return one.__qualname__ if type(one) is types.FunctionType else str(_qualname_of_class(one))


def _is_librarys(module: str) -> bool:
    """Whether a module is of an installed package, loaded or not."""
    top = module.partition(".")[0]
    if top in sys.modules:
        return is_library_module(top)
    spec = importlib.util.find_spec(top)
    return spec is not None and spec.origin is not None and is_library_file(spec.origin)
