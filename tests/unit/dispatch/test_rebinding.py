"""Weights that are replaced by tensors of the same form are taken over, without a new trace.

Whatever could tell the new tensor from the old one, but for its values, keeps an entry to the old.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("scale", T(2))

    def forward(self, x):
        return self.two(self.one(x).relu()) * self.scale

torch.manual_seed(0)
net = Net()

def P(*values):
    return nn.Parameter(torch.tensor([float(v) for v in values]))

def state(seed):
    torch.manual_seed(seed)
    return {k: torch.randn_like(v) for k, v in net.state_dict().items()}
"""

# Each runs one trace.
TAKEN = {
    "load_state_dict(assign=True)": """
call = net
def go(f, see):
    for seed in range(4):
        net.load_state_dict(state(seed), assign=True)
        for i in range(3):
            see(f(T(i)))
""",
    "one parameter at a time": """
call = net
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        name = ("one", "two")[i % 2]
        setattr(getattr(net, name), "weight", nn.Parameter(torch.full((2, 2), float(i))))
""",
    "a buffer": """
call = net
def go(f, see):
    for i in range(6):
        see(f(T(i)))
        net.scale = T(i + 3)
""",
    "there and back": """
call = net
def go(f, see):
    first, other = net.one.weight, nn.Parameter(torch.ones(2, 2))
    for i in range(8):
        net.one.weight = (first, other)[i % 2]
        see(f(T(i)))
        net.one.weight.data.add_(1)
        see(f(T(i)))
""",
    "two that change places": """
call = net
def go(f, see):
    for i in range(6):
        see(f(T(i)))
        net.one.weight, net.two.weight = net.two.weight, net.one.weight
""",
    "tied weights that stay tied": """
net.two.weight = net.one.weight
call = net
def go(f, see):
    for i in range(6):
        see(f(T(i)))
        net.two.weight = net.one.weight = nn.Parameter(torch.full((2, 2), float(i)))
""",
    "a global": """
W = T(2)
def call(x):
    return x * W
def go(f, see):
    global W
    for i in range(6):
        see(f(T(i)))
        W = T(i + 5)
""",
    "an item of a dict, and an attribute": """
class O:
    pass
o, d = O(), {"w": T(2)}
o.w = T(3)
def call(x):
    return x * o.w + d["w"]
def go(f, see):
    for i in range(8):
        see(f(T(i)))
        if i % 2:
            o.w = T(i)
        else:
            d["w"] = T(i)
""",
    "gradients go to the new one": """
call = net
def go(f, see):
    for i in range(6):
        loss = f(T(i)).sum()
        loss.backward()
        see(loss.detach(), [p.grad for p in net.parameters()])
        net.one.weight = nn.Parameter(torch.full((2, 2), float(i)))
        net.one.weight.register_hook(lambda grad: grad * 3)
""",
    "new ones that aren't leaves": """
class O:
    pass
o, base = O(), torch.ones(2, requires_grad=True)
o.w = base * 2
def call(x):
    return x * o.w
def go(f, see):
    for i in range(6):
        f(T(i)).sum().backward()
        see(base.grad)
        o.w = base * (i + 2)
""",
    "an optimizer beside it": """
call = net
def go(f, see):
    for i in range(4):
        net.load_state_dict(state(i), assign=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = f(T(i)).sum()
            loss.backward()
            optimizer.step()
            see(loss.detach())
""",
    "the weight is handed out": """
def call(x):
    return net.one.weight, net.one.weight.t(), x + net.one.weight
def go(f, see):
    for i in range(6):
        with torch.no_grad():
            weight, turned, total = f(T(i))
            see(weight is net.one.weight, total)
            turned.add_(1)
            see(net.one.weight)
        net.one.weight = nn.Parameter(torch.full((2, 2), float(i)))
""",
    "the weight is kept": """
class O:
    pass
o = O()
def call(x):
    o.last = net.one.weight
    return x + net.one.weight
def go(f, see):
    for i in range(6):
        see(f(T(i)), o.last is net.one.weight)
        net.one.weight = nn.Parameter(torch.full((2, 2), float(i)))
""",
    "an argument is changed in place": """
def call(x):
    x.add_(net.scale)
    return x * net.scale
def go(f, see):
    for i in range(6):
        x = T(i)
        see(f(x), x)
        net.scale = T(i + 3)
""",
    "a value is looked at": """
def call(x):
    return x * net.scale if net.scale.sum() > 0 else x - net.scale
def go(f, see):
    for i in range(6):
        see(f(T(i)))
        net.scale = T(i + 3)
""",
    "a number is taken out": """
def call(x):
    return x * net.scale.max().item()
def go(f, see):
    for i in range(6):
        see(f(T(i)))
        net.scale = T(2)
""",
}

