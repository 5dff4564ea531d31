"""Python modules: which names a run takes from a module, and what lies behind those.

A module holds more than a run asks for, so only names that code spells are taken from it, as code
comes to spell them. Of the user's own modules all is taken if a function looks at them as wholes
(`vars(config)`). Of torch and the standard library, what isn't the library's own is followed.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

from tripwire.env import is_installed_file, is_library_module
from tripwire.reading.holders import Holder
from tripwire.reading.kinds import NamesKind
from tripwire.reading.meeting import Meeting, Reached
from tripwire.reading.sources import Attr, Global, Source
from tripwire.reading.uses import Step, StepKind, Uses
from tripwire.rulebook.purity import find_impurity
from tripwire.rulebook.rules import Refuse
from tripwire.values.classes import isinstance
from tripwire.values.contents import name_of_module, own_dict
from tripwire.values.identity import is_librarys
from tripwire.writes.patches import unhooked

# What code names where it may take all that a Python module holds.
OF_WHOLES = frozenset({"__dict__", "__dir__", "__getattribute__", "getmembers", "attrgetter"})


class _PythonModule:
    """A Python module that was met."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self.space: dict[str, Any] = own_dict(module) or {}
        self.names: set[str] = set()  # those that were taken from it
        self.library: Holder | None = None  # of torch or the standard library: what keeps them
        self.path: Source | None = None  # where any name may be taken from it
        self.is_whole = False  # whether all that it holds was met


class ModuleMeeting(Meeting):
    """Meets Python modules, name by name."""

    def __init__(self) -> None:
        super().__init__()
        self._python_modules: dict[int, _PythonModule] = {}  # by identity
        self._looks_at_wholes = False
        self._uses: Uses | None = None  # of the function that begins
        self.handed_on: list[tuple[Refuse, str]] = []  # C functions for C code to call, and where
        self._passed: dict[str, str] = {}  # names that are handed to calls, and where

    def _list_open(self) -> list[tuple[_PythonModule, Source]]:
        """Those from which any name may be taken, with their paths."""
        return [(one, one.path) for one in self._python_modules.values() if one.path is not None]

    def _meet_python_module(self, module: types.ModuleType, path: Source) -> Reached:
        """What the function that begins takes from a module, and what its class holds."""
        known = self._python_modules.get(id(module))
        if known is None:
            known = self._python_modules[id(module)] = _PythonModule(module)
            name = name_of_module(module)
            self.homes.add(name)
            if is_library_module(name):
                known.library = self.holders.remember_library(known.space, path)
            else:  # its class may be the user's own
                self.objects.append((module, path, True))
                yield from self._class_of(module, path)
        taken = self._find_taken(path)
        if taken is None or not taken.isdisjoint(OF_WHOLES):
            if self._looks_at_wholes:
                yield from self._whole_module(known, path)
            if known.path is not None:  # names that come later are taken then
                return
            known.path = path
            taken = frozenset(self._names)
        yield from self._names_of(known, path, taken)

    def _names_of(self, known: _PythonModule, path: Source, names: frozenset[str]) -> Reached:
        space = known.space
        if known.library is None:
            names |= {"__getattr__"}  # which is asked for what isn't there
        new = names - known.names
        if not new:
            return
        known.names.update(new)
        if known.library is None:
            self.holders.remember(space, NamesKind(new), path, True)
            for name in sorted(new & space.keys()):
                yield unhooked(space[name]), Attr(path, name)
            return
        present = self.holders.add_names(known.library, new)
        for name in sorted(new & self._passed.keys()):
            self._judge(name, space.get(name))
        for name in present:
            value = space[name]
            if not is_librarys(value):
                yield value, Attr(path, name)
            elif isinstance(value, type):
                self._remember_library_class(value, Attr(path, name))

    def _whole_module(self, known: _PythonModule, path: Source) -> Reached:
        """All that a Python module of the user's own holds; packages would be walked for long."""
        if known.is_whole or known.library is not None:
            return
        known.is_whole = True
        file = known.space.get("__file__")
        if not (isinstance(file, str) and is_installed_file(file)):
            for value, step in self._attributes(known.module, path, True):
                if value is not vars(builtins):
                    yield value, step

    def _find_taken(self, path: Source) -> frozenset[str] | None:
        """The names that the function that begins takes from a Python module; None: any."""
        if self._uses is None or not isinstance(path, (Global, Attr)):
            return None
        kind = StepKind.GLOBAL if isinstance(path, Global) else StepKind.ATTRIBUTE
        use = self._uses.steps.get(Step(kind, path.name))
        if use is None or use.escapes or use.stored_keys or "__contains__" in use.attributes:
            return None
        return use.taken

    def _look_at_wholes(self) -> None:
        """`vars(config)`: a user's function may ask Python modules for all that they hold."""
        opened = [] if self._looks_at_wholes else self._list_open()
        self._looks_at_wholes = True
        for known, path in opened:
            for value, step in self._whole_module(known, path):
                self.walk(value, step, True)

    def _judge(self, name: str, value: object) -> None:
        """A C function that is handed to a call may be called by C code, which no event shows."""
        if isinstance(value, types.BuiltinFunctionType):
            refuse = find_impurity(value, library=False)
            if refuse is not None:
                self.handed_on.append((refuse, self._passed[name]))
