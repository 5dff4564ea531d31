"""Results that are objects: built again from their parts, and no code of theirs runs."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

PROGRAMS = {
    "one object in several places": """
class R(collections.OrderedDict):
    pass

def call(x):
    inner = R(t=x * 2)
    inner.tag = [x + 1, inner["t"]]
    return {"a": inner, "b": [inner, inner.tag], "c": (inner.tag, None, 3)}

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r["a"]["t"], r["a"].tag, r["c"], type(r["a"]).__name__)
        see(r["a"] is r["b"][0], r["a"].tag is r["b"][1] is r["c"][0], r["a"].tag[1] is r["a"]["t"])
""",
    "hundreds of levels": """
def call(x):
    r = x * 2
    for i in range(300):
        r = [r] if i % 2 else (r, i)
    return r

def go(f, see):
    for i in range(4):
        r, depth = f(T(i)), 0
        while not isinstance(r, torch.Tensor):
            r, depth = r[0], depth + 1
        see(r, depth)
""",
    "namedtuple with attributes": """
class R(collections.namedtuple("R", "a b")):
    pass

def call(x):
    r = R(x * 2, x * 3)
    r.extra = 5
    r.t = x + 1
    return r

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r, r.__dict__, type(r).__name__)
""",
    "namedtuple own __new__": """
class R(collections.namedtuple("R", "a b")):
    __slots__ = ()

    def __new__(cls, a, b=None):
        return super().__new__(cls, a * 10, b)

def call(x):
    return R(x * 2, x * 3)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r, type(r).__name__)
""",
    "namedtuple __new__ other signature": """
class R(collections.namedtuple("R", "a b")):
    __slots__ = ()

    def __new__(cls, a):
        return super().__new__(cls, a * 10, a)

def call(x):
    return R(x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r, type(r).__name__)
""",
    "typing.NamedTuple": """
class R(typing.NamedTuple):
    a: object
    b: int = 3

def call(x):
    return R(x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r, type(r).__name__)
""",
    "torch structseq": """
def call(x):
    return torch.max(x, 0)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r, type(r).__name__, r.values)
""",
    "property setter": """
class O:
    def __init__(self, v):
        self.__dict__["v"] = v

    @property
    def v(self):
        return self.__dict__["v"]

    @v.setter
    def v(self, v):
        self.__dict__["v"] = v * 100

def call(x):
    o = O(42)
    o.__dict__["t"] = x * 2
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.v, r.t)
""",
    "property without setter": """
class O:
    def __init__(self, v, t):
        self.__dict__["v"] = v
        self.t = t

    @property
    def v(self):
        return self.__dict__["v"]

def call(x):
    return O(42, x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.v, r.t)
""",
    "data descriptor": """
class D:
    def __set_name__(self, o, n):
        self.n = n

    def __get__(self, o, c):
        return o.__dict__[self.n]

    def __set__(self, o, v):
        o.__dict__[self.n] = v + 1

class O:
    v = D()

    def __init__(self, v, t):
        self.v = v
        self.t = t

def call(x):
    return O(42, x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.v, r.t)
""",
    "slots with setter override": """
class O:
    __slots__ = ("v", "t")

    def __init__(self, v, t):
        self.v = v
        self.t = t

    def __setattr__(self, n, v):
        object.__setattr__(self, n, v)

def call(x):
    return O(42, x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.v, r.t)
""",
    "slots shadowed in subclass": """
class A:
    __slots__ = ("v",)

class B(A):
    __slots__ = ("v", "t")

def call(x):
    o = B()
    o.v = 1
    o.t = x * 2
    A.v.__set__(o, 9)
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.v, r.t, A.v.__get__(r))
""",
    "slot hidden by property": """
class A:
    __slots__ = ("_v", "t")

class B(A):
    @property
    def _v(self):
        return 77

