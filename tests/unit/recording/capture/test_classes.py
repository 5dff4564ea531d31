"""Classes: what comes out of a record behaves as the class did; defining it doesn't run again."""

# ruff: noqa: UP006, UP007, UP042, UP045, PIE796
from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import functools
import typing
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import pytest
import torch
import unusual_classes
from carrying import Carried, both_ways, check_same_calls
from torch import nn

from tripwire.recording.format import nodes

LOG: list[str] = []


@pytest.fixture(autouse=True)
def _fresh_log():
    LOG.clear()


# --- plain classes ---


class Base:
    shared = [1]

    def __init__(self, x):
        self.x = x

    def hello(self):
        return "base", self.x

    def never_called(self):
        return "never"


class Left(Base):
    def hello(self):
        return "left", super().hello()


class Right(Base):
    def hello(self):
        return "right", super().hello()


class Both(Left, Right):
    def hello(self):
        return "both", super().hello(), __class__.__name__


def says_hello():
    return Both(3).hello()


def test_super_and_the_class_cell_are_carried() -> None:
    check_same_calls(says_hello, ())
    for obj in both_ways(Both(1)):
        assert [c.__name__ for c in type(obj).__mro__] == [c.__name__ for c in Both.__mro__]


def test_only_named_attributes_are_kept() -> None:
    for copy in both_ways(says_hello):
        assert not hasattr(copy.__globals__["Both"], "never_called")
        assert not hasattr(copy.__globals__["Both"], "shared")


class Descriptors:
    def __init__(self):
        self._v = 1

    @property
    def value(self):
        """The value."""
        return self._v

    @value.setter
    def value(self, v):
        self._v = v * 2

    @value.deleter
    def value(self):
        self._v = None

    @classmethod
    def make(cls):
        return cls()

    @staticmethod
    def add(a, b):
        return a + b

    @functools.cached_property
    def slow(self):
        return [self._v]

    def __getattr__(self, name):
        if name.startswith("dyn_"):
            return name
        raise AttributeError(name)


def uses_descriptors():
    d = Descriptors.make()
    d.value = 5
    first = d.value, d.add(1, 2), d.slow is d.slow, d.dyn_x, Descriptors.value.__doc__
    del d.value
    return first, d.value, Descriptors.add(3, 4)


class Positive:
    def __set_name__(self, owner, name):
        LOG.append("set_name")
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        return self if obj is None else getattr(obj, self.name)

    def __set__(self, obj, value):
        if value < 0:
            raise ValueError(f"{self.name} is negative")
        setattr(obj, self.name, value)


class Checked:
    size = Positive()

    def __init__(self, size):
        self.size = size


def uses_checked(n):
    return Checked(n).size


def test_descriptors_are_carried() -> None:
    check_same_calls(uses_descriptors, ())
    check_same_calls(uses_checked, (1,), (-1,))


class Slotted:
    __slots__ = ("__hidden", "a", "b")

    def __init__(self, a):
        self.a = a
        self.__hidden = a + 1

    def both(self):
        return self.a, self.__hidden


class MoreSlots(Slotted):
    __slots__ = ["__dict__", "c"]


def uses_slots():
    s = MoreSlots(1)
    s.c = 3
    s.free = 4
    try:
        Slotted(1).free = 1
    except AttributeError:
        return s.both(), s.c, s.free, s.__dict__, hasattr(s, "b")


def test_slots_come_back_without_a_dict() -> None:
    check_same_calls(uses_slots, ())
    for copy, _ in both_ways((Slotted(4), uses_slots)):
        assert (copy.a, type(copy).__slots__) == (4, ("__hidden", "a", "b"))
        assert not hasattr(copy, "__dict__")


class Meta(type):
    def __new__(meta, name, bases, space, **options):
        LOG.append(f"meta {name}")
        made = super().__new__(meta, name, bases, space)
        made.options = options
        return made

    def __call__(cls, *args):
        return super().__call__(*args), "made by meta"

    def __len__(cls):
        return 42


