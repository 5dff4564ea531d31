"""A tour of tripwire. Read it from top to bottom. Every line runs, and CI runs it.

tripwire observes one real run of a function. This tour shows what it sees, and what it makes of it.
"""

from __future__ import annotations

import tempfile
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import tripwire
from tripwire.tracing import TracingState, get_value_trace, recording, set_value_trace

torch.manual_seed(0)

# --- 1. A run becomes a graph ------------------------------------------------------------------
# `trace` calls the function once. The call is real: `result` is what the function returned.


def smooth(x: torch.Tensor, strength: float = 0.5) -> torch.Tensor:
    """Mix every value with its neighbour."""
    shifted = x.roll(1)
    mixed = x * (1 - strength) + shifted * strength
    return mixed


signal = torch.arange(4.0)
trace = tripwire.trace(smooth, signal)
print(trace, "\n")
assert torch.equal(trace.result, smooth(signal))

# The trace is callable. It runs the graph, not the function.
other = torch.randn(4)
assert torch.equal(trace(other), smooth(other))

# Nodes are named after the user's variables and know the line that made them.
row = trace.find("shifted")
assert row.where.place is not None
assert row.where.place.text == "shifted = x.roll(1)"
assert row.where.place.function == "smooth"

# What lies under a trace is plain torch.fx.
print(trace.graph_module.code)

# --- 2. A trace holds for what it saw ----------------------------------------------------------
# Sizes that Python read and plain arguments are part of the graph. A call with other sizes or other
# plain arguments is refused.

for wrong in ((torch.randn(5),), (other, 0.9)):
    try:
        trace(*wrong)
    except tripwire.InputMismatch as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a trace must not accept what it doesn't hold for")

# --- 3. Every tensor has a source --------------------------------------------------------------
# A tensor in the graph is an argument, or the run read it from something that it can reach, or a
# recorded torch call made it. The first two become inputs, with the path that leads to them.

OFFSET = torch.tensor(10.0)


class Net(nn.Module):
    """Two linear layers that share one weight, and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers, scaled and shifted."""
        hidden = F.relu(self.first(x))
        return self.second(hidden) * self.scale + OFFSET


net = Net()
trace = tripwire.trace(net, other)
print()
for wanted in trace.inputs:
    print(f"input  {wanted}")
assert [str(wanted.source) for wanted in trace.inputs] == [
    "L['x']",
    "L['self'].first.weight",
    "L['self'].first.bias",
    "L['self'].scale",
    "G['OFFSET']",
]

# Every call follows the paths again, so a changed weight is used, not remembered.
with torch.no_grad():
    net.first.weight.mul_(2)
assert torch.equal(trace(other), net(other))

# Gradients flow through the graph to the same parameters.
trace(other).sum().backward()
assert net.first.weight.grad is not None

# Scopes say which module call a node belongs to.
assert {row.scope for row in trace} == {"", "first", "second"}

# A tensor whose origin is unknown would become a constant. tripwire raises instead.
hidden_away = iter([torch.ones(4)])
try:
    tripwire.trace(lambda x: x + next(hidden_away), other)
except tripwire.CannotTrace as error:
    assert error.slug == "unknown-origin"

# --- 4. Values that Python takes out of tensors are branches -----------------------------------
# The trace holds for the value that this run met, and a warning points at the line.


def clip(x: torch.Tensor) -> torch.Tensor:
    """Halve what is too loud."""
    if x.abs().max() > 1:
        x = x / 2
    return x


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trace = tripwire.trace(clip, torch.full((4,), 3.0))
(branch,) = trace.branches
print(f"\nbranch {branch}")
assert branch.value is True
assert issubclass(caught[0].category, tripwire.TracerWarning)

# A size is a branch only if it depends on values.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", tripwire.TracerWarning)
    assert tripwire.trace(lambda x: x * x.shape[0], other).branches == ()
    assert tripwire.trace(lambda x: x * x[x > 0].shape[0], other).branches[0].op == "shape"