# These may be traced again.
TOLD = {
    "tied weights that part": """
net.two.weight = net.one.weight
call = net
def go(f, see):
    for i in range(6):
        see(f(T(i)))
        if i % 3 == 2:
            net.two.weight = nn.Parameter(torch.full((2, 2), float(i)))
""",
    "two that become one": """
def call(x):
    return x * net.one.bias * (2 if net.one.bias is net.two.bias else 3)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.one.bias = net.two.bias if i == 2 else P(i, i)
""",
    "two that become one, without a question": """
call = net
def go(f, see):
    for i in range(9):
        loss = f(T(i)).sum()
        loss.backward()
        see(loss.detach(), net.one.bias.grad, net.two.bias.grad)
        if i % 3 == 2:
            net.one.bias = net.two.bias if i == 2 else P(i, i)
""",
    "the new one is passed, too": """
def call(x):
    x.add_(1)
    return x * net.scale
def go(f, see):
    for i in range(9):
        x = T(i)
        if i % 3 == 2:
            x = net.scale = T(i + 3)
        see(f(x), x, net.scale)
""",
    "the new one shares memory with an argument": """
def call(x):
    x.add_(1)
    return x * net.scale
def go(f, see):
    for i in range(9):
        x = T(i)
        if i % 3 == 2:
            net.scale = x[:]
        see(f(x), x, net.scale)
""",
    "the new one is passed, and nothing is changed": """
def call(x):
    return (x * net.scale) if x is not net.scale else x - 7
def go(f, see):
    for i in range(9):
        x = T(i)
        if i % 3 == 2:
            x = net.scale = T(i + 3)
        see(f(x))
""",
    "other forms": """
call = net
def go(f, see):
    forms = [
        nn.Parameter(torch.ones(2, 2), requires_grad=False),
        nn.Parameter(torch.arange(4.0).view(2, 2).t()),
        nn.Parameter(torch.arange(9.0)[5:].view(2, 2)),
        nn.Parameter(torch.ones(1, 2).expand(2, 2)),
        nn.Parameter(torch.ones(2, 2)),
    ]
    for form in forms:
        net.one.weight = form
        for i in range(3):
            r = f(T(i))
            see(r, r.requires_grad)
""",
    "another class": """
class Mine(nn.Parameter):
    pass
def call(x):
    return net.one(x) * (2 if type(net.one.weight) is Mine else 3)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.one.weight = (Mine if i == 2 else nn.Parameter)(torch.full((2, 2), float(i)))
""",
    "attributes of its own": """
def call(x):
    return x * net.scale * getattr(net.scale, "factor", 1.0)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
            if i == 2:
                net.scale.factor = 5.0
""",
    "id, hash and keys": """
known = {net.scale: 2.0}
members = {net.scale}
seen = hash(net.scale)
def call(x):
    a = known.get(net.scale, 3.0)
    b = 5.0 if net.scale in members else 7.0
    c = 11.0 if hash(net.scale) == seen else 13.0
    return x * net.scale * a * b * c
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a key alone": """
known = {net.scale: 2.0}
def call(x):
    return x * net.scale * known.get(net.scale, 3.0)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a member of a set alone": """
members = {net.scale}
def call(x):
    return x * net.scale * (5.0 if net.scale in members else 7.0)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "hash alone": """
first, seen = net.scale, hash(net.scale)  # it lives on: no other gets its address
def call(x):
    return x * net.scale * (11.0 if hash(net.scale) == seen else 13.0)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "memory that the run writes to, shared and not": """
class O:
    pass
o = O()
o.a = T(1)
o.b = o.a[:]
def call(x):
    o.a.add_(x)
    return x * o.b
def go(f, see):
    for i in range(12):
        see(f(T(i)), o.a, o.b)
        if i % 3 == 2:
            o.a = T(i)
            o.b = o.a[:] if i == 5 else T(i)[:]
""",
    "an lru_cache": """
@functools.lru_cache
def factor(t):
    return float(t.sum())
def call(x):
    return x * net.scale * factor(net.scale)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a list that has it, too": """
both = [net.scale]
def call(x):
    return x * net.scale + both[0]
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a default that is the same": """
def inner(x, w=net.scale):
    return x * w
def call(x):
    return inner(x) + net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a partial that has it": """
inner = functools.partial(torch.mul, net.scale)
def call(x):
    return inner(x) + net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a closure that has it": """
def make():
    w = net.scale
    return lambda x: x * w
inner = make()
def call(x):
    return inner(x) + net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a weak reference to it": """
ref = weakref.ref(net.scale)
def call(x):
    old = ref()
    return x * net.scale * (2 if old is net.scale else 3)
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i)
""",
    "its gradient and its version": """
