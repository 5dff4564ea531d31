"""An error on a hit leaves what the plain call leaves: tensors, effects, random numbers (L3)."""

from __future__ import annotations

import copy
import traceback

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tripwire
from tripwire.dispatch import originals

GOOD, BAD = torch.tensor([1]), torch.tensor([9])
X = torch.arange(3.0)


@pytest.fixture(params=["eager", "aot_eager"])
def backend(request):
    return request.param


class Net(nn.Module):
    """Counts, notes and writes, before and after what may fail."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(size))
        self.register_buffer("late", torch.zeros(size))
        self.table = nn.Parameter(torch.ones(4))
        self.calls = 0
        self.seen: list[str] = []
        self.last = torch.zeros(3)

    def begin(self, x):
        self.calls += 1
        self.seen.append("begun")

    def write(self, x):
        self.total.add_(1)
        self.last = (self.total + x).detach()

    def forward(self, x, i):
        self.begin(x)
        self.write(x)
        y = x * self.table[i]
        self.seen.append("ended")
        self.late.add_(2)
        return y

    def facts(self):
        return self.calls, self.seen, self.total, self.late, self.last


class FailsFirst(Net):
    def forward(self, x, i):
        self.begin(x)
        y = x * self.table[i]
        self.write(x)
        return y


class Draws(Net):
    def write(self, x):
        self.total.add_(torch.rand(3))


class OnlyWrites(Net):
    def begin(self, x):
        pass

    def write(self, x):
        self.total.add_(1)

    def forward(self, x, i):
        self.write(x)
        return x * self.table[i]


class WritesItems(Net):
    def write(self, x):
        self.total[0] = 7.0
        self.total[1:].mul_(x[1:] + 2)


class Normalizes(Net):
    """No version counter tells what a norm writes to its statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def write(self, x):
        self.norm(torch.stack([x, x + 1]))

    def facts(self):
        return *super().facts(), dict(self.norm.named_buffers())


class WritesThroughData(Net):
    """The version counter of a tensor doesn't tell of writes to its `.data`."""

    def write(self, x):
        self.total.data.mul_(2).add_(x)


class SwitchesGradients(Net):
    """Leaves another grad mode behind, unless it fails."""

    def forward(self, x, i):
        self.write(x)
        with torch.no_grad():
            y = x * 2
        y = y + self.table[i]
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return y

    def facts(self):
        return *super().facts(), torch.is_grad_enabled()


class Double(torch.autograd.Function):
    """A compiler may look inside."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class CallsFunction(FailsFirst):
    def begin(self, x):
        super().begin(x)
        Double.apply(x)


class Counted(Net):
    """A custom function notes that it ran, and draws: it mustn't run twice for one call."""

    def __init__(self):
        super().__init__()
        ran = self.ran = []

        class Noting(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, i):
                ran.append(torch.rand(1))
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 2, None

        self.function = Noting

    def forward(self, x, i):
        y = self.function.apply(x, i)
        self.begin(x)
        self.write(y + torch.rand(3))
        y = y * self.table[i]
        self.seen.append("ended")
        self.late.add_(2)
        return y

    def facts(self):
        return *super().facts(), self.ran


class FunctionRaises(Counted):
    """The second of two custom functions raises by itself, after it noted that it ran."""

    def __init__(self):
        super().__init__()
        ran = self.ran

        class Refusing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, i):
                ran.append(torch.rand(1))
                if i > 3:
                    raise IndexError(f"no {int(i)}")
                return x * 3

            @staticmethod
            def backward(ctx, grad):
                return grad * 3, None

        self.second = Refusing

    def forward(self, x, i):
        y = self.function.apply(x, i)
        self.total.add_(torch.rand(3))
        y = self.second.apply(y, i)
        self.begin(x)
        return y


def play(net, call):
    """What each call gave or raised, and what was there after it."""
    torch.manual_seed(0)
    for i in (GOOD, GOOD, BAD, GOOD, BAD, BAD, GOOD):
        result, raised = None, None
        try:
            result = call(X, i).detach()
        except IndexError as error:
            raised = str(error)
        yield copy.deepcopy((result, raised, net.facts(), torch.get_rng_state()))


def check_same(wanted, got):
    wanted, got = tree_leaves(wanted), tree_leaves(got)
    assert len(wanted) == len(got)
    for left, right in zip(wanted, got, strict=True):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)
        else:
            assert left == right


