"""Numbers out of Python's random generators are drawn on each call, as plain Python draws them."""

from __future__ import annotations

import _random
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire
from tripwire.tracing.open import draws

pytestmark = pytest.mark.skipif(not draws.CAN_DRAW, reason="the C module answers the draws")

# What a program does with the generator, what it has, and how many of 20 calls hit at least.
CASES: dict[str, tuple[str, str, int]] = {
    "a decision": ("return x if random.random() < 0.3 else x * W", "", 17),
    "two decisions": (
        "x = -x if random.random() < 0.5 else x\n    return x * W if random.random() < 0.5 else x",
        "",
        14,
    ),
    "a factor": ("return x * random.uniform(0.8, 1.2) + random.random()", "", 18),
    "an int": ("return x * random.randint(0, 9)", "", 18),
    "an int of bits": ("return x * random.getrandbits(8)", "", 18),
    "a place": ("i = random.randrange(0, 5)\n    return x.repeat(8)[i : i + 3]", "", 18),
    "a size": ("return x.new_ones(random.randint(2, 20))", "", 16),
    "a number of a list": ("return x * random.choice([0.5, 1.0, 2.0, 4.0])", "", 18),
    "one of some functions": ("return random.choice([torch.sin, torch.relu])(x)", "", 17),
    "one of some tensors": ("return random.choice([x, x * W, W])+ 1", "", 16),
    "how often": ("for _ in range(random.randint(1, 3)): x = x * W\n    return x", "", 16),
    "an order": ("o = [1, 2]\n    random.shuffle(o)\n    return x * o[0]", "", 17),
    "imported by name": (
        "return x * draw() if draw() < 0.5 else x",
        "from random import random as draw",
        17,
    ),
    "handed back": ("r = random.random()\n    return x * r, r, r > 2", "", 18),
    "stored": ("LAST[0] = random.random()\n    return x * W", "LAST = [0.0]", 17),
    "with a counter": (
        "N['n'] += 1\n    return x * W if random.random() < min(0.9, N['n'] / 9) else x",
        "N = {'n': 0}",
        15,
    ),
    "a generator of its own": (
        "return x * W if OWN.random() < 0.5 else x",
        "OWN = random.Random(5)",
        17,
    ),
    "two that are one": (
        "return x * OWN.random() + OTHER.random()",
        "OWN = OTHER = random.Random(5)",
        18,
    ),
    "a subclass": (
        "return x * OWN.random()",
        "class Half(random.Random):\n"
        "    def random(self): return super().random() * 0.5\nOWN = Half(5)",
        18,
    ),
    "one that suits": ("return x * random.betavariate(0.4, beta=0.4)", "", 18),
    "some that suit": (
        "return x * random.gammavariate(2, 1.5) + normalvariate() + random.vonmisesvariate(1, 2)",
        "from random import normalvariate",
        18,
    ),
    "one by two ways": ("return x * random.triangular(0.5, 2) + random.triangular()", "", 18),
    "one that leaves a number": ("return x * random.gauss(0, 1)", "", 18),
    "some that leave numbers": (
        "for _ in range(3): x = x * random.gauss(1, 0.5)\n    return x * random.random()",
        "",
        18,
    ),
    "some that suit, of a generator of its own": (
        "return x * OWN.betavariate(0.4, 1) + OWN.random() + OWN.lognormvariate(0, 1)",
        "OWN = random.Random(5)",
        18,
    ),
    "one that suits, called by C": ("return x * next(map(random.gauss, [0], [1]))", "", 18),
    "and torch's": ("return x * random.random() + torch.rand(2)", "", 18),
    # What can't be repeated stays as it is: no call hits, and none is wrong.
    "a float that is spelled": (
        "TOLD.append(f'{random.random()}')\n    return x * W",
        "TOLD = []",
        0,
    ),
    "too many ways": (
        "for _ in range(6): x = x * W if random.random() < 0.5 else x\n    return x",
        "",
        0,
    ),
    "called by C": ("return x * next(iter(random.random, 2.0))", "", 0),
    "one that suits, made by the call": ("return x * random.Random(5).gauss(0, 1)", "", 0),
    "one that suits, and is spelled": (
        "TOLD.append(str(random.betavariate(2, 3)))\n    return x * W",
        "TOLD = []",
        0,
    ),
    "one that leaves a number in a generator of its own": (
        "return x * OWN.gauss(0, 1)",
        "OWN = random.Random(5)",
        0,
    ),
    "one that leaves a number in a generator that is named": (
        "return x * PYTHONS.gauss(0, 1)",
        "PYTHONS = random._inst",
        0,
    ),
    "one that suits, of a custom function": (
        "return Noisy.apply(x * random.random())",
        "class Noisy(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * random.gauss(0, 1)\n"
        "    @staticmethod\n    def backward(ctx, g): return g",
        0,
    ),
    "seeded by the call": ("random.seed(3)\n    return x * random.random()", "", 0),
    "set back by the call": (
        "s = random.getstate()\n    x = x * random.random()\n    random.setstate(s)\n    return x",
        "",
        0,
    ),
    "made by the call": ("return x * random.Random(5).random()", "", 0),
    "a number of many bits": ("return x * (random.getrandbits(70) % 7)", "", 0),
    "and a custom function's": (
        "return Noisy.apply(x * random.random())",
        "class Noisy(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * random.random()\n"
        "    @staticmethod\n    def backward(ctx, g): return g",
        0,
    ),
    "in what a checkpoint runs again": (
        "return checkpoint(lambda t: t.sin() * random.random(), x, use_reentrant=False)",
        "from torch.utils.checkpoint import checkpoint",
        0,
    ),
}
TWIN = """
import random
W = torch.tensor([2.0, 3.0])
{made}
def call(x, *more):
    {body}

def go(f, see):
    random.seed(7)
    torch.manual_seed(7)
    for i in range(20):
        see(f(T(i)), {{n: v for n, v in globals().items() if n in ("LAST", "N", "TOLD")}})
        see(random.getstate(), OWN.random() if "OWN" in globals() else 0)
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_each_call_draws_what_plain_python_draws(case: str, backend: str, tmp_path: Path) -> None:
    body, made, hits = CASES[case]
    explained = check_twins(TWIN.format(body=body, made=made), backend, tmp_path, hits=hits)
    assert hits or not explained.hits


SEEDED = """
import random
def call(x):
    return x * 2 if {generator}.random() < 0.5 else x + {generator}.random()