def call(x):
    grad = net.one.bias.grad
    return x * net.one.bias * (1 if grad is None else 2) + net.one.bias._version
def go(f, see):
    for i in range(9):
        with torch.no_grad():
            see(f(T(i)))
        if i % 3 == 2:
            net.one.bias = P(i, i)
            net.one.bias.grad = T(1) if i == 2 else None
            net.one.bias.data.add_(1)
            with torch.no_grad():
                net.one.bias.add_(1)
""",
    "parameters in another order": """
def call(x):
    for number, p in enumerate(net.one.parameters()):
        x = x + p * number
    return x
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            weight = net.one.weight
            del net.one.weight
            net.one.weight = nn.Parameter(torch.full((2, 2), float(i)))
""",
    "a run that writes to its state": """
def call(x):
    net.scale.add_(1)
    return x * net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)), net.scale)
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a run that marks its state": """
def call(x):
    net.scale.mark = 3
    return x * net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)), net.scale.mark)
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a run that keeps by tensor": """
kept = {}
def call(x):
    kept[net.scale] = 1
    return x * net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)), net.scale in kept)
        if i % 3 == 2:
            net.scale = T(i)
""",
    "a value that decides": """
def call(x):
    return x * net.scale if net.scale.sum() > 0 else x - net.scale
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i - 4)
""",
    "numbers that are taken out": """
def call(x):
    return x * net.scale.tolist()[0] + int(net.scale.sum())
def go(f, see):
    for i in range(9):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale = T(i - 4)
""",
    "something else is written with it": """
net.factor = 1.0
def call(x):
    return x * net.scale * net.factor
def go(f, see):
    for i in range(12):
        see(f(T(i)))
        if i % 3 == 2:
            net.scale, net.factor = T(i), float(i % 2)
""",
    "retired while it is replaced": """
net.mode = "a"
def call(x):
    return x * net.scale if net.mode == "a" else x - net.scale
def go(f, see):
    for i in range(16):
        see(f(T(i)))
        net.mode = "ab"[i % 2]
        if i % 3 == 2:
            net.scale = T(i)
""",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TAKEN)
def test_state_of_the_same_form_is_taken_over(name: str, backend: str, tmp_path) -> None:
    assert check_twins(NET + TAKEN[name], backend, tmp_path, hits=4).traces == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOLD)
def test_nobody_can_tell_that_state_was_taken_over(name: str, backend: str, tmp_path) -> None:
    check_twins(NET + TOLD[name], backend, tmp_path)


SPARSE = {
    "coo": "to_sparse()",
    "csr": "to_sparse_csr()",
    "csc": "to_sparse_csc()",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("where", ["held['m']", "held['o'].m", "net.m"])
def test_state_without_one_memory_is_followed(layout, where, backend, tmp_path) -> None:
    check_twins(
        f"""
held, net = {{"o": types.SimpleNamespace()}}, nn.Module()
def fill(k):
    dense = torch.tensor([[0.0, k], [2.0, 0.0]]) if k < 4 else torch.full((2, 2), k)
    {where} = dense.{SPARSE[layout]}
fill(1.0)
def call(x):
    return {where} @ x + {where}.to_dense().sum()

def go(f, see):
    for k in (1.0, 2.0, 4.0, 5.0):
        for _ in range(3):
            see(f(torch.ones(2, 2)))
        {where}.values().mul_(2) if {layout == "csr"} else None
        see(f(torch.ones(2, 2)))
        fill(k)
