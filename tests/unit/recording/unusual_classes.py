"""Unusual classes and functions: each function here takes nothing and says how it went."""

# ruff: noqa
from __future__ import annotations

import abc
import collections
import collections.abc
import copy
import dataclasses
import enum
import functools
import logging
import string
import threading
import typing
import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

ALL = []


def listed(function):
    ALL.append(function)
    return function


class classproperty(property):
    def __get__(self, o, c=None):
        return self.fget(c)


class P:
    @classproperty
    def name(cls):
        return cls.__name__


@listed
def prop_sub():
    return P.name


class mycached(functools.cached_property):
    pass


class Q:
    @mycached
    def v(self):
        return 5


@listed
def cached_sub():
    return Q().v


@functools.total_ordering
class Ord:
    def __init__(s, x):
        s.x = x

    def __lt__(s, o):
        return s.x < o.x

    def __eq__(s, o):
        return s.x == o.x


@listed
def ordering():
    return Ord(1) >= Ord(0), Ord(1) <= Ord(0)


class S(enum.StrEnum):
    A = enum.auto()
    B = "x"
    helper = enum.nonmember(3)


@enum.unique
class U(enum.Enum):
    X = object
    Y = print


@dataclass
class DM:
    a: int
    b: int = 2


class DE(DM, enum.Enum):
    ONE = 1, 3
    TWO = (2,)


@listed
def enums():
    return str(S.A), S("x"), S.helper, U.X.value is object, DE.ONE.b, DE.TWO.a, repr(DE.ONE)


class T2(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})

    def twice(self):
        return self * 2


@listed
def tensor_sub():
    return type(torch.ones(2).as_subclass(T2).twice()).__name__


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FS:
    a: int
    b: list = field(default_factory=list)
    c: int = 3


@listed
def frozen_slots():
    x = FS(1)
    y = copy.copy(x)
    return y == x, copy.deepcopy(x), x.c, FS.__slots__, weakref.ref(x)() is x


class Deco:
    def __init__(s, f):
        s.f = f
        functools.update_wrapper(s, f)

    def __call__(s, *a):
        return "deco", s.f(*a)

    def __get__(s, o, c=None):
        return functools.partial(s, o) if o is not None else s


@Deco
def dec(x):
    return x


class HasDeco:
    @Deco
    def m(self, x):
        return x


@listed
def deco_obj():
    return dec(1), HasDeco().m(2)


class Map(collections.abc.Mapping):
    def __init__(s):
        s.d = {1: 2}

    def __getitem__(s, k):
        return s.d[k]

    def __iter__(s):
        return iter(s.d)

    def __len__(s):
        return len(s.d)


@listed
def mapping():
    return (
        dict(Map()),
        Map().get(5),
        list(Map().items()),
        isinstance(Map(), collections.abc.Mapping),
    )


log = logging.getLogger("x.y")


@listed
def logs():
    log.debug("hi")
    return log.name


class Th(threading.Thread):
    def run(self):
        self.out = 1


@listed
def thread():
    h = Th()
    h.start()
    h.join()
    return h.out


class GA(abc.ABC, typing.Generic[typing.TypeVar("T")]):
    @property
    @abc.abstractmethod
    def z(self): ...


class GB(GA[int]):
    z = 4


@listed
def gabc():
    return GB().z


class Ctx:
    def __enter__(s):
        return s

    def __exit__(s, *a):
        return True

    def __bool__(s):
        return False


@listed
def ctx():
    with Ctx() as c:
        1 / 0
    return bool(c)


class Lazy:
    def __getattribute__(s, n):
        return object.__getattribute__(s, n)

    def __setattr__(s, n, v):
        object.__setattr__(s, n, v * 2)

    def __init__(s):
        s.a = 1


@listed
def lazy():
    return Lazy().a


def outer_cls():
    x = 5

    class A:
        y = x

        def g(self):
            return x, __class__

    return A


A_ = outer_cls()


@listed
def localcls():
    return A_().g()[0], A_().g()[1] is A_, A_.y


class Chain(Exception):
    pass


@listed
def raising():
    try:
        raise Chain("a") from KeyError("b")
    except Chain as e:
        return repr(e), repr(e.__cause__)


class Vec(list):
    def total(self):
        return sum(self)


class DD(collections.defaultdict):
    pass


v_ = Vec([1, 2])
d_ = DD(list, {1: [2]})


@listed
def builtin_subs():
    return v_.total(), d_[1], d_[7]


class WithInit(nn.Module):
    scale: float = 2.0

    def __init__(self):
        super().__init__()
        self.register_parameter("p", nn.Parameter(torch.ones(2)))
        self.act = torch.nn.functional.relu
        self.fn = lambda x: x * self.scale

    def forward(self, x):
        return self.fn(self.act(x) * self.p)


w_ = WithInit()


@listed
def module():
    return w_(torch.ones(2)).tolist()


seq = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
seq[0].weight.data.fill_(1)
seq[0].bias.data.fill_(0)


@listed
def sequential():
    return seq(torch.ones(1, 2)).tolist(), len(seq), [type(m).__name__ for m in seq]


@listed
def training():
    lin = nn.Linear(2, 1, bias=False)
    nn.init.ones_(lin.weight)
    opt = torch.optim.SGD(lin.parameters(), lr=0.1)
    lin(torch.ones(1, 2)).sum().backward()
    opt.step()
    return lin.weight.tolist()


@torch.enable_grad()
def eg(x):
    return torch.is_grad_enabled()


@torch.inference_mode()
def im(x):
    return torch.is_inference_mode_enabled()


@listed
def grads():
    return eg(1), im(1)


def g(n):
    yield from range(n)


@listed
def gen():
    return list(g(3))


class NT(typing.NamedTuple):
    x: "NT | None" = None


@listed
def rec_nt():
    return NT(NT()).x.x


class Weird:
    def __init_subclass__(cls, /, **kw):
        cls.kw = kw

    def __class_getitem__(cls, item):
        return item


class W2(Weird, a=1):
    pass


@listed
def weird():
    return W2.kw, W2[3]


Alias = typing.NewType("Alias", int)


@listed
def newtype():
    return Alias(5)


class Tmpl(string.Template):
    delimiter = "%"


@listed
def tmpl():
    return Tmpl("%x").substitute(x=1)


class Td(typing.TypedDict):
    a: int


class Td2(Td, total=False):
    b: int


@listed
def tdict():
    return Td2(a=1), Td2.__annotations__ and sorted(Td2.__annotations__)


@listed
def exc_group():
    class EG(ExceptionGroup):
        pass

    return repr(EG("m", [ValueError(1)]).exceptions)


@functools.cache
def cc():
    return object()


class LM:
    @functools.lru_cache
    def m(self):
        return 3

    @functools.singledispatchmethod
    def sd(self, x):
        return "any"

    @sd.register
    def _(self, x: int):
        return "int"

    pm = functools.partialmethod(lambda self, a, b: (a, b), 1)


@listed
def methods():
    return LM().m(), LM().sd(1), LM().sd("s"), LM().pm(2)
