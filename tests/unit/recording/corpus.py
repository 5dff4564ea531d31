"""Functions of many kinds, without torch: written by one Python, run by another.

Each takes nothing and returns something that prints the same everywhere.
"""

# ruff: noqa: RET507, C416, SIM222, F821, PIE804, PIE796, UP033, UP042, UP007
from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import math
import operator
import re
import typing
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

SCALE = 3
TABLE = {"a": 1, "b": [2, 3]}
ALL = []
T = TypeVar("T")


def listed(function):
    ALL.append(function)
    return function


# --- functions ---


@listed
def plain():
    return 1 + SCALE


@listed
def branches():
    out = []
    for i in range(10):
        if i % 2:
            continue
        elif i > 6:
            break
        out.append(i)
    else:
        out.append("never")
    return out


@listed
def comprehensions():
    rows = [[i * j for j in range(3) if j] for i in range(3)]
    return rows, {i: str(i) for i in range(2)}, sorted({x for r in rows for x in r}), rows[-1]


@listed
def comprehension_scopes():
    x = "outer"
    inner = [x for x in range(3)]
    fs = [lambda: x for x in range(3)]
    return x, inner, [f() for f in fs], [(lambda y: x + str(y))(z) for z in range(2)]


@listed
def generators():
    def count(n):
        sent = yield "start"
        for i in range(n):
            sent = yield (i, sent)
        return "end"

    def outer():
        result = yield from count(2)
        yield result

    g = outer()
    return [next(g), g.send("a"), g.send("b"), g.send("c")]


@listed
def generator_expression():
    return sum(x * SCALE for x in range(4) if x), max((len(s) for s in ("a", "bcd")), default=0)


@listed
def closures():
    total = 0

    def add(n):
        nonlocal total
        total += n
        return total

    return add(1), add(2), total


@listed
def recursion():
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return fib(15)


@listed
def defaults():
    def f(a, /, b=2, *args, c, d=SCALE, **kw):
        return a, b, args, c, d, sorted(kw.items())

    return f(1, c=3), f(1, 2, 3, 4, c=5, e=6)


@listed
def exceptions():
    seen = []
    try:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("wrapped") from error
        finally:
            seen.append("finally")
    except ValueError as error:
        seen += [type(error.__cause__).__name__, str(error)]
    else:
        seen.append("else")
    return seen


@listed
def exception_groups():
    caught = []
    try:
        raise ExceptionGroup("many", [ValueError(1), TypeError(2), KeyError(3)])
    except* ValueError as group:
        caught.append(len(group.exceptions))
    except* (TypeError, KeyError) as group:
        caught.append(len(group.exceptions))
    return caught


@listed
def context_managers():
    @contextlib.contextmanager
    def level(n, log):
        log.append(("in", n))
        try:
            yield n
        finally:
            log.append(("out", n))

    log = []
    with level(1, log) as a, level(2, log) as b:
        log.append(a + b)
    with contextlib.suppress(ZeroDivisionError):
        1 / 0
    return log


@listed
def matching():
    def kind(x):
        match x:
            case {"type": str() as t, **rest}:
                return t, rest
            case Point(x=0, y=y):
                return "axis", y
            case [1, *rest] | (2, *rest):
                return rest
            case int() | float() if x > 10:
                return "big"
            case Color.RED:
                return "red"
            case None:
                return "none"
            case _:
                return "other"

    values = [{"type": "t", "k": 1}, Point(0, 5), [1, 2, 3], 11, 1.5, Color.RED, None, "x"]
    return [kind(v) for v in values]


@listed
def walrus():
    if (n := len(TABLE)) > 1 and (m := n * 2):
        return n, m, [y := 1, y**2]
    return None


@listed
def strings():
    name, value = "x", 1.5
    return f"{name!r:>6}|{value:{SCALE}.1f}|{value=}|{'nested ' + f'{name}'}", b"raw", r"\n", "ü"


@listed
def unpacking():
    first, *middle, last = range(5)
    (a, b), c = (1, 2), 3
    return first, middle, last, [*middle, *"ab"], {**TABLE, "c": c}, a + b


@listed
def slices():
    xs = list(range(10))
    xs[2:4] = ["a"]
    del xs[-1]
    return xs[::-2], xs[1:3], xs[slice(0, 2)], "abc"[::-1]


@listed
def arithmetic():
    x = 7
    x //= 2
    x **= 2
    x <<= 1
    x |= 1
    return x, -x, ~x, not x, 7 % 3, divmod(-7, 2), 1 < x <= 100 != 5, x if x else None


@listed
def chained():
    return (1 < 2 < 3, 3 > 2 > 2, "a" in "abc" and "d" not in "abc", None or [] or "last")


@listed
def asserts():
    try:
        assert SCALE == 4, f"not {SCALE}"
    except AssertionError as error:
        return str(error)


@listed
def deletes():
    local = {"a": 1, "b": 2}
    del local["a"]
    x = 1
    del x
    try:
        return x
    except UnboundLocalError:
        return local


