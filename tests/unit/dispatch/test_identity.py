"""Identity is a value: what was one object stays one, what was two stays two."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

PROGRAMS = {
    "tuples handed back and stored": """
C, FS, D = (1, 2), frozenset({3}), (T(1), "a")
NT = collections.namedtuple("NT", "a b")(1, 2)

class O:
    pass

o = O()
o.k = None

def call(x, t):
    o.k, o.t, o.d = C, t, D
    return x + 1, C, FS, t, NT, [C, D], {"c": C}

def go(f, see):
    global C
    for i in range(6):
        if i == 3:
            C = (7,)
        t = (i % 2, 5)
        r, c, s, back, n, (first, second), d = f(T(i), t)
        see(r, c is C, s is FS, back is t, n is NT, first is C, second is D, d["c"] is C)
        see(o.k is C, o.t is t, o.d is D)
    for i in range(3):
        r = f(T(i), C)
        see(r[3] is C, r[1] is r[3])
""",
    "lru_cache that is compiled itself": """
met = []

@functools.lru_cache
def call(x):
    met.append(1)
    return x + 1

def go(f, see):
    a, b, c = T(1), T(2), T(3)
    for x in (a, b, b, a, a, c, b, b):
        r = f(x)
        see(r, len(met), f(x) is r)
""",
    "lru_cache with a limit that is compiled itself": """
met = []

@functools.lru_cache(2)
def call(x):
    met.append(1)
    return x + 1

def go(f, see):
    a, b, c = T(1), T(2), T(3)
    for x in (a, b, b, a, a, c, b, b):
        r = f(x)
        see(r, len(met), f(x) is r)
""",
    "cache that is compiled itself": """
met = []

@functools.cache
def call(x):
    met.append(1)
    return x + 1

def go(f, see):
    a, b, c = T(1), T(2), T(3)
    for x in (a, b, b, a, a, c, b, b):
        r = f(x)
        see(r, len(met), f(x) is r)
""",
    "cached method that is compiled itself": """
class O:
    @functools.lru_cache(4)
    def scaled(self, x):
        self.n += 1
        return x * 2

o = O()
o.n = 0
call = o.scaled

def go(f, see):
    a, b = T(1), T(2)
    for x in (a, b, b, a, a, b):
        see(f(x), o.n, f(x) is o.scaled(x))
    O.scaled.cache_clear()
    for x in (a, b, b, a):
        see(f(x), o.n)
""",
    "cached function of plain arguments that is compiled itself": """
met = []

@functools.lru_cache
def call(k, flag=False):
    met.append(k)
    return torch.full((2,), float(k)) if flag else torch.ones(k)

def go(f, see):
    for k in (2, 3, 2, 2, 3, 3):
        r = f(k, flag=k > 2)
        see(r, list(met), f(k, flag=k > 2) is r)
""",
    "tuple stored and met again": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x, t):
        if t is self.last:
            return x * 2
        self.last = t
        return x * 3

call = N()

def go(f, see):
    a, b = (1, 2), tuple([1, 2])
    for t in (a, a, b, b, a, b, b, a, a):
        see(f(T(1), t), call.last is t)
""",
    "x is self.last": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = T(5)

    def forward(self, x):
        if x is self.last:
            return x * 2
        return x * 3

call = N()

def go(f, see):
    for i in range(3):
        see(f(T(i)))
    for i in range(3):
        see(f(call.last))
    for i in range(3):
        see(f(T(i)))
    call.last = T(7)
    for i in range(3):
        see(f(call.last))
    see(f(T(1)))
""",
    "x is PARAM": """
PARAM = nn.Parameter(T(5))

def call(x):
    return x * 2 if x is PARAM else x * 3

def go(f, see):
    for i in range(3):
        see(f(nn.Parameter(T(i))))
    for i in range(3):
        see(f(PARAM))
    for i in range(3):
        see(f(nn.Parameter(T(i))))
""",
    "any x is s": """
seen = [T(1), T(2)]

def call(x):
    return x * 2 if any(x is s for s in seen) else x * 3

def go(f, see):
    for i in range(3):
        see(f(T(i)))
    for i in range(3):
        see(f(seen[0]))
    for i in range(3):
        see(f(seen[1]))
    for i in range(3):
        see(f(T(i)))
""",
    "default tensor": """
D0 = T(4)

def call(x, d=D0):
    return x * 2 if x is d else x * 3

def go(f, see):
    for i in range(3):
        see(f(T(i)))
    for i in range(3):
        see(f(D0))
    for i in range(3):
        see(f(T(i)))
    t = T(8)
    for i in range(3):
        see(f(t, t))
    for i in range(3):
        see(f(t, D0))
    for i in range(3):
        see(f(D0, t))