class WithMeta(metaclass=Meta, option=1):
    def __init__(self, x):
        self.x = x


class Registry:
    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, tag, **kwargs):
        LOG.append(f"init_subclass {cls.__name__}")
        super().__init_subclass__(**kwargs)
        cls.tag = tag
        Registry.known.append(tag)


class Registered(Registry, tag="r"):
    pass


def uses_meta():
    obj, how = WithMeta(5)
    return obj.x, how, len(WithMeta), WithMeta.options, Registered.tag, Registry.known


def defines_another():
    class Another(Registry, tag="another"):
        pass

    return Registry.known


def test_metaclasses_and_hooks_of_definition_do_not_run_again() -> None:
    check_same_calls(uses_meta, ())
    check_same_calls(uses_checked, (1,))
    assert LOG == []
    for copy in both_ways(defines_another):
        assert copy() == ["r", "another"]
    assert LOG == []  # the copies log to a list of their own
    assert Registry.known == ["r"]


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

    @classmethod
    def __subclasshook__(cls, other):
        return NotImplemented


class Square(Shape):
    def area(self):
        return 4


@Shape.register
class Foreign:
    pass


def uses_shape():
    try:
        Shape()
    except TypeError as error:
        return (
            str(error)[:34],
            Square().area(),
            isinstance(Foreign(), Shape),
            issubclass(int, Shape),
        )


def test_abstract_classes_are_carried() -> None:
    check_same_calls(uses_shape, ())


T = TypeVar("T", bound=int)


class Stack(Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []

    def push(self, item: T) -> Stack[T]:
        self.items.append(item)
        return self


class IntStack(Stack[int]):
    pass


@typing.runtime_checkable
class Sized(Protocol):
    def size(self) -> int: ...


class HasSize:
    def size(self):
        return 1


def uses_generics():
    stack = IntStack().push(1)
    alias = Stack[int]
    return (
        stack.items,
        alias().items,
        isinstance(HasSize(), Sized),
        isinstance(3, Sized),
        HasSize().size(),
        alias.__args__,
        IntStack.__orig_bases__[0].__args__,
    )


def test_generics_and_protocols_are_carried() -> None:
    check_same_calls(uses_generics, ())


def makes_classes(base):
    class Local(base):
        class Inner:
            def get(self):
                return base.__name__

        def make(self):
            return self.Inner().get(), Local.__qualname__

    return Local


def test_classes_that_functions_make_come_back() -> None:
    made = makes_classes(Square)

    def calls():
        return made().make(), made().area()

    check_same_calls(calls, ())


class WithTensor:
    weight = torch.arange(3.0)
    table: ClassVar[dict[str, Any]] = {"w": weight}

    def total(self):
        return float(self.weight.sum()), self.table["w"] is self.weight


def test_class_attributes_that_hold_tensors() -> None:
    def calls():
        return WithTensor().total()

    check_same_calls(calls, ())


class Failure(ValueError):
    def __init__(self, code, *args):
        super().__init__(f"code {code}", *args)
        self.code = code

    def __str__(self):
        return f"<{self.code}>"


def fails():
    raise Failure(3)


def test_exceptions_of_ones_own() -> None:
    check_same_calls(fails, ())
    for copy in both_ways(Failure(4)):
        assert (copy.code, copy.args, str(copy)) == (4, ("code 4",), "<4>")


class Arithmetic(int):
    def __add__(self, other):
        return Arithmetic(int.__add__(self, other) * 2)

    __radd__ = __add__

    def __eq__(self, other):
        return int(self) == other

    __hash__ = int.__hash__

    def __iter__(self):
        yield int(self)

    def __getitem__(self, i):
        return i

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return True


def uses_operators():
    a = Arithmetic(2)
    with a:
        raise KeyError
    return int(a + 3), list(a), a[5], a == 2, {a: 1}[2], hash(a)


def test_operators_of_a_class_come_back() -> None:
    check_same_calls(uses_operators, ())


class Reflects:
    one = 1
    _two = 2

    def all(self, name):
        return getattr(self, name)


def test_code_that_computes_names_gets_everything() -> None:
    def calls(name):
        return Reflects().all(name)

    check_same_calls(calls, ("_two",), ("one",), ("three",))


class CallsBack(collections.UserDict):
    def __missing__(self, key):
        return self.fallback(key)

    def fallback(self, key):
        return key * 2

    def never(self): ...


def uses_library_base():
    d = CallsBack(a=1)
    return d["a"], d["zz"], dict(d.items()), d.copy() == d


def test_what_a_librarys_base_may_call_is_kept() -> None:
    check_same_calls(uses_library_base, ())


INSTALLED = """
def use(config):
    return helper(config)

def helper(config):
    return config.width * 2
"""


def test_what_an_installed_package_may_ask_of_a_users_object_is_kept(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_for_test.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(folder))
    import installed_for_test

    class Config:
        def __init__(self):
            self.width = 4
            self.password = "hunter2"

    config, use = Config(), installed_for_test.use

    def by_name():
        return use(config)

    def by_module():
        return installed_for_test.use(config)

    def by_import():
        from installed_for_test import use

        return use(config)

    check_same_calls(by_name, ())
    check_same_calls(by_module, ())
    check_same_calls(by_import, ())
    space = {"__name__": "made", "lib": installed_for_test, "config": config}
    exec("def f():\n    return lib.use(config)", space)
    carried = Carried(value=space["f"])
    assert carried.build()["value"]() == 8
    assert "hunter2" not in str(carried.table)


# --- dataclasses ---


@dataclass
class Point:
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list, compare=False)
    count: ClassVar[int] = 7

    def norm(self):
        return abs(self.x) + abs(self.y)


