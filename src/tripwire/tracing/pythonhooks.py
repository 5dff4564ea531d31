"""Python hooks: what of Python itself is patched while a run is observed.

Most names are found in the bytecode. These hooks see what only a call shows: computed attribute
names, hashes of objects, environment variables, modules that are imported by name. A run that is
refused no longer needs them.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import json.encoder
import operator
import os
import random
import sys
import weakref
from collections.abc import Callable
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
import torch.utils.checkpoint

from tripwire.ranges import is_library_caller
from tripwire.reading.account import RECORDED
from tripwire.reading.reader import add_go_between
from tripwire.rulebook.purity import OF_NUMPY, draws_from_numpy
from tripwire.rulebook.refusals import Refusal
from tripwire.tracing.open.draws import AS_A_WHOLE, CAN_DRAW, draw_whole
from tripwire.tracing.state import CURRENT, TracingState
from tripwire.values.classes import MADE_BY_PYTHON, find_in_class, ids_of, isinstance, name_of
from tripwire.values.identity import PLAIN
from tripwire.values.numbers import is_open
from tripwire.writes.patches import Patch

# --- attribute names that are computed ------------------------------------------------------------


_GETATTR, _HASATTR = getattr, hasattr


def _wrap_by_name(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Names in code are read off the code; names that are computed are noted here."""
    stores = plain.__name__ in ("setattr", "delattr")

    @functools.wraps(plain)  # pickles as what it stands for
    def by_name(owner: Any, name: Any, /, *rest: Any) -> Any:
        state = CURRENT.state
        if is_open(owner) and type(name) is str and not find_in_class(type(owner.value), name):
            owner = owner.value  # which hasn't what torch and tripwire have on open numbers
        if state is not None and isinstance(name, str):
            if str(name) not in state.computed_names:
                state.computed_names.add(str(name))
                if plain is _HASATTR:
                    state.tested_names.add(str(name))
                state.reach.see_computed(str(name))
            if plain is not _HASATTR:
                state.tested_names.discard(str(name))
            if stores and isinstance(owner, ModuleType):  # seen before it is written
                state.reach.walk_names(frozenset({str(name)}))
            elif name in MADE_BY_PYTHON and plain is _GETATTR:
                state.reach.walk_made_of(owner, str(name))
        return plain(owner, name, *rest)

    return by_name


add_go_between(
    next(c for c in _wrap_by_name.__code__.co_consts if getattr(c, "co_name", None) == "by_name")
)


# --- numbers that objects have by their identity --------------------------------------------------


