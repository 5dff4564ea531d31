"""The table of a record: what is read from it is what was written."""

from __future__ import annotations

import collections
import threading
import tracemalloc
import types
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forging import read_table
from roundtrip import again, encode, write
from torch import nn

import tripwire
from tripwire.errors import BadRecord
from tripwire.recording.format import nodes
from tripwire.recording.format.blobs import NewBlob
from tripwire.recording.format.decode import view
from tripwire.recording.format.file import NewRecord, Record


def objects_of(path) -> bytes:
    with zipfile.ZipFile(path) as file:
        return file.read("objects.json")


def test_a_node_is_a_list_of_its_tag_and_fields_without_those_that_have_their_default(
    tmp_path,
) -> None:
    path = write(tmp_path, [{}, set(), frozenset({1}), [2], (3, "x")])
    tree = read_table(objects_of(path))
    assert tree["roots"] == {"value": [0]}
    wanted = [["dict"], ["set"], ["set", [1], True], ["list", [2]], ["tuple", [3, "x"]]]
    assert tree["nodes"][1:] == wanted


@pytest.mark.parametrize("count", [499, 500, 501, 1000, 1250])
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        set,
        frozenset,
        collections.deque,
        lambda items: {i: -i for i in items},
        lambda items: collections.OrderedDict((i, str(i)) for i in items),
    ],
)
def test_a_long_container_comes_back(tmp_path, make, count) -> None:
    value = make(range(count))
    found = again(tmp_path, [value, value])
    assert found[0] == value and type(found[0]) is type(value)
    assert found[0] is found[1]
    if not isinstance(value, set | frozenset):
        assert list(found[0]) == list(value)


ATTRIBUTES = [
    {},
    {"a": None},
    {"a": None, "b": 1, "c": None, "d": None, "e": 2},
    {"b": 1, "c": None},
    {"a b": None, "": None, " ": None, "c": None, "d": [None]},
    {"-": 1, "-a": None, "0": 2, "12": None, "%": 3, "%20": 4, "a%20b": None, "é": 5, "٣": 6},
    {"": 1},
    {"": None, "-": None},
    {"a\nb": 1, "\t": None, "\0": 2},
]


NAMES = [
    ["a"],
    ["a.b", "a.b.c", "", ".", "..", "a.", ".a", "0", "a.0", "-", "a.-b", "%", "1:2", "a:b", "a b"],
    ["layers.0.mlp", "layers.1.mlp", "layers.1", "mlp.layers", "layers"] * 5,
    [f"part{i % 7}.part{i % 5}" for i in range(1200)],
    ["é.ü", "٣.٣", "a\nb", "\0", "x" * 60],
    ["one", "two", "three", "four"] * 3 + ["four", "three", "two", "one"],
    [
        "a_b",
        "_",
        "__",
        "_a",
        "a_",
        "__init__",
        "a_1",
        "1_a",
        "a_-1",
        "a_%",
        "a_.b_",
        "_0._1",
        "a_b_c",
    ],
    [f"number_of_{a}_{b}" for a in ("layers", "heads", "1") for b in ("hidden", "layers", "2")] * 2,
]


def test_what_says_the_same_comes_back_apart(tmp_path) -> None:
    numbers = [[[1, True, 1.0]] * 2, [[True, 1, 1.0]]]
    value = [[[1, "a"] for _ in range(50)], [{} for _ in range(50)], *numbers]
    found = again(tmp_path, value)
    assert found == value
    assert len({id(one) for one in (*found[0], *found[1])}) == 100
    assert found[2][0] is found[2][1]
    assert [type(one) for one in found[3][0]] == [bool, int, float]


def test_long_lists_that_say_the_same_come_back_apart(tmp_path) -> None:
    value = [list(range(1200)) for _ in range(3)] + [["x"] * 1200 for _ in range(3)]
    found = again(tmp_path, value)
    assert found == value and len(set(map(id, found))) == 6


def test_references_keep_what_is_shared(tmp_path) -> None:
    shared = [[i] for i in range(20)]
    value = [shared, shared[3:9], shared[::-1], [shared[0], 5, *shared[1:4], None, shared[4]]]
    found = again(tmp_path, value)
    assert found == value
    assert all(one is found[0][one[0]] for part in found[1:3] for one in part)


def count_keys(x):
    return collections, Counter(x)


def test_things_of_a_library_are_named(tmp_path) -> None:
    value = [nn.Linear, nn.Bilinear, nn.Identity, nn.ReLU]
    assert all(map(lambda a, b: a is b, again(tmp_path, value), value))
    path = tripwire.record_call(tmp_path / "y.rec")(count_keys, "aab")
    assert b'["library","collections","Counter"]' in objects_of(path)
    assert tripwire.replay(path, trust=True) == (collections, Counter("aab"))


