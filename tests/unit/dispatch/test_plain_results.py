"""Results without a tensor: compiled code gives them as well, as long as what was read holds."""

from __future__ import annotations

import pytest
import torch
from support import check_compiles, write
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

PROGRAMS = {
    "objects compare": """
class P:
    def __init__(self, v):
        self.v = v

    def __eq__(self, other):
        return self.v == other.v

def call(a, b):
    return a == b

def go(f, see):
    for other in (1, 1, 2, 2, 1):
        see(f(P(1), P(other)))
    P.__eq__ = lambda self, other: "replaced"
    see(f(P(1), P(1)), f(P(1), P(1)))
""",
    "an object's hash, length, truth and index": """
class P:
    n = 3

    def __hash__(self):
        return self.n

    __len__ = __index__ = __hash__

    def __bool__(self):
        return self.n > 2

def call(p):
    return hash(p), len(p), bool(p), [0, 1, 2, 3, 4][p]

def go(f, see):
    p = P()
    for n in (3, 3, 2, 2, 3):
        p.n = n
        see(f(p))
    P.__bool__ = lambda self: True
    see(f(p), f(p))
""",
    "what a tensor is": """
def call(x):
    return x.shape, x.dtype, x.stride(), x.requires_grad, x.is_leaf, len(x), x.grad is None

def go(f, see):
    grown = T().requires_grad_()
    for x in (T(), T(), T().double(), torch.ones(4)[::2], grown, grown * 2, torch.ones(2, 3)):
        see(*map(str, f(x)))
        see(*map(str, f(x)))
    grown.sum().backward()
    see(*map(str, f(grown)))
""",
    "what a parameter is": """
net = nn.Linear(2, 2)

def call():
    return net.weight.requires_grad, str(net.weight.dtype), net.training, net.bias is None

def go(f, see):
    see(f(), f())
    net.weight.requires_grad_(False)
    see(f(), f())
    net.eval()
    see(f(), f())
    net.double()
    see(f(), f())
    net.bias = None
    see(f(), f())
""",
    "the caller may write to the result": """
ROWS = [1, 2]

def call(x):
    return {"rows": list(ROWS), "tags": {x.ndim}, "same": ROWS}

def go(f, see):
    for _ in range(4):
        found = f(T())
        see(found["rows"], sorted(found["tags"]), found["same"] is ROWS)
        found["rows"].append(3)
        found["tags"].add(9)
    ROWS.append(5)
    see(f(T())["rows"])
""",
    "an argument comes back": """
def call(a, b):
    return a if a.first else b

def go(f, see):
    a, b = types.SimpleNamespace(first=True), types.SimpleNamespace(first=False)
    for one, other in ((a, b), (a, b), (b, a), (b, a), (a, a)):
        see(f(one, other) is one, f(one, other) is other)
""",
    "which tensor it is": """
KEPT = T()

def call(x, y):
    return x is y, x is KEPT, any(x is one for one in (y, KEPT))

def go(f, see):
    x, y = T(1), T(2)
    for pair in ((x, y), (x, y), (x, x), (KEPT, y), (y, KEPT), (x, y)):
        see(f(*pair))
""",
    "values decide": """
def call(x):
    return "large" if x.sum() > 3 else "small"

def go(f, see):
    for i in range(8):
        see(f(T(i % 4)))
""",
    "values are compared": """
def call(x, y):
    return torch.equal(x, y), torch.allclose(x, y + 1), x.sum().item() > 3

def go(f, see):
    for i in range(8):
        see(f(T(i % 4), T(1)))
""",
    "numbers that vary": """
def call(n, x):
    return n * 2 + x.shape[0], n > 3, f"{n}"

def go(f, see):
    for n in (1, 1, 2, 3, 4, 5, 6, 6):
        see(f(n, T()))
""",
    "nothing, but what is written": """
history = []
seen = [0]
best = {}

def call(x, warmup=2):
    seen[0] += 1
    if len(history) < warmup:
        history.append(x.sum().item())
        return
    if x.sum().item() > best.get("sum", 0):
        best["sum"] = x.sum().item()

def go(f, see):
    for i in range(8):
        see(f(T(i % 4)), list(history), list(seen), dict(best))
        if i == 5:
            history.clear()
""",
    "nothing, until there is enough": """
queue = []

def call(x):
    if len(queue) < 4:
        return None
    return torch.stack(queue).sum(0) + x

def go(f, see):
    for i in range(9):
        see(f(T(i)))
        queue.append(T(i))
        if i == 6:
            del queue[1:]
""",
    "torch's state": """
def call():
    return torch.is_grad_enabled(), str(torch.get_default_dtype())

def go(f, see):
    see(f(), f())
    with torch.no_grad():
        see(f(), f())
    torch.set_default_dtype(torch.float64)
    try:
        see(f(), f())
    finally:
        torch.set_default_dtype(torch.float32)
    see(f())
""",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_result_without_a_tensor_is_the_plain_one(name, backend, tmp_path) -> None:
    check_twins(PROGRAMS[name], backend, tmp_path, hits=1)


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_a_result_without_a_tensor_is_compiled_with_fullgraph(backend) -> None:
    config = {"scale": 2}

    def describe(x):
        return f"{tuple(x.shape)} {config['scale']}"

    x = torch.ones(2, 3)
    calls = [x, x, write(config, "scale", 5), x, x]
    compiled = check_compiles(describe, calls, traces=2, backend=backend)
    assert tripwire.explain(compiled).hits == 2


@pytest.mark.parametrize("dynamic", [None, False])
def test_what_values_decide_isnt_traced_for_ever(dynamic) -> None:
    def is_large(x):
        return bool(x.sum() > 2)

    calls = [torch.full((2,), float(i % 5)) for i in range(20)]
    check_compiles(is_large, calls, traces=2, backend="eager", dynamic=dynamic)


def test_a_comparison_of_a_number_out_of_a_tensor_isnt_traced_for_ever() -> None:
    calls = [torch.full((2,), float(i % 5)) for i in range(20)]
    check_compiles(lambda x: x.sum().item() > 2, calls, traces=3, backend="eager")
