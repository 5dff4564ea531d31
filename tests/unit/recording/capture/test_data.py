"""Plain values, containers and instances come back as they were; nothing of theirs runs."""

from __future__ import annotations

import abc
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import logging
import math
import pathlib
import random
import re
import threading
import time
import types
import typing
import uuid
import weakref

import numpy as np
import pytest
import torch
from roundtrip import again, encode, name_code, seen

from tripwire.errors import BadRecord, CannotReplay
from tripwire.recording.capture.classes import _names_of_code
from tripwire.recording.capture.encode import Encoder
from tripwire.recording.capture.origin import KEEP_ALL, Blobs
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import BlobRuns, StoredBlobs
from tripwire.recording.format.container import ByteSource
from tripwire.recording.format.decode import view
from tripwire.recording.format.file import Record
from tripwire.recording.format.views import ObjectView, OpaqueView

PLAIN = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1, 10**400, 0.0, 1.0, 1e300,
    5e-324, 0.1, math.inf, -math.inf, 1j, complex(-0.0, math.inf), "", "é\0\n", "x" * 65, "\ud800",
    "\ud800" * 70, b"", b"\0\xff", bytearray(b"ab"), ..., NotImplemented, range(3),
    range(-(2**70), 2**70, 3), slice(1, None, 2.5), (), (1, (2,)), [], [[[]]], {}, {1: "a"}, set(),
    {1, "a", (2, 3)}, frozenset({1, frozenset({2})}), collections.deque([1, 2], maxlen=3),
    collections.OrderedDict(a=1, b=2), collections.Counter("aab"),
]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    PLAIN,
    ids=lambda v: f"{v!r:.30}" if type(v) not in (set, frozenset) else type(v).__name__,
)
def test_plain_values_come_back(tmp_path, value) -> None:
    for found in (again(tmp_path, value), seen(tmp_path, value)):
        assert type(found) is type(value)
        assert found == value
        assert repr(found) == repr(value)


def test_nan_keeps_its_bits_and_zero_its_sign(tmp_path) -> None:
    import struct

    odd = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    found = again(tmp_path, [odd, -0.0])
    assert struct.pack(">d", found[0]).hex() == "7ff8000000000123"
    assert math.copysign(1, found[1]) == -1


def test_sharing_and_cycles_come_back(tmp_path) -> None:
    shared: list[object] = [1]
    value = {"a": shared, "b": (shared, shared)}
    value["self"] = value
    found = again(tmp_path, value)
    assert found["a"] is found["b"][0] is found["b"][1]
    assert found["self"] is found


def test_a_tuple_that_reaches_itself_through_a_list(tmp_path) -> None:
    inner: list[object] = []
    value = (inner,)
    inner.append(value)
    found = again(tmp_path, value)
    assert found[0][0] is found


def test_orders_and_factories_are_kept(tmp_path) -> None:
    ordered = collections.OrderedDict(a=1, b=2, c=3)
    ordered.move_to_end("a")
    default = collections.defaultdict(list, {3: [1], 1: [2]})
    found = again(tmp_path, [ordered, default])
    assert list(found[0]) == ["b", "c", "a"]
    assert found[1] == default
    assert found[1].default_factory is list


def test_nothing_is_too_deep(tmp_path) -> None:
    value: object = 1
    for _ in range(20_000):
        value = (value,)
    found = again(tmp_path, [value])[0]
    depth = 0
    while found != 1 if isinstance(found, int) else True:
        found = found[0]
        depth += 1
    assert depth == 20_000


# --- instances ---


@dataclasses.dataclass
class Point:
    x: int
    y: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    x: int
    y: object


class Slotted:
    __slots__ = ("_Slotted__hidden", "a", "unset")


class Both(Slotted):
    def __init__(self) -> None:
        self.a = 1
        self.b = 2


class Colour(enum.Enum):
    RED = "r"
    BLUE = (1, 2)


class Flags(enum.Flag):
    A = 1
    B = 2


class Number(enum.IntEnum):
    ONE = 1


class Pair(typing.NamedTuple):
    left: object
    right: object = 3


class Names(list):
    pass


class Table(dict):
    def __setitem__(self, key, value):
        raise AssertionError("ran")

    __init__ = update = items = __iter__ = __setitem__


class Count(int):
    pass


class Word(str):
    pass


class Recent(collections.deque):
    pass


