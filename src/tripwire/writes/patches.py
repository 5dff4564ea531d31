"""Patches: the one place through which foreign code is patched for a while.

What was there is restored exactly, also after an exception, unless somebody else has put something
in its place meanwhile: that stays. A function of Python or torch that is
written in Python stays the same object, for code that compares it; only its code is replaced.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from inspect import CO_GENERATOR
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

from msgspec import Struct

from tripwire.env import find_wrapped, passes_on
from tripwire.forks import free_in_children
from tripwire.values.classes import isinstance
from tripwire.values.identity import StandsFor, code_of, is_library_function

_ABSENT = object()


class Patch(Struct, frozen=True):
    """One attribute that is replaced for a while by something made from the original."""

    owner: Any
    name: str
    wrap: Callable[[Any], object]

    def apply(self, undo: list[Callable[[], None]]) -> None:
        """Replace the attribute; `undo` gets what puts it back, before anything is changed."""
        before = vars(self.owner).get(self.name, _ABSENT)
        # A compiler in another thread may end first: what it wrapped runs our code, and stays.
        function = find_wrapped(before) or before if type(before) is FunctionType else before
        if isinstance(function, FunctionType) and _can_run_other_code(function):
            self._run_other_code(function, undo)
        else:
            self._replace(before, undo)

    def _run_other_code(self, function: FunctionType, undo: list[Callable[[], None]]) -> None:
        code = code_of(function)
        undo.append(lambda: setattr(function, "__code__", code))
        function.__code__ = self._find_detour(function, code)

    def _find_detour(self, function: FunctionType, code: CodeType) -> CodeType:
        """Made once: places and names are known by their code objects."""
        defaults = function.__defaults__, function.__kwdefaults__
        known = _detours.get((id(self.owner), self.name))
        if known is not None and known[0] is function and known[1:3] == (code, defaults):
            return known[3]
        plain = FunctionType(code, function.__globals__, function.__name__, defaults[0])
        plain.__kwdefaults__ = defaults[1]
        detour = _build_detour(self.wrap(plain), code)
        _detours[id(self.owner), self.name] = (function, code, defaults, detour)
        return detour

    def _replace(self, before: object, undo: list[Callable[[], None]]) -> None:
        value = self.wrap(getattr(self.owner, self.name))
        mark_hook(value, before)

        def put_back() -> None:
            if vars(self.owner).get(self.name, _ABSENT) is not value:
                return  # somebody replaced it meanwhile
            if before is not _ABSENT:
                setattr(self.owner, self.name, before)
            else:
                delattr(self.owner, self.name)

        undo.append(put_back)
        setattr(self.owner, self.name, value)


# By owner and name: the function, its code and defaults, and the code that it runs instead.
_detours: dict[tuple[int, str], tuple[FunctionType, CodeType, tuple[Any, Any], CodeType]] = {}


def _can_run_other_code(function: FunctionType) -> bool:
    """A function that somebody put there is watched for its code, and so is replaced instead."""
    return not function.__closure__ and is_library_function(function)


def _detour(*args: Any, **kwargs: Any) -> Any:
    hook: Any = "hook"
    return hook(*args, **kwargs)


def _generator_detour(*args: Any, **kwargs: Any) -> Any:
    hook: Any = "hook"
    return (yield from hook(*args, **kwargs))


def _build_detour(hook: object, code: CodeType) -> CodeType:
    """Code that calls a hook, for a function whose globals aren't ours.

    A generator function stays one: Python 3.13 warns of code of another kind.
    """
    detour = (_generator_detour if code.co_flags & CO_GENERATOR else _detour).__code__
    consts = [hook if const == "hook" else const for const in detour.co_consts]
    return detour.replace(
        co_consts=(*consts, StandsFor(code)), co_name=code.co_name, co_qualname=code.co_qualname
    )


class RarerCollections(Struct, frozen=True):
    """The garbage collector runs less often: its first threshold is higher.

    Code that makes many objects which stay alive would make it search everything in vain. Garbage
    is still collected; a threshold that somebody sets meanwhile stays.
    """

    factor: int

    def apply(self, undo: list[Callable[[], None]]) -> None:
        """Raise the threshold; `undo` gets what lowers it again."""
        before = gc.get_threshold()
        raised = (before[0] * self.factor, *before[1:])

        def put_back() -> None:
            if gc.get_threshold() == raised:
                gc.set_threshold(*before)

        undo.append(put_back)
        gc.set_threshold(*raised)


class Applicable(Protocol):
    """Something of Python or torch that is changed for a while."""

    def apply(self, undo: list[Callable[[], None]]) -> None:
        """Change it; `undo` gets what puts it back, before anything is changed."""


class Patches:
    """Patches that are in place while anybody needs them; shared by all threads."""

    def __init__(self, find: Callable[[], tuple[Applicable, ...]]) -> None:
        self._find = find
        self._lock = free_in_children(threading.Lock())  # a finaliser may find it held
        self._users: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    @property
    def are_in_place(self) -> bool:
        """Whether anybody needs them now."""
        return bool(self._undo)

    def enter(self, user: int) -> None:
        """Keep them in place for somebody."""
        with self._lock:
            if not self._users:
                self._undo_all()  # nothing, unless an interrupt hit just here before
                self._apply_all()
            self._users.add(user)

    def leave(self, user: int) -> None:
        """The same need them no more; telling it twice is fine."""
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._undo_all()

    def try_leave(self, user: int) -> bool:
        """`leave`, unless somebody enters or leaves right now: a finaliser can't wait."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._users.discard(user)
            if not self._users:
                self._undo_all()
        finally:
            self._lock.release()
        return True

    def _apply_all(self) -> None:
        try:
            for patch in self._find():
                patch.apply(self._undo)
        except BaseException:
            self._undo_all()
            raise

    def _undo_all(self) -> None:
        while self._undo:
            self._undo[-1]()  # may run twice if interrupted, and may not be lost
            self._undo.pop()


def mark_hook(hook: object, original: object) -> None:
    """Note what a hook of ours stands for while it is in place."""
    function = hook.__func__ if type(hook) is MethodType else hook
    if type(function) is FunctionType:
        function.__dict__[_ORIGINAL] = original


def unhooked(value: object) -> object:
    """What a hook of ours or make_fx's, which any thread may have put there, stands for.

    Else the value.
    """
    if type(value) is FunctionType and value.__dict__:
        wrapped = find_wrapped(value)
        if wrapped is not None and passes_on(value):
            return wrapped
        return value.__dict__.get(_ORIGINAL, value)
    if type(value) is MethodType and type(value.__func__) is FunctionType:
        return value.__func__.__dict__.get(_ORIGINAL, value)
    return value


_ORIGINAL = "__tripwire_original__"