@dataclass(frozen=True, order=True)
class Version:
    major: int
    minor: int = 0

    def bump(self):
        return dataclasses.replace(self, minor=self.minor + 1)


@dataclass(slots=True, kw_only=True, repr=False)
class Config:
    lr: float = 0.1
    steps: int
    extra: dict[str, int] = field(default_factory=lambda: {"k": 1}, metadata={"help": "x"})

    def __repr__(self):
        return f"Config({self.lr})"


@dataclass
class Point3(Point):
    z: int = 3
    _: KW_ONLY
    scale: InitVar[int] = 2
    w: int = 9

    def __post_init__(self, scale):
        self.z *= scale


@dataclass(unsafe_hash=True, init=False, match_args=False)
class Custom:
    a: int

    def __init__(self, a):
        self.a = a * 10

    def __eq__(self, other):
        return True


def uses_dataclasses():
    p, q = Point(1), Point(1, 2, ["t"])
    v = Version(1)
    c = Config(steps=3)
    three = Point3(1, 2, z=4, w=5)
    try:
        v.major = 2
    except dataclasses.FrozenInstanceError as error:
        frozen = str(error)
    return (
        repr(p),
        p == q,
        p.norm(),
        q.tags,
        p.tags is not Point(1).tags,
        Point.count,
        repr(v.bump()),
        v < v.bump(),
        hash(v) == hash(Version(1)),
        frozen,
        repr(c),
        c.extra,
        hasattr(c, "__dict__"),
        repr(three),
        repr(Custom(1)),
        Custom(1) == 3,
        [f.name for f in dataclasses.fields(Point3)],
        dataclasses.asdict(three),
        Config.__dataclass_fields__["extra"].metadata["help"],
        Point3.__match_args__,
        "__match_args__" in vars(Custom),
        Config.__slots__,
    )


def matches_dataclass(p):
    match p:
        case Point(x, y=2):
            return x
    return None