""",
        backend,
        tmp_path,
        hits=1,
    )


def test_sets_walk_through_tensors_by_address() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterDict({f"p{n}": torch.full((), float(n)) for n in range(9)})

        def forward(self, x):
            p = self.all
            for weight in {p.p0, p.p1, p.p2, p.p3, p.p4, p.p5, p.p6, p.p7, p.p8}:
                x = x * 2 + weight
            return x

    net = Net()
    fast = tripwire.compile(net, backend="eager")
    for _ in range(6):
        for _ in range(3):
            assert torch.equal(fast(torch.ones(())), net(torch.ones(())))
        old = [net.all.pop(name) for name in list(net.all)]  # lives, so addresses are others
        net.all.update({f"p{n}": torch.full((), float(n)) for n in range(9)})
        assert len(old) == 9


def test_an_entry_that_was_retired_takes_over_what_came_meanwhile() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mode = nn.Linear(2, 2), "a"

        def forward(self, x):
            return self.layer(x) if self.mode == "a" else -self.layer(x)

    net = Net()
    fast = tripwire.compile(net, backend="eager")
    for mode in "abababab":
        net.mode = mode
        net.layer.weight = nn.Parameter(torch.randn(2, 2))
        x = torch.randn(2)
        for _ in range(3):
            assert torch.equal(fast(x), net(x))
    found = tripwire.statistics(fast)
    assert found.traces == 2
    assert found.rebound


def test_what_was_replaced_can_die() -> None:
    net = nn.Linear(2, 2)
    fast = tripwire.compile(net, backend="eager")
    fast(torch.ones(2))
    old = weakref.ref(net.weight)
    net.weight = nn.Parameter(torch.ones(2, 2))
    fast(torch.ones(2))
    gc.collect()
    assert old() is None


def test_an_argument_where_an_old_weight_was_is_no_state() -> None:
    net = nn.Linear(2, 2)
    fast = tripwire.compile(net, backend="eager")
    with torch.no_grad():
        fast(torch.ones(2))
        for _ in range(50):  # one of the arguments gets an old weight's address
            net.weight = nn.Parameter(torch.randn(2, 2))
            fast(torch.ones(2))
            del net.weight
            x = torch.ones(2)
            net.weight = nn.Parameter(torch.randn(2, 2))
            assert torch.equal(fast(x), net(x))
    assert tripwire.statistics(fast).traces == 1


def test_weights_are_swapped_while_threads_call() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(8)))
    fast = tripwire.compile(net, backend="eager")
    x, errors, ends = torch.ones(2), [], threading.Event()

    def weights(factor: float) -> dict[str, torch.Tensor]:
        return {name: torch.eye(2) * factor for name in net.state_dict()}

    def call() -> None:
        with torch.no_grad():
            while not ends.is_set():
                powers = {2.0**n for n in range(9)}  # so many layers are new
                if fast(x)[0].item() not in powers:
                    errors.append("another value")

    net.load_state_dict(weights(1.0), assign=True)
    with torch.no_grad():
        fast(x)
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(100):
        net.load_state_dict(weights(1.0 + number % 2), assign=True)
    ends.set()
    for thread in threads:
        thread.join()
    assert not errors
    with torch.no_grad():
        assert torch.equal(fast(x), net(x))
    assert tripwire.statistics(fast).rebound


@pytest.mark.parametrize("trains", [False, True])
def test_code_of_inductor_takes_over_weights(trains: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fast = tripwire.compile(net, backend="inductor")
    for _ in range(3):
        state = {name: torch.randn_like(weight) for name, weight in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
        for _ in range(3):
            x = torch.randn(3, 4)
            with torch.set_grad_enabled(trains):
                got, expected = fast(x), net(x)
            torch.testing.assert_close(got, expected)
            if trains:
                wanted = torch.autograd.grad(expected.sum(), list(net.parameters()))
                torch.testing.assert_close(
                    torch.autograd.grad(got.sum(), list(net.parameters())), wanted
                )
    assert tripwire.statistics(fast).traces == 1


def test_frozen_weights_are_not_taken_over() -> None:
    net = nn.Linear(2, 2)
    fast = tripwire.compile(net, backend="inductor", options={"freezing": True})
    with torch.no_grad():
        for value in range(3):
            net.weight = nn.Parameter(torch.full((2, 2), float(value)))
            for _ in range(3):
                torch.testing.assert_close(fast(torch.ones(2)), net(torch.ones(2)))
    assert tripwire.statistics(fast).rebound == 0
