"""Generations: what was made during a run, told from what was there before.

While tagging is installed, a module that is constructed or unpickled is tagged with the number
of the generation. Each install starts a new one, so a module's tag equals the current number
only if the module was made since the latest install.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules import module as module_globals

from tripwire.values.classes import isinstance
from tripwire.writes.patches import Patch
from tripwire.writes.subscriptions import install
from tripwire.writes.weakkeys import ExactWeakKeyDictionary


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
        if _undo:  # somebody may have kept this function beyond its time
            GenerationTracker.tag(self)

    return tagging


_PATCHES = (Patch(nn.Module, "__init__", _then_tag), Patch(nn.Module, "__setstate__", _then_tag))

_lock = threading.RLock()
_installs = 0
_undo: list[Callable[[], None]] = []


def install_generation_tagging() -> Tagging:
    """Start a new generation and tag what is made, until it is undone. Installs may overlap."""
    return Tagging()


class Tagging:
    """One install; it ends by `undo` or with its `with`. The last one to end unpatches."""

    __slots__ = ("_installed",)

    def __init__(self) -> None:
        global _installs
        with _lock:
            if not _installs:
                try:
                    for patch in _PATCHES:
                        install(patch, _undo)
                except BaseException:
                    _uninstall()
                    raise
            _installs += 1
            GenerationTracker.generation += 1
            self._installed = True

    def undo(self) -> None:
        """End this install; a second call does nothing."""
        global _installs
        with _lock:
            if self._installed:
                self._installed = False
                _installs -= 1
                if not _installs:
                    _uninstall()

    def __enter__(self) -> Tagging:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _uninstall() -> None:
    while _undo:
        _undo[-1]()  # may run twice if interrupted, and may not be lost
        _undo.pop()