""",
    "default tensor inner": """
D0 = T(4)

def inner(x, d=D0):
    return x * 2 if x is d else x * 3

def call(x):
    return inner(x)

def go(f, see):
    for i in range(3):
        see(f(T(i)))
    for i in range(3):
        see(f(D0))
    for i in range(3):
        see(f(T(i)))
""",
    "dict keyed by tensor argument": """
ts = [T(1), T(2), T(3)]
st = {t: torch.zeros(2) for t in ts}

def call(t):
    st[t].add_(1)
    return st[t] * 1

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3]), list(st.values()))
""",
    "dict keyed by object argument": """
class K:
    pass

ts = [K(), K(), K()]
st = {t: torch.zeros(2) for t in ts}

def call(t, x):
    st[t].add_(x)
    return st[t] * 1

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3], T(1)), list(st.values()))
""",
    "set membership tensor": """
ts = [T(1), T(2), T(3)]
S = {ts[0]}

def call(t):
    return t * 2 if t in S else t * 3

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3]))
    S.add(ts[1])
    for i in range(9):
        see(f(ts[i % 3]))
""",
    "set membership object": """
class K:
    pass

ts = [K(), K(), K()]
S = {ts[0]}

def call(t, x):
    return x * 2 if t in S else x * 3

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3], T(1)))
    S.add(ts[1])
    for i in range(9):
        see(f(ts[i % 3], T(1)))
""",
    "list membership object": """
class K:
    pass

ts = [K(), K(), K()]
S = [ts[0]]

def call(t, x):
    return x * 2 if t in S else x * 3

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3], T(1)))
    S.append(ts[1])
    for i in range(9):
        see(f(ts[i % 3], T(1)))
""",
    "list index object": """
class K:
    pass

ts = [K(), K(), K()]

def call(t, x):
    return x * ts.index(t)

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3], T(1)))
""",
    "hash tensor": """
def call(t):
    return t * (hash(t) % 97)

def go(f, see):
    keep = []
    for i in range(3):
        t = T(1)
        keep.append(t)
        h = hash(t) % 97
        see(bool((f(t) == h).all()))
""",
    "id compare": """
P0 = T(1)

def call(t):
    return t * 2 if id(t) == id(P0) else t * 3

def go(f, see):
    for i in range(3):
        see(f(T(2)))
    for i in range(3):
        see(f(P0))
    for i in range(3):
        see(f(T(2)))
""",
    "dict by id": """
ts = [T(1), T(2), T(3)]
st = {id(t): torch.zeros(2) for t in ts}

def call(t):
    st[id(t)].add_(1)
    return st[id(t)] * 1

def go(f, see):
    for i in range(9):
        see(f(ts[i % 3]), list(st.values()))
""",
    "hash object": """
class K:
    pass

def call(k, x):
    return x * (hash(k) % 97)

def go(f, see):
    keep = []
    for i in range(4):
        t = K()
        keep.append(t)
        h = hash(t) % 97
        see(bool((f(t, T(1)) == h).all()))
""",
    "object is state": """
class K:
    pass

a, b = K(), K()
cur = a

def call(k, x):
    return x * 2 if k is cur else x * 3

def go(f, see):
    for i in range(9):
        see(f((a, b, K())[i % 3], T(1)))
""",
    "weakref argument": """
def call(r, x):
    t = r()
    return x * 2 if t is None else x * t

def go(f, see):
    a, b = T(2), T(3)
    ra, rb = weakref.ref(a), weakref.ref(b)
    for i in range(3):
        see(f(ra, T(1)))
    for i in range(3):
        see(f(rb, T(1)))
    del a
    for i in range(3):
        see(f(ra, T(1)))
    for i in range(3):
        see(f(rb, T(1)))
""",
    "weakref argument to object": """
class K:
    pass

def call(r, x):
    t = r()
    return x * 2 if t is None else x * t.s

def go(f, see):
    a, b = K(), K()
    a.s = 5
    b.s = 6
    ra, rb = weakref.ref(a), weakref.ref(b)
    for i in range(3):
        see(f(ra, T(1)))
    for i in range(3):
        see(f(rb, T(1)))
    a.s = 9
    for i in range(3):
        see(f(ra, T(1)))
    del a
    for i in range(3):
        see(f(ra, T(1)))
    for i in range(3):
        see(f(rb, T(1)))
""",
    "weakref state": """
class K:
    pass

h = K()
h.t = T(2)
r = weakref.ref(h)

def call(x):
    t = r()
    return x * 2 if t is None else x * t.t

def go(f, see):
    global h
    for i in range(3):
        see(f(T(1)))
    h.t = T(4)
    for i in range(3):
        see(f(T(1)))
    del h
    for i in range(3):
        see(f(T(1)))