class Trouble(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__("trouble", code)
        self.code = code


class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self) -> None: ...


class Concrete(Abstract):
    def f(self) -> None: ...


def test_instances_come_back_without_their_constructors(tmp_path) -> None:
    slotted = Slotted()
    slotted.a = [1]
    concrete = Concrete()
    concrete.me = concrete
    value = [Point(1, [2]), Pin(1, "a"), slotted, Both(), concrete, types.SimpleNamespace(a=1)]
    found = again(tmp_path, value)
    assert found[0] == value[0]
    assert found[1] == value[1]
    assert found[2].a == [1] and not hasattr(found[2], "unset")
    assert (found[3].a, found[3].b) == (1, 2)
    assert found[4].me is found[4] and type(found[4]) is Concrete
    assert found[5] == value[5]


def test_attributes_with_names_that_are_none_are_passed_over(tmp_path) -> None:
    odd = types.SimpleNamespace(a=1)
    odd.__dict__.update({3: "three", "\ud800": 1})
    assert again(tmp_path, odd) == types.SimpleNamespace(a=1)


def test_enums_and_named_tuples_come_back(tmp_path) -> None:
    stamp = time.gmtime(0)
    value = [Colour.RED, Colour.BLUE, Flags.A | Flags.B, Flags(0), Number.ONE, Pair(1, [2]), stamp]
    found = again(tmp_path, value)
    assert found[0] is Colour.RED and found[1] is Colour.BLUE
    assert found[2] == Flags.A | Flags.B and found[3] == Flags(0) and found[4] is Number.ONE
    assert found[5] == Pair(1, [2]) and type(found[5]) is Pair
    assert found[6] == stamp and type(found[6]) is time.struct_time


def test_subclasses_of_containers_hold_what_they_held(tmp_path) -> None:
    table = Table.__new__(Table)
    dict.update(table, {"a": table})
    names = Names([1, 2])
    names.extra = names
    recent = Recent([1, 2, 3], maxlen=2)
    value = [names, table, Count(7), Word("w" * 100), recent]
    found = again(tmp_path, value)
    assert list(found[0]) == [1, 2] and found[0].extra is found[0] and type(found[0]) is Names
    assert type(found[1]) is Table and dict.__getitem__(found[1], "a") is found[1]
    assert found[2] == 7 and type(found[2]) is Count
    assert found[3] == "w" * 100 and type(found[3]) is Word
    assert found[4] == recent and found[4].maxlen == 2


def test_exceptions_keep_their_arguments_and_attributes(tmp_path) -> None:
    found = again(tmp_path, [Trouble(3), KeyError("k"), OSError(2, "no")])
    assert found[0].args == ("trouble", 3) and found[0].code == 3 and type(found[0]) is Trouble
    assert found[1].args == ("k",)
    assert found[2].args == (2, "no")


def test_values_of_the_standard_library_come_back(tmp_path) -> None:
    utc = datetime.UTC
    value = [
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, utc),
        datetime.date(2020, 1, 2),
        datetime.time(1, 2),
        datetime.timedelta(1, 2, 3),
        decimal.Decimal("1.50"),
        uuid.UUID(int=5),
        re.compile("a+", re.IGNORECASE),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("/a"),
    ]
    assert again(tmp_path, value) == value
    assert again(tmp_path, logging.getLogger("a.b")) is logging.getLogger("a.b")


def test_a_random_generator_goes_on_where_it_was(tmp_path) -> None:
    source = random.Random(3)
    source.random()
    found = again(tmp_path, source)
    assert found.random() == source.random()


def test_an_object_is_complete_before_it_is_hashed(tmp_path) -> None:
    pin = Pin(1, ("a", 2))
    value = {pin: "v", "set": {pin}, "frozen": frozenset({pin})}
    found = again(tmp_path, value)
    assert found[pin] == "v" and found["set"] == {pin} and found["frozen"] == {pin}


class Ring:
    """Reached from a frozenset that it holds itself."""


def test_an_object_and_a_frozenset_that_hold_each_other(tmp_path) -> None:
    ring = Ring()
    ring.others = (frozenset({ring, 1}),)
    found = again(tmp_path, ring)
    assert found in found.others[0] and found is not ring


# --- what can't be kept ---


