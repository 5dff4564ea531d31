"""Patches: what the user put in the place of a library's own functions.

Libraries are named in a record, not put into it, so a replaced function would be the library's
own again at replay. Functions of the user's that stand in a library's module, or in a class of a
library's that the call met, are recorded with their place. They stand there while a replay runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from tripwire.recording.origin import (
    find_library,
    is_library_file,
    is_library_module,
    module_dict,
)
from tripwire.values.classes import class_dict, isinstance, mro

Patch = tuple[object, str, object]  # a module or class, a name in it, what is there

_MISSING = object()


def find_patches(met: Iterable[object]) -> list[Patch]:
    """Every patch in a library's module, and those in classes among the values that were met."""
    found: list[Patch] = []
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), types.ModuleType):
            foreign = _find_foreign(module_dict(module))
            if foreign and is_library_module(name):
                found += [(module, key, value) for key, value in foreign]
    classes: dict[int, type] = {}
    for value in met:
        cls = value if isinstance(value, type) else type(value)
        classes.update((id(base), base) for base in mro(cls))
    for cls in classes.values():
        foreign = _find_foreign(class_dict(cls))
        if foreign and find_library(cls) is not None:
            found += [(cls, key, value) for key, value in foreign]
    return found


def _find_foreign(space: Any) -> list[tuple[str, object]]:
    return [
        (key, value)
        for key, value in list(space.items())
        if type(value) is types.FunctionType and type(key) is str and _is_users(value.__code__)
    ]


def _is_users(code: types.CodeType) -> bool:
    return _is_users_file(code.co_filename)


@functools.cache
def _is_users_file(name: str) -> bool:
    """Whether a function was written by the user: libraries make theirs from text, too."""
    return not name.startswith("<") and not is_library_file(name)


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """The patches of a record in their places; what was there comes back."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            before = vars(owner).get(name, _MISSING)
            stack.callback(_put, owner, name, before)
            setattr(owner, name, value)
        yield


def _put(owner: object, name: str, value: object) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
