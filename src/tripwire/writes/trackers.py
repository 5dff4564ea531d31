"""Trackers: `MutationTracker` and `GenerationTracker`, as in PyTorch.

A mutation tracker belongs to one object: when the object is changed, code that read it is
invalidated. The tracker holds code weakly and invalidates it once, after the change. The object is
watched only while there is code to invalidate; after that its class is restored. Attribute writes
are reported at once, with the writer's line. Writes to the dicts behind an object are reported
before the next Python function starts, with the C module from 3.12 on. These are items of a dict,
`__dict__` written directly, attributes of classes and Python modules, a module's tables. All else
(lists, sets, cells; without watchers dicts, too) is found by `check()`.

Generations tell what was made during a run from what was there before. While tagging is installed,
a module that is constructed or unpickled is tagged with the number of the generation. Each install
starts a new one, so a module's tag equals the current number only if the module was made since the
latest install.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, ClassVar, Protocol

from torch import nn
from torch.nn.modules import module as module_globals

from tripwire.env import is_library_file
from tripwire.forks import make_lock
from tripwire.ranges import Frame
from tripwire.values.classes import is_exactly, isinstance
from tripwire.writes import sentry, snapshots, watching
from tripwire.writes.patches import Patch, Patches
from tripwire.writes.subscriptions import ExactWeakKeyDictionary, can_refer
from tripwire.writes.watching import Change, Watch

log = logging.getLogger("tripwire.watch")


class GuardedCode(Protocol):
    """Code that holds only while what it read is unchanged."""

    def invalidate(self, ref: weakref.ref[GuardedCode]) -> object:
        """Called once, with the reference that led here, when something read was changed."""


class MutationTracker:
    """The mutations of one object, and the code that they concern.

    While there is code to invalidate, each write that is seen counts. Afterwards the count is
    updated when somebody reads it: once for each name that differs from the last look.
    """

    db: ClassVar[ExactWeakKeyDictionary[MutationTracker]] = ExactWeakKeyDictionary()
    # Objects without weak references, while they are watched.
    pinned: ClassVar[dict[int, tuple[object, MutationTracker]]] = {}

    def __init__(self) -> None:
        self._count = 0
        # While nobody is told: what finds the object, and how it was at the last look.
        self._left: tuple[Callable[[], object], snapshots.Snapshot] | None = None
        self.writer: Frame | None = None  # of the latest mutation; None where it isn't known
        self.watchers: list[weakref.ref[GuardedCode]] = []
        self._watch: Watch | None = None
        self._dicts: _Dicts | None = None  # where Python tells of writes to dicts

    @classmethod
    def find(cls, obj: object) -> MutationTracker | None:
        """The tracker of an object that is or was watched."""
        pinned = cls.pinned.get(id(obj))
        return cls.db.get(obj) if pinned is None else pinned[1]

    @property
    def mutation_count(self) -> int:
        """How many there were."""
        with _lock:
            obj = None if self._left is None else self._left[0]()
            if self._left is not None and obj is not None:
                find, held = self._left
                now = snapshots.read(obj)
                if not snapshots.is_unchanged(held, now):
                    self._count += len(list(snapshots.compare(held, now, {})))
                    self._left = find, snapshots.hold(now, {})
            return self._count

    def on_mutation(self, name: object) -> None:
        """Count a mutation, and invalidate the code that wasn't told yet."""
        self._count += 1
        with _lock:
            told, self.watchers = self.watchers, []
        self._rest()
        for ref in told:
            code = ref()
            if code is not None:
                try:
                    code.invalidate(ref)
                except Exception:
                    log.warning("invalidating %r for %r raised", code, name, exc_info=True)

    def track(self, guarded_code: GuardedCode) -> None:
        """Tell this code of the next mutation."""
        with _lock:
            self.watchers.append(weakref.ref(guarded_code, self._forget))

    def check(self) -> bool:
        """Compare with what was there, for writes that nothing saw; whether there were any."""
        watch, dicts = self._watch, self._dicts
        if dicts is not None:
            dicts.note_writers()
        return watch is not None and bool(watch.check())

    def _hear(self) -> None:
        """A dict behind the object was written."""
        watch = self._watch
        if watch is None:
            return
        if not watch.is_under_way:
            self.check()
        obj = watch.find()
        if self._watch is watch and obj is not None:  # nobody was told: it may have other dicts
            self._listen(obj)

    def _forget(self, ref: weakref.ref[GuardedCode]) -> None:
        with _lock:
            self.watchers = [watcher for watcher in self.watchers if watcher is not ref]
        self._rest()

    def _arm(self, obj: object) -> None:
        """Watch the object, if nobody did meanwhile and the code is still there."""
        if self._watch is not None:
            return
        self._count, self._left = self.mutation_count, None
        fresh: Watch | None = watching.watch(obj, self._changed)
        with _lock:
            if self._watch is None and self.watchers:
                self._watch, fresh = fresh, None
        if fresh is not None:
            fresh.cancel()
        elif sentry.TELLS:
            self._listen(obj)

    def _listen(self, obj: object) -> None:
        """Be told of writes to the dicts that the object has now."""
        tracker = weakref.ref(self)

        def hear() -> None:
            found = tracker()
            if found is not None:
                found._hear()

        dicts = _Dicts(obj, hear)
        with _lock:
            if self._watch is not None:  # nobody was told meanwhile
                self._dicts, dicts = dicts, self._dicts
        if dicts is not None:
            dicts.close()

    def _changed(self, change: Change) -> None:
        dicts = self._dicts
        noted = None if dicts is None else dicts.find_writer(change.name)
        self.writer = change.where or noted
        self.on_mutation(change.name)

    def _rest(self) -> None:
        """End the watch if there is no code left to tell."""
        with _lock:
            if self.watchers:
                return
            watch, self._watch = self._watch, None
            dicts, self._dicts = self._dicts, None
            for address, (_, tracker) in tuple(self.pinned.items()):
                if tracker is self:
                    del self.pinned[address]
        if dicts is not None:
            dicts.close()
        if watch is not None:
            obj = watch.find()
            watch.cancel()
            if obj is not None:
                # A list or dict has no weak references: it lives as long as its tracker is held.
                find = weakref.ref(obj) if can_refer(obj) else lambda: obj
                self._left = find, snapshots.hold(snapshots.read(obj), {})