@listed
def global_state():
    global _hidden
    _hidden = [1]
    _hidden.append(2)
    return _hidden


@listed
def missing_name():
    try:
        return surely_not_defined  # noqa: F821
    except NameError as error:
        return error.name


@listed
def lambdas():
    fs = [lambda x: x + 1, lambda x: x * 2, lambda x, y=SCALE: (x, y)]
    return [f(5) for f in fs], (lambda *a, **k: (a, k))(1, z=2)


pairs = [lambda x: x + 1, lambda x: x + 2], {"k": lambda: SCALE}


@listed
def lambdas_of_the_module():
    return pairs[0][0](1), pairs[0][1](1), pairs[1]["k"]()


@listed
def imports():
    import os.path as p
    from math import pi, sqrt

    return p.basename("/a/b"), round(pi, 3), sqrt(16)


@listed
def libraries():
    counts = collections.Counter("abca")
    return (
        counts.most_common(1),
        json.dumps({"a": [1, None]}),
        re.sub(r"\d+", "#", "a12b3"),
        list(itertools.accumulate([1, 2, 3], operator.mul)),
        math.gcd(12, 18),
        functools.reduce(operator.add, [1, 2, 3]),
    )


@listed
def async_code():
    async def tick(n):
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    async def main():
        squares = [i * i async for i in tick(3)]
        async with contextlib.AsyncExitStack():
            total = 0
            async for i in tick(4):
                total += i
        return squares, total, await asyncio.gather(one(1), one(2))

    async def one(n):
        return n

    return asyncio.run(main())


@listed
def sorting():
    people = [("b", 2), ("a", 2), ("c", 1)]
    return sorted(people, key=lambda p: (-p[1], p[0])), sorted(people, key=operator.itemgetter(0))


@listed
def loops_with_else():
    n = 0
    while n < 5:
        n += 1
        if n == 9:
            break
    else:
        n = -n
    return n


@listed
def star_calls():
    def f(*args, **kwargs):
        return args, kwargs

    return f(*[1, 2], *(3,), **{"a": 1}, **{"b": 2})


# --- decorators ---


def shout(function):
    @functools.wraps(function)
    def wrapper(*args):
        return str(function(*args)).upper()

    return wrapper


def times(n):
    def decorate(function):
        def wrapper(x):
            for _ in range(n):
                x = function(x)
            return x

        return wrapper

    return decorate


@listed
@shout
def decorated():
    return "quiet"


@times(3)
def doubled(x):
    return x * 2


@functools.lru_cache(maxsize=None)
def slow_fib(n):
    return n if n < 2 else slow_fib(n - 1) + slow_fib(n - 2)


@functools.singledispatch
def describe(x):
    return "thing"


@describe.register
def _(x: int):
    return "int"


@describe.register(list)
def _(x):
    return ["list", *map(describe, x)]


@contextlib.contextmanager
def tagged(tag):
    yield [tag]


@listed
def uses_decorated():
    with tagged("t") as got:
        return doubled(1), slow_fib(20), describe([1, "x"]), got, decorated.__name__


# --- classes ---


class Animal:
    kind = "animal"
    __secret = 4

    def __init__(self, name):
        self.name = name

    def speak(self):
        return f"{self.name} the {self.kind}", self.__secret

    @property
    def upper(self):
        return self.name.upper()

    @classmethod
    def make(cls):
        return cls("made")

    @staticmethod
    def add(a, b):
        return a + b

    @functools.cached_property
    def cached(self):
        return [self.name]


class Dog(Animal):
    kind = "dog"

    def speak(self):
        return "woof", super().speak(), __class__.__name__


@listed
def inheritance():
    d = Dog.make()
    return d.speak(), d.upper, Dog.add(1, 2), d.cached is d.cached, isinstance(d, Animal)


class Meta(type):
    def __call__(cls, *args):
        return super().__call__(*args), cls.__name__


class Made(metaclass=Meta):
    def __init__(self, x=1):
        self.x = x


@listed
def metaclasses():
    obj, name = Made(2)
    return obj.x, name, type(Made).__name__


class Plugin:
    found: list[str] = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Plugin.found.append(cls.__name__)


class First(Plugin):
    pass


@listed
def subclass_hooks():
    class Second(Plugin):
        pass

    return Plugin.found


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Unit(Shape):
    def area(self):
        return 1


@listed
def abstract():
    try:
        Shape()
    except TypeError:
        return Unit().area(), issubclass(Unit, Shape)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


@listed
def slots():
    s = Slots()
    try:
        s.c = 1
    except AttributeError:
        return s.a, hasattr(s, "b"), Slots.__slots__


class Vector:
    def __init__(self, *xs):
        self.xs = xs

    def __add__(self, other):
        return Vector(*(a + b for a, b in zip(self.xs, other.xs, strict=True)))

    def __eq__(self, other):
        return self.xs == other.xs

    def __hash__(self):
        return hash(self.xs)

    def __iter__(self):
        return iter(self.xs)

    def __getitem__(self, i):
        return self.xs[i]

    def __len__(self):
        return len(self.xs)

    def __call__(self, k):
        return [x * k for x in self.xs]

    def __repr__(self):
        return f"Vector{self.xs}"


