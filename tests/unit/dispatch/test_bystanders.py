"""Looking at objects runs none of their code: no property, no `__torch_function__`."""

from __future__ import annotations

import pytest
from sidebyside import BACKENDS, check_twins

PROGRAMS = {
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_looking_runs_no_code_of_the_program(name, backend, tmp_path) -> None:
    if name in EAGER_ONLY and backend != "eager":
        pytest.skip("torch looks at the tensors, too")
    check_twins(PROGRAMS[name], backend, tmp_path)