class Doubled:
    def __init__(self, number):
        super().__init__()
        self.number = number

    def both(self):
        return [self.one(), self.two()]

    def one(self):
        return self.number

    def two(self, times=2):
        return self.number * times


class Tripled(Doubled):
    step = None

    def __init__(self, number):
        super().__init__(number + (self.step or 0))

    def two(self, times=3):
        return (lambda: super(Tripled, self).two(times))()


def make_adder(add):
    def adder(value):
        return value + add

    return adder


ADDERS = [make_adder(i) for i in range(30)]


def use_functions(first, second):
    return first.both() + second.both() + [adder(1) for adder in ADDERS]


def test_functions_of_one_code_come_back_apart(tmp_path) -> None:
    path = tripwire.record_call(tmp_path / "x.rec")(use_functions, Doubled(1), Tripled(2))
    with Record.open(path) as record:
        held = record.table.nodes
    functions = [node for node in held if isinstance(node, nodes.Function)]
    assert len(functions) >= 37
    assert {f.qualname for f in functions} >= {"Tripled.two", "make_adder.<locals>.adder"}
    expected = use_functions(Doubled(1), Tripled(2))
    assert tripwire.replay(path, trust=True) == expected == [1, 2, 2, 6, *range(1, 31)]


class Kept(torch.Tensor):
    pass


def test_tensors_with_the_same_attributes_come_back_with_their_own(tmp_path) -> None:
    values = [torch.full((2,), float(i)) for i in range(2500)]
    for i, value in enumerate(values):
        value.note, value.nothing, value.own = "x", None, [i] if i % 100 == 0 else True
    shared = values[3].own = values[4].own = ["shared"]
    values[7].requires_grad_().grad = torch.ones(2)
    values[8].requires_grad_().grad = torch.full((2,), 8.0)
    values[9] = values[9].as_subclass(Kept)
    found = again(tmp_path, values)
    assert all(map(torch.equal, found, values))
    for i, (one, value) in enumerate(zip(found, values, strict=True)):
        assert list(vars(one).items()) == list(vars(value).items()), i
        assert (one.grad is None) is (value.grad is None)
    assert found[3].own is found[4].own and found[3].own == shared
    assert found[0].own is not found[100].own
    assert found[8].grad.tolist() == [8.0, 8.0]
    assert type(found[9]).__name__ == "Kept"


class Scaled(nn.Module):
    def __init__(self, scale: object, depth: object = 3) -> None:
        super().__init__()
        self.scale, self.depth = scale, depth
        self.inner = nn.Identity()


@pytest.mark.parametrize(
    "values",
    [
        [1, 1, 1],
        [1, True, 1.0],
        [0.0, -0.0, 0.0],
        [None, None, 0],
        ["a", "a", "b"],
        [1] * 40 + [2] * 40 + [True] * 40,
        [[1], [1], [1]],
    ],
    ids=str,
)
def test_equal_is_not_the_same(tmp_path, values) -> None:
    model = nn.ModuleList([Scaled(value) for value in values])
    found = [module.scale for module in again(tmp_path, model)]
    assert [(type(v), repr(v)) for v in found] == [(type(v), repr(v)) for v in values]
    if type(values[0]) is list:
        assert len(set(map(id, found))) == len(found)  # three lists, not one


def test_modules_keep_their_order_and_what_they_share(tmp_path) -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList([nn.Linear(2, 2), shared, Scaled(1), shared, nn.Linear(3, 2)])
    found = again(tmp_path, model)
    assert found[1] is found[3]
    assert [type(m) for m in found] == [type(m) for m in model]
    assert [m.in_features for m in found if hasattr(m, "in_features")] == [2, 2, 2, 3]


def test_a_table_that_was_read_can_be_written(tmp_path) -> None:
    value = [[[], [], {}], nn.Linear(2, 3), nn.Linear(2, 3), [1, True, 1.0, 0.0, -0.0], "a b", use]
    path = tripwire.record_call(tmp_path / "x.rec")(use, [value, [0.0], [-0.0], [True], ADDERS])
    with Record.open(path) as record:
        held = [NewBlob(b.dtype, b.shape, b.size, Held(record, i)) for i, b in blobs_of(record)]
        files = {name: record.read(name) for name in record.members if "/" in name}
        manifest = msgspec.structs.replace(record.manifest, members={})
        again = NewRecord(manifest, record.table, held, files).write(tmp_path / "y.rec")
    assert path.read_bytes() == again.read_bytes()