class Net:
    pass

REAL = random.random
net = Net()
net.rng = random.Random(1)

def go(f, see):
    random.seed(7)
    for i in range(20):
        {between}
        see(f(T(i)), random.getstate(), net.rng.getstate())
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("generator", "between", "hits"),
    [
        ("random", "random.seed(i) if i % 3 == 0 else None", 16),
        ("random", "random.random() if i % 3 == 0 else None", 16),
        ("net.rng", "net.rng.seed(i) if i % 3 == 0 else None", 16),
        ("net.rng", "net.rng = random.Random(i) if i == 10 else net.rng", 4),
        ("net.rng", "net.rng = random if i == 10 else net.rng", 4),
        ("random", "random.random = (lambda: 0.25) if i in (10, 11) else REAL", 4),
    ],
)
def test_a_generator_that_is_seeded_or_replaced_between_calls(
    generator: str, between: str, hits: int, backend: str, tmp_path: Path
) -> None:
    source = SEEDED.format(generator=generator, between=between)
    check_twins(source, backend, tmp_path, hits=hits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_that_raises_has_drawn_as_plain_python(backend: str, tmp_path: Path) -> None:
    source = """
import random
def call(x, y):
    r = random.random()
    x = x @ y
    return x * r * random.random()

def go(f, see):
    random.seed(7)
    for i in range(20):
        try:
            see(f(T(i), torch.ones(3 if i % 5 == 4 else 2)))
        except RuntimeError:
            see("raised")
        see(random.getstate())
"""
    check_twins(source, backend, tmp_path, hits=12)


def test_explaining_and_asking_draw_nothing() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() < 0.5 else x

    compiled = tripwire.compile(call, backend="eager")
    random.seed(7)
    for _ in range(8):
        compiled(torch.ones(2))
    assert compiled.statistics().hits
    before = random.getstate()
    entries = compiled._dispatcher.entries
    told = [entry.standing.find_failures((torch.ones(2),), {}) for entry in entries]
    assert sorted(map(len, told)) == [0, 1]  # one is for the next call, the other isn't
    assert random.getstate() == before
    assert "random.random()" in str(tripwire.explain(compiled))


def test_a_module_with_many_ways_has_its_submodules_compiled() -> None:
    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(6)]
            self.parts = torch.nn.ModuleList(part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                if random.random() < 0.8:
                    x = part(x)
            return x

    net = Dropped()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(6):
        compiled(torch.ones(2))
    assert any(part._compiled_call_impl is not None for part in net.parts)


def test_another_thread_draws_plainly_while_a_run_draws() -> None:
    seen: list[object] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        own = random.Random(3)
        thread = threading.Thread(target=lambda: seen.append(own.random()))
        if len(seen) < 2:
            thread.start()
            thread.join()
        return x * random.random()

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    assert [type(one) for one in seen] == [float] * len(seen)
    assert seen[0] == random.Random(3).random()


def test_a_copied_generator_goes_on_as_the_other() -> None:
    one, other = random.Random(3), _random.Random(4)
    for count in (0, 1, 623, 624, 700):
        for _ in range(count):
            one.random()
        draws._casts.copy_generator(one, other)  # type: ignore[union-attr]
        assert other.getstate() == _random.Random.getstate(one)
        assert other.random() == one.random()
    with pytest.raises(TypeError):
        draws._casts.copy_generator(one, object())  # type: ignore[union-attr]


def test_the_generators_functions_are_pythons_own_after_a_run() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        raise_now = random.random() < 2
        if raise_now and len(raised) == 1:
            raised.append(True)
            raise KeyError("once")
        return x * random.random()

    raised: list[bool] = [True]
    compiled = tripwire.compile(call, backend="eager")
    for _ in range(4):
        with suppress(KeyError):
            compiled(torch.ones(2))
        number = random.random()
        assert type(number) is float
        assert type(random.getrandbits(3)) is int


# The same of NumPy's: what a program does, between its calls as well, and how many of 20 hit.
OF_NUMPY: dict[str, tuple[str, str, int]] = {
    "a decision": ("return x if np.random.rand() < 0.3 else x * W", "", 17),
    "mixup": ("r = np.random.beta(0.4, b=0.4)\n    return r * x + (1 - r) * x.flip(0), r", "", 18),
    "factors": ("return x * np.random.uniform(0.8, 1.2) + np.random.random()", "", 18),
    "some that leave numbers": (
        "return x * np.random.normal(0, 1) + np.random.randn() * np.random.gamma(2.5)",
        "",
        18,
    ),
    "an int": ("return x * np.random.randint(2, 9)", "", 18),
    "a place": ("i = np.random.randint(5)\n    return x.repeat(8)[i : i + 3]", "", 15),
    "and Python's": ("return x * np.random.rand() + random.random() * np.random.rand()", "", 18),
    "stored": ("LAST[0] = np.random.rand()\n    return x * W", "", 17),
    "seeded between calls": (
        "return x * np.random.normal() if np.random.rand() < 0.5 else x",
        "np.random.seed(i) if i % 3 == 0 else None",
        16,
    ),
    "drawn from between calls": ("return x * np.random.normal()", "np.random.normal()", 18),
    "put back between calls": (
        "return x * np.random.normal()",
        "np.random.set_state(STATE) if i % 4 == 3 else None",
        18,
    ),
    "exchanged between calls": (
        "return x * np.random.normal()",
        "np.random.set_bit_generator(np.random.PCG64(i)) if i == 9 else None",
        18,
    ),
    "replaced between calls": (
        "return x * np.random.rand()",
        "np.random.rand = (lambda: 0.25) if i in (10, 11) else REAL",
        4,
    ),
    "drawn by a helper": ("return mixed(x)", "", 18),
    # What can't be repeated stays as it is.
    "an array": ("return x * torch.tensor(np.random.rand(2))", "", 0),
    "an order": ("return x[torch.tensor(np.random.permutation(2))]", "", 0),
    "by name": ("return x * rand()", "", 0),
    "seeded by the call": ("np.random.seed(3)\n    return x * np.random.rand()", "", 0),
    "read by the call": (
        "s = np.random.get_state()[1][0]\n    return x * np.random.rand() + float(s)",
        "",
        0,
    ),
    "read behind a function": (
        "s = np.random.rand.__self__.get_state()[2]\n    return x * np.random.rand() + s",
        "",
        0,
    ),
    "few ints": ("TOLD.append(str(np.random.randint(2, 5)))\n    return x * W", "", 16),
    "many ints": ("TOLD.append(str(np.random.randint(9)))\n    return x * W", "", 0),
    "a float that is spelled": ("TOLD.append(str(np.random.rand()))\n    return x * W", "", 0),
    "a custom function's": (
        "return Noisy.apply(x * np.random.rand())",
        "",
        0,
    ),
}
NUMPY_TWIN = """
import random
import numpy as np
from numpy.random import rand
W, LAST, TOLD = torch.tensor([2.0, 3.0]), [0.0], []
class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * np.random.rand()
    @staticmethod
    def backward(ctx, g): return g

def mixed(x):
    part = np.random.beta(0.4, 0.4)
    return x * part + W * (1 - part)

def call(x):
    {body}

def go(f, see):
    np.random.set_bit_generator(np.random.MT19937())
    np.random.seed(7)
    random.seed(7)
    REAL, STATE = np.random.rand, np.random.get_state()
    try:
        for i in range(20):
            {between}
            see(f(T(i)), LAST, TOLD, np.random.get_state(legacy=False), random.getstate())
    finally:
        np.random.rand = REAL
        np.random.set_bit_generator(np.random.MT19937())
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", OF_NUMPY)
def test_each_call_draws_what_numpy_draws(case: str, backend: str, tmp_path: Path) -> None:
    body, between, hits = OF_NUMPY[case]
    source = NUMPY_TWIN.format(body=body, between=between or "pass")
    explained = check_twins(source, backend, tmp_path, hits=hits)
    assert hits or not explained.hits
