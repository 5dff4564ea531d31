"""Objects that lie about their class: a call that plain Python runs is run, with its result.

Mocks with a spec, proxies, and metaclasses with methods of their own stand in every place that a
call can come to. None of their code runs more often than in the plain call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import nn

import tripwire
from tripwire.telemetry.log import logging_to

RAN: collections.Counter[str] = collections.Counter()


def noting(name: str, answer: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A method that notes that it ran, and answers or raises."""

    def method(self: object, *args: object) -> object:
        RAN[name] += 1
        if answer is None:
            raise RuntimeError(f"{name} was asked")
        return answer(self, *args)

    return method


_SILENT = ("eq", "hash", "len", "bool", "iter", "getitem", "repr", "getattr")


class Lazy:
    """Not there yet: whatever it is asked for raises."""

    __class__ = property(noting("__class__"))  # type: ignore[assignment]
    __dict__ = property(noting("__dict__"))  # type: ignore[assignment]
    for _name in _SILENT:
        locals()[f"__{_name}__"] = noting(_name)


class LazyLookup:
    __getattribute__ = noting("__getattribute__")


class Proxy:
    """Says that it is what it stands for, as werkzeug's and wrapt's do."""

    def __init__(self, target: object) -> None:
        object.__setattr__(self, "target", target)

    __class__ = property(noting("__class__", lambda self: type(self.target)))  # type: ignore[assignment]
    __eq__ = noting("__eq__", lambda self, other: self.target == other)
    __hash__ = noting("__hash__", lambda self: hash(self.target))  # type: ignore[assignment]
    __len__ = noting("__len__", lambda self: len(self.target))
    __iter__ = noting("__iter__", lambda self: iter(self.target))
    __getitem__ = noting("__getitem__", lambda self, key: self.target[key])
    __getattr__ = noting("__getattr__", lambda self, name: getattr(self.target, name))


class LyingDict(dict):  # type: ignore[type-arg]
    """A dict that denies it."""

    __class__ = property(noting("__class__", lambda self: int))  # type: ignore[assignment]


def odd_class(*names: str) -> Any:
    """A class whose metaclass raises when it is asked one of these."""
    body = {name: noting(f"type {name}") for name in names}
    if "__eq__" in names and "__hash__" not in names:
        body["__hash__"] = None  # as Python does
    return type("Meta", (type,), body)("Odd", (), {"scale": 3.0})


METACLASSES = [
    ("__eq__",),
    ("__hash__",),
    ("__eq__", "__hash__"),
    ("__instancecheck__", "__subclasscheck__"),
    ("__getattribute__",),
    ("__bool__", "__len__", "__iter__", "__repr__", "__contains__"),
]
KINDS: dict[str, Callable[[], Any]] = {
    **{
        f"MagicMock({getattr(spec, '__name__', spec)})": functools.partial(MagicMock, spec=spec)
        for spec in (dict, list, tuple, str, int, float, bool, set, type, slice, torch.Size)
    },
    **{
        f"Mock({spec.__name__})": functools.partial(Mock, spec=spec)
        for spec in (torch.nn.Module, torch.Tensor, torch.dtype, functools.partial, noting)
    },
    "MagicMock": MagicMock,
    "Mock(module)": functools.partial(Mock, spec=types),
    "lazy": Lazy,
    "lazy lookup": LazyLookup,
    "lying dict": lambda: LyingDict(a=1),
    **{
        f"proxy of {type(target).__name__}": functools.partial(Proxy, target)
        for target in ({"a": 1}, [1], "abc", 3, torch.ones(2), torch.nn.Linear(2, 2), int, noting)
    },
    **{f"object of {' '.join(m)}": lambda m=m: odd_class(*m)() for m in METACLASSES[:-2]},
    "object of __getattribute__": lambda: object.__new__(odd_class("__getattribute__")),
    "object of protocols": lambda: odd_class(*METACLASSES[-1])(),
    **{f"class of {' '.join(m)}": functools.partial(odd_class, *m) for m in METACLASSES},
}


class Box:
    def __init__(self, held: object) -> None:
        self.held = held


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


@dataclasses.dataclass(eq=False)
class Fields:
    held: object


Named = collections.namedtuple("Named", "held")  # noqa: PYI024
HELD: object = None
ELSEWHERE = types.ModuleType("elsewhere")


