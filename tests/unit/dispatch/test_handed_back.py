"""Calls that return their argument itself: a write to the result is a write to the argument."""

from __future__ import annotations

import pytest
from unit.dispatch.sidebyside import BACKENDS, check_twins

PROGRAMS = {
    "F.dropout eval": """
def call(x, r):
    y = F.dropout(x, 0.5, training=False)
    y += r
    return y

def go(f, see):
    for i in range(4):
        x = T(i)
        y = f(x, T(1))
        see(x, y, y is x)
""",
    "behind a view that runs as it is": """
def call(x, r):
    y = x.view(2)
    y += r
    x += r
    return x

def go(f, see):
    for i in range(4):
        x = T(i).requires_grad_()
        with torch.no_grad():
            y = f(x, T(1))
        see(x, y, y is x)
""",
    "behind a view that is read": """
def call(x, r):
    y = x[:1] * 2
    z = x.reshape(x.shape) * 2
    x += r
    return x, y, z

def go(f, see):
    for i in range(4):
        x = T(i).requires_grad_()
        with torch.no_grad():
            y, *rest = f(x, T(1))
        see(x, y, y is x, rest)
""",
    "both of two views": """
def call(x, r):
    y, z = x.view(2), x.view(1, 2)
    y += r
    z *= 2
    x += r
    return z, x, y

def go(f, see):
    for i in range(4):
        x = T(i).requires_grad_()
        with torch.no_grad():
            z, y, w = f(x, T(1))
        see(x, y, z, w, y is x, w._base is x, z._base is x)
""",
    "nn.Dropout eval": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.Dropout(0.5)
        self.l = nn.Linear(2, 2)

    def forward(self, x):
        h = self.d(x)
        h += 1
        return h

call = N().eval()

def go(f, see):
    for i in range(4):
        x = T(i)
        y = f(x)
        see(x, y, y is x)
""",
    "alias of state": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.zeros(2))
        self.d = nn.Dropout()

    def forward(self, x):
        h = self.d(self.b)
        h += x
        return h * 2

call = N().eval()

def go(f, see):
    for i in range(4):
        see(f(T(1)), call.b)
""",
    "alias of intermediate": """
def call(x):
    a = x * 2
    b = F.dropout(a, 0.5, False)
    b += 1
    return a, b

def go(f, see):
    for i in range(4):
        a, b = f(T(i))
        see(a, b, a is b)
""",
    "identity result": """
def call(x):
    return F.dropout(x, 0.5, False), x

def go(f, see):
    for i in range(4):
        x = T(i)
        a, b = f(x)
        see(a is x, b is x, a is b)
""",
    "is-test": """
def call(x):
    y = F.dropout(x, 0.5, False)
    return x * 2 if y is x else x * 3

def go(f, see):
    for i in range(4):
        see(f(T(i)))
""",
    "contiguity differs": """
def call(x):
    y = x.contiguous()
    y += 1
    return y

def go(f, see):
    for i in range(8):
        x = torch.full((2, 3), float(i))
        x = x.t() if i % 4 > 1 else x
        y = f(x)
        see(x, y, y is x)
""",
    "param grad": """
w = nn.Parameter(T(2))

def call(x):
    y = F.dropout(x * w, 0.5, False)
    y += x
    return y.sum()

def go(f, see):
    for i in range(4):
        w.grad = None
        f(T(i)).backward()
        see(w.grad)
""",
    "autograd leaf": """
def call(x):
    y = F.dropout(x, 0.5, False)
    y = y * 2
    return y

def go(f, see):
    for i in range(4):
        x = T(i).requires_grad_()
        f(x).sum().backward()
        see(x.grad)
""",
    "under no_grad": """
def call(x):
    with torch.no_grad():
        y = F.dropout(x, 0.5, False)
        y += 1
    return y * 2

def go(f, see):
    for i in range(4):
        x = T(i).requires_grad_()
        see(f(x), x)
""",
    "module stack": """
call = nn.Sequential(
    nn.Dropout(0.5), nn.Identity(), nn.Flatten(0), nn.Dropout(0.3, inplace=True)
).eval()

def go(f, see):
    for i in range(4):
        x = T(i)
        y = f(x)
        see(x, y, y is x)
        y += 1
        see(x)
""",
    "train then eval": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.Dropout(0.5)

    def forward(self, x):
        h = self.d(x)
        h += 1
        return h

call = N()

def go(f, see):
    for mode in (True, False, True, False):
        call.train(mode)
        for i in range(3):
            torch.manual_seed(i)
            x = T(i)
            y = f(x)
            see(x, y, y is x)
""",
    "residual": """
class N(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.Dropout(0.1)
        self.l = nn.Linear(2, 2)
        nn.init.ones_(self.l.weight)
        nn.init.zeros_(self.l.bias)

    def forward(self, x):
        h = self.d(self.l(x))
        h += x
        return h

call = N().eval()

def go(f, see):
    for i in range(4):
        x = T(i).requires_grad_()
        y = f(x)
        y.sum().backward()
        see(x.grad, y, call.l.weight.grad)
""",
    "autocast to": """
def call(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.to(torch.float32)
        y += 1
        return y @ y

def go(f, see):
    for i in range(3):
        x = torch.full((2, 2), float(i))
        y = f(x)
        see(x, y)
""",
    "inference mode": """
def call(x):
    with torch.inference_mode():
        a = x * 2
        b = F.dropout(a, 0.5, False)
        b += 1
        return a * 1

def go(f, see):
    for i in range(3):
        see(f(T(i)).clone())
""",
    "to subclass/param": """
w = nn.Parameter(T(2))

def call(x):
    with torch.no_grad():
        v = w.contiguous()
        v.mul_(2)
    return x * w

def go(f, see):
    for i in range(3):
        see(f(T(i)), w)
""",
    "nested lists": """
def call(x):
    a, b = torch.atleast_1d(x, x * 2)
    a += 1
    b += 1
    return a, b, x * 1

def go(f, see):
    for i in range(3):
        x = T(i)
        a, b, c = f(x)
        see(a, b, c, a is x, x)
""",
    "returned alias only": """
def call(x):
    return x.contiguous()

def go(f, see):
    for i in range(3):
        x = T(i)
        see(f(x) is x)
""",
}
EXPRESSIONS = {
    "x.contiguous()",
    "x.to(torch.float32)",
    "x.to(x)",
    "x.type_as(x)",
    "x.type(torch.float32)",
    "x.float()",
    "x.cpu()",
    "F.alpha_dropout(x, 0.5, False)",
    "F.feature_alpha_dropout(x.view(1, 2, 1), 0.5, False)",
    "nn.Identity()(x)",
    "x.reshape(2)",
    "x.squeeze()",
    "x.expand_as(x)",
    "torch.dropout(x, 0.5, False)",
    "F.dropout(x, 0.0, True)",
    "F.dropout1d(x.view(1, 1, 2), 0.5, False)",
    "F.dropout2d(x.view(1, 1, 1, 2), 0.5, False)",
    "x.conj()",
    "x.resolve_conj()",
    "x.resolve_neg()",
    "torch.real(x)",
    "+x",
    "x.contiguous(memory_format=torch.contiguous_format)",
    "torch.atleast_1d(x)",
    "torch.broadcast_to(x, (2,))",
    "x.view(2).contiguous()",
    "x.detach()",
    "x.flatten()",
    "x.ravel()",
    "x.movedim(0, 0)",
    "x.t()",
    "torch.as_tensor(x)",
    "torch.asarray(x)",
    "torch.squeeze(x, 0)",
    "F.rrelu(x, training=False)",
    "torch.broadcast_tensors(x)[0]",
    "x.split(2)[0]",
    "x.chunk(1)[0]",
    "x.unflatten(0, (2,))",
    "x.expand(2)",
    "x.to(torch.float32, copy=False)",
    "F.dropout(F.dropout(x, 0.5, False), 0.5, False)",
    "F.dropout(x, 0.5, False, True)",
    "x.relu_()",
    "x.tensor_split(1)[0]",
    "x.narrow(0, 0, 2)",
    "x.view_as(x)",
    "x.sum_to_size(2)",
    "x.to_dense()",
    "torch.atleast_1d((x,))[0]",
    "F.dropout3d(x.view(1, 1, 1, 1, 2), 0.5, False)",
    'x.float().contiguous().to("cpu")',
    'x.to(device="cpu", dtype=torch.float32)',
    "x.resolve_conj().resolve_neg()",
}
BEHIND_INDUCTOR = ["F.dropout eval", "alias of state"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_handed_back_is_the_argument(name, backend, tmp_path) -> None:
    check_twins(PROGRAMS[name], backend, tmp_path)


@pytest.mark.parametrize("name", BEHIND_INDUCTOR)
def test_inductor_agrees_that_what_is_handed_back_is_the_argument(name, tmp_path) -> None:
    check_twins(PROGRAMS[name], "inductor", tmp_path, hits=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("expression", sorted(EXPRESSIONS))
def test_writes_go_where_plain_code_puts_them(expression, backend, tmp_path) -> None:
    source = f"""
def call(x, r):
    y = {expression}
    y += r
    return y, x * 1

def go(f, see):
    for i in range(3):
        x = T(i)
        y, z = f(x, 1.0)
        see(x, y, z, y is x, y.data_ptr() == x.data_ptr())
"""
    check_twins(source, backend, tmp_path, hits=2)


# What a call returns or keeps: an array, and a tensor whose memory it has.
ARRAYS = {
    "beside its tensor": ("y = x * 2", "y, y.numpy()"),
    "a part of it": ("y = x * 2", "y, y.numpy()[1:]"),
    "a view of its tensor": ("y = x * 2", "y.view(2), y.numpy()"),
    "of the argument": ("y = x", "x * 2, x.numpy()"),
    "of state": ("y = STATE", "x * 2, STATE.numpy()"),
    "asked for by NumPy": ("import numpy; y = x * 2", "y, numpy.asarray(y)"),
    "kept in state": ("y = x * 2; KEPT['a'] = y.numpy()", "y, KEPT['a']"),
    "alone": ("y = x * 2", "x * 1, y.numpy()"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_has_the_memory_that_it_has_in_plain_code(name, backend, tmp_path) -> None:
    body, result = ARRAYS[name]
    source = f"""
STATE, KEPT = T(3), {{}}
def call(x):
    {body}
    return {result}

def go(f, see):
    x = T(1)  # equal values, since an array's are compared
    for i in range(4):
        y, array = f(x)
        array[0] += 5
        see(x, y, array.tolist(), STATE, [a.tolist() for a in KEPT.values()])
        x = T(1)
        STATE.fill_(3)
"""
    check_twins(source, backend, tmp_path)


TWO = {
    "detached": "y, y.detach()",
    "its own view": "y, y.view(2)",
    "there and back": "y.unsqueeze(0).squeeze(0), y",
    "a whole slice": "y[:], y",
    "three": "y, y.detach(), y.expand(2)",
    "kept and returned": "KEPT.__setitem__('y', y.detach()) or (y, KEPT['y'])",
}


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
@pytest.mark.parametrize("name", TWO)
def test_two_results_with_one_memory_are_two_tensors(name, backend, tmp_path) -> None:
    source = f"""
KEPT = {{}}
def call(x):
    y = x * 2
    return {TWO[name]}

def go(f, see):
    for i in range(4):
        one, two, *rest = f(T(i))
        see(one is two, one.data_ptr() == two.data_ptr(), len({{*map(id, rest), id(one), id(two)}}))
        one.note = i
        see(hasattr(two, "note"))
        two.add_(1)
        two.unsqueeze_(0)
        see(one, two, rest)
"""
    check_twins(source, backend, tmp_path, hits=1)


SCRIPTS = {  # name: what the script does, what the call makes of it
    "another value": ("if bool(x.sum() > 0):\n        return x * 2\n    return x", "x + 1, y"),
    "another size": ("if bool(x.sum() > 0):\n        return x[:1]\n    return x", "x * y.shape[0]"),
    "a length": ("if bool(x.sum() > 0):\n        return x[:1]\n    return x", "x + len(y), y"),
    "in a list": (
        "if bool(x.sum() > 0):\n        return [x * 2, x]\n    return [x, x * 2]",
        "x + 1, y[0]",
    ),
    "by a loop": ("while bool(x.sum() > 0):\n        x = x - 1\n    return x", "x * 3, y"),
    "always": ("return x", "x + 1, y * 2"),
    "in place": ("x.add_(1)\n    return x", "x + 1, y * 2"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_may_hand_back_its_argument(name, backend, tmp_path) -> None:
    body, result = SCRIPTS[name]
    program = f"""
@torch.jit.script
def script(x):
    {body}
def call(x):
    y = script(x)
    return {result}
def go(f, see):
    for value in (-1, -1, -2, 1, 1, -1, 2, -3):
        see(f(T(value)))
"""
    check_twins(program, backend, tmp_path, hits=2 if name in ("always", "in place") else 0)