@listed
def operators():
    v = Vector(1, 2) + Vector(3, 4)
    return v, v == Vector(4, 6), {v: 1}[Vector(4, 6)], list(v), v[0], len(v), v(2)


class Stack(Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []

    def push(self, x: T) -> Stack[T]:
        self.items.append(x)
        return self


@typing.runtime_checkable
class Closable(Protocol):
    def shut(self) -> None: ...


class Door:
    def shut(self):
        return "bang"


@listed
def generics():
    return Stack[int]().push(1).items, isinstance(Door(), Closable), isinstance(1, Closable)


class Positive:
    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, obj, owner=None):
        return getattr(obj, self.name)

    def __set__(self, obj, value):
        setattr(obj, self.name, abs(value))


class Measured:
    size = Positive()


@listed
def descriptors():
    m = Measured()
    m.size = -3
    return m.size, vars(m)


class Failure(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


@listed
def own_exceptions():
    try:
        raise Failure(3)
    except Failure as error:
        return error.code, str(error), error.args


# --- dataclasses, enums, namedtuples ---


@dataclass
class Point:
    x: int
    y: int = 2
    tags: list = field(default_factory=list, repr=False)


@dataclass(frozen=True, order=True, slots=True)
class Version:
    major: int
    minor: int = 0

    def bump(self):
        return dataclasses.replace(self, minor=self.minor + 1)


@dataclass(kw_only=True)
class Options(Point):
    z: int = 3
    extra: dataclasses.InitVar[int] = 1
    shared: typing.ClassVar[int] = 9

    def __post_init__(self, extra):
        self.z += extra


@listed
def dataclass_basics():
    return (
        Point(1),
        Point(1) == Point(1, tags=["x"]),
        Point(1).tags,
        Options(1, z=5),
        Options.shared,
    )


@listed
def dataclass_frozen():
    v = Version(1)
    try:
        v.major = 2
    except dataclasses.FrozenInstanceError:
        return v.bump(), v < v.bump(), hash(v) == hash(Version(1)), dataclasses.astuple(v)


@listed
def dataclass_fields():
    return [f.name for f in dataclasses.fields(Options)], dataclasses.asdict(Point(1))


class Color(enum.Enum):
    RED = 1
    BLUE = enum.auto()
    ALIAS = 1

    def loud(self):
        return self.name + "!"


class Planet(enum.Enum):
    EARTH = (5.0, 6.0)

    def __init__(self, mass, radius):
        self.mass = mass

    @property
    def heavy(self):
        return self.mass > 4


class Perm(enum.Flag):
    R = 4
    W = 2
    RW = 6


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Word(str, enum.Enum):
    A = "a"


@listed
def enums():
    return (
        Color.RED.loud(),
        Color(2).name,
        Color.ALIAS.name,
        [c.name for c in Color],
        Color["BLUE"].value,
    )


@listed
def enums_with_state():
    return Planet.EARTH.heavy, Planet((5.0, 6.0)).name


@listed
def flags():
    return (Perm.R | Perm.W).value, Perm.R in Perm.RW, Perm(6) is Perm.RW, [p.name for p in Perm.RW]


@listed
def int_enums():
    return Level.HIGH + 1, Level(1).name, Word("a").value, sorted([Level.HIGH, Level.LOW])[0].name


class Pair(NamedTuple):
    left: int
    right: str = "r"

    def joined(self):
        return f"{self.left}{self.right}"


Plain = collections.namedtuple("Plain", "a b", defaults=[7])


class Derived(collections.namedtuple("DerivedBase", "x")):
    def twice(self):
        return self.x * 2


@listed
def namedtuples():
    return Pair(1), Pair(1).joined(), Plain(1), Plain(1)._replace(b=2), Derived(4).twice()


@listed
def typing_objects():
    return (
        str(list[int]),
        str(dict[str, int] | None),
        typing.get_args(typing.Union[int, str])[0].__name__,
    )


@listed
def partials():
    add = functools.partial(operator.add, 5)
    return add(1), functools.partial(int, base=2)("101"), [].__len__(), str.upper("a")


@listed
def tracebacks():
    def inner(x):
        return [
            x,
            x / 0,
        ]

    try:
        inner(1)
    except ZeroDivisionError as error:
        lines, at = [], error.__traceback__
        while at is not None:
            code = at.tb_frame.f_code
            lines.append((code.co_name, at.tb_lineno, code.co_qualname))
            at = at.tb_next
        return lines


@listed
def qualified_names():
    class Local:
        def method(self): ...

    return Local.__qualname__, Local.method.__qualname__, Dog.speak.__qualname__, plain.__module__


@listed
def reflection():
    return sorted(vars(Dog("x"))), getattr(Dog, "ki" + "nd"), hasattr(Dog, "no" + "pe")