class Net(torch.nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        object.__setattr__(self, "held", held)

    def forward(self, x: torch.Tensor) -> object:
        return self.held is None, x + 1


def passed(x, value):
    return x + 1


def compared(x, value):
    return type(value) is dict, x + 1


def attribute(x, box):
    return box.held is None, x + 1


def in_global(x):
    return HELD is None, x + 1


def first(x, items):
    return items[0] is None, x + 1


def under_key(x, items):
    return items["k"] is None, x + 1


def returned(x, value):
    return value, x + 1


def returned_alone(x, value):
    return value


def keys_counted(x, items):
    return [key is None for key in items], x + len(items)


def in_module(x):
    return ELSEWHERE.held is None, x + 1


def returned_inside(x, value):
    return {"a": [value], "b": x + 1}


def stored(x, box, value):
    box.other = value
    return x + 1


def appended(x, items, value):
    items.append(value)
    return x + 1


def starred(x, *values):
    return len(values), x + 1


def same_one(x, value, items):
    return value is items[0], x + 1


def enclosed(value):
    def inner(x):
        return value is None, x + 1

    return inner


def defaulted(value):
    def inner(x, y=value):
        return y is None, x + 1

    return inner


def in_class(value):
    class Holder:
        held = value

    def inner(x):
        return Holder.held is None, x + 1

    return inner


def places(value: object) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Calls that come to a value, each in another place."""
    global HELD
    HELD = value
    x = torch.ones(2)
    vars(ELSEWHERE)["held"] = value
    for function in (passed, compared, returned, returned_inside, returned_alone):
        yield function, (x, value)
    for inside in ([value], (value,), {"k": value}, Box(value)):
        yield returned_alone, (x, inside)
    yield in_module, (x,)
    for holder in (Box, Slots, Fields, Named, lambda v: types.SimpleNamespace(held=v)):
        yield attribute, (x, holder(value))
    yield in_global, (x,)
    for items in ([value], (value, 1), collections.deque([value])):
        yield first, (x, items)
    yield under_key, (x, {"k": value})
    yield stored, (x, Box(1), value)
    yield appended, (x, [], value)
    yield starred, (x, value, value)
    yield same_one, (x, value, [value])
    yield functools.partial(passed, value=value), (x,)
    for build in (enclosed, defaulted, in_class, Net):
        yield build(value), (x,)


def is_same(left: Any, right: Any) -> bool:
    """Whether two results are one, without asking what lies in them."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if type(left) is tuple or type(left) is list:
        return len(left) == len(right) and all(map(is_same, left, right))
    if type(left) is dict:
        return list(left) == list(right) and all(map(is_same, left.values(), right.values()))
    return type(left) is torch.Tensor and torch.equal(left, right)


def check_like_plain(function: Callable[..., Any], args: tuple[Any, ...], **options: Any) -> Any:
    """Compiled, a call gives the plain result and asks an object no more than the plain one."""
    RAN.clear()
    plain = function(*args)
    asked = RAN.copy()
    compiled = tripwire.compile(function, backend="eager", **options)
    for _ in range(3):
        RAN.clear()
        assert is_same(compiled(*args), plain), function
        assert not RAN - asked, function
    return compiled


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_with_an_object_that_lies_runs_as_plain_python_runs_it(kind):
    for function, args in places(KINDS[kind]()):
        check_like_plain(function, args)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_with_another_object_that_lies_runs_and_is_explained(kind):
    for function, args in places(KINDS[kind]()):
        compiled = check_like_plain(function, args)
        RAN.clear()
        assert str(tripwire.explain(compiled))
        assert not RAN, function
    one, other = KINDS[kind](), KINDS[kind]()
    compiled = tripwire.compile(returned, backend="eager")
    x = torch.ones(2)
    assert compiled(x, one)[0] is one
    RAN.clear()
    assert compiled(x, other)[0] is other
    assert not RAN


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_with_an_object_that_lies_as_a_key_runs(kind):
    value, x = KINDS[kind](), torch.ones(2)
    try:
        holders = [{value: 1}, {1: 2, value: 3}, frozenset([value])]
    except (RuntimeError, TypeError):
        pytest.skip("plain Python can't hash it")
    for items in holders:
        compiled = tripwire.compile(keys_counted, backend="eager")
        for _ in range(3):
            assert is_same(compiled(x, items)[1], keys_counted(x, items)[1])


def test_what_a_dict_holds_that_denies_being_one_is_read():
    box = LyingDict(scale=2.0)

    def scaled(x):
        return x * box["scale"]

    compiled = tripwire.compile(scaled, backend="eager")
    x = torch.ones(2)
    assert compiled(x)[0] == 2.0
    box["scale"] = 5.0
    assert compiled(x)[0] == 5.0


def test_attributes_of_objects_with_odd_metaclasses_are_read_and_never_stale():
    for names in METACLASSES[:-2]:
        odd = odd_class(*names)()

        def scaled(x, odd=odd):
            return x * odd.scale

        compiled = tripwire.compile(scaled, backend="eager")
        x = torch.ones(2)
        assert compiled(x)[0] == 3.0
        odd.scale = 4.0
        assert compiled(x)[0] == 4.0


def raises_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def failing(*args: object) -> None:
        function(*args)
        raise ValueError("recorded")

    return failing


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Mock" not in kind or "dict" in kind])
def test_a_failing_call_with_an_object_that_lies_is_recorded_and_told(
    kind, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    held = KINDS[kind]()
    x = torch.ones(2)
    calls = [(passed, (x, held)), (attribute, (x, Box(held)))]
    with logging_to(tmp_path / "log"):
        for number, (function, args) in enumerate(calls):
            failing = raises_after(function)
            folder = tmp_path / str(number)
            compiled = tripwire.compile(failing, backend="eager", record_on_error=folder)
            RAN.clear()
            with pytest.raises(ValueError, match="recorded"):
                compiled(*args)
            assert not RAN, function
            assert [tripwire.load_record(path) for path in folder.glob("*.rec")], function


AUDITED = ["MagicMock(dict)", "lazy", "object of __getattribute__", "object of __eq__ __hash__"]


@pytest.mark.parametrize(
    "kind",
    [kind if kind in AUDITED else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_an_audit_with_an_object_that_lies_comes_to_its_end(kind):
    held = KINDS[kind]()
    x = torch.ones(2)
    for target, args in ((first, (x, [held])), (attribute, (x, Box(held))), (Net(held), (x,))):
        audit = tripwire.audit(tripwire.compile(target, backend="eager"), *args)
        assert audit.findings
        assert audit.ok, audit.faults


def test_a_module_whose_metaclass_raises_is_compiled_and_audited():
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            if name in ("__name__", "__qualname__", "__module__", "__mro__", "__dict__"):
                raise RuntimeError(name)
            return super().__getattribute__(name)

    class Odd(torch.nn.Module, metaclass=Meta):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.scale = 3.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    compiled = tripwire.compile(Odd(), backend="eager")
    assert compiled(torch.ones(2))[0] == 3.0
    assert tripwire.audit(compiled, torch.ones(2)).ok


# --- callables that answer for themselves ------------------------------------------------------


def _raising(error: type[Exception]) -> Callable[..., Any]:
    def answer(self: object, name: str) -> object:
        raise error(name)

    return answer


ANSWERS: dict[str, Callable[..., Any]] = {
    "a number": lambda self, name: 1.5,
    "itself": lambda self, name: self,
    "None": lambda self, name: None,
    "KeyError": _raising(KeyError),
    "RuntimeError": _raising(RuntimeError),
    "AttributeError": _raising(AttributeError),
}


@pytest.mark.parametrize("how", ["__getattr__", "__getattribute__"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_callable_that_answers_for_every_attribute_is_compiled(name, how):
    asked: list[str] = []

    def answer(self: object, attribute: str) -> object:
        asked.append(attribute)
        known = object.__getattribute__(self, "__dict__")
        if attribute in known or attribute in ("__module__", "__doc__", "__dict__"):
            return object.__getattribute__(self, attribute)
        return ANSWERS[name](self, attribute)

    def call(self: Any, x: torch.Tensor, k: int = 1) -> torch.Tensor:
        return x * self.gain + k

    cls = type("Answering", (), {how: answer, "__call__": call})
    scaling = cls()
    vars(scaling)["gain"] = 2.0
    compiled = tripwire.compile(scaling, backend="eager")
    asked.clear()
    for gain in (2.0, 2.0, 3.0, 3.0):
        vars(scaling)["gain"] = gain
        assert compiled(torch.ones(2), k=4).tolist() == [gain + 4] * 2
    assert set(asked) <= {"gain", "__dict__"}
    assert str(tripwire.explain(compiled)).startswith("Answering")
    assert tripwire.preview(scaling, torch.ones(2)).name == cls.__qualname__


class Hashed(nn.Module):
    """A module with a hash of its own, as metrics have, which names what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.sum()
        return self.total

    def __hash__(self) -> int:
        return hash((type(self).__name__, id(self)))


def test_no_hash_of_a_module_is_asked() -> None:
    module, x = Hashed(), torch.ones(2)
    compiled = tripwire.compile(lambda x: module(x) * 2, backend="eager", fullgraph=True)
    assert [compiled(x).item() for _ in range(4)] == [4.0, 8.0, 12.0, 16.0]
    assert compiled.statistics().traces <= 2