def check_twins(build, backend, fullgraph=True):
    plain, net = build(), build()
    compiled = tripwire.compile(net, backend=backend, fullgraph=fullgraph)
    expected = list(play(plain, plain))
    found = list(play(net, compiled))
    for wanted, got in zip(expected, found, strict=True):
        check_same(wanted, got)
    assert compiled.statistics().hits >= 5


@pytest.mark.parametrize(
    "kind", [Net, FailsFirst, Draws, OnlyWrites, WritesItems, Normalizes, WritesThroughData]
)
def test_an_error_on_a_hit_leaves_what_the_plain_call_leaves(kind, backend) -> None:
    with torch.no_grad():
        check_twins(kind, backend)


@pytest.mark.parametrize("kind", [CallsFunction, Counted, FunctionRaises])
def test_an_error_behind_a_custom_function_leaves_what_the_plain_call_leaves(kind, backend) -> None:
    check_twins(kind, backend, fullgraph=False)


def test_what_a_custom_function_raises_on_a_hit_ends_at_its_own_line() -> None:
    net = FunctionRaises()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(3):
        compiled(X, GOOD)
    with pytest.raises(IndexError, match="no 9") as raised:
        compiled(X, BAD)
    assert compiled.statistics().hits == 3
    last = traceback.extract_tb(raised.tb)[-1]
    assert last.line == 'raise IndexError(f"no {int(i)}")'


def test_after_an_error_on_a_hit_the_grad_mode_is_that_of_the_plain_call() -> None:
    with torch.no_grad():
        check_twins(SwitchesGradients, "eager")


def test_an_error_on_a_hit_is_undone_in_training_mode_too(backend) -> None:
    check_twins(Net, backend)


def test_what_is_too_large_to_copy_is_not_written_twice() -> None:
    size = originals.LARGEST_COPY

    class Large(FailsFirst):
        def __init__(self):
            super().__init__(size)

        def write(self, x):
            self.total.add_(1)

    with torch.no_grad():
        check_twins(Large, "eager")  # nothing was written yet, and its version says so


def test_an_error_after_a_large_write_leaves_the_tensors_as_they_are() -> None:
    class Large(Net):
        def write(self, x):
            self.total.add_(1)

    net = Large(originals.LARGEST_COPY)
    compiled = tripwire.compile(net, fullgraph=True)
    compiled(X, GOOD)
    with pytest.raises(IndexError):
        compiled(X, BAD)
    assert net.total.unique().tolist() == [2.0]


def test_a_version_counter_does_not_move_where_the_plain_call_writes_nothing() -> None:
    net = FailsFirst()
    compiled = tripwire.compile(net, fullgraph=True)
    compiled(X, GOOD)
    before = net.total._version
    with pytest.raises(IndexError):
        compiled(X, BAD)
    assert net.total._version == before


def test_tensors_made_in_inference_mode_are_put_back(backend) -> None:
    with torch.inference_mode():
        check_twins(Net, backend)


def test_a_tensor_that_got_a_gradient_function_is_not_put_back() -> None:
    def call(buffer, i):
        seen.append(1)
        buffer.mul_(weight)
        return buffer * table[i]

    seen, weight, table = [], torch.ones(3, requires_grad=True), torch.ones(4)
    compiled = tripwire.compile(call, fullgraph=True)
    compiled(torch.ones(3), GOOD)
    buffer = torch.full((3,), 2.0)
    with pytest.raises(IndexError):
        compiled(buffer, BAD)
    assert buffer.grad_fn is not None
    assert buffer.tolist() == [2.0, 2.0, 2.0]


def test_graphs_that_change_nothing_keep_nothing() -> None:
    compiled = tripwire.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)
    compiled(X)
    (entry,) = compiled._dispatcher.entries
    assert entry._undo is None


def test_an_interrupt_is_not_taken_for_an_error_of_the_graph() -> None:
    def stopping(module, inputs):
        def run(*args):
            raise KeyboardInterrupt

        return run

    net = Net()
    compiled = tripwire.compile(net, backend=stopping, fullgraph=True)
    compiled(X, GOOD)
    with pytest.raises(KeyboardInterrupt):
        compiled(X, GOOD)
    assert net.calls == 1
