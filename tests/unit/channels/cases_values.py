"""Values: plain globals told apart to the bit, and tensors whose values steer Python."""

from unit.channels.channel import Family

FAMILY = Family("values")
case, everywhere = FAMILY.case, FAMILY.everywhere

# --- plain values in globals --------------------------------------------------------------------

_VALUES = {
    "one as int, bool, float": ["1", "True", "1.0"],
    "zeros of both signs": ["0.0", "-0.0"],
    "nan": ["float('nan')", "1.0", "float('nan')"],
    "big integer": ["2**70", "2**70 + 1"],
    "string": ["'a'", "'b'", "''"],
    "bytes and string": ["b'a'", "'a'"],
    "None": ["None", "0", "False"],
    "complex": ["1j", "complex(-0.0, 1.0)"],
    "tuple": ["(1, 'a', None)", "(True, 'a', None)", "(1, 'a', (None,))"],
    "dtype": ["torch.float32", "torch.float64"],
    "range and slice": ["range(3)", "range(0, 6, 2)"],
}
for _name, (_first, *_others) in _VALUES.items():
    case(
        f"{_name}, as a global",
        f"""
        VALUE = {_first}
        def call(x):
            return x * 2, VALUE
        """,
        writes=[f"VALUE = {text}" for text in _others],
        unrelated=["OTHER = 1"],
    )
case(
    "sign of a global zero",
    """
    import math
    SHIFT = 0.0
    def call(x):
        return torch.where(x == x, SHIFT, x), x * math.copysign(1.0, SHIFT)
    """,
    writes=["SHIFT = -0.0"],
)
case(
    "string that chooses",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = "relu"
        def forward(self, x):
            return getattr(torch, self.act)(x)
    call = Net()
    """,
    writes=["call.act = 'tanh'", "call.act = 'neg'"],
)

# --- tensor values used by Python ---------------------------------------------------------------

_FLIP = ["x.abs()", "-x.abs()"]

case("if on a sum", "def call(x): return x * 2 if x.sum() > 0 else x * 3", inputs=_FLIP)
case(
    "if on a value made inside",
    """
    layer = nn.Linear(4, 4)
    def call(x):
        y = layer(x)
        return y * 2 if y.sum() > 0 else y * 3
    """,
    inputs=["x * 9", "-x * 9"],
)
case(
    "while on a tensor",
    """
    def call(x):
        while x.sum() < 8:
            x = x * 2
        return x
    """,
    inputs=["x.abs() + 1", "x.abs() + 0.2", "x.abs() + 5"],
)
case(
    "int of a tensor",
    "def call(x, k): return x * int(k) + int(k)",
    inputs=["x, torch.tensor(1)", "x, torch.tensor(2)", "x, torch.tensor(n)"],
)
case(
    "item as a size",
    "def call(x, k): return x.sum() + torch.ones(k.item())",
    inputs=["x, torch.tensor(2)", "x, torch.tensor(3)"],
)
case(
    "item as an index",
    "def call(x, k): return x[: k.item()] * 2",
    inputs=["x, torch.tensor(2)", "x, torch.tensor(3)"],
)
case(
    "float of a tensor as a constant",
    "def call(x, s): return x * float(s)",
    inputs=["x, torch.tensor(2.0)", "x, torch.tensor(3.0)", "x, torch.tensor(float(n))"],
)
case(
    "lengths as a list",
    """
    def call(x, lengths):
        return [part * len(part) for part in x.split(lengths.tolist())]
    """,
    inputs=["x, torch.tensor([1, 3])", "x, torch.tensor([2, 2])", "x, torch.tensor([1, 1, 2])"],
)
case(
    "loop over a tensor's values",
    """
    def call(x, k):
        for value in k:
            x = x * 2 if value > 0 else x + 1
        return x
    """,
    inputs=["x, torch.tensor([1, -1])", "x, torch.tensor([-1, 1])", "x, torch.tensor([1])"],
)
case(
    "mask.all() and mask.any()",
    """
    def call(x, mask):
        if mask.all():
            return x
        return x.masked_fill(~mask, 0.0) if mask.any() else x * 0 - 1
    """,
    inputs=["x, torch.ones(4) > 0", "x, torch.arange(4) > 1", "x, torch.ones(4) < 0"],
)
case(
    "number of nonzero elements",
    "def call(x): return x * len(x.nonzero())",
    inputs=["x", "x.relu()", "x * 0"],
)
case(
    "boolean index",
    "def call(x): return x[x > 0] * 2",
    inputs=["x", "x.abs()", "-x.abs()"],
)
case(
    "torch.equal and allclose",
    "def call(x, y): return x * 2 if torch.equal(x, y) else x * 3 + torch.allclose(x, y, atol=0.1)",
    inputs=["x, x.clone()", "x, y", "x, x + 0.01"],
)
case(
    "tensor value in a global",
    """
    LIMIT = torch.tensor(0.0)
    def call(x):
        return x * 2 if LIMIT > 1 else x
    """,
    writes=["LIMIT.add_(2)", "LIMIT = torch.tensor(0.5)"],
)
case(
    "value of a parameter",
    """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(0.0))
        def forward(self, x):
            return x if self.gate.item() == 0 else x * self.gate
    call = Net()
    """,
    writes=["call.gate.data.fill_(2.0)", "call.gate.data = torch.tensor(0.0)"],
)
case(
    "value read after a write in place",
    """
    def call(x):
        x.add_(1)
        return x * 2 if x.max() > 1.5 else x * 3
    """,
    inputs=["x.clamp(max=0)", "x.clamp(min=1)"],
)
case(
    "tensor in a list: `in` and index",
    "def call(x, k): return x * 2 if 2 in k else x * k.tolist().index(1)",
    inputs=["x, torch.tensor([1, 2])", "x, torch.tensor([3, 1])"],
)
case(
    "NumPy value of a tensor",
    "def call(x): return x * float(x.numpy().max())",
    inputs=["x", "x.abs() + 1"],
)
case(
    "formatted tensor value",
    "def call(x, k): return x * len(f'{k.item():.1f}')",
    inputs=["x, torch.tensor(1.0)", "x, torch.tensor(100.0)"],
)

# --- sizes used by Python -----------------------------------------------------------------------

case(
    "loop over a size",
    """
    def call(x):
        out = x[0]
        for i in range(1, x.shape[0]):
            out = out * 0.5 + x[i]
        return out
    """,
    inputs=["m", "m[:2]", "m[:1]"],
)
case(
    "if on a size",
    "def call(x): return x * 2 if x.size(0) > 2 else x * x.numel()",
    inputs=["x", "x[:2]", "x[:1]"],
)
case(
    "unpacked tensor",
    """
    def call(x):
        first, *rest = x
        return first * len(rest) + sum(rest)
    """,
    inputs=["m", "m[:2]"],
)
case(
    "number of dimensions",
    "def call(x): return x.sum(-1) if x.dim() > 1 else x * 2",
    inputs=["x", "m"],
)