def call(x):
    o = B()
    A._v.__set__(o, 5)
    o.t = x * 2
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r._v, A._v.__get__(r), r.t)
""",
    "frozen dataclass": """
@dataclasses.dataclass(frozen=True, slots=True)
class O:
    v: int
    t: object

def call(x):
    return O(4, x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.v, r.t)
""",
    "dict subclass with attrs": """
class O(dict):
    pass

def call(x):
    o = O(a=x * 2)
    o.k = 5
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, dict(r), r.__dict__)
""",
    "list subclass": """
class O(list):
    pass

def call(x):
    o = O([x * 2])
    o.k = 5
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, list(r), r.__dict__)
""",
    "tuple subclass": """
class O(tuple):
    pass

def call(x):
    o = O([x * 2])
    o.k = 5
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, list(r), r.__dict__)
""",
    "set subclass, no tensors": """
class O(set):
    pass

def call(x):
    o = O([1, 2])
    o.k = 5
    return o, x * 2

def go(f, see):
    for i in range(4):
        r, y = f(T(i))
        see(type(r).__name__, list(r), r.__dict__, y)
""",
    "int subclass with attr": """
class O(int):
    pass

def call(x):
    o = O(4)
    o.k = x * 2
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, int(r), r.__dict__)
""",
    "int subclass plain attr": """
class O(int):
    pass

def call(x):
    o = O(4)
    o.k = 2
    return o, x * 2

def go(f, see):
    for i in range(4):
        r, y = f(T(i))
        see(type(r).__name__, int(r), r.__dict__, y)
        r.k = 8
""",
    "float subclass property": """
class O(float):
    @property
    def k(self):
        return 4

def call(x):
    return O(4.5), x * 2

def go(f, see):
    for i in range(4):
        r, y = f(T(i))
        see(type(r).__name__, float(r), y)
""",
    "namedtuple half made": """
class R(collections.namedtuple("R", "a b")):
    pass

def call(x):
    return tuple.__new__(R, (x * 2,))

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(len(r), r.a, type(r).__name__)
""",
    "defaultdict subclass / Counter": """
def call(x):
    c = collections.Counter("aab")
    return c, x * 2

def go(f, see):
    for i in range(4):
        c, y = f(T(i))
        see(dict(c), type(c).__name__, y)
        c["z"] = 1
""",
    "SimpleNamespace": """
def call(x):
    return types.SimpleNamespace(a=x * 2, b=3)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, r.a, r.b)
""",
    "__dict__ slot object": """
class O:
    __slots__ = ("a", "__dict__")

def call(x):
    o = O()
    o.a = x * 2
    o.b = x * 3
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.a, r.b)
""",
    "object stored in state with setter": """
class O:
    def __init__(self, v):
        self.__dict__["v"] = v

    @property
    def v(self):
        return self.__dict__["v"]

    @v.setter
    def v(self, v):
        self.__dict__["v"] = v * 100

S = []

def call(x):
    S.append(O(x * 2))
    return x * 3

def go(f, see):
    for i in range(4):
        y = f(T(i))
        see(y, [s.v for s in S])
""",
    "metaclass call": """
class M(type):
    def __call__(cls, *a):
        o = super().__call__(*a)
        o.made = True
        return o

class O(metaclass=M):
    def __init__(self, t):
        self.t = t

def call(x):
    return O(x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.made, r.t)
""",
    "__new__ object": """
class O:
    def __new__(cls, t):
        o = super().__new__(cls)
        o.n = 5
        return o

    def __init__(self, t):
        self.t = t

def call(x):
    return O(x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.n, r.t)
""",
    "OrderedDict with attribute": """
class OD(collections.OrderedDict):
    pass

def call(x):
    o = OD(a=x * 2)
    o.q = 4
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, dict(r), r.q)
""",
    "deque subclass": """
class OD(collections.deque):
    pass

def call(x):
    o = OD([x * 2], 3)
    o.q = 4
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, list(r), r.q)
""",
    "OrderedDict instance attr": """