class Hostile:
    ran: typing.ClassVar[list[str]] = []

    def __getattribute__(self, name):
        Hostile.ran.append(name)
        raise RuntimeError(name)

    def __repr__(self):
        Hostile.ran.append("repr")

    def __eq__(self, other):
        Hostile.ran.append("eq")

    def __hash__(self):
        if Hostile.ran is not None and Hostile.counting:
            Hostile.ran.append("hash")
        return 1

    def __reduce_ex__(self, n):
        Hostile.ran.append("reduce")

    counting = False


class Meta(type):
    def __hash__(cls):
        if Hostile.counting:
            Hostile.ran.append("meta hash")
        return 1

    def __eq__(cls, other):
        if Hostile.counting:
            Hostile.ran.append("meta eq")
        return cls is other

    def __instancecheck__(cls, value):
        Hostile.ran.append("instancecheck")
        return True


class HostileClass(metaclass=Meta):
    @property
    def __dict__(self):
        Hostile.ran.append("dict")
        return {}

    @property
    def __class__(self):
        Hostile.ran.append("class")
        return int


def test_no_code_of_the_users_runs_while_encoding() -> None:
    one, two = Hostile(), HostileClass()
    keyed = {one: 1}
    ordered = collections.OrderedDict([(one, 1), (2, two)])
    group, frozen = {one}, frozenset({one})
    Hostile.ran.clear()
    Hostile.counting = True
    try:
        encode([one, two, keyed, ordered, group, frozen, (one,), [two]])
    finally:
        Hostile.counting = False
    assert Hostile.ran == []


def generator():
    yield 1


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock, threading.RLock, pathlib.Path(__file__).open, io.StringIO, generator,
        lambda: iter([1]), weakref.WeakKeyDictionary, lambda: weakref.WeakSet(), threading.Thread,
        lambda: memoryview(b"x"), lambda: zip([1]),
        lambda: np.array([object()]), lambda: np.zeros(2, "i4,f4"), lambda: generator().gi_frame,
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_told_never_raised(make, tmp_path) -> None:
    value = make()
    record, encoder = encode({"it": [value]})
    assert encoder.left_out, record.table
    assert encoder.left_out[0].what.startswith("value['it'][0]")
    found = again(tmp_path, {"it": [value]})
    del found
    if hasattr(value, "close"):
        value.close()


def test_a_missing_value_raises_when_it_is_used(tmp_path) -> None:
    found = again(tmp_path, [threading.Lock()])[0]
    for use in (lambda: found.acquire(), lambda: found.__enter__(), lambda: found + 1, found):
        with pytest.raises(CannotReplay, match="lock") as raised:
            use()
        assert raised.value.slug == "replay-missing-value"