# --- 5. In-place changes are part of the graph; other writes are listed ------------------------


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Change the argument itself."""
    x -= x.mean()
    x /= x.std()
    return x


trace = tripwire.trace(normalise, torch.randn(4))
assert trace.inputs[0].written
mine = torch.arange(4.0)
assert trace(mine) is mine  # an input that is returned comes back as itself
assert abs(float(mine.mean())) < 1e-6

history: list[int] = []


def remember(x: torch.Tensor) -> torch.Tensor:
    """Write to a list as well."""
    history.append(len(history))
    return x + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", tripwire.TracerWarning)
    trace = tripwire.trace(remember, other)
assert [str(effect) for effect in trace.effects] == ["G['history'][0]"]

# --- 6. A custom autograd function is one node, and its backward runs --------------------------


class Clamp(torch.autograd.Function):
    """Clamp that lets every gradient through."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        """The values."""
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        """The gradient, as it comes."""
        return grad


trace = tripwire.trace(lambda x: Clamp.apply(x) * 3, other)
call = trace.rows[1].facts.python
assert call is not None
assert call.function is Clamp
loud = torch.full((4,), 9.0, requires_grad=True)
trace(loud).sum().backward()
assert loud.grad is not None
assert loud.grad.tolist() == [3, 3, 3, 3]

# --- 7. A refusal: the run goes to its end, and the reason is data -----------------------------

run = tripwire.Tracer().run(lambda x: torch.func.functionalize(torch.sin)(x), (other,), {})
assert torch.equal(run.result, other.sin())  # type: ignore[arg-type]
assert run.trace is None
print(f"refused: {run.refusal.slug if run.refusal else ''}")

# --- 8. The tracing state, used by hand --------------------------------------------------------

state = TracingState()
set_value_trace(other, state.graph().placeholder("x"), state)
with recording(state):
    state.push_scope("mine")
    doubled = other * 2
    state.pop_scope()
assert get_value_trace(doubled, state).target == "mul"
assert state.current_scope() == ""

# --- 9. Compiling: guards check the arguments, wires watch everything else ---------------------


class Scaled(torch.nn.Module):
    """Reads an attribute, counts its calls, and asks a tensor for its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale up where all is positive."""
        self.calls += 1
        return x * self.scale if bool((x > 0).all()) else x


scaled = Scaled()
fast = tripwire.compile(scaled, backend="eager", fullgraph=True)
ones = torch.ones(3)
for _ in range(3):
    assert fast(ones).tolist() == [2, 2, 2]
assert (fast.statistics().traces, fast.statistics().hits) == (1, 2)
assert scaled.calls == 3  # an effect: compiled calls repeat it

scaled.scale = 3.0  # a write to something that the run read: the compiled code is discarded
assert fast(ones).tolist() == [3, 3, 3]
print(f"retired: {fast.statistics().causes[0]}")

assert fast(-ones).tolist() == [-1, -1, -1]  # the branch has another value: another entry
assert fast(ones).tolist() == [3, 3, 3]
assert fast.statistics().traces == 3

scaled.scale = 2.0  # the old value is back, and so is the entry that was traced with it
assert fast(ones).tolist() == [2, 2, 2]
assert fast.statistics().traces == 3

# --- 10. Why, who, where -----------------------------------------------------------------------
# `explain` says what is known of something compiled. `preview` runs a plain call once, and says
# what was captured, or why it can't be.

explained = tripwire.explain(fast)
assert explained.hits == fast.statistics().hits
assert "scale: 2.0 → 3.0" in explained.retirements[0]

seen = tripwire.preview(lambda x: x * len(str(id(x))), ones)
assert seen.refusal is not None
print(f"would run as plain Python: {seen.refusal.slug}")

# --- 11. Records: a call as a file that runs again elsewhere -------------------------------------


def divide(x: torch.Tensor, by: int) -> torch.Tensor:
    """Fail, if you like."""
    if by == 0:
        raise ValueError("by is 0")
    return x / by


with tempfile.TemporaryDirectory() as folder:
    path = tripwire.record_call(f"{folder}/divide.rec", check=False)(divide, ones, by=0)
    record = tripwire.load_record(path)  # runs nothing of it
    assert record.locals["by"] == 0
    try:
        tripwire.replay(path, trust=True)  # runs it
    except ValueError as failed:
        print(f"replayed: {failed!r}")
    else:
        raise AssertionError("a replay must raise what the call raised")

print("\nThe end.")