class _Dicts:
    """The dicts behind one object, and who wrote to them."""

    __slots__ = ("_labels", "_sentry", "_whole", "_writers")

    def __init__(self, obj: object, listener: Callable[[], None]) -> None:
        found = snapshots.dicts_of(obj)
        self._labels = [label for _, label in found]
        self._writers: dict[object, tuple[CodeType, int]] = {}
        self._whole: tuple[CodeType, int] | None = None
        self._sentry = sentry.Sentry([(space, None) for space, _ in found], [], listener)

    def note_writers(self) -> None:
        """Take over who wrote since this was asked last."""
        touches = self._sentry.take()
        self._whole = touches[0].writer if len(touches) == 1 else None
        self._writers = {
            snapshots.label_of(self._labels[touch.index], key): (code, line)
            for touch in touches
            for key, code, line in touch.writers
            if key is not None
        }

    def find_writer(self, name: object) -> Frame | None:
        """Who wrote what a listener knows by this name; None where that isn't known."""
        found = self._writers.get(name) if is_exactly(name, str, int, bytes) else None
        place = found or self._whole
        if place is None:
            return None
        code, line = place
        library = is_library_file(code.co_filename)
        return Frame(code.co_filename, line, code.co_qualname, None, library)

    def close(self) -> None:
        """Stop watching."""
        self._sentry.close()


_lock = make_lock()