@pytest.mark.parametrize(
    "big",
    [
        lambda n: list(range(2 * 10**6 // n)),
        lambda n: [[] for _ in range(300_000 // n)],
        lambda n: [Point(i) for i in range(100_000 // n)],
        lambda n: [[Point(j) for j in range(100)] for i in range(1000 // n)],
        lambda n: "[" * (10**6 // n),
        lambda n: "é" * (2 * 10**7 // n),
        lambda n: bytes(3 * 10**7 // n),
        lambda n: {str(i): i for i in range(10**6 // n)},
        lambda n: [(i, str(i), [i, (i,)]) for i in range(50_000 // n)],
    ],
)
def test_what_is_too_large_for_a_table_is_left_out_and_the_rest_can_be_read(
    big, tmp_path, room
) -> None:
    record, encoder = encode({"small": [1], "big": big(room)})
    assert encoder.left_out
    assert all(omission.what.startswith("value['big']") for omission in encoder.left_out)
    with Record.open(record.write(tmp_path / "x.rec")) as opened:
        assert view(opened.table, opened.blobs)["value"]["small"] == [1]


def test_a_large_vocabulary_fits(tmp_path) -> None:
    words = {f"word{i}": i for i in range(250_000)}
    assert again(tmp_path, words) == words


@pytest.mark.parametrize(
    "many",
    [
        lambda: [0] * 10**6,
        lambda: ["a"] * 400_000,
        lambda: [()] * 200_000,
        lambda: "[" * 400_000 + "😀",
        lambda: [[] for _ in range(50_000)],
        lambda: dict.fromkeys(range(300000)),
        lambda: ["é"] * 200_000,
        lambda: "[" * 500_000,
    ],
)
def test_what_deflates_to_next_to_nothing_is_as_large_in_the_file_as_a_reader_wants_it(
    many, tmp_path
) -> None:
    """A small file with a large table is refused, so a sound one isn't that small."""
    value = many()
    assert again(tmp_path, value) == value


class Wants:
    def __init__(self) -> None:
        self.known = {"x"}

    def wants(self, cls: type, name: str) -> bool:
        return name in self.known


def test_names_that_nothing_uses_are_left_out() -> None:
    record, _ = encode([Point(1, [5])], names=Wants())
    assert nodes.Object((2,), ("x",), (1,)) in record.table.nodes


def test_names_may_become_wanted_while_encoding() -> None:
    wants = Wants()

    class Late:
        def grow(self) -> None:
            wants.known.add("y")

        def node(self) -> nodes.AnyNode:
            return nodes.ConstantNode("Ellipsis")

    blobs = Blobs(KEEP_ALL)
    encoder = Encoder(blobs, KEEP_ALL, name_code, wants)
    root = encoder.slot([Point(1, [5])])
    encoder.place(Late())
    table = encoder.finish({"value": root})
    kept = next(node for node in table.nodes if isinstance(node, nodes.Object))
    assert kept.names == ("x", "y")
    assert nodes.List((5,)) in table.nodes


def test_views_describe_without_trust(tmp_path) -> None:
    found = seen(tmp_path, [Point(1, [2]), threading.Lock(), Colour.RED, Pair(1, 2)])
    assert isinstance(found[0], ObjectView)
    assert found[0].attributes == {"x": 1, "y": [2]}
    assert repr(found[0].cls) == "<test_data.Point>"
    assert isinstance(found[1], OpaqueView)
    assert found[2].name == "RED" and found[3].items == (1, 2)


# --- tables that no encoder writes ---


def table_view(*table: nodes.AnyNode) -> object:
    blobs = StoredBlobs(ByteSource.of(b""), (), BlobRuns(0))
    return view(nodes.Table({"value": (0,)}, table), blobs)["value"]


@pytest.mark.parametrize(
    "table",
    [
        (nodes.Tuple(((0,),)),),
        (nodes.Tuple(((1,),)), nodes.Tuple(((0,),))),
        (nodes.Set(((0,),), True),),
        (nodes.Dict(((1,),), (1,)), nodes.List(())),
        (nodes.Set(((1,),), False), nodes.Set((), False)),
        (nodes.Deque((), -1),),
        (nodes.Text(b"\xff"),),
        (nodes.TorchValue("dtype", "nn"),),
        (nodes.TorchValue("device", "nowhere"),),
        (nodes.TorchValue("size", "1,x"),),
        (nodes.Function("f", "f", 9, (1,), None, None, (), None), nodes.Namespace("m", (), ())),
    ],
)
def test_nonsense_is_a_damaged_record(table) -> None:
    with pytest.raises(BadRecord):
        table_view(*table)


def test_a_key_that_would_take_forever_to_hash_is_refused() -> None:
    chain = [nodes.Tuple(((i + 1,), (i + 1,))) for i in range(1, 60)]
    with pytest.raises(BadRecord):
        table_view(nodes.Set(((1,),), False), *chain, nodes.Tuple(()))


def test_keys_that_all_collide_are_refused() -> None:
    prime = 2**61 - 1
    count = 5000
    keys = tuple((i + 1,) for i in range(count))
    numbers = [nodes.BigInt(f"{prime * (i + 2**64):x}") for i in range(count)]
    with pytest.raises(BadRecord):
        table_view(nodes.Set(keys, False), *numbers)


def _decorate(function):
    @functools.wraps(function)
    def wrapper(self):
        return function(self) + self.asked_by_a_wrapper

    return wrapper


class Decorated:
    @torch.no_grad()
    @_decorate
    def method(self):
        return self.asked_behind_two

    @functools.cached_property
    def cached(self):
        return self.asked_once

    @property
    def plain(self):
        return 1

    @plain.setter
    def plain(self, value):
        self.asked_by_a_setter.append(value)


def test_names_that_a_librarys_methods_ask_for_are_found_behind_decorators() -> None:
    found = set(_names_of_code(Decorated))
    assert found >= {
        *("asked_by_a_wrapper", "asked_behind_two", "asked_once", "asked_by_a_setter"),
    }
