"""Looking at objects runs none of their code: no property, no `__torch_function__`."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

COUNTED = """
N = [0]

class Says:
    def __init__(self, v):
        self.v = v

    @property
    def __class__(self):
        N[0] += 1
        return SAYS

class Asked:
    def __init__(self, v):
        self.v = v

    def __getattribute__(self, name):
        N[0] += 1
        return object.__getattribute__(self, name)

@dataclasses.dataclass
class Fields:
    v: object

    def __getattribute__(self, name):
        N[0] += 1
        return object.__getattribute__(self, name)

class Pair(collections.namedtuple("Pair", "v w")):
    def __getattribute__(self, name):
        N[0] += 1
        return tuple.__getattribute__(self, name)
"""
STAND_INS = ("int", "list", "dict", "str", "type", "torch.Tensor", "nn.Module", "functools.partial")
PROGRAMS = {
    **{
        f"__class__ says {name}": f"""{COUNTED}
SAYS = {name}
kept = [Says(2.0), {{"k": Says(3.0)}}]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = Asked(4.0)

    def forward(self, x, o, d):
        return x * self.held.v + kept[0].v * kept[1]["k"].v + o.v + d["z"][0].v

call = Net()

def go(f, see):
    o = Says(5.0)
    for given in (o, Says(6.0)):
        for i in range(3):
            see(f(T(i), given, {{"z": (o,)}}), N)
    kept[1]["k"].v, kept[0], call.held.v = 9.0, Says(1.0), 7.0
    for i in range(3):
        see(f(T(i), o, {{"z": (o,)}}), N)
    o.v = 80.0
    for i in range(3):
        see(f(T(i), o, {{"z": (o,)}}), N)
"""
        for name in STAND_INS
    },
    "__class__ and __getattribute__ of results": f"""{COUNTED}
SAYS = list
stored = {{}}

def call(x):
    stored["o"] = Says(x + 1)
    return Says(x * 2), Asked(x), [Says(3.0)], Fields(x), Pair(x, 1)

def go(f, see):
    for i in range(4):
        says, asked, (third,), fields, pair = f(T(i))
        values = [object.__getattribute__(o, "v") for o in (asked, fields)]
        see(says.v, values, third.v, tuple.__iter__(pair).__next__(), stored["o"].v, N)
""",
    "__getattribute__ of fields and pairs": f"""{COUNTED}
fields, pair = Fields(T(1)), Pair(T(3), 1)

def call(x, d, t):
    return x * fields.v + d.v + pair.v + t[0]

def go(f, see):
    for i in range(3):
        see(f(T(i), Fields(T(2)), Pair(T(4), 5)), N)
    object.__setattr__(fields, "v", T(30))
    for i in range(3):
        see(f(T(i), fields, pair), N)
""",
    "a mock that stands for a class": """
from unittest import mock

class Config:
    k = 2.0

config = mock.Mock(spec=Config, k=3.0)
sized = mock.MagicMock(spec=list)
sized.__len__.return_value = 4

def call(x, m):
    return x * config.k + m.k + len(sized)

def go(f, see):
    for i in range(3):
        see(f(T(i), config), sized.__len__.call_count)
    config.k = 7.0
    sized.__len__.return_value = 5
    for i in range(3):
        see(f(T(i), mock.Mock(spec=Config, k=4.0)), sized.__len__.call_count)
""",
    "__dict__ property state": """
N = [0]

class O:
    def __init__(self):
        self.a = 2

    @property
    def __dict__(self):
        N[0] += 1
        return {"a": 99}

o = O()

def call(x):
    return x * o.a

def go(f, see):
    for i in range(3):
        see(f(T(i)), N[0])
    o.a = 3
    for i in range(3):
        see(f(T(i)), N[0])
""",
    "__dict__ property argument": """
N = [0]

class O:
    def __init__(self):
        self.a = 2

    @property
    def __dict__(self):
        N[0] += 1
        return {"a": 99}

def call(o, x):
    return x * o.a

def go(f, see):
    o = O()
    for i in range(3):
        see(f(o, T(i)), N[0])
    o.a = 3
    for i in range(3):
        see(f(o, T(i)), N[0])
""",
    "__dict__ property module": """
N = [0]

