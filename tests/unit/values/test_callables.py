"""The code of a callable is found without running any of the user's."""

from __future__ import annotations

import functools

import torch

from tripwire.values.classes import find_in_class
from tripwire.values.contents import find_code, functions_behind


def plain(x):
    return x


class Wrapper:
    def __init__(self, wrapped) -> None:
        self.__wrapped__ = wrapped

    def __call__(self, x):
        return self.__wrapped__(x)


def test_what_an_object_wraps_is_its_code() -> None:
    assert find_code(Wrapper(plain)) is plain.__code__
    assert find_code(functools.cache(plain)) is plain.__code__


def test_a_wrapped_value_is_not_asked_whether_it_is_true() -> None:
    assert find_code(Wrapper(torch.ones(2))) is Wrapper.__call__.__code__


def test_what_lies_in_a_class_is_found_as_it_lies_there() -> None:
    class Base:
        @property
        def name(self):
            raise AssertionError("it was run")

    class Derived(Base):
        pass

    assert find_in_class(Derived, "name") is vars(Base)["name"]
    assert find_in_class(Derived, "nothing") is None


def test_functions_are_found_behind_descriptors_and_decorators() -> None:
    def quiet(function):
        def inner(x):
            return function(x)

        return inner

    def loud(function):
        return functools.wraps(function)(quiet(function))

    class Own(property):
        pass

    for descriptor in (staticmethod, classmethod, property, Own, functools.cached_property):
        assert list(functions_behind(descriptor(plain))) == [plain]
    assert list(functions_behind(loud(plain)))[1:] == [plain]
    assert plain not in functions_behind(quiet(plain))
    assert plain in functions_behind(quiet(plain), through_cells=True)


def test_a_function_that_wraps_itself_is_found_once() -> None:
    def own(x):
        return own

    own.__wrapped__ = own
    assert list(functions_behind(own, own, through_cells=True)) == [own]