def _wrap_hash(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What hashes by identity has another number where it is another object."""

    @functools.wraps(plain)
    def hashed(value: Any, /) -> Any:
        state = CURRENT.state
        if state is not None and state.quiet and not is_library_caller(1):
            if _has_own_number(state, value):
                where = state.capture_range(1)
                state.refuse(Refusal("reads-identity", _HASHED.format(name_of(type(value))), where))
        return plain(value)

    return hashed


_HASHED = (
    "`hash` of a {} depends on which object it is, and the next call may have another one. Keep "
    "a name or a number of your own in the object."
)


def _has_own_number(state: TracingState, value: Any) -> bool:
    """Whether `hash` tells this object from equal ones, and the next call may have another."""
    cls = type(value)
    if cls is tuple or cls is frozenset:
        return any(_has_own_number(state, item) for item in value)
    if id(cls) in PLAIN or issubclass(cls, (type, ModuleType, BuiltinFunctionType)):
        return bool(value != value)  # nan
    if issubclass(cls, torch.Tensor):
        known = state.values.find(value)
        return known is None or not any(known.sources.values())
    by_identity = (
        find_in_class(cls, "__hash__") is object.__hash__ or id(cls) in _HASHES_WHAT_IT_HAS
    )
    return by_identity and not state.reach.is_anchored(value)


_HASHES_WHAT_IT_HAS = ids_of(MethodType, weakref.ref)


# --- numbers that are open ------------------------------------------------------------------------


def _take_away(_: object) -> None:
    """The encoder of JSON in C takes the numbers of Python alone. The one in Python takes all."""


def _wrap_json(plain: Callable[..., Any]) -> Callable[..., Any]:
    """It spells numbers by methods of `int` and `float`, which take none but Python's."""

    def make_encoder(
        markers: Any, default: Any, encoder: Any, indent: Any, spell: Any, *args: Any
    ) -> Any:
        def spell_float(value: Any) -> Any:
            return spell(value.__float__() if is_open(value) else value)

        return plain(markers, default, encoder, indent, spell_float, *args, _intstr=_spell_int)

    return make_encoder


def _spell_int(value: Any) -> str:
    return int.__repr__(operator.index(value) if is_open(value) else value)


def _wrap_draw(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What draws until a number suits it is one draw; see tracing/open/draws.py."""

    @functools.wraps(plain)
    def drawn(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = CURRENT.state
        if state is not None and state.refusal is None and CAN_DRAW:
            found = draw_whole(state, self, plain, args, kwargs)
            if found is not NotImplemented:
                return found
        return plain(self, *args, **kwargs)

    return drawn


def _wrap_numpy_draw(plain: Any) -> Callable[..., Any]:
    """A function of `numpy.random`, which is a method of a generator."""
    if not draws_from_numpy(plain):
        return cast("Callable[..., Any]", plain)  # somebody else's
    return MethodType(_wrap_draw(plain.__func__), plain.__self__)


# --- environment variables ------------------------------------------------------------------------


def _wrap_environment_item(plain: Callable[..., Any]) -> Callable[..., Any]:
    def get_item(self: Any, key: Any) -> Any:
        state = CURRENT.state
        if state is not None and state.environment is not None and isinstance(key, str):
            state.environment.add(key)
        return plain(self, key)

    return get_item


def _wrap_environment(plain: Callable[..., Any]) -> Callable[..., Any]:
    def read_all(self: Any) -> Any:
        state = CURRENT.state
        if state is not None:
            state.environment = None
        return plain(self)

    return read_all


# --- modules that are imported by name ------------------------------------------------------------


def _wrap_import(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`import` statements are read off the code; `importlib.import_module` passes here."""

    def import_by_name(name: str, package: Any = None, level: int = 0) -> Any:
        try:
            return plain(name, package, level)
        finally:  # that there is none is a read as well
            state, CURRENT.state = CURRENT.state, None  # what the walk asks isn't the run's
            try:
                if state is not None and isinstance(name, str):
                    state.reach.walk_import(_find_whole_name(name, package, level))
            finally:
                CURRENT.state = state

    return import_by_name


def _find_whole_name(name: str, package: Any, level: int) -> str:
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except ImportError:  # beyond the top: the import itself raises
        return name


def _wrap_loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What an import runs isn't the run's, so nobody looks: Dynamo, which checkpoint imports."""

    def load(name: str, import_: Any) -> Any:
        state = CURRENT.state
        if state is not None and name == "torch._dynamo" and name not in sys.modules:
            with state.lifted():
                return load_unseen(name, import_)
        return load_unseen(name, import_)

    def load_unseen(name: str, import_: Any) -> Any:
        state = CURRENT.state
        observer = None if state is None else state.observer
        if observer is None or observer.paused:
            return plain(name, import_)
        observer.pause()
        try:
            return plain(name, import_)
        finally:
            observer.resume()

    return load


def find_patches() -> tuple[Patch, ...]:
    """Those of Python, and of NumPy where it is there."""
    numpy = sys.modules.get("numpy.random")
    names = OF_NUMPY if numpy is not None and CAN_DRAW else ()
    return *_PATCHES, *(Patch(numpy, name, _wrap_numpy_draw) for name in names)


_PATCHES = (
    Patch(os._Environ, "__getitem__", _wrap_environment_item),
    Patch(os._Environ, "__iter__", _wrap_environment),
    Patch(os._Environ, "__len__", _wrap_environment),
    *(Patch(builtins, name, _wrap_by_name) for name in sorted(RECORDED)),
    Patch(builtins, "hash", _wrap_hash),
    Patch(json.encoder, "c_make_encoder", _take_away),
    Patch(json.encoder, "_make_iterencode", _wrap_json),
    *(Patch(random.Random, name, _wrap_draw) for name in AS_A_WHOLE),
    Patch(importlib._bootstrap, "_gcd_import", _wrap_import),
    Patch(importlib._bootstrap, "_find_and_load", _wrap_loading),
)