def test_dataclasses_are_carried() -> None:
    check_same_calls(uses_dataclasses, ())
    check_same_calls(matches_dataclass, (1,))
    for obj, match in both_ways((Point3(1, 2, ["a"]), matches_dataclass)):
        assert repr(obj) == repr(Point3(1, 2, ["a"]))
        assert match(obj) == 1
        assert dataclasses.fields(obj)[0].type == "int"


def test_generated_methods_are_not_in_the_record() -> None:
    carried = Carried(value=uses_dataclasses)
    assert [code.name for code in carried.table.codes if code.source is None] == []


# --- enums ---


class Color(enum.Enum):
    RED = 1
    GREEN = enum.auto()
    ALIAS = 1

    def shout(self):
        return self.name + "!"

    @classmethod
    def first(cls):
        return next(iter(cls))

    @classmethod
    def _missing_(cls, value):
        return cls.GREEN if value == "?" else None


class Planet(enum.Enum):
    EARTH = (5.97e24, 6.37e6)
    MARS = (6.42e23, 3.39e6)

    def __init__(self, mass, radius):
        LOG.append("planet")
        self.mass = mass
        self.radius = radius

    @property
    def density(self):
        return round(self.mass / self.radius**3)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 10


class Word(str, enum.Enum):
    A = "a"
    B = "b"

    def twice(self):
        return self.value * 2


class Perm(enum.Flag, boundary=enum.KEEP):
    R = 4
    W = 2
    X = 1
    RW = R | W


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Numbered(int, enum.Enum):
    def __new__(cls, number, label):
        LOG.append("numbered")
        made = int.__new__(cls, number)
        made._value_ = label
        made.label = label
        return made

    A = 1, "one"
    B = 2, "two"


class Behaviour(enum.Enum):
    ADD = enum.member(lambda a, b: a + b)
    LIST = [1, 2]

    def run(self, *args):
        return self.value(*args)


def uses_enums():
    return (
        Color.RED.shout(),
        Color(2) is Color.GREEN,
        Color["ALIAS"] is Color.RED,
        Color("?").name,
        Color.first().name,
        [c.name for c in Color],
        Planet.EARTH.density,
        Planet((5.97e24, 6.37e6)).name,
        Level.HIGH + 1,
        Level(1) is Level.LOW,
        sorted([Level.HIGH, Level.LOW]),
        Word.A.twice(),
        Word("b").name,
        Word.A == "a",
        (Perm.R | Perm.X).value,
        Perm.RW & Perm.R,
        str(Perm(8 | 4)),
        [p.name for p in Perm.RW],
        Bits.ONE | Bits.TWO,
        ~Bits.ONE,
        Numbered.A + 1,
        Numbered("two").label,
        Behaviour.ADD.run(1, 2),
        Behaviour([1, 2]).name,
        repr(Color.RED),
        Level.LOW in Level,
    )


def test_enums_are_carried() -> None:
    def text():
        return [str(x) for x in uses_enums()]

    check_same_calls(text, ())
    assert LOG == []


def test_members_are_one_with_their_class() -> None:
    for color, flag, number, cls in both_ways((Color.ALIAS, Perm.R | Perm.X, Numbered.B, Color)):
        assert color is cls.RED
        assert flag.value == 5
        assert (int(number), number.value) == (2, "two")


# --- namedtuples ---


class Pair(NamedTuple):
    left: int
    right: str = "r"

    def joined(self):
        return f"{self.left}{self.right}"

    @property
    def flipped(self):
        return self.right, self.left


Plain = collections.namedtuple("Plain", "a b class", rename=True, defaults=[5])


class Derived(collections.namedtuple("DerivedBase", ["x"])):
    __slots__ = ()

    def __new__(cls, x):
        return super().__new__(cls, x * 2)

    def get(self):
        return self.x


class GenericPair(NamedTuple, Generic[T]):
    item: T