class O(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = 2
        self.l = nn.Linear(2, 2)
        nn.init.ones_(self.l.weight)

    def forward(self, x):
        return self.l(x) * self.a

    @property
    def __dict__(self):
        N[0] += 1
        return (
            object.__getattribute__(self, "__class__")
            .__mro__[1]
            .__dict__["__dict__"]
            .__get__(self)
        )

call = O()

def go(f, see):
    n = N[0]
    for i in range(3):
        see(f(T(i)).shape, N[0] - n)
        n = N[0]
    call.a = 3
    n = N[0]
    for i in range(3):
        see(f(T(i)).shape, N[0] - n)
        n = N[0]
""",
    "__dict__ property result": """
N = [0]

class O:
    def __init__(self, t):
        self.t = t

    @property
    def __dict__(self):
        N[0] += 1
        return {"a": 99}

def call(x):
    return O(x * 2)

def go(f, see):
    for i in range(3):
        see(f(T(i)).t, N[0])
""",
    "class attribute __dict__ on metaclass": """
N = [0]

class M(type):
    @property
    def __dict__(cls):
        N[0] += 1
        return {}

class O(metaclass=M):
    a = 2

def call(x):
    return x * O.a

def go(f, see):
    for i in range(3):
        see(f(T(i)), N[0])
    O.a = 3
    for i in range(3):
        see(f(T(i)), N[0])
""",
    "__torch_function__ sees": """
L = []

class S(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        L.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})

def call(x):
    return x * 2

def go(f, see):
    for i in range(4):
        x = T(i).as_subclass(S)
        L.clear()
        y = f(x)
        see(list(L))
        see(y.as_subclass(torch.Tensor))
""",
    "__torch_function__ state": """
L = []

class S(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        L.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})

P0 = T(3).as_subclass(S)

def call(x):
    return x * P0

def go(f, see):
    for i in range(4):
        L.clear()
        y = f(T(i))
        see(list(L))
        see(y.as_subclass(torch.Tensor))
""",
    "__torch_function__ raises on shape": """
class S(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.shape.__get__:
            raise RuntimeError("no shape")
        return super().__torch_function__(func, types, args, kwargs or {})

def call(x):
    return x * 2

def go(f, see):
    for i in range(4):
        x = T(i).as_subclass(S)
        y = f(x)
        see(y.as_subclass(torch.Tensor))
""",
    "unused subclass argument": """
L = []

class S(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        L.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})

def call(x, y):
    return x * 2

def go(f, see):
    for i in range(4):
        y = T(i).as_subclass(S)
        L.clear()
        r = f(T(i), y)
        see(list(L))
        see(r)
""",
    "subclass in result": """
L = []

class S(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        L.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})

def call(x, y):
    return x * 2, [y]

def go(f, see):
    for i in range(4):
        y = T(i).as_subclass(S)
        L.clear()
        r = f(T(i), y)
        see(list(L))
        see(r[0])
""",
    "list subclass __len__/__iter__ counts": """
N = [0]

class LL(list):
    def __len__(self):
        N[0] += 1
        return list.__len__(self)

    def __iter__(self):
        N[0] += 1
        return list.__iter__(self)

S = LL([1, 2])

def call(x, l):
    return x * S[0] * l[1]

def go(f, see):
    l = LL([1, 2])
    for i in range(3):
        see(f(T(i), l), N[0])
    S[0] = 5
    for i in range(3):
        see(f(T(i), l), N[0])
""",
    "dict subclass counts": """
N = [0]

class LL(dict):
    def __len__(self):
        N[0] += 1
        return dict.__len__(self)

    def __iter__(self):
        N[0] += 1
        return dict.__iter__(self)

    def keys(self):
        N[0] += 1
        return dict.keys(self)

    def items(self):
        N[0] += 1
        return dict.items(self)

    def __contains__(self, k):
        N[0] += 1
        return dict.__contains__(self, k)

S = LL(a=1, b=2)

def call(x, l):
    return x * S["a"] * l["b"]

def go(f, see):
    l = LL(a=1, b=2)
    for i in range(3):
        see(f(T(i), l), N[0])
    S["a"] = 5
    for i in range(3):
        see(f(T(i), l), N[0])
""",
    "__len__ bool object argument": """
N = [0]

class O:
    a = 2

    def __len__(self):
        N[0] += 1
        return 1

    def __bool__(self):
        N[0] += 1
        return True

    def __eq__(self, o):
        N[0] += 1
        return True

    __hash__ = None

def call(o, x):
    return x * o.a

def go(f, see):
    o = O()
    for i in range(3):
        see(f(o, T(i)), N[0])
""",
}
# Behind AOTAutograd, torch itself looks at a subclass's tensors.
EAGER_ONLY = {"__torch_function__ sees", "__torch_function__ state", "subclass in result"}

BEHIND_INDUCTOR = ["__dict__ property state", "__class__ and __getattribute__ of results"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_looking_runs_no_code_of_the_program(name, backend, tmp_path) -> None:
    if name in EAGER_ONLY and backend != "eager":
        pytest.skip("torch looks at the tensors, too")
    check_twins(PROGRAMS[name], backend, tmp_path)


@pytest.mark.parametrize("name", BEHIND_INDUCTOR)
def test_inductor_agrees_that_looking_runs_no_code_of_the_program(name, tmp_path) -> None:
    check_twins(PROGRAMS[name], "inductor", tmp_path)