def call(x):
    o = collections.OrderedDict(a=x * 2)
    o.q = 4
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(type(r).__name__, dict(r), r.q)
""",
    "pytree class with other attribute": """
from torch.utils import _pytree as pt

class O:
    def __init__(self, t):
        self.t = t

pt.register_pytree_node(O, lambda o: ([o.t], None), lambda c, _: O(c[0]))

def call(x):
    o = O(x * 2)
    o.extra = 5
    return o

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.t, r.__dict__)
""",
    "hidden in list with keys": """
class K:
    pass

def call(k, x):
    return [{(k, 1): x * 2}], {"k": k}, (k,)

def go(f, see):
    for i in range(4):
        k = K()
        r, d, t = f(k, T(i))
        see(list(r[0])[0][0] is k, d["k"] is k, t[0] is k)
""",
    "defaultdict factory": """
def call(x):
    d = collections.defaultdict(list)
    d["a"].append(x * 2)
    return d

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(dict(r), r.default_factory is list)
""",
    "slots namedtuple subclass": """
class R(collections.namedtuple("R", "a b")):
    __slots__ = ()

    @property
    def s(self):
        return self.a + self.b

    def __init__(self, *a):
        raise_if_called()

CALLS = []

def raise_if_called():
    CALLS.append(1)

def call(x):
    return R(x * 2, x * 3)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.s, type(r).__name__)
""",
    "__setattr__ frozen": """
class R:
    def __init__(self, t):
        object.__setattr__(self, "t", t)

    def __setattr__(self, k, v):
        raise AttributeError("frozen")

def call(x):
    return R(x * 2)

def go(f, see):
    for i in range(4):
        see(f(T(i)).t)
""",
    "__getattr__ object": """
class R:
    def __init__(self, t):
        self.t = t

    def __getattr__(self, n):
        return n

def call(x):
    return R(x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.t, r.zzz)
""",
    "cached_property": """
class R:
    def __init__(self, t):
        self.t = t

    @functools.cached_property
    def d(self):
        return self.t * 2

def call(x):
    r = R(x * 2)
    r.d
    return r

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.t, r.__dict__["d"], r.d)
""",
    "same object twice": """
class R:
    pass

def call(x):
    r = R()
    r.t = x * 2
    r.l = [r.t]
    return r, [r, r.l], {"r": r}

def go(f, see):
    for i in range(4):
        a, b, c = f(T(i))
        see(a is b[0], a.l is b[1], c["r"] is a, a.t is a.l[0])
""",
    "generic dataclass with property field": """
@dataclasses.dataclass
class R:
    t: object
    n: int = 0

    def __post_init__(self):
        self.n += 1

def call(x):
    return R(x * 2)

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(r.t, r.n)
""",
    "pytree registered dict subclass": """
from torch.utils import _pytree as pt

class R(collections.OrderedDict):
    def __post_init__(self):
        pass

    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        super().__setattr__(k, v)

pt.register_pytree_node(R, lambda r: (list(r.values()), list(r)), lambda v, k: R(zip(k, v)))

def call(x):
    r = R()
    r["t"] = x * 2
    r.extra = 3
    return r

def go(f, see):
    for i in range(4):
        r = f(T(i))
        see(dict(r), r.t is r["t"], r.extra)
""",
    "defaultdict subclass": """
class D(collections.defaultdict):
    pass

def call(x):
    d = D(list)
    d["a"].append(x * 2)
    d.k = 5
    return d

def go(f, see):
    for i in range(4):
        d = f(T(i))
        see(dict(d), d.k, d.default_factory is list, type(d).__name__)
""",
    "an argument's __dict__": """
class O:
    pass

def call(o, x):
    o.n = 3
    return vars(o), x * 2