""",
    "weakref state vs argument": """
h = T(2)
r = weakref.ref(h)

def call(x):
    return x * 2 if r() is x else x * 3

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    for i in range(3):
        see(f(h))
    for i in range(3):
        see(f(T(1)))
""",
    "weakset": """
class K:
    pass

a, b = K(), K()
W = weakref.WeakSet([a])

def call(k, x):
    return x * 2 if k in W else x * 3

def go(f, see):
    for i in range(6):
        see(f((a, b)[i % 2], T(1)))
    W.add(b)
    for i in range(6):
        see(f((a, b)[i % 2], T(1)))
""",
    "weakkeydict": """
class K:
    pass

a, b = K(), K()
W = weakref.WeakKeyDictionary()
W[a] = T(2)
W[b] = T(3)

def call(k, x):
    return x * W[k]

def go(f, see):
    for i in range(6):
        see(f((a, b)[i % 2], T(1)))
    W[b] = T(5)
    for i in range(6):
        see(f((a, b)[i % 2], T(1)))
""",
    "lru_cache object": """
class K:
    def __init__(self, s):
        self.s = s

a, b = K(2), K(3)

@functools.lru_cache
def scale(k):
    return k.s

def call(k, x):
    return x * scale(k)

def go(f, see):
    for i in range(6):
        see(f((a, b)[i % 2], T(1)))
    a.s = 9
    for i in range(6):
        see(f((a, b, K(a.s))[i % 3], T(1)))
""",
    "lru_cache tensor": """
@functools.lru_cache
def scale(k):
    return k * 2

a, b = T(2), T(3)

def call(k, x):
    return x * scale(k)

def go(f, see):
    for i in range(6):
        see(f((a, b)[i % 2], T(1)))
""",
    "tuple arg and state": """
S = (1, 2)

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(tuple([1, 2]), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(tuple([1, 2]), T(1)))
""",
    "frozenset arg and state": """
S = frozenset((1, 2))

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(frozenset([1, 2]), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(frozenset([1, 2]), T(1)))
""",
    "array arg and state": """
import numpy as np

S = np.ones(2)

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(np.ones(2), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(np.ones(2), T(1)))
""",
    "bytearray arg and state": """
S = bytearray(b"ab")

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(bytearray(b"ab"), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(bytearray(b"ab"), T(1)))
""",
    "array.array arg and state": """
S = array.array("i", [1, 2])

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(array.array("i", [1, 2]), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(array.array("i", [1, 2]), T(1)))
""",
    "deque arg and state": """
S = collections.deque([1, 2])

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(collections.deque([1, 2]), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(collections.deque([1, 2]), T(1)))
""",
    "list arg and state": """
S = [1, 2]

def call(t, x):
    return x * 2 if t is S else x * 3

