"""Subscriptions: observers are told of attribute writes, by patching an object's class.

The class's `__setattr__` and `__delattr__` are replaced by methods that tell the observers.

A class is patched once, however many subscribe to it. When the last subscription ends, it is
restored: its own method is back, or the name is removed if it had none. What a user put there
meanwhile stays. A patched method runs what it replaced. An inherited method is looked up on each
call, so a base class can change meanwhile.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, overload

from msgspec import Struct

from tripwire.forks import make_lock
from tripwire.values.classes import can_be_written, isinstance, mro, name_of
from tripwire.writes.patches import Patch

T = TypeVar("T")
D = TypeVar("D")


class _Key(weakref.ref[object]):
    """A weak reference that remembers the address of what it led to."""

    __slots__ = ("address",)

    address: int


class ExactWeakKeyDictionary(Generic[T]):
    """A mapping from objects, by identity, to values. Keys need not be hashable.

    A key is held weakly, and its entry goes with it. An object that was made at a dead key's
    address finds nothing: an entry is used only if its reference still leads to the key asked for.
    """

    __slots__ = ("__weakref__", "_entries", "_forget")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_Key, T]] = {}
        this = weakref.ref(self)  # a dictionary that is let go dies at once, without the collector

        # Runs before the key's memory is free, so the address can't belong to a new key yet.
        def forget(key: weakref.ref[object]) -> None:
            mapping = this()
            if mapping is not None and isinstance(key, _Key):
                found = mapping._entries.get(key.address)
                if found is not None and found[0] is key:
                    del mapping._entries[key.address]

        self._forget = forget

    def _find(self, key: object) -> tuple[_Key, T] | None:
        found = self._entries.get(id(key))
        # A dead reference leads to None, and None can't be a key.
        return found if found is not None and key is not None and found[0]() is key else None

    def __getitem__(self, key: object) -> T:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        return found[1]

    @overload
    def get(self, key: object) -> T | None: ...
    @overload
    def get(self, key: object, default: D) -> T | D: ...
    def get(self, key: object, default: D | None = None) -> T | D | None:
        """The key's value, or the default."""
        found = self._find(key)
        return default if found is None else found[1]

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: object, value: T) -> None:
        found = self._find(key)
        if found is not None:
            self._entries[id(key)] = (found[0], value)
            return
        try:
            reference = _Key(key, self._forget)
        except TypeError:
            raise TypeError(
                f"{name_of(type(key))} objects can't be weakly referenced, so they can't be "
                "keys of an ExactWeakKeyDictionary. A class of your own can be, with "
                "'__weakref__' among its __slots__."
            ) from None
        reference.address = id(key)
        self._entries[id(key)] = (reference, value)

    def __delitem__(self, key: object) -> None:
        if self._find(key) is None:
            raise KeyError(key)
        del self._entries[id(key)]

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()

    def __repr__(self) -> str:
        return f"<ExactWeakKeyDictionary of {len(self)}>"


_NAMES = ("__setattr__", "__delattr__")
_ABSENT = object()


class AttributeWrite(Struct, eq=False):
    """An attribute write that is under way."""

    name: object
    frame: FrameType | None  # the writer's; None when it is over
    thread: int


class WriteObserver(Protocol):
    """Is told around the attribute writes of one object."""

    def before(self, obj: object, write: AttributeWrite) -> object:
        """Called before a write; what it returns comes back after."""

    def after(self, obj: object, write: AttributeWrite, before: Any) -> None:
        """Called after a write, also when it raised."""

    def gone(self) -> None:
        """Called when the object has died."""


# --- one patch -----------------------------------------------------------------------------------


# What a patched method replaced: the class's own, or _ABSENT.
_replaced: ExactWeakKeyDictionary[object] = ExactWeakKeyDictionary()


def see_through(space: dict[str, Any]) -> dict[str, Any]:
    """A class's attributes as they are without patches; changes `space`."""
    for name in _NAMES:
        while name in space and (plain := _replaced.get(space[name], space)) is not space:
            if plain is _ABSENT:
                del space[name]
            else:
                space[name] = plain
    return space


def _wrap_method(cls: type, name: str) -> Callable[[Any], object]:
    own = vars(cls).get(name, _ABSENT)

    def wrap(plain: Any) -> object:
        @functools.wraps(plain)
        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            observers = find_observers(self) if type(self) is cls else ()
            if not observers:
                return _bind(cls, name, own, self)(*args, **kwargs)
            frame = sys._getframe(1)
            write = AttributeWrite(args[0] if args else None, frame, threading.get_ident())
            opened: list[tuple[WriteObserver, object]] = []
            try:
                try:
                    for observer in observers:
                        opened.append((observer, observer.before(self, write)))
                    return _bind(cls, name, own, self)(*args, **kwargs)
                finally:
                    for observer, before in opened:
                        observer.after(self, write, before)
            finally:
                write.frame = None  # it holds the object; an interrupted observer may keep it

        _replaced[patched] = own
        return patched

    return wrap


def _bind(cls: type, name: str, own: Any, instance: Any) -> Callable[..., Any]:
    """The method that would run if the class weren't patched."""
    if own is not _ABSENT:
        get = getattr(type(own), "__get__", None)
        return own if get is None else get(own, instance, type(instance))  # type: ignore[no-any-return]
    try:
        above = super(cls, instance)
    except TypeError:  # C.__setattr__(other, ...): object's own takes any object
        return functools.partial(getattr(super(cls, cls), name), instance)
    return getattr(above, name)  # type: ignore[no-any-return]


