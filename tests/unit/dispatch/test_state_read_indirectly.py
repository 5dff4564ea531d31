"""State that is read under another name, by a library or by C code: compiled code follows it."""

from __future__ import annotations

import logging
import textwrap
import types
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

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
    "a partial of a C function": (
        """
        import functools, random
        draw = functools.partial(random.Random(0).random)
        def call(x):
            return x * draw()
        """,
        "",
    ),
    "a C function in a list, called by C": (
        """
        import random
        draws = [random.Random(0).random]
        def call(x):
            return x * next(iter(draws[0], 2))
        """,
        "",
    ),
    "parametrizations, cached": (
        """
        from torch.nn.utils import parametrize
        class Scaled(torch.nn.Module):
            def forward(self, w): return w * 2
        net = torch.nn.Linear(2, 2)
        with torch.no_grad():
            net.weight.fill_(1.0), net.bias.fill_(0.0)
        parametrize.register_parametrization(net, "weight", Scaled())
        def call(x):
            return net(x)
        """,
        "parametrize._cache_enabled += 1; call(torch.ones(2))  # as `parametrize.cached()` does\n"
        "net.parametrizations.weight.original.data.fill_(7.0)",
    ),
    "levels of loggers that are looked up": (
        """
        import logging
        name = f"tripwire.tests.{id(object())}"
        def call(x):
            return x * 2 if logging.getLogger(name).isEnabledFor(10) else x
        """,
        "logging.getLogger(name).setLevel(10)",
    ),
    "the worker that loads data": (
        """
        def call(x):
            return x * 2 if torch.utils.data.get_worker_info() else x
        """,
        "torch.utils.data._utils.worker._worker_info = 7",
    ),
    "classes that become trees": (
        """
        from torch.utils import _pytree
        class Pair:
            def __init__(self, a, b): self.a, self.b = a, b
        pair = Pair(torch.ones(2), torch.ones(2))
        def call(x):
            return x * len(_pytree.tree_leaves(pair))
        """,
        "_pytree.register_pytree_node(Pair, lambda p: ([p.a, p.b], None), lambda v, _: Pair(*v))",
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
    torch.utils.data._utils.worker._worker_info = None
    parametrize._cache_enabled, parametrize._cache = 0, {}


def test_distributions_that_begin_to_check_their_arguments() -> None:
    def call(x):
        return torch.distributions.Bernoulli(0.5 * torch.ones(2)).log_prob(x)

    before = torch.distributions.Distribution._validate_args
    compiled = tripwire.compile(call, backend="eager")
    try:
        torch.distributions.Distribution.set_default_validate_args(False)
        for _ in range(3):
            assert torch.equal(compiled(X * 3), call(X * 3))
        torch.distributions.Distribution.set_default_validate_args(True)
        for _ in range(2):
            with pytest.raises(ValueError, match="support"):
                compiled(X * 3)
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize(
    ("effect", "look"),
    [
        ("torch.set_printoptions(precision=7)", "torch._tensor_str.PRINT_OPTS.precision"),
        ("logging.getLogger('tripwire.t').setLevel(37)", "logging.getLogger('tripwire.t').level"),
        ("warnings.simplefilter('ignore', ResourceWarning)", "warnings.filters[0]"),
    ],
)
def test_effects_on_libraries_are_not_lost(effect, look) -> None:
    undo = "torch.set_printoptions(precision=4); logging.getLogger('tripwire.t').setLevel(0)"
    space = {"torch": torch, "logging": logging, "warnings": warnings}
    with warnings.catch_warnings():
        exec(f"def call(x):\n    {effect}\n    return x * 2", space)
        compiled = tripwire.compile(space["call"], backend="eager")
        try:
            space["call"](X)
            wanted = eval(look, space)
            for _ in range(3):
                exec(undo, space)
                warnings.resetwarnings()
                assert torch.equal(compiled(X), X * 2)
                assert eval(look, space) == wanted
        finally:
            exec(undo, space)


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
    from support import run_with_torch

    assert run_with_torch(_PRECISION) == "True"


_backends = torch.backends
_cudnn, _mkldnn, _matmul, _mha = (
    _backends.cudnn,
    _backends.mkldnn,
    _backends.cuda.matmul,
    _backends.mha,
)
_conv = _backends.mkldnn.conv


@pytest.mark.parametrize(
    ("read", "write", "other"),
    [
        (lambda: _conv.fp32_precision, lambda v: setattr(_conv, "fp32_precision", v), "bf16"),
        (lambda: _cudnn.enabled, lambda v: setattr(_cudnn, "enabled", v), False),
        (lambda: _mkldnn.enabled, lambda v: setattr(_mkldnn, "enabled", v), False),
        (lambda: _mkldnn.deterministic, lambda v: setattr(_mkldnn, "deterministic", v), True),
        (
            lambda: _matmul.allow_fp16_accumulation,
            lambda v: setattr(_matmul, "allow_fp16_accumulation", v),
            True,
        ),
        (
            lambda: _backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
            _backends.cuda.allow_fp16_bf16_reduction_math_sdp,
            True,
        ),
        (lambda: _mha.get_fastpath_enabled(), _mha.set_fastpath_enabled, False),
        (lambda: torch._C._get_nnpack_enabled(), torch._C._set_nnpack_enabled, False),
    ],
    ids=["conv", "cudnn", "mkldnn", "deterministic", "accumulation", "sdp", "mha", "nnpack"],
)
def test_switches_of_back_ends_under_other_names(read, write, other) -> None:
    plain = lambda x: x * 2 if read() == other else x  # noqa: E731
    compiled = tripwire.compile(plain, backend="eager")
    x, before = torch.ones(2), read()
    assert before != other
    try:
        for value in (other, before, other):
            assert torch.equal(compiled(x), plain(x))
            write(value)
            assert torch.equal(compiled(x), plain(x))
    finally:
        write(before)


def test_state_that_came_to_want_a_gradient_and_is_asked_without_grad_mode() -> None:
    state = {"k": torch.ones(4)}

    def call(x):
        return x * (1 + 3 * state["k"].requires_grad), state["k"]

    compiled = tripwire.compile(call, backend="eager")
    x = torch.ones(4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x)[0], call(x)[0])
    state["k"].mul_(torch.ones(4).requires_grad_())
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x)[0], call(x)[0])