def uses_namedtuples():
    p = Pair(1)
    return (
        p,
        p.joined(),
        p.flipped,
        repr(p),
        p._replace(left=3),
        Pair._fields,
        Pair._field_defaults,
        p._asdict(),
        Plain(1, 2),
        Plain(1, 2)._2,
        repr(Plain(1, 2)),
        Derived(2).get(),
        GenericPair(3).item,
        Pair._make([7, "x"]).left,
    )


def test_namedtuples_come_back_with_their_methods() -> None:
    check_same_calls(uses_namedtuples, ())
    values = Pair(4, "q"), Plain(1, 2), Derived(3), uses_namedtuples
    for pair, plain, derived, _ in both_ways(values):
        assert (pair.joined(), plain._2, derived.get()) == ("4q", 5, 6)
        assert pair == (4, "q")


class Movie(typing.TypedDict, total=False):
    name: str


def test_typed_dicts_come_back() -> None:
    def calls():
        return Movie(name="x"), Movie.__total__

    check_same_calls(calls, ())


# --- modules of torch ---


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("shift", torch.ones(size))
        self.calls = 0
        self.unused = "nobody asks"

    def forward(self, x):
        self.calls += 1
        return self.linear(x) + self.shift

    def extra_repr(self):
        return "extra"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(3), Block(3)])
        self.tied = self.blocks[0]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tied(x)


def test_a_module_comes_back_with_its_tied_weights_and_no_more_than_code_asks_for() -> None:
    net = Net()
    x = torch.randn(2, 3)
    for copy in both_ways(net):
        assert torch.equal(copy(x), net(x))
        assert copy.tied is copy.blocks[0]
        assert set(copy.state_dict()) == set(net.state_dict())
        assert not hasattr(copy.blocks[0], "unused")
        assert copy.training


def test_hooks_and_a_forward_of_the_instance() -> None:
    net = Block(3)
    net.register_forward_hook(lambda module, args, out: out * 2)
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    inner = net.forward
    net.forward = lambda x: inner(x) + 100
    x = torch.randn(2, 3)
    for copy in both_ways(net):
        assert torch.equal(copy(x), net(x))


class Square2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_autograd_functions_are_carried() -> None:
    def grad():
        x = torch.tensor(3.0, requires_grad=True)
        Square2.apply(x).backward()
        return float(x.grad)

    check_same_calls(grad, ())


@pytest.mark.parametrize("function", unusual_classes.ALL, ids=lambda f: f.__name__)
def test_unusual_classes_and_functions_replay_alike(function) -> None:
    def text():
        return repr(function())

    check_same_calls(text, ())


# --- nodes ---


def test_classes_of_libraries_are_named() -> None:
    carried = Carried(value=[nn.Linear, dict, collections.OrderedDict, type(None), typing.Any])
    assert carried.nodes(nodes.Class) == []
    built = carried.build()["value"]
    assert built == [nn.Linear, dict, collections.OrderedDict, type(None), typing.Any]


def test_typing_objects_come_back_equal() -> None:
    values = [
        list[int],
        dict[str, list[int]],
        int | None,
        typing.Optional[int],
        typing.Union[int, str],
        typing.Callable[[int, str], bool],
        typing.Callable[..., int],
        typing.Literal["a", 1],
        typing.List[int],
        typing.Annotated[int, "note"],
        typing.Tuple[int, ...],
        typing.ForwardRef("X"),
        typing.Generic,
        typing.Dict,
    ]
    for made in both_ways(values):
        assert made == values


def test_a_class_that_cannot_be_looked_at_is_left_out_and_nothing_runs() -> None:
    class Nasty(type):
        def __getattribute__(cls, name):
            LOG.append(name)
            raise RuntimeError

        @property
        def __module__(cls):
            raise RuntimeError

    class Victim(metaclass=Nasty):
        pass

    LOG.clear()
    Carried(value=Victim)
    assert LOG == []
