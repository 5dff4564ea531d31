"""Branches: values that Python takes out of tensors that are changed in place around them."""

from unit.channels.channel import Family

FAMILY = Family("branches")
case = FAMILY.case
HOPELESS = Family("hopeless branches")  # not meant to be compiled; wrong they may not be

_FLIP = ["x.abs()", "-x.abs()"]
_FLIP_BOTH = ["x.abs(), y.abs()", "-x.abs(), y.abs()", "x.abs(), -y.abs()"]

# --- the run's own memory -------------------------------------------------------------------------

case(
    "write to a tensor that has nothing to do with it",
    """
    def call(x):
        other = torch.zeros(4)
        other.add_(1)
        return x * 2 + other if x.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "write to a copy of the tensor",
    """
    def call(x):
        y = x.clone()
        y.neg_()
        return y * 2 if y.sum() > 0 else y * 3
    """,
    inputs=_FLIP,
)
case(
    "write through a view",
    """
    def call(x):
        y = x.clone()
        y[1:].mul_(-5)
        return y * 2 if y.sum() > 0 else y * 3
    """,
    inputs=_FLIP,
)
case(
    "write to the base of a view made before",
    """
    def call(x):
        base = x.clone()
        first = base[0]
        base.neg_()
        return x * 2 if first.item() > 0 else x * 3
    """,
    inputs=["torch.ones(4)", "-torch.ones(4)"],
)
case(
    "write by an index",
    """
    def call(x):
        counts = torch.zeros(4)
        counts[x > 0] = 1.0
        counts[0] = counts[1]
        return x * counts.sum().item()
    """,
    inputs=["x.abs()", "-x.abs()", "x.abs() * torch.tensor([-1, 1, 1, -1])"],
)
case(
    "write into an out argument",
    """
    def call(x):
        out = torch.empty(4)
        torch.mul(x, -1, out=out)
        return x * 2 if out.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "write after the value was taken",
    """
    def call(x):
        y = x.clone()
        positive = bool((y > 0).all())
        y.neg_()
        return y * 2 if positive else y * 3
    """,
    inputs=_FLIP,
)
case(
    "value taken twice, a write between",
    """
    def call(x):
        y = x.clone()
        first = y[0].item()
        y.add_(1)
        return x * first * y[0].item()
    """,
    inputs=["torch.full((4,), 2.0)", "torch.full((4,), 1.0)"],
)
case(
    "view taken twice, a write between",
    """
    def call(x):
        y = x.clone()
        view = y[0]
        first = view.item()
        y.mul_(-1)
        second = view.item()
        return x * first + second
    """,
    inputs=["torch.full((4,), 2.0)", "torch.full((4,), -2.0)"],
)
case(
    "comparison kept over a write",
    """
    def call(x):
        y = x.clone()
        total = y.sum()
        y.zero_()
        return x * 2 + y if total > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "memory that is freed and used again",
    """
    def call(x):
        out = 0
        for i in range(3):
            y = x * (i + 1)
            y.neg_()
            del y
            z = x * 2
            out = out + (z if z.sum() > 0 else -3 * z)
            del z
        return out
    """,
    inputs=_FLIP,
)
case(
    "write in a loop on what steers it",
    """
    def call(x):
        y = x.abs().sum() * 0
        n = 0
        while y < 3:
            y += x.abs().max().clamp(min=1).round()
            n += 1
        return x * n
    """,
    inputs=["torch.ones(4)", "torch.ones(4) * 2", "torch.ones(4) * 5"],
)
case(
    "write to a slice of a tensor that is read whole",
    """
    def call(x):
        whole = torch.zeros(2, 4)
        row = whole[1]
        row.copy_(x)
        del row
        return x * 2 if whole.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "write by a function with a flag",
    """
    def call(x):
        y = x - 1
        torch.nn.functional.relu(y, inplace=True)
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=["x.abs() + 2", "-x.abs()"],
)
case(
    "write by a function with a flag, in inference mode",
    """
    @torch.inference_mode()
    def call(x):
        y = x - 1
        torch.nn.functional.relu(y, inplace=True)
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=["x.abs() + 2", "-x.abs()"],
)
case(
    "write by a custom function",
    """
    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.neg_()
            ctx.mark_dirty(x)
            return x
        @staticmethod
        def backward(ctx, grad):
            return -grad
    def call(x):
        y = x.clone()
        Negate.apply(y)
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "write by a scripted function",
    """
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        @torch.jit.script
        def negate(x):
            x.neg_()
            return x + 1
    def call(x):
        y = x.clone()
        negate(y)
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "other data in a tensor",
    """
    def call(x):
        y, z = torch.zeros(4), x.clone()
        y.data = z
        z.neg_()
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "set_ to another tensor's memory",
    """
    def call(x):
        y, z = torch.zeros(4), x.clone()
        y.set_(z)
        z.neg_()
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "shape changed in place",
    """
    def call(x):
        y = x.clone()
        y.unsqueeze_(0)
        y.t_()
        return x * 2 if y[0].item() > 0 else x * len(y)
    """,
    inputs=["torch.ones(4)", "-torch.ones(4)"],
)