def blobs_of(record):
    return [(i, record.blobs[i]) for i in range(len(record.blobs))]


class Held:
    def __init__(self, record, number):
        self.data = record.blobs.read(number)

    def chunks(self):
        yield self.data


def use(x):
    return x


@pytest.mark.parametrize("none", [{499}, {500}, {998, 999}, {0, 499, 999}, set(range(1500))])
def test_attributes_that_are_none_are_kept_among_many(tmp_path, none) -> None:
    plain = types.SimpleNamespace(**{f"a{i}": None if i in none else i for i in range(1500)})
    tensor = torch.ones(2)
    vars(tensor).update(vars(plain))
    found = again(tmp_path, [plain, tensor])
    assert list(vars(found[0]).items()) == list(vars(plain).items())
    assert list(vars(found[1]).items()) == list(vars(plain).items())


def test_sentences_come_back(tmp_path) -> None:
    value = {f"{i} the cat sat on the mat and ate": f"{i} " + "is " * 19 for i in range(2000)}
    assert again(tmp_path, value) == value


LONG = ["x" * 100_000, "[{" * 50_000, '"' * 100_000, "é" * 50_000, "a" * 40_000 + "\U0001f600",
        "\0" * 50_000, "\ud800" * 40_000, b"\xff" * 100_001,
        bytearray(range(256)) * 300]  # fmt: skip


@pytest.mark.parametrize("value", LONG, ids=lambda value: f"{type(value).__name__}-{value[:1]!r}")
def test_a_long_string_comes_back(tmp_path, value) -> None:
    found = again(tmp_path, [value, value])
    assert found[0] == value and type(found[0]) is type(value)
    assert found[0] is found[1]


def test_a_class_of_many_attributes_comes_back(tmp_path) -> None:
    wide = type("Wide", (), {f"value{number}": number for number in range(6000)})

    def read(x):
        return [getattr(x, f"value{number}") for number in (0, 499, 500, 5999)]

    path = tripwire.record_call(tmp_path / "x.rec")(read, wide())
    assert tripwire.replay(path, trust=True) == [0, 499, 500, 5999]


def test_modules_that_share_many_names_come_back(tmp_path) -> None:
    first = nn.ModuleList([nn.Identity() for _ in range(1500)])
    value = [first, nn.ModuleList(list(first)), nn.ModuleList([*first, nn.ReLU()])]
    for module in value[:2]:
        for i in range(1200):
            module.register_buffer(f"buffer{i}", None)
            setattr(module, f"plain{i}", i)
    found = again(tmp_path, value)
    for one, module in zip(found, value, strict=True):
        assert list(one._modules) == list(module._modules)
        assert list(one._buffers) == list(module._buffers)
        for mine, theirs in zip(one, first, strict=False):
            assert type(mine) is type(theirs)
    assert found[1].plain1199 == 1199
    assert found[0][3] is found[1][3] is found[2][3]


def told_and_seen(tmp_path: Path, value: object) -> tuple[object, Any]:
    """What a record says that it left out, and what is seen in its file, which can be opened."""
    made = encode(value)[0]
    with Record.open(made.write(tmp_path / "x.rec")) as record:
        return made.manifest.omissions, view(record.table, record.blobs)["value"]


