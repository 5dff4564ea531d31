"""State that is seldom read, or in a way that no name tells: compiled code follows it, too."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tripwire

X = torch.ones(2)

# A world, with `call`; what is written between calls.
CASES = {
    "a namespace that is compared": (
        """
        a, b = types.SimpleNamespace(n=1), types.SimpleNamespace(n=1)
        def call(x):
            return x * 2 if a == b else x
        """,
        "a.n = 2",
    ),
    "a namespace that is printed": (
        """
        a = types.SimpleNamespace(n=1)
        def call(x):
            return x * len(repr(a))
        """,
        "a.n = 1000",
    ),
    "names that are computed, under another name": (
        """
        from operator import attrgetter as get
        held = types.SimpleNamespace(scale=2.0)
        name = "scale"
        def call(x):
            return x * get(name)(held)
        """,
        "held.scale = 3.0",
    ),
    "object.__getattribute__, under another name": (
        """
        get = object.__getattribute__
        class Held: pass
        held = Held(); held.scale = 2.0
        name = "scale"
        def call(x):
            return x * get(held, name)
        """,
        "held.scale = 3.0",
    ),
    "arguments of a methodcaller": (
        """
        from operator import methodcaller
        scales = [2.0]
        class Held:
            def first(self, values): return values[0]
        held, first = Held(), methodcaller("first", scales)
        def call(x):
            return x * first(held)
        """,
        "scales[0] = 3.0",
    ),
    "special methods of tensors": (
        """
        def call(x):
            return x + 1
        """,
        "torch.Tensor.__add__ = lambda self, other: self * 5",
    ),
    "subclasses": (
        """
        class Base: pass
        class One(Base): pass
        def call(x):
            return x * len(Base.__subclasses__())
        """,
        "class Two(Base): pass",
    ),
    "a lock": (
        """
        import threading
        lock = threading.Lock()
        def call(x):
            return x * 2 if lock.locked() else x
        """,
        "lock.acquire()",
    ),
    "weak references, counted": (
        """
        import weakref
        class Held: pass
        held = Held()
        def call(x):
            return x * weakref.getweakrefcount(held)
        """,
        "ref = weakref.ref(held, print)",
    ),
    "whether sparse tensors are checked": (
        """
        checks = torch.sparse.check_sparse_tensor_invariants
        checks.disable()
        def call(x):
            return x * 2 if checks.is_enabled() else x
        """,
        "checks.enable()",
    ),
    "a generator that is seeded": (
        """
        generator = torch.Generator()
        def call(x):
            generator.manual_seed(0)
            return x + torch.rand(1, generator=generator)
        """,
        "",
    ),
    "a generator that is set": (
        """
        generator = torch.Generator()
        state = generator.get_state()
        def call(x):
            generator.set_state(state)
            return x + torch.rand(1, generator=generator)
        """,
        "",
    ),
    "questions that a dense tensor can't answer": (
        """
        def call(x):
            return x.coalesce().values() if x.is_sparse and not x.is_coalesced() else x * 3
        """,
        "",
    ),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    add = torch.Tensor.__add__
    checks = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    yield
    torch.Tensor.__add__ = add
    torch.sparse.check_sparse_tensor_invariants(checks).__enter__()


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_call_gives_what_a_plain_one_gives(name) -> None:
    world, write = CASES[name]
    spaces: list[dict[str, object]] = [{"torch": torch, "types": types} for _ in range(2)]
    for space in spaces:
        exec(textwrap.dedent(world), space)
    calls = [spaces[0]["call"], tripwire.compile(spaces[1]["call"], backend="eager")]
    for _ in range(3):
        assert torch.equal(*(call(X) for call in calls))
    for space in spaces:
        exec(write, space)
    for _ in range(3):
        assert torch.equal(*(call(X) for call in calls))


def test_an_array_that_is_passed_in_and_changes() -> None:
    import array

    values = array.array("d", [1.0, 2.0])
    compiled = tripwire.compile(lambda x, values: x * sum(values), backend="eager")
    for first in (1.0, 1.0, 9.0, 1.0):
        values[0] = first
        assert torch.equal(compiled(X, values), X * (first + 2.0))


def test_a_module_whose_buffers_have_no_shape_yet() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    found = tripwire.compile(nn.LazyBatchNorm1d(), backend="eager")
    plain = nn.LazyBatchNorm1d()
    for _ in range(3):
        assert torch.equal(found(x), plain(x))


_PRECISION = """
import torch, tripwire
f = tripwire.compile(lambda x: x * 2 if torch.backends.cudnn.enabled else x, backend="eager")
x = torch.ones(2)
for write in (
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'ieee'",
):
    for _ in range(3):
        assert f(x).tolist() == [2.0, 2.0]
    exec(write)
    for _ in range(3):
        assert f(x).tolist() == [2.0, 2.0]
print(tripwire.statistics(f).hits > 6)
"""


def test_precision_that_is_set_for_each_back_end() -> None:
    from support import run_python

    assert run_python(_PRECISION) == "True"
