"""Inputs: what a call is given changes from call to call, in each way that a program can see."""

from unit.channels.channel import Family

FAMILY = Family("inputs")
case = FAMILY.case

_SHOWN = """
def call(x):
    return x * 2, x.dtype, tuple(x.shape), x.stride(), x.requires_grad
"""

# --- tensors ------------------------------------------------------------------------------------

case("dtype", _SHOWN, inputs=["x", "x.double()", "x.to(torch.int64)", "x.bfloat16()"])
case("shape", _SHOWN, inputs=["x", "x[:2]", "m", "x[:0]", "x[0]"])
case("size that turns 1", "def call(x, y): return x + y", inputs=["x, y", "x, y[:1]", "x[:1], y"])
case("stride", _SHOWN, inputs=["m", "m.t()", "m[:, ::2]", "m[0].expand(4, 4)"])
case("requires_grad", _SHOWN, inputs=["x", "x.requires_grad_()"])
case(
    "requires_grad with a parameter beside it",
    """
    layer = nn.Linear(4, 4).requires_grad_(False)
    def call(x):
        return layer(x)
    """,
    inputs=["x", "x.requires_grad_()"],
)
case(
    "a Parameter",
    "def call(x): return x * 2, isinstance(x, nn.Parameter)",
    inputs=["x", "nn.Parameter(x)", "nn.Parameter(x, requires_grad=False)"],
)
case(
    "a tensor subclass",
    """
    class Negated(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            return -out.as_subclass(torch.Tensor) if func is torch.Tensor.mul else out
    def call(x):
        return x * 2
    """,
    inputs=["x", "x.as_subclass(Negated)"],
)
case(
    "same tensor twice, then two",
    """
    def call(a, b):
        a.add_(1)
        return a + b, a is b
    """,
    inputs=["x, x", "x, y", "x, x.clone()"],
)
case(
    "overlapping views with a write through one",
    """
    def call(a, b):
        a.mul_(2)
        return a.sum() + b
    """,
    inputs=["x, y", "x[:3], x[1:]", "x, x.view(2, 2)", "x[:2], x[2:]"],
)
case(
    "views of one base without overlap, then with more",
    """
    def call(a, b, c):
        b.add_(a.sum())
        return a * b + c
    """,
    inputs=["m[0], m[1], m[2]", "m[0], m[1], m[1]", "m[0], m[0], m[2]"],
)
case(
    "returned as it came",
    "def call(x): return x.contiguous(), x + 1",
    inputs=["m", "m.t()"],
)
case(
    "argument that is also a global",
    """
    BIAS = torch.ones(4)
    def call(x):
        x = x.mul_(2) if x is not BIAS else x
        return x + BIAS
    """,
    inputs=["x", "BIAS", "BIAS.view(4)"],
    state="BIAS",
)
case(
    "argument that is also a parameter",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
        def forward(self, x):
            return x * self.weight, x is self.weight
    call = Net()
    """,
    inputs=["x", "call.weight"],
)
case(
    "leaf or not",
    "def call(x): return x * 2 if x.is_leaf else x * 3 + (x.grad_fn is None)",
    inputs=["x.requires_grad_()", "x.requires_grad_() * 1"],
)
case(
    "base of a view",
    "def call(x): return x * 2 if x._base is None else x + x._base.sum()",
    inputs=["x", "m[0]", "m[1][:2]"],
)
case(
    "version counter",
    "def call(x): return x * x._version",
    inputs=["x", "x.add_(1)", "x.add_(1).mul_(2)"],
)
case(
    "Python attribute on a tensor",
    """
    def tagged(x, scale):
        x.scale = scale
        return x
    def call(x):
        return x * getattr(x, "scale", 1.0)
    """,
    inputs=["x", "tagged(x, 2.0)", "tagged(x, 3.0)"],
)
case(
    "gradient of an argument",
    """
    def with_grad(x):
        x.grad = torch.ones(4)
        return x
    def call(x):
        return x * 2 if x.grad is None else x + x.grad
    """,
    inputs=["x", "with_grad(x)"],
)
case(
    "conjugate bit",
    "def call(x): return x * 2, x.is_conj()",
    inputs=["x.to(torch.complex64)", "x.to(torch.complex64).conj()"],
)
case(
    "memory format read",
    "def call(x): return x * 2 if x.is_contiguous() else x * 3",
    inputs=["m", "m.t()", "m[:, :2]"],
)
case(
    "tensor of zero dimensions or a number",
    "def call(x, s): return x * s",
    inputs=["x, 2", "x, torch.tensor(2.0)", "x, torch.tensor(2.0, dtype=torch.float64)", "x, 2.5"],
)

# --- plain values -------------------------------------------------------------------------------

case(
    "numbers that are equal but not the same",
    "def call(x, v): return x.to(torch.int64) * v, v",
    inputs=["x, 1", "x, True", "x, 1.0", "x, 1 + 0j"],
)
case(
    "zeros of both signs, nan, infinity",
    "def call(x, v): return x / v, v",
    inputs=["x, 0.0", "x, -0.0", "x, float('nan')", "x, -float('nan')", "x, float('inf')"],
)
case("big integers", "def call(x, v): return x * (v % 7)", inputs=["x, 2**70", "x, 2**70 + 1"])
case(
    "strings, bytes, None",
    "def call(x, v): return x * 2 if v is None else x * len(v) + (v in ('a', b'a'))",
    inputs=["x, None", "x, 'a'", "x, b'a'", "x, 'ab'", "x, ''"],
)
case(
    "complex numbers",
    "def call(x, v): return x * v",
    inputs=["x, 1j", "x, 2j", "x, complex(-0.0, 1)"],
)
case(
    "tuples of numbers",
    "def call(x, v): return x * v[0] + len(v), v",
    inputs=["x, (1, 2)", "x, (1.0, 2)", "x, (1, 2, 3)", "x, [1, 2]", "x, (True, 2)"],
)
case(
    "dtype, slice, range, size",
    "def call(x, d, s, r, z): return x.to(d)[s].sum() + sum(r) + torch.ones(z)",
    inputs=[
        "x, torch.float32, slice(0, 2), range(3), torch.Size([2])",
        "x, torch.float64, slice(0, 2), range(3), torch.Size([2])",
        "x, torch.float32, slice(1, 2), range(3), torch.Size([2])",
        "x, torch.float32, slice(0, 2), range(0, 9, 4), torch.Size([2])",
        "x, torch.float32, slice(0, 2), range(3), torch.Size([3])",
    ],
)
case(
    "functions and classes",
    "def call(x, f, c): return f(x) * c(2.5)",
    inputs=["x, torch.neg, int", "x, torch.abs, int", "x, torch.neg, float", "x, lambda v: v, int"],
)
case(
    "enum members",
    """
    import enum
    class Mode(enum.Enum):
        FAST = 1
        SLOW = 2
    def call(x, mode):
        return x * 2 if mode is Mode.FAST else x * 3
    """,
    inputs=["x, Mode.FAST", "x, Mode.SLOW"],
)
case(
    "NumPy arrays and scalars",
    """
    import numpy as np
    def call(x, a, s):
        return x + torch.from_numpy(a) * float(s) + a.dtype.itemsize
    """,
    inputs=[
        "x, np.ones(4), np.float64(2)",
        "x, np.ones(4, 'float32'), np.float64(2)",
        "x, np.full(4, float(n)), np.float64(2)",
        "x, np.ones(4), np.float32(3)",
        "x, np.ones(1), np.float64(2)",
    ],
)
case(
    "NumPy array shared with an earlier call, changed in place",
    """
    import numpy as np
    ARRAY = np.ones(4, "float32")
    def call(x, a):
        return x * torch.as_tensor(a)
    """,
    inputs=["x, ARRAY"],
    writes=["ARRAY[1] = 5.0", "ARRAY *= 2"],
)

# --- containers and objects ---------------------------------------------------------------------

case(
    "length of a list of tensors",
    "def call(xs): return sum(t * (i + 1) for i, t in enumerate(xs))",
    inputs=["[x]", "[x, y]", "[x, y, x]", "(x, y)"],
)
case(
    "keys of a dict and their order",
    """
    def call(d):
        out = 0
        for key, value in d.items():
            out = out * 2 + value * len(key)
        return out
    """,
    inputs=["{'a': x, 'b': y}", "{'b': y, 'a': x}", "{'a': x}", "{'a': x, 'long': y}"],
)
case(
    "same list passed twice",
    """
    def call(a, b):
        a.append(a[0] * 2)
        return sum(b), len(a) + len(b)
    """,
    inputs=["*([[x]] * 2)", "[x], [x]"],
)
case(
    "same tensor inside two containers",
    """
    def call(a, b):
        a["t"].add_(1)
        return a["t"] + b[0]
    """,
    inputs=["{'t': x}, [y]", "{'t': x}, [x]"],
)
case(
    "object with other attributes, of another class",
    """
    class A:
        scale = 2.0
    class B:
        scale = 3.0
    def made(cls, **attributes):
        bag = cls()
        vars(bag).update(attributes)
        return bag
    def call(x, bag):
        return x * bag.scale
    """,
    inputs=["x, A()", "x, made(A, scale=4.0)", "x, B()", "x, made(A, other=1, scale=5.0)"],
)
case(
    "object that holds tensors",
    """
    from types import SimpleNamespace as Space
    def call(batch):
        batch.x.add_(1)
        return batch.x * batch.y, batch.x is batch.y
    """,
    inputs=["Space(x=x, y=y)", "Space(x=x, y=x)", "Space(x=x, y=y.double())"],
)
case(
    "dataclass and namedtuple",
    """
    import dataclasses, collections
    Pair = collections.namedtuple("Pair", "x scale")
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        scale: float
    def call(batch):
        return batch.x * batch.scale, type(batch).__name__
    """,
    inputs=["Batch(x, 2.0)", "Batch(x, 3.0)", "Pair(x, 2.0)"],
)
case(
    "module as an argument",
    """
    A, B = nn.Linear(4, 4), nn.Linear(4, 4)
    def call(x, layer):
        return layer(x)
    """,
    inputs=["x, A", "x, B", "x, nn.Tanh()"],
)
case(
    "iterator used up",
    "def call(xs): return sum(t * 2 for t in xs), next(xs, None)",
    inputs=["iter([x])", "iter([x, y])"],
)

# --- signatures ---------------------------------------------------------------------------------

case(
    "number of arguments",
    "def call(*xs, **named): return sum(xs) * (len(xs) + 2 * len(named))",
    inputs=["x", "x, y", "x, y, x", "x, a=1", "x, a=1, b=2"],
)
case(
    "order of keywords",
    """
    def call(**named):
        out = 0
        for name, value in named.items():
            out = out * 2 + value
        return out, list(named)
    """,
    inputs=["a=x, b=y", "b=y, a=x"],
)
case(
    "keyword-only arguments and defaults",
    "def call(x, scale=2.0, *, shift=1.0): return x * scale + shift",
    inputs=["x", "x, 2.0", "x, scale=3.0", "x, shift=2.0", "x=x, scale=4.0, shift=0.0"],
    changes=False,  # the second form says what the defaults say
)
case(
    "positional tensors given by keyword",
    "def call(a, b): return a - b",
    inputs=["x, y", "x, b=y", "b=x, a=y", "y, x"],
    changes=False,  # the second form says what the first says
)
case(
    "deques with different limits",
    "import collections\ndef call(x, d):\n    d.append(1)\n    return x * len(d) * d.maxlen",
    inputs=["x, collections.deque([1], maxlen=2)", "x, collections.deque([1], maxlen=1)"],
)

# --- what an attribute of a tensor leads to -------------------------------------------------------

_LABEL = """
class Label:
    bonus = 2.0
    def __init__(self, value, **others):
        self.value = value
        self.__dict__.update(others)
def labelled(x, label):
    x.label = label
    return x
"""
case(
    "object on a tensor argument",
    _LABEL + "def call(x): return x * x.label.value * x.label.bonus",
    inputs=[
        "labelled(x, Label(2.0))",
        "labelled(x, Label(3.0))",
        "labelled(x, Label(3.0, bonus=7.0))",
    ],
)
case(
    "object on a tensor that is state",
    _LABEL
    + "W = labelled(torch.ones(4), Label(2.0))\n"
    + "def call(x): return x * W.label.value * W.label.bonus",
    writes=["W.label.value = 3.0", "Label.bonus = 9.0", "W.label.bonus = 7.0"],
    unrelated=["W.label.other = 1.0"],
)
case(
    "containers on a tensor that is state",
    "W = torch.ones(4)\nW.table, W.row = {'a': 1.0}, [2.0]\n"
    "def call(x): return x * W.table['a'] * W.row[0]",
    writes=["W.table['a'] = 3.0", "W.row[0] = 4.0"],
)
case(
    "tensor below an attribute of a parameter",
    _LABEL
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.label = Label(torch.full((4,), 2.0))
    def forward(self, x):
        return x * self.weight * self.weight.label.value
call = Net()
""",
    writes=[
        "call.weight.label.value = torch.full((4,), 3.0)",
        "call.weight.label.value.fill_(4.0)",
    ],
)
