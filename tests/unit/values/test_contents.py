"""What values hold: found without their code, and without keeping anything alive."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import OrderedDict, deque

import pytest
import torch

import tripwire
from tripwire.reading.tensors import iter_held
from tripwire.values.classes import module_of
from tripwire.values.contents import own_dict, parts_of

X = torch.ones(2)


class Plain:
    """An object with a dict."""

    def __init__(self) -> None:
        self.held = X

    def method(self) -> None:
        pass


class Slotted:
    """An object without one."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = X


class Hidden(Plain):
    """Its `__dict__` is a property, and must not run."""

    @property
    def __dict__(self):
        raise AssertionError("asked")


def closing(held: torch.Tensor):
    return lambda: held


HOLDERS = [
    [X],
    (X,),
    deque([X]),
    {"a": X},
    {X: "a"},
    {X},
    frozenset([X]),
    OrderedDict(a=X),
    types.MappingProxyType({"a": X}),
    Plain(),
    Slotted(),
    Hidden(),
    Plain().method,
    functools.partial(print, X),
    functools.partial(print, a=X),
    closing(X),
    slice(X, None),
    property(closing(X)),
    functools.cached_property(closing(X)),
    staticmethod(closing(X)),
    classmethod(closing(X)),
]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: type(holder).__name__)
def test_a_tensor_is_found_in_whatever_holds_it(holder) -> None:
    assert [held is X for held in iter_held(holder)] == [True]


def test_parts_have_the_names_under_which_they_are_reached() -> None:
    method = Plain().method
    assert dict(parts_of(method)) == {"__self__": method.__self__, "__func__": method.__func__}
    assert dict(parts_of(list[int])) == {"__origin__": list, "__args__": (int,)}
    assert dict(parts_of(int | str)) == {"__args__": (int, str)}
    assert not dict(parts_of(Plain()))


def test_no_class_is_kept_alive_by_having_been_looked_at() -> None:
    def look():
        class Local(Plain):
            pass

        class Other:
            pass

        for cls in (Local, Other):
            own_dict(cls())
        return [weakref.ref(Local), weakref.ref(Other)]

    refs = look()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_users_class_dies_with_the_compiled_function_that_read_from_it() -> None:
    def play():
        class Settings:
            def __init__(self) -> None:
                self.scale = 2.0

        settings = Settings()
        compiled = tripwire.compile(lambda x: x * settings.scale, backend="eager")
        for _ in range(3):
            compiled(X)
        return weakref.ref(Settings)

    ref = play()
    gc.collect()
    assert ref() is None


def test_a_class_made_without_a_module_is_of_none() -> None:
    space: dict[str, type] = {}
    exec("made = type('Made', (), {})", space)
    assert module_of(space["made"]) == ""
