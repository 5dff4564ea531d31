"""Branches: values that Python took out of tensors are recorded, with a warning at the line."""

import warnings

import pytest
import torch
from support import quiet_trace

import tripwire
from tripwire import TracerWarning

X = torch.tensor([1.0, 2.0, 3.0])


def branches(fn, *args):
    return [(branch.op, branch.value) for branch in quiet_trace(fn, *(args or (X,))).branches]


TAKEN = {
    "bool": (lambda x: x * 2 if x.sum() > 0 else x, [("__bool__", True)]),
    "int": (lambda x: x * int(x[0]), [("__int__", 1)]),
    "float": (lambda x: x * float(x[1]), [("__float__", 2.0)]),
    "item": (lambda x: x * x[2].item(), [("item", 3.0)]),
    "tolist": (lambda x: x * x.tolist()[0], [("tolist", [1.0, 2.0, 3.0])]),
    "index": (lambda x: x * [5, 6, 7][x[0].long()], [("__index__", 1)]),
    "contains": (lambda x: x * (2.0 in x), [("__contains__", True)]),
    "equal": (lambda x: x * torch.equal(x, x), [("equal", True)]),
    "allclose": (lambda x: x * torch.allclose(x, x), [("allclose", True)]),
    "is_nonzero": (lambda x: x * torch.is_nonzero(x[0]), [("is_nonzero", True)]),
    "format": (lambda x: x * float(f"{x[0]:.1f}"), [("__format__", "1.0")]),
    "range": (lambda x: sum(x for _ in range(x[2].long())), [("__index__", 3)]),
    "and": (lambda x: x if x[0] > 0 and x[1] > 0 else -x, [("__bool__", True)] * 2),
}


@pytest.mark.parametrize("name", TAKEN)
def test_value_is_recorded(name: str) -> None:
    fn, expected = TAKEN[name]
    assert branches(fn) == expected


def test_numpy_arrays_are_recorded_as_copies() -> None:
    np = pytest.importorskip("numpy")
    x = X.clone()
    trace = quiet_trace(lambda x: x * float(x.numpy()[0]), x)
    (branch,) = trace.branches
    x.zero_()
    assert branch.value.tolist() == [1, 2, 3]
    assert branches(lambda x: x * float(np.asarray(x)[0]))[0][0] == "__array__"


SIZED = {
    "nonzero": lambda x: x * x.nonzero().shape[0],
    "mask": lambda x: x * x[x > 1].numel(),
    "len of where": lambda x: x * len(torch.where(x > 1)[0]),
    "residuals": lambda x: x * torch.linalg.lstsq(x[:, None], x[:, None]).residuals.shape[0],
    "unique": lambda x: x * x.unique().size(0),
    "through other ops": lambda x: x * (x[x > 1] * 2 + 1).exp().shape[0],
    "masked_select": lambda x: x * torch.masked_select(x, x > 1).size(0),
    "iteration": lambda x: x * sum(torch.ones(()) for _ in x[x > 1]),
    "unbind": lambda x: x * len(x[x > 1].unbind()),
    "slice bound": lambda x: x * x[: x[0].long()].shape[0],
    "arange": lambda x: x * torch.arange(x[2].long()).numel(),
    "repeat_interleave": lambda x: x * torch.repeat_interleave(x, x.long()).numel(),
    "custom tag": lambda x: x * torch.ops.aten.nonzero(x).shape[0],
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_depend_on_values_are_branches(name: str) -> None:
    assert branches(SIZED[name])


FIXED = {
    "shape of an input": lambda x: x * x.shape[0],
    "reduction of a masked tensor": lambda x: x * x[x > 1].sum(),
    "dim of a masked tensor": lambda x: x * x[x > 1].dim(),
    "metadata": lambda x: x if x.dtype == torch.float32 and x.is_contiguous() else -x,
    "index by a tensor": lambda x: x * x[torch.tensor([0, 1])].shape[0],
    "where with three arguments": lambda x: x * torch.where(x > 1, x, x).shape[0],
}


@pytest.mark.parametrize("name", FIXED)
def test_sizes_that_only_depend_on_shapes_are_none(name: str) -> None:
    assert branches(FIXED[name]) == []


def test_a_branch_says_from_what_and_where() -> None:
    def f(x):
        total = x.sum()
        if total > 0:  # HERE
            return x
        return -x

    (branch,) = quiet_trace(f, X).branches
    (taken,) = branch.inputs
    assert taken.target == "gt"
    assert taken.args[0].name == "total"
    assert "HERE" in branch.where.place.text
    assert str(branch).startswith("__bool__(gt) = True at test_branches.py:")


def test_the_warning_points_at_the_users_line() -> None:
    def f(x):
        if x.sum() > 0:  # HERE
            return x * 2
        return x

    with pytest.warns(TracerWarning, match="asks whether a tensor is true") as caught:
        tripwire.trace(f, X)
    (warning,) = caught
    assert warning.filename == __file__
    with open(__file__) as file:
        assert "# HERE" in file.read().splitlines()[warning.lineno - 1]


def test_a_trace_without_branches_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tripwire.trace(lambda x: x.relu(), X)


def test_a_caught_failure_of_a_torch_call_is_refused() -> None:
    def f(x):
        try:
            return torch.linalg.inv(x)
        except RuntimeError:
            return x

    with pytest.raises(tripwire.CannotTrace) as caught:
        quiet_trace(f, torch.zeros(2, 2))
    assert caught.value.slug == "caught-exception"


# --- lengths ---


def test_lengths_and_iterations_are_branches_and_warn_of_nothing() -> None:
    def program(x):
        total = x[0] * len(x)
        for row in x:
            total = total + row
        first, second = x * 2
        return total + first, second

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = tripwire.trace(program, torch.ones(2, 3))
    line = program.__code__.co_firstlineno
    assert [(b.op, b.value, b.where.place.line - line) for b in trace.branches] == [
        ("__len__", 2, 1),
        ("__iter__", 2, 2),
        ("__iter__", 2, 4),
    ]
    assert [str(b.inputs[0]) for b in trace.branches] == ["x", "x", "mul"]
    with pytest.raises(tripwire.InputMismatch):
        trace(torch.ones(3, 3))


def test_a_length_that_depends_on_values_is_one_branch() -> None:
    with pytest.warns(tripwire.TracerWarning, match="__len__"):
        trace = tripwire.trace(lambda x: x * len(x[x > 0]), torch.ones(2))
    assert [(branch.op, branch.value) for branch in trace.branches] == [("__len__", 2)]


def test_asking_for_a_value_trace_adds_no_branch() -> None:
    def program(x):
        assert tripwire.tracing.get_value_trace(x).name == "x"
        return x.sin()

    assert tripwire.trace(program, torch.ones(2)).branches == ()
