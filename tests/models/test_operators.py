"""Every operator in torch's own test database traces to a graph that computes the same.

For each operator, in each form that it has (function, method, Python operator, and in place on
a clone), on a few of the samples that torch tests it with:

- tracing succeeds and the trace checks out, or it is refused as `REFUSED` says;
- the traced call, the graph on the same inputs, and the graph on other values all give what
  plain torch gives, to the last bit: results, strides, and what is written into arguments;
- an argument that the call changed is marked as written;
- gradients through the graph are those through plain torch, to the last bit;
- where plain torch raises, the traced call raises the same.

Samples are float32, or of the first dtype in `DTYPES` that the operator takes. Everything runs
on the CPU. The tables name all that is left out, and why.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tripwire

# Operators and tracing warn a lot, and rightly: of deprecations, and of branches.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SAMPLES = 4  # of each form of each operator,
CONSIDERED = 40  # spread over this many: neighbours are much alike
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)

# Operators by the names that their tests have in torch. A refused one is refused on at least
# one of its samples, and on none with another slug.
REFUSED = {
    "allclose": ("no-tensors", "returns a bool"),
    "broadcast_shapes": ("no-tensors", "returns a torch.Size"),
    "equal": ("no-tensors", "returns a bool"),
    "item": ("no-tensors", "returns a number"),
    "nn_functional_triplet_margin_with_distance_loss": (
        "callable-argument",
        "takes the distance as a Python function",
    ),
}
_NO_CPU = "takes no dtype on the CPU"
SKIPPED = {
    "jiterator_2inputs_2outputs": "needs a GPU",
    "jiterator_4inputs_with_extra_args": "needs a GPU",
    "jiterator_binary": "needs a GPU",
    "jiterator_binary_return_by_ref": "needs a GPU",
    "jiterator_unary": "needs a GPU",
    "nn_functional_batch_norm_without_cudnn": _NO_CPU,
    "torch__scaled_mm": _NO_CPU,
    "torch__scaled_mm_v2": _NO_CPU,
    "torch_ops_aten__efficient_attention_forward": _NO_CPU,
    "torch_ops_aten__flash_attention_forward": _NO_CPU,
}
# What is compared less strictly.
UNINITIALISED = {  # values are what the memory held before: only the rest is compared
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
INEXACT = {  # plain torch, called twice, differs in the last bits
    "linalg_lstsq",
    "linalg_lstsq_grad_oriented",
}

Inputs = tuple[Any, Any, Any]  # a sample: its first argument, the others, keyword arguments


@dataclass(frozen=True, slots=True)
class Case:
    """One form of one operator, as a function of a sample."""

    info: Any
    form: str
    call: Callable[[Any, Any, Any], Any]

    @property
    def operator(self) -> str:
        return self.info.formatted_name

    @property
    def in_place(self) -> bool:
        return self.form.startswith("in-place")


# --- the database ----------------------------------------------------------------------------


def import_database() -> types.ModuleType:
    """Its module imports expecttest, which nothing here needs: a stand-in will do."""
    missing = importlib.util.find_spec("expecttest") is None
    if missing:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal import common_methods_invocations
    finally:
        if missing:
            del sys.modules["expecttest"]
    return common_methods_invocations


def iter_cases() -> Iterator[Case]:
    for info in import_database().op_db:
        yield Case(info, "function", plainly(info.op))
        if info.method_variant is not None:
            yield Case(info, "method", plainly(info.method_variant))
        if info.operator_variant is not None:
            yield Case(info, "operator", plainly(info.operator_variant))
        if info.inplace_variant is not None:
            yield Case(info, "in-place", on_a_clone(info.inplace_variant))
        if info.inplace_operator_variant is not None:
            yield Case(info, "in-place-operator", on_a_clone(info.inplace_operator_variant))


def plainly(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(subject: Any, args: Any, kwargs: Any) -> Any:
        return op(subject, *args, **kwargs)

    return call


def on_a_clone(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(subject: Any, args: Any, kwargs: Any) -> Any:
        return op(subject.clone(), *args, **kwargs)

    return call


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # The database takes seconds to import: not where slow tests are left out anyway.
    if "case" in metafunc.fixturenames:
        wanted = "not slow" not in metafunc.config.option.markexpr
        cases = iter_cases() if wanted else ()
        metafunc.parametrize("case", [as_parameter(case) for case in cases])


def as_parameter(case: Case) -> Any:
    marks = []
    if case.operator in SKIPPED:
        marks.append(pytest.mark.skip(reason=SKIPPED[case.operator]))
    return pytest.param(case, id=f"{case.operator}-{case.form}", marks=marks)


@pytest.fixture(autouse=True, scope="module")
def seeded_by_the_test() -> Iterator[None]:
    """The database wraps random operators in a seed of its own, and tracing refuses to seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_database(), "wrapper_set_seed", lambda op, *a, **k: op(*a, **k))
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- samples ---------------------------------------------------------------------------------