def watch(obj: object, guarded_code: GuardedCode) -> MutationTracker:
    """From now on a mutation of `obj` invalidates `guarded_code`.

    Works for whatever `tripwire.watch` works for. Attribute writes are told at once, writes to
    dicts and classes where Python tells of them, all else when `check()` of the tracker is called.
    """
    with _lock:
        tracker = MutationTracker.find(obj) or MutationTracker()
        tracker.track(guarded_code)
        if can_refer(obj):
            MutationTracker.db[obj] = tracker
        else:
            MutationTracker.pinned[id(obj)] = (obj, tracker)
    try:
        tracker._arm(obj)
    except BaseException:  # it can't be watched
        tracker.watchers.clear()
        tracker._rest()
        raise
    return tracker


# --- generations ---


class GenerationTracker:
    """The current generation, and what was made in which. There is one for the process."""

    generation: ClassVar[int] = 0
    dynamic_classes: ClassVar[ExactWeakKeyDictionary[bool]] = ExactWeakKeyDictionary()
    generation_values: ClassVar[ExactWeakKeyDictionary[int]] = ExactWeakKeyDictionary()

    @classmethod
    def tag(cls, obj: object) -> None:
        """Note that an object was made in the current generation."""
        cls.generation_values[obj] = cls.generation

    @classmethod
    def mark_class_dynamic(cls, module_class: type[nn.Module]) -> None:
        """Count every module of exactly this class as dynamic."""
        if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
            raise TypeError(
                f"only a class of modules can be dynamic, and {module_class!r} isn't one"
            )
        cls.dynamic_classes[module_class] = True

    @classmethod
    def get_generation_value(cls, obj: object) -> int:
        """The generation in which an object was made; -1 if it has no tag."""
        return cls.generation_values.get(obj, -1)

    @classmethod
    def check(cls, obj: object) -> bool:
        """Whether an object was made in this generation."""
        return cls.generation_values.get(obj) == cls.generation

    @classmethod
    def clear(cls) -> None:
        """Forget every tag and dynamic class, and count from 0 again."""
        cls.generation = 0
        cls.dynamic_classes.clear()
        cls.generation_values.clear()


def is_dynamic_nn_module(obj: object, is_export: bool = False) -> bool:
    """Whether an object is a module that can't be taken as what its class says.

    It has a `forward` of its own, is a mapping as well, says so (`torchdynamo_force_dynamic`,
    either way), is called with global hooks, is of a dynamic class, or was made in this
    generation. An export runs global forward hooks as part of the program, so there only the
    backward ones count.
    """
    is_module = isinstance(obj, nn.Module)
    if is_module and ("forward" in vars(obj) or isinstance(obj, Mapping)):
        return True
    forced = getattr(obj, "torchdynamo_force_dynamic", None)
    if forced is not None:
        return bool(forced)
    if is_module and _has_global_hooks(backward_only=is_export):
        return True
    return type(obj) in GenerationTracker.dynamic_classes or GenerationTracker.check(obj)


def _has_global_hooks(backward_only: bool) -> bool:
    hooks = [module_globals._global_backward_hooks, module_globals._global_backward_pre_hooks]
    if not backward_only:
        hooks += [module_globals._global_forward_hooks, module_globals._global_forward_pre_hooks]
    return any(hooks)


# --- tagging -------------------------------------------------------------------------------------


def _then_tag(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def tagging(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if _PATCHES.are_in_place:  # somebody may have kept this function beyond its time
            GenerationTracker.tag(self)

    return tagging


_PATCHES = Patches(
    lambda: (Patch(nn.Module, "__init__", _then_tag), Patch(nn.Module, "__setstate__", _then_tag))
)
_installs = itertools.count()


def install_generation_tagging() -> Tagging:
    """Start a new generation and tag what is made, until it is undone. Installs may overlap."""
    return Tagging()


class Tagging:
    """One install; it ends by `undo` or with its `with`. The last one to end unpatches."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number = next(_installs)
        _PATCHES.enter(self._number)
        with _lock:
            GenerationTracker.generation += 1

    def undo(self) -> None:
        """End this install; a second call does nothing."""
        _PATCHES.leave(self._number)

    def __enter__(self) -> Tagging:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