# --- memory from outside --------------------------------------------------------------------------

case(
    "write to an input, value of it",
    """
    def call(x):
        x.neg_()
        return x * 2 if x.sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)
case(
    "write to an input after its value was taken",
    """
    def call(x):
        positive = bool(x.sum() > 0)
        x.neg_()
        return x * 2 if positive else x * 3
    """,
    inputs=_FLIP,
)
case(
    "write to an input, value of a view made before",
    """
    def call(x):
        first = x[0]
        x.neg_()
        return x * 2 if first.item() > 0 else x * 3
    """,
    inputs=["torch.ones(4)", "-torch.ones(4)"],
)
case(
    "write to an input, value of another",
    """
    def call(x, y):
        x.neg_()
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=_FLIP_BOTH,
)
case(
    "write to an input, value of another that overlaps or not",
    """
    def call(x, y):
        x.neg_()
        return x * 2 if y.sum() > 0 else x * 3
    """,
    inputs=["x.abs(), y.abs()", "*(lambda t: (t, t[:2]))(x.abs())", "x, -y.abs()"],
)
case(
    "write to an input that may be a view of state",
    """
    STATE = torch.ones(4)
    def call(x):
        x.neg_()
        return x * 2 if STATE.sum() > 0 else x * 3
    """,
    inputs=["x.abs()", "STATE[:]"],
    state="STATE.tolist()",
)
case(
    "write to an input that shares its memory through NumPy",
    """
    import numpy
    ARRAY = numpy.ones(4, dtype=numpy.float32)
    STATE = torch.from_numpy(ARRAY)
    def call(x):
        x.neg_()
        return x * 2 if STATE.sum() > 0 else x * 3
    """,
    inputs=["x.abs()", "torch.from_numpy(ARRAY)"],
    state="STATE.tolist()",
)
case(
    "write to a buffer, value of it",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
        def forward(self, x):
            self.steps += 1
            return x * 2 if self.steps > 4 else x * 3
    call = Net()
    """,
    writes=["call.steps.zero_()"],
    state="call.steps.item()",
)
case(
    "write to a buffer after its value was taken",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
        def forward(self, x):
            late = self.steps > 4
            self.steps += 1
            return x * 2 if late else x * 3
    call = Net()
    """,
    writes=["call.steps.zero_()"],
    state="call.steps.item()",
)
case(
    "input stored in a tensor's data, then written",
    """
    def call(x):
        y = torch.zeros(4)
        y.data = x
        y.neg_()
        return y * 2 if x.sum() > 0 else y * 3
    """,
    inputs=_FLIP,
)
case(
    "running statistics, value of them",
    """
    MEAN, VAR = torch.zeros(4), torch.ones(4)
    def call(m):
        y = torch.nn.functional.batch_norm(m, MEAN, VAR, training=True, momentum=1.0)
        return y * 2 if MEAN.sum() > 0 else y * 3
    """,
    inputs=["m.abs()", "-m.abs()"],
    state="MEAN.tolist()",
)
case(
    "gradient that a backward inside accumulates",
    """
    P = nn.Parameter(torch.ones(4))
    def call(x):
        (P * x).sum().backward()
        return x * 2 if P.grad.sum() > 0 else x * 3
    """,
    writes=["P.grad.fill_(-9.0)", "P.grad.fill_(9.0)"],
    inputs=["x.clamp(min=0) + 1"],
    state="P.grad.tolist()",
)
case(
    "values of a sparse tensor",
    """
    def call(x):
        s = torch.eye(4).to_sparse().coalesce()
        s.values().mul_(x)
        return x * 2 if s.to_dense().sum() > 0 else x * 3
    """,
    inputs=_FLIP,
)

# --- contexts -------------------------------------------------------------------------------------

case(
    "autocast left before the value is computed",
    """
    LAYER = nn.Linear(4, 4)
    def call(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = LAYER(x)
        return y * 2 if x.sum() > 0 else y * 3
    """,
    inputs=_FLIP,
)
case(
    "value computed in autocast",
    """
    def call(m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m * (m @ m).sum().item()
    """,
    inputs=["torch.ones(4, 4) * 1.001", "torch.ones(4, 4) * 2"],
)

# --- sizes that come out of scripts ---------------------------------------------------------------

_SCRIPT = """
    import warnings
    def script(function):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(function)
"""
case(
    "size of a scripted function's result",
    _SCRIPT
    + """
    @script
    def pairs(x):
        return x.unsqueeze(0) * torch.arange(x.size(0), dtype=x.dtype).unsqueeze(1)
    def call(x):
        y = pairs(x)
        return y * y.shape[0] + len(y)
    """,
    inputs=["x", "x[:2]", "x[:1]"],
)
case(
    "size that a script takes from values",
    _SCRIPT
    + """
    @script
    def positive(x):
        return x[x > 0]
    def call(x):
        y = positive(x)
        return x * y.shape[0] + len(y)
    """,
    inputs=["x.abs()", "x.abs() * torch.tensor([1, -1, 1, -1])", "-x.abs()"],
)
case(
    "size on which a script decides by a value",
    _SCRIPT
    + """
    @script
    def some(x):
        if bool(x.sum() > 0):
            return x[:2]
        return x
    def call(x): return x * some(x).shape[0]
    """,
    inputs=_FLIP,
)
case(
    "number of tensors that a script returns",
    _SCRIPT
    + """
    @script
    def rows(x, n: int):
        parts = [x]
        for i in range(n):
            parts.append(x * i)
        return parts
    N = 2
    def call(x):
        parts = rows(x, N)
        return sum(parts) * len(parts)
    """,
    writes=["N = 3"],
)