def make_samples(case: Case) -> list[Inputs]:
    info = case.info
    dtype = next(dtype for dtype in DTYPES if dtype in info.dtypes)
    grads = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    samples = info.sample_inputs("cpu", dtype, requires_grad=grads)
    usable = (one for one in samples if not (case.in_place and one.broadcasts_input))
    found = list(itertools.islice(usable, CONSIDERED))
    step = max(1, (len(found) - 1) / (SAMPLES - 1))
    chosen = [found[int(i * step)] for i in range(min(SAMPLES, len(found)))]
    return [map_tensors(as_leaf, (one.input, one.args, one.kwargs)) for one in chosen]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], inputs: Any) -> Any:
    """The same with other tensors. A tensor in two places is one tensor afterwards, too."""
    changed: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    return pytree.tree_map(visit, inputs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def copied(inputs: Any) -> Any:
    return map_tensors(copy_leaf, inputs)


def copy_leaf(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.strided:
        return copy.deepcopy(tensor)  # keeps any strides, as clone doesn't
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def with_other_values(inputs: Any) -> Any:
    return map_tensors(change_values, inputs)


@torch.no_grad()
def change_values(tensor: torch.Tensor) -> torch.Tensor:
    """Values that most operators still accept: floats shrink, integers and bools swap places."""
    if tensor.layout is not torch.strided:
        return copy_leaf(tensor)
    changed = torch.empty_like(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        changed.copy_(tensor * 0.75)
    else:
        changed.copy_(tensor.flip(0) if tensor.dim() else tensor)
    return changed.requires_grad_(tensor.requires_grad)


# --- comparing -------------------------------------------------------------------------------


def check_same(got: Any, expected: Any, case: Case) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        check_same_tensor(got, expected, case)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            check_same(mine, theirs, case)
    else:
        assert got == expected


def check_same_tensor(got: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    assert got.requires_grad == expected.requires_grad
    assert got._is_view() == expected._is_view()
    assert got.is_conj() == expected.is_conj()
    exact = {} if case.operator in INEXACT else {"rtol": 0.0, "atol": 0.0}
    if case.operator in UNINITIALISED:
        got, expected = got.to("meta"), expected.to("meta")
    strided = expected.layout is torch.strided
    torch.testing.assert_close(got, expected, equal_nan=True, check_stride=strided, **exact)


def gradients_of(inputs: Any, result: Any) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a weighted sum; a plain one is constant for a softmax, say."""
    wanted = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    made = [weigh(tensor) for tensor in tensors_in(result) if tensor.requires_grad]
    if not wanted or not made:
        return ()
    return torch.autograd.grad(sum(made), wanted, allow_unused=True)


def weigh(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return (real * torch.arange(1, real.numel() + 1).reshape(real.shape).cos()).sum()


def check_raises_the_same(error: Exception, run: Callable[[], object]) -> None:
    with pytest.raises(type(error)) as raised:
        run()
    assert str(raised.value) == str(error)


def check_written(trace: tripwire.Trace, before: Inputs, after: Inputs) -> None:
    was, now = trace.bind(*before), trace.bind(*after)
    for wanted in trace.inputs:
        if not is_equal(wanted.source.fetch(was), wanted.source.fetch(now)):
            assert wanted.written, f"{wanted.name} was changed"


def is_equal(left: Any, right: Any) -> bool:
    try:
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


# --- the test --------------------------------------------------------------------------------


def test_an_operator_becomes_a_graph_that_computes_the_same(case: Case) -> None:
    samples = make_samples(case)
    assert samples
    slugs = {check_sample(case, sample) for sample in samples} - {None}
    assert slugs == ({REFUSED[case.operator][0]} if case.operator in REFUSED else set())


def check_sample(case: Case, sample: Inputs) -> str | None:
    """Compare plain torch and tripwire on one sample; the slug where tracing is refused."""
    plain, traced, again = copied(sample), copied(sample), copied(sample)
    try:
        expected = seeded(case.call, *plain)
    except Exception as error:
        check_raises_the_same(error, lambda: seeded(tripwire.trace, case.call, *traced))
        return None
    try:
        trace = seeded(tripwire.trace, case.call, *traced)
    except tripwire.CannotTrace as refusal:
        return refusal.slug
    trace.check()
    check_same(trace.result, expected, case)
    check_same(tensors_in(traced), tensors_in(plain), case)
    check_written(trace, sample, traced)
    got = seeded(trace, *again)
    check_same(got, expected, case)
    check_same(tensors_in(again), tensors_in(plain), case)
    if case.info.supports_autograd:
        check_gradients(case, (plain, expected), (again, got))
    if not trace.branches:  # with one, the trace holds for these values only
        check_other_values(case, trace, with_other_values(sample))
    return None


def check_gradients(case: Case, plain: tuple[Any, Any], graph: tuple[Any, Any]) -> None:
    try:
        expected = gradients_of(*plain)
    except RuntimeError as error:  # some in-place forms have no derivative
        check_raises_the_same(error, lambda: gradients_of(*graph))
    else:
        check_same(gradients_of(*graph), expected, case)


def check_other_values(case: Case, trace: tripwire.Trace, plain: Inputs) -> None:
    inputs = copied(plain)
    try:
        expected = seeded(case.call, *plain)
    except Exception:  # the operator doesn't take these values
        return
    check_same(seeded(trace, *inputs), expected, case)
    check_same(tensors_in(inputs), tensors_in(plain), case)


def seeded(call: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(1)
    return call(*args)