def go(f, see):
    for i in range(3):
        see(f([1, 2], T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f([1, 2], T(1)))
""",
    "nested tuple arg": """
S = (1, (2, 3))

def call(t, x):
    return x * 2 if t[1] is S[1] else x * 3

def go(f, see):
    for i in range(3):
        see(f((1, tuple([2, 3])), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f((5, S[1]), T(1)))
    for i in range(3):
        see(f((1, tuple([2, 3])), T(1)))
""",
    "two tuple args": """
def call(a, b, x):
    return x * 2 if a is b else x * 3

def go(f, see):
    a = (1, 2)
    b = tuple([1, 2])
    for i in range(3):
        see(f(a, b, T(1)))
    for i in range(3):
        see(f(a, a, T(1)))
    for i in range(3):
        see(f(a, b, T(1)))
""",
    "eq default object": """
class K:
    pass

cur = K()

def call(a, x):
    return x * 2 if a == cur else x * 3

def go(f, see):
    for i in range(3):
        see(f(K(), T(1)))
    for i in range(3):
        see(f(cur, T(1)))
    for i in range(3):
        see(f(K(), T(1)))
""",
    "plain object() sentinel": """
S = object()

def call(a, x):
    return x * 2 if a is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(object(), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(None, T(1)))
    for i in range(3):
        see(f(object(), T(1)))
""",
    "slots object": """
class K:
    __slots__ = ("a",)

S = K()

def call(a, x):
    return x * 2 if a is S else x * 3

def go(f, see):
    for i in range(3):
        see(f(K(), T(1)))
    for i in range(3):
        see(f(S, T(1)))
    for i in range(3):
        see(f(K(), T(1)))
""",
    "remove from list": """
class K:
    pass

a, b = K(), K()

def call(k, L, x):
    L.remove(k)
    return x * len(L)

def go(f, see):
    for i in range(6):
        L = [a, b]
        see(f((a, b)[i % 2], L, T(1)), L[0] is a, L[0] is b)
""",
    "count in tuple": """
class K:
    pass

a, b = K(), K()
S = (a, a, b)

def call(k, x):
    return x * S.count(k)

def go(f, see):
    for i in range(6):
        see(f((a, b, K())[i % 3], T(1)))
""",
    "frozen dataclass eq": """
@dataclasses.dataclass(frozen=True)
class K:
    a: int

S = {K(1): 2, K(2): 3}

def call(k, x):
    return x * S.get(k, 7)

def go(f, see):
    for i in range(9):
        see(f(K(i % 3), T(1)))
""",
    "argument same as last result": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = x * 2 if x is self.last else x * 3
        self.last = y
        return y

call = N()

def go(f, see):
    y = f(T(1))
    see(y)
    for i in range(3):
        y = f(y)
        see(y)
    for i in range(3):
        see(f(T(1)))
    y = f(T(1))
    for i in range(3):
        y = f(y)
        see(y)
""",
    "remember argument": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = x * 2 if x is self.last else x * 3
        self.last = x
        return y

call = N()

def go(f, see):
    a, b = T(1), T(2)
    for t in (a, a, b, b, a, b, a, a, a, b, b, b, a, b, a, b):
        see(f(t))
""",
    "set add argument": """
S = set()

def call(t):
    y = t * 2 if t in S else t * 3
    S.add(t)
    return y

def go(f, see):
    ts = [T(1), T(2), T(3)]
    for i in (0, 0, 1, 1, 2, 0, 1, 2, 2):
        see(f(ts[i]), len(S))
""",
    "list append seen": """
S = []

def call(t):
    y = t * 2 if any(t is s for s in S) else t * 3
    S.append(t)
    return y

def go(f, see):
    ts = [T(1), T(2), T(3)]
    for i in (0, 0, 1, 1, 2, 0, 1, 2, 2):
        see(f(ts[i]), len(S))
""",
    "carried kept alive": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.zeros(2)

    def forward(self, x):
        self.h = self.h * 0.5 + x
        return self.h

call = N()

def go(f, see):
    keep = [call.h]
    for i in range(5):
        keep.append(f(T(i)))
        see(keep[-1], call.h is keep[-1])
""",
    "carried is argument": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.zeros(2)

    def forward(self, x):
        y = self.h * 0.5 + x
        self.h = y
        x.add_(1)
        return y

call = N()

def go(f, see):
    for i in range(3):
        see(f(T(i)))
    for i in range(3):
        x = call.h
        see(f(x), x)
    for i in range(3):
        see(f(T(i)))
    for i in range(3):
        x = call.h.view(2)
        see(f(x), x)
""",
    "carried swapped": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = T(1)
        self.b = T(2)

    def forward(self, x):
        same = self.a is self.b
        self.a, self.b = self.b * 2, self.a * 3
        return x * (2 if same else 3) + self.a

call = N()

def go(f, see):
    for i in range(3):
        see(f(T(i)))
    call.a = call.b
    for i in range(3):
        see(f(T(i)), call.a, call.b)
    call.a = call.b
    for i in range(3):
        see(f(T(i)), call.a, call.b)
""",
    "parameter passed as argument": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(T(2))
        self.v = nn.Parameter(T(3))

    def forward(self, x):
        return x * 2 if any(x is p for p in self.parameters()) else x * 3

call = N()

def go(f, see):
    for p in [nn.Parameter(T(1)), call.w, call.v, nn.Parameter(T(4))] * 3:
        see(f(p))
""",
    "identity in nested containers": """
reg = {"a": [T(1), {"b": T(2)}]}

def call(x, r=reg):
    return x * 2 if x is r["a"][1]["b"] else x * 3 if x is r["a"][0] else x * 5

def go(f, see):
    for i in range(9):
        see(f([T(3), reg["a"][0], reg["a"][1]["b"]][i % 3]))
""",
    "argument list of state tensors": """
ts = [T(1), T(2), T(3)]

def call(l):
    return sum((t * 2 if t is ts[0] else t * 3) for t in l)

def go(f, see):
    for i in range(9):
        see(f([ts[i % 3], ts[(i + 1) % 3]]))
    for i in range(3):
        see(f([T(1), T(2)]))
""",
    "optimizer state": """
ts = [nn.Parameter(T(1)), nn.Parameter(T(2))]
st = collections.defaultdict(dict)
for t in ts:
    st[t]["m"] = torch.zeros(2)

def call(t, g):
    st[t]["m"].mul_(0.9).add_(g)
    return st[t]["m"] * 1

def go(f, see):
    for i in range(8):
        see(f(ts[i % 2], T(i)), [v["m"] for v in st.values()])
""",
    "weakref none then some": """
class K:
    pass

def call(r, x):
    return x * 2 if r() is None else x * 3

def go(f, see):
    a, b = K(), K()
    ra, rb = weakref.ref(a), weakref.ref(b)
    see(f(ra, T(1)))
    see(f(rb, T(1)))
    del a
    for i in range(6):
        see(f((ra, rb)[i % 2], T(1)))
""",
    "weakref to argument": """
class K:
    pass

def call(r, k, x):
    return x * 2 if r() is k else x * 3

def go(f, see):
    a, b = K(), K()
    ra, rb = weakref.ref(a), weakref.ref(b)
    for i in range(8):
        see(f((ra, rb)[i % 2], (a, b)[i // 2 % 2], T(1)))
""",
    "weakref in list": """
class K:
    pass

def call(l, x):
    return x * sum(r() is not None for r in l)

def go(f, see):
    ks = [K() for _ in range(3)]
    l = [weakref.ref(k) for k in ks]
    for i in range(3):
        see(f(l, T(1)))
    ks.pop()
    for i in range(3):
        see(f(l, T(1)))
    ks.pop()
    for i in range(3):
        see(f(l, T(1)))
""",
    "weakref tensor args other": """
def call(r, x):
    return x * 3 if r() is x else x * 2

def go(f, see):
    a = T(2)
    b = T(3)
    for i in range(8):
        see(f(weakref.ref((a, b)[i % 2]), (a, b)[i // 2 % 2]))
""",
    "result key is the argument": """
class K:
    pass

def call(k, x):
    return {k: x * 2}

def go(f, see):
    ks = [K(), K(), K()]
    for k in ks:
        r = f(k, T(1))
        see(k in r, len(r))
""",
    "set result of argument": """
class K:
    pass

def call(k, x):
    return {k, 1}, frozenset([k]), x * 2

def go(f, see):
    ks = [K(), K(), K()]
    for k in ks:
        r, s, _ = f(k, T(1))
        see(k in r, k in s)
""",
    "dict put keyed by argument": """
class K:
    pass

D = {}

def call(k, x):
    D[k] = x * 2
    return x * 3

def go(f, see):
    ks = [K(), K(), K(), K()]
    for k in ks:
        f(k, T(1))
        see([k in D for k in ks])
""",
    "set add object argument": """
class K:
    pass

D = set()

def call(k, x):
    D.add(k)
    return x * 3

def go(f, see):
    ks = [K(), K(), K(), K()]
    for k in ks:
        f(k, T(1))
        see([k in D for k in ks])
""",
    "argument object stored": """
class K:
    pass

class H:
    pass

h = H()
h.k = None

def call(k, x):
    h.k = k
    return x * 3

def go(f, see):
    ks = [K(), K(), K(), K()]
    for k in ks:
        f(k, T(1))
        see([k is h.k for k in ks])
""",
    "a dict that is passed, keyed by what is passed": """
class K:
    pass

a, b = K(), K()
D = {a: T(2), b: T(3)}

def call(k, d, x):
    return x * d[k]

def go(f, see):
    for i in range(6):
        see(f((a, b)[i % 2], D, T(1)))
""",
    "a set that is passed, asked for what is passed": """
class K:
    pass

a, b = K(), K()

def call(k, s, x):
    return x * 2 if k in s else x

def go(f, see):
    one = {a}
    for i in range(6):
        see(f((a, b)[i % 2], one, T(1)))
""",
    "a dict that is passed, keyed by a tuple of what is passed": """
class K:
    pass

a, b = K(), K()

def call(d, k, x):
    return x * d[k, 1]

def go(f, see):
    d = {(a, 1): 2, (b, 1): 3}
    for i in range(6):
        see(f(d, (a, b)[i % 2], T(1)))
""",
    "a dict that is passed, keyed by a tensor that is passed": """
a, b = T(4), T(4)

def call(d, k, x):
    return x * d[k]

def go(f, see):
    d = {a: 2, b: 3}
    for i in range(6):
        see(f(d, (a, b)[i % 2], T(1)))
""",
    "weakkeydict that is passed": """
class K:
    pass

a, b = K(), K()
W = weakref.WeakKeyDictionary()
W[a] = T(2)
W[b] = T(3)

def call(k, w, x):
    return x * w[k]

def go(f, see):
    for i in range(6):
        see(f((a, b)[i % 2], W, T(1)))
""",
    "lru_cache that is passed": """
@functools.lru_cache
def cfg():
    return {"s": 2}

def call(x, memo):
    return x * memo()["s"]

def go(f, see):
    for i in range(6):
        see(f(T(1), cfg))
        cfg()["s"] = 5 if i == 2 else cfg()["s"]
    cfg.cache_clear()
    for i in range(3):
        see(f(T(1), cfg))
""",
    "lru_cache in an object that is passed": """
@functools.lru_cache
def cfg():
    return [2]

class H:
    memo = None

def call(x, h):
    return x * h.memo()[0]

def go(f, see):
    h = H()
    h.memo = cfg
    for i in range(6):
        see(f(T(1), h))
        cfg()[0] = i
""",
    "enum member that is passed, and written": """
import enum

class Mode(enum.Enum):
    FAST = 1
    SLOW = 2

def call(x, mode):
    return x * 2 if mode is Mode.FAST else x * mode.value

def go(f, see):
    for i in range(8):
        see(f(T(1), (Mode.FAST, Mode.SLOW)[i % 2]))
        Mode.SLOW._value_ = 2 + i // 4
""",
    "stores what lies there already": """
class Box:
    out = None

box = Box()

def call(x, h):
    box.out = h
    return x * 2

def go(f, see):
    for first, second in ((T(1), T(2)), ({"a": 1}, {"a": 1}), (Box(), Box())):
        box.out = first
        for h in (first, second, first, second):
            see(f(T(1), h), box.out is h)
""",
    "stores into what is passed what lies there already": """
class Box:
    out = None

def call(x, h, box):
    box.out = h
    return x * 2

def go(f, see):
    a, b, box = T(1), T(2), Box()
    box.out = a
    for h in (a, b, a, b):
        see(f(T(1), h, box), box.out is h)
""",
    "may store, and doesn't": """
class Box:
    out = None

box = Box()

def call(x, h, n):
    if n > 4:
        box.out = h
    return x * 2

def go(f, see):
    a, b = T(1), T(2)
    box.out = a
    for i in range(8):
        see(f(T(1), (a, b)[i % 2], i), box.out is a)
""",
    "one nan in a list, and another": """
nan = float("nan")

def call(x, items, one):
    return x * 2 if nan in items else x * 3 if one in HELD else x

HELD = [nan]

def go(f, see):
    for i in range(6):
        see(f(T(1), [nan if i % 2 else float("nan")], nan if i % 3 else float("nan")))
""",
    "lru_cache dict result": """
@functools.lru_cache
def cfg():
    return {"s": 2}

def call(x):
    return x * cfg()["s"]

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    cfg()["s"] = 5
    for i in range(3):
        see(f(T(1)))
    cfg.cache_clear()
    for i in range(3):
        see(f(T(1)))
""",
    "lru_cache class result": """
class C:
    s = 2

@functools.lru_cache(maxsize=None)
def cfg(k):
    return C

def call(x):
    return x * cfg(1).s

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    C.s = 5
    for i in range(3):
        see(f(T(1)))
""",
    "cache by tensors shape": """
@functools.lru_cache
def mask(n):
    return torch.ones(n) * 3

def call(x):
    return x * mask(x.shape[0])

def go(f, see):
    for i in range(8):
        see(f(torch.ones(2 + i % 2)))
""",
    "hash of state object": """
class K:
    pass

k = K()

def call(x):
    return x * (hash(k) % 97)

def go(f, see):
    global k
    h = hash(k) % 97
    for i in range(3):
        see(bool((f(T(1)) == h).all()))
    k = K()
    h = hash(k) % 97
    for i in range(3):
        see(bool((f(T(1)) == h).all()))
""",
    "hash of forms": """
def call(x):
    return x * (hash((x.dtype, x.layout, x.shape, None, ...)) % 97)

def go(f, see):
    for x in (T(1), T(1), T(1).double(), torch.ones(3), T(1)):
        see(bool((f(x) == hash((x.dtype, x.layout, x.shape, None, ...)) % 97).all()))
""",
    "hash of tuple with argument": """
class K:
    pass

def call(k, x):
    return x * (hash((k, 1)) % 97)

def go(f, see):
    keep = []
    for i in range(4):
        k = K()
        keep.append(k)
        see(bool((f(k, T(1)) == hash((k, 1)) % 97).all()))
""",
    "hash of values": """
def call(k, x):
    return x * (hash((k, 1, "a")) % 97)

def go(f, see):
    for i in range(4):
        see(bool((f(i // 2, T(1)) == hash((i // 2, 1, "a")) % 97).all()))
""",
    "hash user-defined": """
class K:
    def __init__(self, a):
        self.a = a

    def __hash__(self):
        return hash(self.a)

    def __eq__(self, o):
        return self.a == o.a

def call(k, x):
    return x * (hash(k) % 97)

def go(f, see):
    for i in range(6):
        see(bool((f(K(i // 2), T(1)) == hash(i // 2) % 97).all()))
""",
    "map hash": """
class K:
    pass

def call(ks, t):
    return t * (sum(map(hash, ks)) % 97)

def go(f, see):
    keep = []
    for i in range(3):
        k = [K(), K()]
        keep.append(k)
        see(bool((f(k, T(1)) == sum(map(hash, k)) % 97).all()))
""",
    "is_set_to": """
W = T(3)

def call(x):
    return x * 2 if x.is_set_to(W) else x * 3

def go(f, see):
    for i in range(9):
        see(f([T(3), W, W.view(2)][i % 3]))
""",
    "_base": """
W = T(3)

def call(x):
    return x * 2 if x._base is W else x * 3

def go(f, see):
    V = T(4)
    for i in range(9):
        see(f([V.view(2), W.view(2), T(1)][i % 3]))
""",
    "data_ptr": """
W = T(3)

def call(x):
    return x * 2 if x.data_ptr() == W.data_ptr() else x * 3

def go(f, see):
    for i in range(9):
        see(f([T(3), W, W.view(2)][i % 3]))
""",
    "grad is": """
W = nn.Parameter(T(3))
W.grad = T(1)

def call(x):
    return x * 2 if x is W.grad else x * 3

def go(f, see):
    for i in range(9):
        see(f([T(3), W.grad][i % 2]))
""",
    "tensor attribute": """
W = T(3)
W.tag = T(1)

def call(x):
    return x * 2 if x is W.tag else x * 3

def go(f, see):
    for i in range(9):
        see(f([T(3), W.tag][i % 2]))
""",
    "argument's attribute": """
class K:
    pass

def call(k, x):
    return x * 2 if k.t is x else x * 3

def go(f, see):
    k = K()
    k.t = T(1)
    for i in range(9):
        see(f(k, [T(3), k.t][i % 2]))
""",
    "args in dict": """
def call(d):
    return d["a"] * 2 if d["a"] is d.get("b") else d["a"] * 3

def go(f, see):
    t = T(1)
    for i in range(9):
        see(f({"a": t, "b": [t, T(1)][i % 2]}))
""",
    "module param identity": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x):
        return x * 2 if self.a.weight is self.b.weight else x * 3

call = N()

def go(f, see):
    for i in range(3):
        see(f(T(1)))
    call.b.weight = call.a.weight
    for i in range(3):
        see(f(T(1)))
    call.b.weight = nn.Parameter(torch.ones(2, 2))
    for i in range(3):
        see(f(T(1)))
""",
    "param set membership": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.frozen = {self.a.weight}

    def forward(self, x, p):
        return x * 2 if p in self.frozen else x * 3

call = N()

def go(f, see):
    for i in range(9):
        see(f(T(1), [call.a.weight, call.b.weight, nn.Parameter(torch.ones(2, 2))][i % 3]))
    call.frozen.add(call.b.weight)
    for i in range(9):
        see(f(T(1), [call.a.weight, call.b.weight, nn.Parameter(torch.ones(2, 2))][i % 3]))
""",
    "memo by tensor": """
memo = {}

def call(x):
    if x not in memo:
        memo[x] = x * 3
    return memo[x] + 1

def go(f, see):
    ts = [T(i) for i in range(3)]
    for i in range(9):
        see(f(ts[i % 3]), len(memo))
""",
    "memo by object": """
class K:
    pass

memo = {}

def call(k, x):
    if k not in memo:
        memo[k] = x * 3
    return memo[k] + 1

def go(f, see):
    ks = [K() for i in range(3)]
    for i in range(9):
        see(f(ks[i % 3], T(i)), len(memo))
""",
    "weak value dict": """
class K:
    pass

W = weakref.WeakValueDictionary()
a = K()
a.s = 2
W["a"] = a

def call(x):
    k = W.get("a")
    return x * 3 if k is None else x * k.s

def go(f, see):
    global a
    for i in range(3):
        see(f(T(1)))
    a.s = 5
    for i in range(3):
        see(f(T(1)))
    del a
    for i in range(3):
        see(f(T(1)))
""",
    "WeakMethod": """
class K:
    def m(self, x):
        return x * self.s

def call(r, x):
    m = r()
    return x if m is None else m(x)

def go(f, see):
    a, b = K(), K()
    a.s = 2
    b.s = 3
    ra, rb = weakref.WeakMethod(a.m), weakref.WeakMethod(b.m)
    for i in range(6):
        see(f([ra, rb][i % 2], T(1)))
    a.s = 7
    for i in range(6):
        see(f([ra, rb][i % 2], T(1)))
    del a
    for i in range(6):
        see(f([ra, rb][i % 2], T(1)))
""",
    "weak proxy argument": """
class K:
    pass

def call(p, x):
    return x * p.s

def go(f, see):
    a, b = K(), K()
    a.s = 2
    b.s = 3
    for i in range(6):
        see(f(weakref.proxy([a, b][i % 2]), T(1)))
    a.s = 7
    for i in range(6):
        see(f(weakref.proxy([a, b][i % 2]), T(1)))
""",
    "weakref with callback": """
class K:
    pass

def call(r, x):
    return x * 2 if r() is None else x * r().s

def go(f, see):
    a, b = K(), K()
    a.s = 2
    b.s = 3
    ra, rb = weakref.ref(a, lambda _: 0), weakref.ref(b, lambda _: 0)
    for i in range(6):
        see(f([ra, rb][i % 2], T(1)))
    del a
    for i in range(6):
        see(f([ra, rb][i % 2], T(1)))
""",
    "weakref attribute of module": """
class K:
    pass

class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = None

    def forward(self, x):
        return x * 2 if self.r() is None else x * self.r().s

call = N()

def go(f, see):
    a, b = K(), K()
    a.s = 2
    b.s = 3
    call.r = weakref.ref(a)
    for i in range(3):
        see(f(T(1)))
    a.s = 9
    for i in range(3):
        see(f(T(1)))
    call.r = weakref.ref(b)
    for i in range(3):
        see(f(T(1)))
    del b
    for i in range(3):
        see(f(T(1)))
""",
    "partial args identity": """
W = T(3)

def g(w, x):
    return x * 2 if x is w else x * 3

call = functools.partial(g, W)

def go(f, see):
    for i in range(6):
        see(f([T(3), W][i % 2]))
""",
    "method owner tensor": """
class K:
    def __init__(self):
        self.w = T(3)

    def run(self, x):
        return x * 2 if x is self.w else x * 3

k = K()
call = k.run

def go(f, see):
    for i in range(6):
        see(f([T(3), k.w][i % 2]))
""",
    "array shared written": """
import numpy as np

A = np.ones(2)

def call(a, x):
    A[0] += 1
    return x * float(a[0])

def go(f, see):
    for i in range(6):
        see(f([np.ones(2), A][i % 2], T(1)))
""",
    "bytearray written": """
B = bytearray(b"ab")

def call(b, x):
    B.append(1)
    return x * len(b)

def go(f, see):
    for i in range(6):
        see(f([bytearray(b"ab"), B][i % 2], T(1)), len(B))
""",
    "deque written": """
B = collections.deque([1])

def call(b, x):
    B.append(1)
    return x * len(b)

def go(f, see):
    for i in range(6):
        see(f([collections.deque([1]), B][i % 2], T(1)), len(B))
""",
    "frozenset of tensors": """
a, b = T(1), T(2)
S = frozenset([a])

def call(x):
    return x * 2 if x in S else x * 3

def go(f, see):
    for i in range(9):
        see(f([a, b, T(1)][i % 3]))
""",
    "tuple of tensors contains is": """
a, b = T(1), T(2)
S = (a, b)

def call(x):
    return x * 2 if any(x is s for s in S) else x * 3

def go(f, see):
    for i in range(9):
        see(f([a, b, T(1)][i % 3]))
""",
    "closure tensor": """
def mk(w):
    def call(x):
        return x * 2 if x is w else x * 3

    return call

W = T(4)
call = mk(W)

def go(f, see):
    for i in range(9):
        see(f([W, T(1)][i % 2]))
""",
    "class attribute tensor": """
class C:
    w = T(4)

def call(x):
    return x * 2 if x is C.w else x * 3

def go(f, see):
    for i in range(9):
        see(f([C.w, T(1)][i % 2]))
""",
    "kw default tensor": """
W = T(4)

def call(x, *, w=W):
    return x * 2 if x is w else x * 3

def go(f, see):
    for i in range(9):
        see(f([W, T(1)][i % 2]))
    for i in range(3):
        see(f(W, w=W))
    for i in range(3):
        t = T(1)
        see(f(t, w=t))
""",
    "in-place on the state it is": """
W = T(4)

def call(x):
    W.add_(1)
    return x * 2

def go(f, see):
    for i in range(9):
        see(f([W, T(1)][i % 2]), W)
""",
}
BEHIND_INDUCTOR = ["x is self.last", "dict keyed by tensor argument"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_identity_is_told_as_plain_code_tells_it(name, backend, tmp_path) -> None:
    check_twins(PROGRAMS[name], backend, tmp_path)


@pytest.mark.parametrize("name", BEHIND_INDUCTOR)
def test_inductor_agrees_that_identity_is_told_as_plain_code_tells_it(name, tmp_path) -> None:
    check_twins(PROGRAMS[name], "inductor", tmp_path, hits=1)