# --- sizes that come out of custom autograd functions ---------------------------------------------


def _custom(forward: str, before: str = "") -> str:
    """A program whose result depends on the size of what a custom function returns."""
    return f"""
    {before}
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            {forward}
        @staticmethod
        def backward(ctx, grad): return grad
    def call(x):
        y = Custom.apply(x)
        return x * y.shape[0] + y.sum()
    """


case("size of a custom function's result", _custom("return x * 2"), inputs=["x", "x[:2]"])
case(
    "value that a custom function leads to",
    _custom("return x.exp()").replace("return x * y", "return x if y.sum() > 6 else x * y"),
    inputs=["x.abs() + 1", "-x.abs() - 1"],
)
case(
    "size that a custom function takes from a global",
    _custom("return x[:N]", "N = 3"),
    writes=["N = 2", "N = 4"],
)
case(
    "size that a custom function takes from a helper",
    _custom(
        "ctx.half = True; return helper(x)",
        "def helper(x, n=3): return torch.cat([x, x])[:n]",
    ),
    writes=[
        "helper.__defaults__ = (2,)",
        "helper.__code__ = (lambda x, n: x[:1]).__code__",
        "helper = lambda x: x[:4]",
    ],
)
case(
    "size that a custom function takes from a helper's helper",
    _custom(
        "return outer(x)",
        "inner = lambda x: x[:3]; outer = lambda x: inner(x) * 2",
    ),
    writes=["inner = lambda x: x[:2]"],
)
case(
    "forward of a custom function replaced by one of another size",
    _custom("return x[:3]"),
    writes=["Custom.forward = staticmethod(lambda ctx, x: x[:2])"],
)
case(
    "forward replaced behind an apply that was bound before",
    _custom("return x[:3]").replace("Custom.apply(x)", "APPLY(x)") + "\n    APPLY = Custom.apply",
    writes=["Custom.forward = staticmethod(lambda ctx, x: x[:2])"],
)
case(
    "builtin that a custom function names, shadowed",
    _custom("return x[: min(3, 4)]"),
    writes=["min = lambda a, b: 2"],
)
for _name, _forward in {
    "a mask": "return x[x > 0]",
    "an item": "return x[: int((x > 0).sum().item())]",
    "a condition": "return x[:1] if x.sum() > 0 else x[:2]",
    "a tensor as a bound": "return x[: (x > 0).sum()]",
    "a tensor as a size": "return torch.ones((x > 0).sum())",
    "a caught error": "\n            ".join(
        ["try: torch.linalg.cholesky(torch.diag(x))", "except RuntimeError: return x[:2]"]
        + ["return x"]
    ),
}.items():
    HOPELESS.case(
        f"size that a custom function takes from {_name}",
        _custom(_forward),
        inputs=["x.abs()", "x.abs() * torch.tensor([1, -1, 1, -1])", "-x.abs()"],
    )
for _name, (_before, _forward, _write) in {
    "its class": ("", "return x[: getattr(Custom, 'n', 3)]", "Custom.n = 2"),
    "a list": ("L = [3]", "return x[: L[0]]", "L[0] = 2"),
    "an object": (
        "import types; C = types.SimpleNamespace(n=3)",
        "return x[: C.n]",
        "C.n = 2",
    ),
    "a tensor of the world": ("T = torch.ones(3)", "return x[: T.shape[0]]", "T = torch.ones(2)"),
    "an attribute of a function": ("def f(): return f.n", "return x[: f()]", "f.n = 2"),
}.items():
    HOPELESS.case(
        f"size that a custom function takes from {_name}",
        _custom(_forward, _before) + ("\n    f.n = 3" if "f.n" in _before else ""),
        writes=[_write],
    )
HOPELESS.case(
    "size that a custom function draws",
    _custom("return x[: R.randint(1, 3)]", "import random; R = random.Random(0)"),
    changes=False,
)
HOPELESS.case(
    "size and a counter in a custom function",
    _custom("SEEN.append(1); return x[: len(SEEN) % 3 + 1]", "SEEN = []"),
    state="list(SEEN)",
    changes=False,
)
HOPELESS.case(
    "size that a custom function takes from a context that wants gradients",
    _custom("return x[:2] if ctx.needs_input_grad[0] else x[:3]").replace(
        "+ y.sum()", "+ y.sum().detach()"
    ),
    inputs=["x", "x.clone().requires_grad_()"],
)