def test_what_a_record_has_no_room_for_is_told_and_the_rest_can_be_read(tmp_path, room) -> None:
    names = [f"attribute{i}" for i in range(100)]
    many = [types.SimpleNamespace(**dict.fromkeys(names, 1)) for _ in range(4500 // room)]
    tensors = [torch.zeros(0) for _ in range(8000 // room)]
    for number, tensor in enumerate(tensors):
        vars(tensor).update({f"a{i}": (number, i) for i in range(20)})
    modules = [nn.Identity() for _ in range(8000 // room)]
    for number, module in enumerate(modules):
        vars(module).update({f"b{i}": number + i for i in range(50)})
    for value in (many, tensors, modules):
        assert told_and_seen(tmp_path, value)[0]


class Slotted:
    __slots__ = tuple(f"a_name_of_a_slot{i}" for i in range(6000))

    def __init__(self):
        for name in self.__slots__:
            setattr(self, name, 1)


def make_wide():
    module = nn.Module()
    for i in range(15_000):
        setattr(module, f"a_rather_long_attribute_{i}", i)
        module.register_buffer(f"a_rather_long_buffer_{i}", None)
    module.child = nn.Identity()
    return module


Pair = collections.namedtuple("Pair", [f"x{i}" for i in range(20)])
SMALL = [  # hardly fits into an nth of the room, or doesn't; or into a line
    lambda n: [10**18 + i for i in range(700_000 // n)],
    lambda n: [1 / 3 + i for i in range(500_000 // n)],
    lambda n: [f"name{i}" for i in range(400_000 // n)],
    lambda n: [f"a name {i}" for i in range(400_000 // n)],
    lambda n: {f"[{{,{i}": f'"{i}"' for i in range(90_000 // n)},
    lambda n: {f"a.b.c.{i}": "a.b.c." + "x.y" * 15 for i in range(100_000 // n)},
    lambda n: {f"[{{,{i}": f'"{i}"' for i in range(200_000 // n)},
    lambda n: [f"[[[[{i}" for i in range(400_000 // n)],
    lambda n: ["ab cd"] * (350_000 // n),
    lambda n: ["\1" * 50 + f"a{i}" for i in range(200_000 // n)],
    lambda n: ["€" * 50 + f"a{i}" for i in range(220_000 // n)],
    lambda n: "\ud800" * (10**7 // n),
    lambda n: [Pair(*range(20)) for _ in range(40_000 // n)],
    lambda n: {"[[[[" + "\0" * 56 + str(i): i for i in range(500)},
    lambda n: types.SimpleNamespace(**{"x" * 1100 + str(i): i for i in range(500)}),
    lambda n: types.SimpleNamespace(**{"[" * 1000 + str(i): i for i in range(1000)}),
    lambda n: Slotted(),
    lambda n: make_wide(),
    lambda n: [["\1" * 63] for _ in range(70_000 // n)],
    lambda n: 1 << 3_000_000,
    lambda n: [1 << 1_000_000 for _ in range(140 // n)],
    lambda n: [torch.ones(n, dtype=torch.bool) for n in range(1, 2000)],
    lambda n: [torch.ones(n, 0) for n in range(4000)],
    lambda n: [
        types.SimpleNamespace(**{"x" * 900 + str(i): i for i in range(700)}) for _ in range(2)
    ],
    lambda n: [f"model.layers.projection.weight.model.layers.{i}" for i in range(150_000 // n)],
    lambda n: [["\0" * 60] for _ in range(60_000 // n)],
    lambda n: {"[" * 60 + str(i): '"' * 60 for i in range(450)},
    lambda n: [
        types.SimpleNamespace(**{f"a{i}": f'"{i},,,,,,,,' * 5 for i in range(20)})
        for _ in range(4000 // n)
    ],
]


@pytest.mark.parametrize("make", SMALL, ids=map(str, range(len(SMALL))))
def test_small_values_take_room_too(tmp_path, make, room) -> None:
    value = make(room)
    told, found = told_and_seen(tmp_path, value)
    assert told or not hasattr(value, "__len__") or len(found) == len(value)


WIDE = tuple(range(1000))
SOUND = [
    {1 << k: k for k in range(2000)},
    {(WIDE, i): i for i in range(2000)},
    {(-1, -2), (-2, -1), (-1, -1), -1, -2, 1 << 61, 1 << 122},
]


@pytest.mark.parametrize("value", SOUND, ids=["powers", "shared", "equal hashes"])
def test_sound_keys_come_back(tmp_path, value) -> None:
    assert again(tmp_path, value) == value


def test_many_functions_with_names_of_their_own(tmp_path) -> None:
    functions = [use_again for _ in range(1)]
    for i in range(3000):
        function = types.FunctionType(use_again.__code__, globals())
        function.__qualname__ = function.__name__ = f"named_{i}"
        functions.append(function)
    path = tripwire.record_call(tmp_path / "x.rec")(names_of, functions)
    assert tripwire.replay(path, trust=True) == names_of(functions)


def use_again():
    return 1


def names_of(functions):
    return [(one.__name__, one.__qualname__, one()) for one in functions]


def test_many_functions_with_many_cells(tmp_path) -> None:
    shared = [[i] for i in range(6)]
    a, b, c, d, e, f = shared

    def make(i):
        u, v, w, x, y, z = ([i, one] for one in range(6))

        def inner():
            return (a, u, b, v, c, w, d, x, e, y, f, z)

        return inner

    functions = [make(i) for i in range(500)]
    path = tripwire.record_call(tmp_path / "x.rec")(call_all, functions)
    assert tripwire.replay(path, trust=True) == call_all(functions)


def call_all(functions):
    return [function() for function in functions]


class Loud(type):
    def __hash__(cls):
        raise RuntimeError("nobody may ask")


class Quiet(metaclass=Loud):
    pass


def test_classes_of_items_are_not_asked_for_their_hash(tmp_path) -> None:
    found = again(tmp_path, ["a", Quiet()])
    assert found[0] == "a" and type(found[1]).__name__ == "Quiet"


def test_long_strings_in_a_list_are_not_copied(tmp_path) -> None:
    value = [str(i) * 10**7 for i in range(10)]
    tracemalloc.start()
    try:
        encode(value)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * 10**7  # the two that fit, as JSON, one at a time


def test_a_module_and_an_object_of_many_parts_come_back(tmp_path) -> None:
    model = nn.ModuleList([nn.Identity() for _ in range(12_000)] + [Scaled(1), Scaled(2)])
    plain = types.SimpleNamespace(**{f"name{i}": i % 1500 or None for i in range(12_000)})
    found = again(tmp_path, [model, plain])
    assert [type(m) for m in found[0]] == [type(m) for m in model]
    assert [m.scale for m in list(found[0])[-2:]] == [1, 2]
    assert list(vars(found[1]).items()) == list(vars(plain).items())


def test_a_call_with_a_great_many_things_that_are_left_out_can_be_opened(tmp_path) -> None:
    """Each of them is a line of the manifest, which a reader doesn't take at any size."""
    locks = [threading.Lock() for _ in range(3000)]
    path = tripwire.record_call(tmp_path / "x.rec")(len, locks)
    omissions = tripwire.load_record(path).manifest.omissions
    assert 100 < len(omissions) <= 1001
    assert omissions[-1].what == "..."


LONG = {
    "list": list(range(30_000)),
    "tuple": tuple(map(str, range(30_000))),
    "set": set(range(30_000)),
    "frozenset": frozenset(range(30_000)),
    "deque": collections.deque(range(30_000), 40_000),
    "dict": {str(i): -i for i in range(30_000)},
    "ordered": collections.OrderedDict((i, [i]) for i in range(3_000)),
    "text": "a long text, " * 30_000,
    "wide text": "a long text, " * 30_000 + "\N{SNAKE}",
    "half a character": "a long text, " * 30_000 + "\ud800",
    "bytes": bytes(range(256)) * 2_000,
    "bytearray": bytearray(range(256)) * 2_000,
    "int": -(3**300_000),
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_what_takes_several_lines_comes_back(tmp_path, value) -> None:
    path = write(tmp_path, [value, value])
    assert any(line.startswith(b" ") for line in objects_of(path).splitlines())
    found = again(tmp_path, [value, value])
    assert found[0] == value and type(found[0]) is type(value)
    assert found[0] is found[1]
    assert getattr(found[0], "maxlen", None) == getattr(value, "maxlen", None)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleDict({f"part{i}": nn.Identity() for i in range(3_000)})
        for i in range(3_000):
            setattr(self, f"name{i}", i)

    def forward(self, x):
        return sum((getattr(self, f"name{i}") for i in range(3_000)), x + len(self.many))


def test_a_module_that_takes_several_lines_is_replayed(tmp_path) -> None:
    path = tripwire.record_call(tmp_path / "x.rec")(Wide(), torch.ones(2))
    assert sum(line.startswith(b' ["nn') for line in objects_of(path).splitlines()) > 2
    assert tripwire.replay(path, trust=True).tolist() == [4_501_501.0] * 2


def test_a_file_that_changes_after_it_was_checked_is_refused(tmp_path) -> None:
    """What is read later is what was checked, whoever writes to the file meanwhile."""
    path = write(tmp_path, list(range(30_000)))  # more than is read ahead
    with Record.open(path) as record:
        objects = record.members["objects.json"]
        with path.open("r+b") as file:
            file.seek(objects.start + 20_000)
            file.write(b"x" * 9_000)
        with pytest.raises(BadRecord):
            assert record.table


def test_another_sound_table_in_the_place_of_the_checked_one_is_refused(tmp_path) -> None:
    path = write(tmp_path, list(range(30_000)))
    other = write(tmp_path / "other", list(range(1_000, 31_000))).read_bytes()
    with Record.open(path) as record:
        path.write_bytes(other)
        with Record.of(other) as sound:
            record.members = sound.members
        with pytest.raises(BadRecord, match="isn't what the manifest says"):
            assert record.table


def named(kind: str) -> object:
    name = "n" * 200_000
    if kind == "class":
        return type(name, (), {})()
    if kind == "Python module":
        return types.ModuleType(name)
    module = nn.Module()
    module.add_module(name, nn.Identity())
    return module


@pytest.mark.parametrize("kind", ["class", "Python module", "module"])
def test_a_name_that_is_too_long_for_a_line_is_left_out_and_the_rest_is_read(
    tmp_path, kind
) -> None:
    path = tripwire.record_call(tmp_path / "x.rec")(len, [named(kind), 7])
    assert tripwire.load_record(path).args[0][1] == 7