def go(f, see):
    for i in range(4):
        o = O()
        space, y = f(o, T(i))
        space["late"] = 4
        see(o.n, o.late, space is vars(o), y)
""",
    "a view of an argument's __dict__": """
class O:
    pass

def call(o):
    o.n = 3
    return vars(o).keys()

def go(f, see):
    for i in range(4):
        o = O()
        view = f(o)
        o.late = 4
        see(list(view))
""",
    "__dict__ of state, kept in state": """
class O:
    pass

P, KEPT = O(), []
P.k = 1

def call(x):
    KEPT.append(P.__dict__)
    return x * 2

def go(f, see):
    for i in range(4):
        see(f(T(i)), KEPT[-1] is vars(P))
""",
    "an object and its __dict__": """
class O:
    pass

def call(x):
    o, p = O(), O()
    o.t, p.t = x * 2, x * 3
    return vars(o), o, p, vars(p)

def go(f, see):
    for i in range(4):
        space, o, p, other = f(T(i))
        see(space is vars(o), other is vars(p), o.t, p.t)
""",
    "an empty table of a module": """
net = nn.Linear(2, 2)

def call(x):
    return net._buffers, x * 2

def go(f, see):
    for i in range(4):
        table, y = f(T(i))
        see(table is net._buffers, y)
""",
    "a module's tables": """
net = nn.Linear(2, 2)

def call(x):
    return net._parameters, net._buffers, net._forward_hooks, net.__dict__, x * 2

def go(f, see):
    for i in range(4):
        parameters, buffers, hooks, space, y = f(T(i))
        see(buffers is net._buffers)
        see(parameters is net._parameters, hooks is net._forward_hooks, space is vars(net), y)
""",
}
COMPILED = {
    "views of a dict": """
def call(x):
    d = {"a": x * 2, "b": 3}
    return d.keys(), d.values(), d.items(), d

def go(f, see):
    for i in range(4):
        *views, d = f(T(i))
        d["c"] = 4
        see(*[type(view).__name__ for view in views], *map(list, views))
""",
    "views of a dict subclass": """
class D(dict):
    def keys(self):
        return "of its own"

def call(x):
    return dict.keys(D(a=1, b=2)), x * 2

def go(f, see):
    for i in range(4):
        see(list(f(T(i))[0]))
""",
    "a view of state": """
STATE = {"a": 1}

def call(x):
    return STATE.items(), x * 2

def go(f, see):
    for i in range(4):
        view, y = f(T(i))
        STATE[i // 2] = 5
        see(list(view), y)
    kept = f(T())[0]
    STATE["last"] = 6
    see(list(kept))
""",
    "a sentinel": """
MISSING = object()

def call(x, missing=MISSING):
    return MISSING, missing, x * 2

def go(f, see):
    for i in range(4):
        see(*[one is MISSING for one in f(T(i))[:2]])
""",
    "a member of an enum of tuples": """
import enum

class E(tuple, enum.Enum):
    A = (1, 2)

def call(x):
    return E.A, x * 2

def go(f, see):
    for i in range(4):
        see(f(T(i))[0] is E.A)
""",
    "NotImplemented": """
def call(x):
    return x.shape.__eq__(3), NotImplemented

def go(f, see):
    for i in range(4):
        see(*[one is NotImplemented for one in f(T(i))])
""",
}
BEHIND_INDUCTOR = ["namedtuple own __new__", "property setter"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_built_as_the_run_made_them(name, backend, tmp_path) -> None:
    check_twins(PROGRAMS[name], backend, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COMPILED)
def test_results_are_built_on_hits(name, backend, tmp_path) -> None:
    check_twins(COMPILED[name], backend, tmp_path, hits=2)


@pytest.mark.parametrize("name", BEHIND_INDUCTOR)
def test_inductor_agrees_that_results_are_built_as_the_run_made_them(name, tmp_path) -> None:
    check_twins(PROGRAMS[name], "inductor", tmp_path, hits=1)