# --- one class -----------------------------------------------------------------------------------


class _Patched:
    """A class that is patched for some users."""

    __slots__ = ("undo", "users")

    def __init__(self) -> None:
        self.users: set[object] = set()
        self.undo: list[Callable[[], None]] = []


_lock = make_lock()
_classes: ExactWeakKeyDictionary[_Patched] = ExactWeakKeyDictionary()
# Classes to let go of, and for whom, from where waiting could be for ever.
_due: deque[tuple[type, object]] = deque()


def can_patch(cls: type) -> bool:
    """Whether methods of the class can be replaced without running anybody's code."""
    if not can_be_written(cls):
        return False
    meta = type(cls)  # its own __setattr__ would run when the class is patched
    return all(_inherited(meta, name) is getattr(type, name) for name in _NAMES)


def _inherited(cls: type, name: str) -> object:
    for base in mro(cls):
        space = see_through({name: vars(base)[name]} if name in vars(base) else {})
        if name in space:
            return space[name]
    raise AttributeError(name)


def ensure_patched(cls: type) -> Callable[[], None]:
    """Keep a class patched until the function that this returns is called.

    However often it is asked for, the class is patched once. The patch alone does nothing:
    `watch` says for which objects and whom.
    """
    if not can_patch(cls):
        raise TypeError(
            f"{name_of(cls)} can't be patched: it is built in, or its metaclass decides what "
            "is set on it. Watch its objects and compare with Watch.check()."
        )
    user = object()
    pending = [(cls, user)]

    def let_go() -> None:
        _due.extend(pending)  # nothing, at the second call
        pending.clear()
        _settle()

    try:
        with _lock:
            found = _classes.get(cls)
            if found is None:
                _classes[cls] = found = _Patched()
            found.users.add(user)
            for name in _NAMES[len(found.undo) :]:
                Patch(cls, name, _wrap_method(cls, name)).apply(found.undo)
        _settle()
        return let_go
    except BaseException:
        let_go()
        raise


def _settle() -> None:
    """Let go of classes that are due. Whoever holds the lock settles for those who can't wait.

    An object can die anywhere, also while its thread holds locks that somebody in here waits for.
    """
    while _due and _lock.acquire(blocking=False):
        try:
            while _due:
                cls, user = _due[0]  # may be done twice if interrupted, and may not be lost
                found = _classes.get(cls)
                if found is not None:
                    found.users.discard(user)
                    if not found.users:
                        while found.undo:  # the first methods that are patched come last
                            found.undo[-1]()
                            found.undo.pop()
                        del _classes[cls]
                _due.popleft()
        finally:
            _lock.release()


# --- one object ----------------------------------------------------------------------------------

_observers: ExactWeakKeyDictionary[tuple[WriteObserver, ...]] = ExactWeakKeyDictionary()
_pinned: dict[int, tuple[object, tuple[WriteObserver, ...]]] = {}  # objects without weak references


def find_observers(obj: object) -> tuple[WriteObserver, ...]:
    """Who is told of an object's writes, in the order in which they asked."""
    found = _observers.get(obj)
    if found is not None:
        return found
    pinned = _pinned.get(id(obj))
    return () if pinned is None else pinned[1]


def _set_observers(obj: object, observers: tuple[WriteObserver, ...]) -> None:
    if can_refer(obj):
        if observers:
            _observers[obj] = observers
        elif obj in _observers:
            del _observers[obj]
    elif observers:
        _pinned[id(obj)] = (obj, observers)
    else:
        _pinned.pop(id(obj), None)


def can_refer(obj: object) -> bool:
    """Whether an object can be weakly referenced."""
    try:
        weakref.ref(obj)
    except TypeError:
        return False
    return True


class Subscription:
    """An observer's place beside one object; its class is patched as long as both are there."""

    __slots__ = ("_class", "_finalizer", "_let_go", "_observer")

    def __init__(self, obj: object, observer: WriteObserver) -> None:
        self._observer = observer
        self._class: type | None = type(obj)  # None when it is over
        self._let_go: Callable[[], None] | None = None
        self._finalizer: weakref.finalize[..., object] | None = None
        try:
            self._let_go = ensure_patched(type(obj))
            with _lock:
                _set_observers(obj, (*find_observers(obj), observer))
            if can_refer(obj):
                self._finalizer = weakref.finalize(obj, self._died)
                self._finalizer.atexit = False
            _settle()
        except BaseException:
            self.end(obj)
            raise

    def _died(self) -> None:
        self._drop_class()
        self._observer.gone()

    def _drop_class(self) -> None:
        if self._let_go is not None:
            self._let_go()

    def follow(self, obj: object) -> None:
        """Patch the object's new class in place of the old, if its `__class__` was set."""
        cls = type(obj)
        if cls is self._class:
            return
        with _lock:
            if self._class is not None:
                self._drop_class()
                self._class = cls
                self._let_go = ensure_patched(cls) if can_patch(cls) else None
        _settle()

    def end(self, obj: object) -> None:
        """Leave the object."""
        self._drop_class()
        with _lock:
            self._class = None
            rest = tuple(o for o in find_observers(obj) if o is not self._observer)
            _set_observers(obj, rest)
        if self._finalizer is not None:
            self._finalizer.detach()
        _settle()


class PatchStatistics(NamedTuple):
    """What is patched at the moment."""

    classes: int
    objects: int  # observed ones


def statistics() -> PatchStatistics:
    """Count the classes that are patched and the objects for which they are."""
    return PatchStatistics(len(_classes), len(_observers) + len(_pinned))
