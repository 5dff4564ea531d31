"""Custom autograd functions: their code runs on every call and every backward, or might as well."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import tripwire
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.errors import FunctionChanged

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def make_function(forward, backward):
    space = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(Function)("Custom", (Function,), space)


def leave_alone(n):
    """Nothing is written between the calls."""


# --- reads: each gives a program, what is written between its calls, and what to look at ----------


def class_attribute():
    class Scale(Function):
        factor = 2.0

        @staticmethod
        def forward(ctx, x):
            return x * Scale.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * Scale.factor

    def write(n):
        Scale.factor = float(n)

    return lambda x: Scale.apply(x.sin()) + 1, write, None


def item_of_a_dict():
    table = {"factor": 2.0}
    custom = make_function(
        lambda ctx, x: x * table["factor"], lambda ctx, grad: grad * table["factor"]
    )

    def write(n):
        table["factor"] = float(n)

    return lambda x: custom.apply(x.sin()) + 1, write, None


def element_of_a_list():
    factors = [2.0]
    custom = make_function(lambda ctx, x: x * factors[0], lambda ctx, grad: grad * factors[0])

    def write(n):
        factors[0] = float(n)

    return lambda x: custom.apply(x.sin()) + 1, write, None


def cell():
    factor = 2.0
    custom = make_function(lambda ctx, x: x * factor, lambda ctx, grad: grad * factor)

    def write(n):
        nonlocal factor
        factor = float(n)

    return lambda x: custom.apply(x.sin()) + 1, write, None


def object_that_is_passed():
    config = SimpleNamespace(factor=2.0)

    def forward(ctx, x, given):
        ctx.given = given
        return x * given.factor

    custom = make_function(forward, lambda ctx, grad: (grad * ctx.given.factor, None))

    def write(n):
        config.factor = float(n)

    return lambda x: custom.apply(x.sin(), config) + 1, write, None


def only_in_the_backward():
    config = SimpleNamespace(factor=2.0)
    custom = make_function(lambda ctx, x: x * 2, lambda ctx, grad: grad * config.factor)

    def write(n):
        config.factor = float(n)

    return lambda x: custom.apply(x.sin()) + 1, write, None


FACTOR = 2.0


class OfGlobals(Function):
    @staticmethod
    def forward(ctx, x):
        return x * FACTOR

    @staticmethod
    def backward(ctx, grad):
        return scaled(grad)


SLOPE = 2.0


def scaled(grad):
    return grad * SLOPE


def globals_of_both():
    globals().update(FACTOR=2.0, SLOPE=2.0)

    def write(n):
        globals().update(FACTOR=float(n), SLOPE=n + 0.5)

    return lambda x: OfGlobals.apply(x.sin()) + 1, write, None


class Replaced(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def replaced_backward():
    Replaced.backward = staticmethod(lambda ctx, grad: grad * 3)

    def write(n):
        Replaced.backward = staticmethod(lambda ctx, grad: grad * n)

    return lambda x: Replaced.apply(x.sin()) + 1, write, None


def dtype_of_its_result():
    config = SimpleNamespace(dtype=torch.float64)
    custom = make_function(lambda ctx, x: x.to(config.dtype), lambda ctx, grad: grad.float())

    def write(n):
        config.dtype = torch.float32 if n % 2 else torch.float64

    return lambda x: custom.apply(x.sin()).exp() + 1, write, None


def whether_its_result_wants_a_gradient():
    config = SimpleNamespace(marks=False)

    def forward(ctx, x):
        y = x * 2
        if config.marks:
            ctx.mark_non_differentiable(y)
        return y

    custom = make_function(forward, lambda ctx, grad: grad * 2)

    def write(n):
        config.marks = bool(n % 2)

    return lambda x: custom.apply(x.sin()).exp() + x, write, None


READS = [
    dtype_of_its_result,
    whether_its_result_wants_a_gradient,
    class_attribute,
    item_of_a_dict,
    element_of_a_list,
    cell,
    object_that_is_passed,
    only_in_the_backward,
    globals_of_both,
    replaced_backward,
]


# --- writes ------------------------------------------------------------------------------------


def appends():
    log = []

    def forward(ctx, x):
        log.append("forward")
        return x * 2

    def backward(ctx, grad):
        log.append("backward")
        return grad * 2

    custom = make_function(forward, backward)
    return lambda x: custom.apply(x.sin()) + 1, leave_alone, lambda: list(log)


def appends_to_an_argument():
    log = []

    def forward(ctx, x, given):
        given.append(len(given))
        return x * 2

    custom = make_function(forward, lambda ctx, grad: (grad * 2, None))
    return lambda x: custom.apply(x.sin(), log) + 1, leave_alone, lambda: list(log)


def counts_on_its_class():
    class Counting(Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            Counting.runs += 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            Counting.runs += 10
            return grad * 2

    return lambda x: Counting.apply(x.sin()) + 1, leave_alone, lambda: Counting.runs


def counts_beside_other_code():
    seen = {"inside": 0, "outside": 0}

    def forward(ctx, x):
        seen["inside"] += 1
        return x * 2

    custom = make_function(forward, lambda ctx, grad: grad * 2)

    def f(x):
        seen["outside"] += 1
        return custom.apply(x.sin()) + 1

    return f, leave_alone, lambda: dict(seen)


def counts_what_other_code_counts():
    seen = {"runs": 0}

    def forward(ctx, x):
        seen["runs"] += 1
        return x * 2

    custom = make_function(forward, lambda ctx, grad: grad * 2)

    def f(x):
        y = custom.apply(x.sin())
        seen["runs"] *= 2
        return y + 1

    return f, leave_alone, lambda: dict(seen)


def counts_what_other_code_takes_back():
    seen = {"runs": 0}

    def forward(ctx, x):
        seen["runs"] += 1
        return x * 2

    custom = make_function(forward, lambda ctx, grad: grad * 2)

    def f(x):
        y = custom.apply(x.sin())
        seen["runs"] -= 1
        return y + 1

    return f, leave_alone, lambda: dict(seen)


def counts_what_other_code_reads():
    seen = {"runs": 0}

    def forward(ctx, x):
        seen["runs"] += 1
        return x * 2

    custom = make_function(forward, lambda ctx, grad: grad * 2)
    return lambda x: custom.apply(x.sin()) * seen["runs"], leave_alone, lambda: dict(seen)


def changes_its_context():
    class Stateful(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.slope = 2.0
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.slope = ctx.slope + 1
            return grad * ctx.slope

    return lambda x: Stateful.apply(x.sin()) + 1, leave_alone, None


def changes_a_tensor():
    total = torch.zeros(3)

    def forward(ctx, x):
        total.add_(x)
        return x * 2

    custom = make_function(forward, lambda ctx, grad: grad * 2)
    return lambda x: custom.apply(x.sin()) + 1, leave_alone, total.tolist


def changes_its_argument():
    factors = [2.0]

    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(factors[0])

    custom = make_function(forward, lambda ctx, grad: grad * factors[0])

    def f(x):
        y = x.sin()
        return custom.apply(y) + y

    def write(n):
        factors[0] = float(n)

    return f, write, None


def result_is_changed_in_place():
    factors = [2.0]
    custom = make_function(lambda ctx, x: x * factors[0], lambda ctx, grad: grad * factors[0])

    def f(x):
        y = custom.apply(x.sin())
        y.add_(1)
        y[:2].mul_(2)
        return y * 2

    def write(n):
        factors[0] = float(n)

    return f, write, None


WRITES = [
    appends,
    appends_to_an_argument,
    counts_on_its_class,
    counts_beside_other_code,
    counts_what_other_code_counts,
    counts_what_other_code_takes_back,
    counts_what_other_code_reads,
    changes_its_context,
    changes_a_tensor,
    changes_its_argument,
    result_is_changed_in_place,
]


def play(program, backend):
    """What six calls show, each with two backwards; something is written after the third."""
    fn, write, look = program()
    call = fn if backend is None else tripwire.compile(fn, backend=backend)
    shown = []
    for n in range(6):
        x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
        result = call(x)
        loss = result.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        shown.append((result.detach(), x.grad, look() if look else None))
        if n >= 2:
            write(n)
    return shown, call


# Inductor gets one graph of all of these, and compiles it once.
QUICK = {
    *(class_attribute, item_of_a_dict, element_of_a_list, cell, object_that_is_passed),
    *(only_in_the_backward, appends, appends_to_an_argument, counts_on_its_class),
}


def on_backends(programs):
    """Each program behind each back end; behind Inductor the slow ones as slow tests."""
    return pytest.mark.parametrize(
        ("program", "backend"),
        [
            pytest.param(
                program,
                backend,
                id=f"{program.__name__}-{backend}",
                marks=pytest.mark.slow if backend == "inductor" and program not in QUICK else (),
            )
            for program in programs
            for backend in ("eager", "aot_eager", "inductor")
        ],
    )


@on_backends(READS)
def test_what_a_custom_function_reads_is_read_on_every_call(program, backend) -> None:
    shown, compiled = play(program, backend)
    for mine, plain in zip(shown, play(program, None)[0], strict=True):
        torch.testing.assert_close(mine[:2], plain[:2])
    assert compiled.statistics().hits > 0


@on_backends(WRITES)
def test_what_a_custom_function_writes_is_written_once_per_call(program, backend) -> None:
    shown, _ = play(program, backend)
    for mine, plain in zip(shown, play(program, None)[0], strict=True):
        torch.testing.assert_close(mine[:2], plain[:2])
        assert mine[2] == plain[2]


# --- the kind of its result hangs on a value ------------------------------------------------------


def another_dtype(ctx, x, y):
    return x * 2 if y.sum() > 0 else x.double()


def another_dtype_by_item(ctx, x, y):
    return x * 2 if y.sum().item() > 0 else x.half()


def none_beside_it(ctx, x, y):
    return (x * 2, x * 3 if y.sum() > 0 else None)


def another_number_of_results(ctx, x, y):
    return (x * 2, x * 3) if y.sum() > 0 else (x * 2, x * 3, x * 4)


def without_a_gradient(ctx, x, y):
    z = x * 2
    if y.sum() > 0:
        ctx.mark_non_differentiable(z)
    return z


def complex_numbers(ctx, x, y):
    return x * 2 if y.sum() > 0 else x * 1j


def go_by_the_kind(found):
    """Code that goes by all that Python can ask of a result without its values."""
    results = found if isinstance(found, tuple) else (found,)
    total = 0
    for result in results:
        if result is None:
            total = total + len(results)
        elif result.is_complex():
            total = total + result.real * 5
        else:
            total = total + result.to(torch.float64) * (2 if result.requires_grad else 3)
    return total


def check_by_value(f, backend, raises=0):
    """Six calls beside plain ones; in some of them the value that decides is another."""
    compiled, raised = tripwire.compile(f, backend=backend), 0
    for sign in (-1, -1, 1, 1, -1, 1):
        sides = []
        for call in (f, compiled):
            x = torch.linspace(-1, 1, 4).requires_grad_()
            try:
                result = call(x, torch.full((2,), float(sign)))
            except FunctionChanged as error:
                assert "function-changed" in str(error)
                raised += 1
                continue
            if result.requires_grad:
                result.sum().backward()
            sides.append((result.detach(), x.grad))
        if len(sides) == 2:
            torch.testing.assert_close(*sides)
    assert raised == raises
    assert compiled.statistics().hits > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "forward",
    [
        another_dtype,
        another_dtype_by_item,
        none_beside_it,
        another_number_of_results,
        without_a_gradient,
        complex_numbers,
    ],
)
def test_code_goes_by_the_kind_of_result_that_this_call_got(forward, backend) -> None:
    custom = make_function(forward, lambda ctx, *grads: (grads[0].real * 2, None))
    check_by_value(lambda x, y: go_by_the_kind(custom.apply(x.sin(), y)), backend)


def view_of_its_argument(ctx, x, y):
    return x.double() if y.sum() > 0 else x.view(-1)


def changed_argument(ctx, x, y):
    ctx.mark_dirty(x)
    x.mul_(2)
    return x, x.double() if y.sum() > 0 else x * 2


def in_a_checkpoint(custom, x, y):
    return checkpoint(custom.apply, x, y, use_reentrant=False)


COUNTS = {"runs": 0, "shift": 1}


def written_state(ctx, x, y):
    COUNTS["runs"] += 1
    return another_dtype(ctx, x, y)


def apply(custom, x, y):
    return custom.apply(x, y)


def apply_and_read(custom, x, y):
    return custom.apply(x, y) * COUNTS["shift"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("forward", "call"),
    [
        (view_of_its_argument, apply),
        (changed_argument, apply),
        (another_dtype, in_a_checkpoint),
        (without_a_gradient, in_a_checkpoint),
        (written_state, apply_and_read),
    ],
)
def test_where_the_call_cannot_be_made_again_another_kind_is_an_error_once(
    forward, call, backend
) -> None:
    custom = make_function(forward, lambda ctx, *grads: (grads[0] * 2, None))
    check_by_value(lambda x, y: go_by_the_kind(call(custom, x.sin(), y)), backend, raises=1)


# --- those that a compiler may look into ---------------------------------------------------------


class Sine(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * ctx.factor if ctx.needs_input_grad[0] else None, None


class Doubling(Function):
    """Its backward does more than compute."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.ran = True
        return grad * 2


def net(x):
    return Sine.apply(Sine.apply(x * 2, 3.0).relu(), 2.0) + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_of_its_arguments_alone_is_part_of_the_graph(backend) -> None:
    compiled = tripwire.compile(net, backend=backend, fullgraph=True)
    for _ in range(3):
        sides = []
        for call in (compiled, net):
            x = torch.linspace(-1, 1, 5).requires_grad_()
            call(x).sum().backward()
            sides.append(x.grad)
        torch.testing.assert_close(*sides)
    assert compiled.statistics().hits == 2
    assert not find_dispatcher(compiled).refusals


def test_without_gradients_no_backward_matters() -> None:
    compiled = tripwire.compile(
        lambda x: Doubling.apply(x) + 1, backend="aot_eager", fullgraph=True
    )
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert compiled.statistics().hits == 2


def test_with_gradients_the_graph_is_cut_around_it(caplog) -> None:
    compiled = tripwire.compile(lambda x: Doubling.apply(x.sin()) + 1, backend="aot_eager")
    for _ in range(3):
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
    assert compiled.statistics().hits == 2
    assert caplog.text.count("`Doubling`") == 1
    assert "[graph-cut]" in caplog.text


# --- those that change an argument, or hand it out -----------------------------------------------


def changes_what_dropout_hands_back(ctx, x, y):
    t = F.dropout(x, 0.5, training=False)
    t += y
    return t * 1


def changes_what_dropout_hands_back_of_its_own(ctx, x, y):
    t = x * 1
    F.dropout(t, 0.5, training=False).add_(y)
    return t


def changes_what_dropout_hands_back_and_says_so(ctx, x, y):
    t = F.dropout(x, 0.5, training=False)
    t += y
    ctx.mark_dirty(t)
    return t


def asks_whether_dropout_handed_it_back(ctx, x, y):
    return x * y if F.dropout(x, 0.5, training=False) is x else x + y


def returns_what_dropout_hands_back(ctx, x, y):
    return F.dropout(x, 0.5, training=False)


def changes_it(ctx, x, y):
    x += y
    return x * 1


def changes_it_and_says_so(ctx, x, y):
    ctx.mark_dirty(x)
    return x.add_(y)


def changes_a_view_of_it(ctx, x, y):
    x[1:] += y[1:]
    return x * 1


def changes_it_in_a_loop(ctx, x, y):
    for _ in range(2):
        x.view(2, 2).mul_(2)
    return x + y


def changes_it_and_returns_it(ctx, x, y):
    x += y
    return x


def changes_what_relu_hands_back(ctx, x, y):
    t = F.relu(x, inplace=True)
    t += y
    return t * 1


def plain_backward(ctx, grad):
    return grad * 3, grad * 2


def once(custom, x, y):
    return custom.apply(x, y)


def twice_with_one_argument(custom, x, y):
    custom.apply(x, y)
    return custom.apply(x, y)


def in_a_loop(custom, x, y):
    t = x
    for _ in range(2):
        t = custom.apply(t, y)
    return t


def with_something_made(custom, x, y):
    z = x * 2
    return custom.apply(z, y) + z


def as_leaf(x):
    return x.requires_grad_()


def without_gradient(x):
    return x


def look(call, prepare):
    """What a caller sees of a call: results, arguments, gradients, and who shares memory."""
    x, y = (prepare(torch.arange(4.0) + n) for n in (1, 2))
    try:
        results = call(x, y)
    except RuntimeError as error:  # torch's: a leaf that is changed by one who says so
        return type(error), str(error)
    if results[0].requires_grad:
        sum(result.sum() for result in results).backward()
    tensors = (x, y, *results)
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return (
        [tensor.tolist() for tensor in tensors],
        [one.is_leaf and one.grad is not None and one.grad.tolist() for one in (x, y)],
        [memory.index(place) for place in memory],
    )


def check_sight(f, prepare, backend):
    """Whether a caller sees the same of compiled calls."""
    compiled = tripwire.compile(f, backend=backend)
    for _ in range(3):
        assert look(compiled, prepare) == look(f, prepare)


CHANGING = [
    changes_what_dropout_hands_back,
    changes_what_dropout_hands_back_of_its_own,
    changes_what_dropout_hands_back_and_says_so,
    asks_whether_dropout_handed_it_back,
    returns_what_dropout_hands_back,
    changes_it,
    changes_it_and_says_so,
    changes_a_view_of_it,
    changes_it_in_a_loop,
    changes_it_and_returns_it,
    changes_what_relu_hands_back,
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("prepare", [without_gradient, as_leaf])
@pytest.mark.parametrize("use", [once, twice_with_one_argument, in_a_loop, with_something_made])
@pytest.mark.parametrize("forward", CHANGING)
def test_arguments_are_changed_and_handed_out_as_in_plain_code(
    forward, use, prepare, backend
) -> None:
    custom = make_function(forward, plain_backward)
    check_sight(lambda x, y: (use(custom, x, y), x * 2, y + 1), prepare, backend)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [without_gradient, as_leaf])
def test_arguments_are_changed_and_handed_out_behind_inductor(prepare) -> None:
    for forward in CHANGING:
        custom = make_function(forward, plain_backward)
        check_sight(
            lambda x, y, custom=custom: (in_a_loop(custom, x, y), x * 2), prepare, "inductor"
        )


def test_a_tensor_that_comes_out_of_a_tuple_shares_its_memory() -> None:
    custom = make_function(lambda ctx, pair, y: pair[0], lambda ctx, grad: (None, grad * 2))
    check_sight(lambda x, y: (custom.apply((x,), y), x * 2), as_leaf, "aot_eager")


def test_a_backward_changes_what_dropout_hands_back() -> None:
    def backward(ctx, grad):
        own = grad * 1
        F.dropout(own, 0.5, training=False)[0] = 7.0
        return own, grad

    custom = make_function(lambda ctx, x, y: x * y, backward)
    check_sight(lambda x, y: (custom.apply(x, y),), as_leaf, "aot_eager")


HANDED_BACK = [
    *("x.contiguous()", "x.to(torch.float32)", "x.type(torch.float32)", "x.type_as(y)"),
    *("x.float()", "x.cpu()", "x.flatten()", "torch.positive(x)", "torch.real(x)"),
    *("torch.conj(x)", "x.resolve_conj()", "x.resolve_neg()", "x.sum_to_size(4)"),
    "torch.atleast_1d(x)",
]


@pytest.mark.parametrize("expression", HANDED_BACK)
def test_what_compilers_hand_back_as_well_cuts_no_graph(expression) -> None:
    space = {"torch": torch}
    code = f"t = {expression}\n    assert t is x\n    t += y\n    return t * 1"
    exec(f"def forward(ctx, x, y):\n    {code}\n", space)
    custom = make_function(space["forward"], plain_backward)

    def f(x, y):
        return custom.apply(x, y), x * 2

    compiled = tripwire.compile(f, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert look(compiled, without_gradient) == look(f, without_gradient)
    assert compiled.statistics().hits == 2


def test_a_cut_says_what_would_be_copied(caplog) -> None:
    custom = make_function(changes_what_dropout_hands_back, plain_backward)
    compiled = tripwire.compile(lambda x: custom.apply(x.sin(), x) + 1, backend="aot_eager")
    compiled(torch.ones(2))
    assert "`dropout` returns its argument itself" in caplog.text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_with_one_in_its_middle_trains(backend) -> None:
    slopes = {"slope": 0.5}
    custom = make_function(lambda ctx, x: x.clamp(min=0), lambda ctx, grad: grad * slopes["slope"])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x):
            y = custom.apply(self.norm(self.first(x)))
            with torch.no_grad():
                scale = custom.apply(y).max()
            with torch.autocast("cpu"):
                z = self.last(y)
            return z.float() / scale

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net())
    calls = (tripwire.compile(models[0], backend=backend), models[1])
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for n in range(5):
        slopes["slope"] = 0.5 + n
        for call, step in zip(calls, steps, strict=True):
            step.zero_grad()
            call(torch.randn(5, 3, generator=torch.Generator().manual_seed(n))).sum().backward()
            step.step()
        torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    assert calls[0].statistics().hits == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "ask",
    [
        "isinstance(x, nn.Parameter)",
        "type(x) is nn.Parameter",
        "x.__class__ is nn.Parameter",
        "is_parameter(x)",
    ],
)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_custom_function_may_ask_whether_it_got_a_parameter(place, ask, backend) -> None:
    space = {"torch": torch, "nn": torch.nn}
    asks = {"forward": "False", "backward": "False", place: ask}
    exec(
        f"def is_parameter(x):\n"
        f"    return isinstance(x, nn.Parameter)\n"
        f"class Asks(torch.autograd.Function):\n"
        f"    @staticmethod\n"
        f"    def forward(ctx, x):\n"
        f"        ctx.save_for_backward(x)\n"
        f"        return x * 2 if {asks['forward']} else x * 3\n"
        f"    @staticmethod\n"
        f"    def backward(ctx, grad):\n"
        f"        (x,) = ctx.saved_tensors\n"
        f"        return grad * 5 if {asks['backward']} else grad * 7\n",
        space,
    )
    asks = space["Asks"]

    def call(x):
        return asks.apply(x) + 1

    compiled = tripwire.compile(call, backend=backend)
    for make in (
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ):
        for _ in range(3):
            x, y = make(), make()
            result, expected = compiled(x), call(y)
            assert torch.equal(result, expected)
            result.sum().backward()
            expected.sum().backward()
            assert torch.equal(x.grad, y.grad)


# --- what is written between a call and its backward ---

STATE = {
    "autocast": (
        lambda ctx, g: g * (2 if torch.is_autocast_enabled("cpu") else 3),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ),
    "the default dtype": (
        lambda ctx, g: g * (2 if torch.get_default_dtype() == torch.float64 else 3),
        lambda: using_default_dtype(torch.float64),
    ),
    "grad mode": (
        lambda ctx, g: g * (2 if torch.is_grad_enabled() else 3),
        lambda: torch.no_grad(),
    ),
}


@contextlib.contextmanager
def using_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_backward_asks_for_torchs_state_when_it_runs(name, backend) -> None:
    backward, enter = STATE[name]
    custom = make_function(lambda ctx, x: x * 1, backward)
    w = torch.arange(1.0, 4.0, requires_grad=True)

    def lose(x):
        return custom.apply(w * x).sum()

    compiled = tripwire.compile(lose, backend=backend)
    for number in range(4):
        found = []
        for call in (compiled, lose):
            w.grad = None
            loss = call(torch.arange(3.0) + number)
            with enter() if number > 1 else contextlib.nullcontext():
                loss.backward()
            found.append(w.grad)
        assert torch.equal(*found), number


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_computes_under_the_autocast_of_its_own_time(inside, backend) -> None:
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.float() @ w.t(), x.t() @ g.float()

    custom = make_function(forward, backward)
    w = torch.randn(16, 16, requires_grad=True)

    def lose(x):
        return custom.apply(x.sin(), w).float().pow(2).sum()

    compiled = tripwire.compile(lose, backend=backend)
    for number in range(4):
        x = torch.randn(4, 16)
        found = []
        for call in (compiled, lose):
            w.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                loss.backward()
            found.append(w.grad)
        torch.testing.assert_close(*found, msg=str(number))
    assert compiled.statistics().hits >= 2


FACTOR, KIND, FLIPS, PART = 2.0, torch.float32, True, slice(0, 2)


def scale_by_global(g):
    return g * FACTOR


BETWEEN = {
    "a float": (lambda ctx, g: g * FACTOR, "FACTOR", 5.0),
    "a float, in a function": (lambda ctx, g: scale_by_global(g), "FACTOR", 5.0),
    "an int": (lambda ctx, g: g * int(FACTOR), "FACTOR", 3),
    "a dtype": (lambda ctx, g: (g / 3).to(KIND).float(), "KIND", torch.bfloat16),
    "a flag": (lambda ctx, g: -g if FLIPS else g * 1, "FLIPS", False),
    "a slice": (lambda ctx, g: torch.cat([g[PART], g[PART], g])[:3], "PART", slice(0, 1)),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_backward_reads_globals_when_it_runs(name, backend, monkeypatch) -> None:
    backward, variable, later = BETWEEN[name]
    custom = make_function(lambda ctx, x: x * 1, backward)
    w = torch.arange(1.0, 4.0, requires_grad=True)

    def lose(x):
        return custom.apply(w * x).sum()

    compiled = tripwire.compile(lose, backend=backend)
    for number in range(5):
        found = []
        for call in (compiled, lose):
            with monkeypatch.context() as world:
                w.grad = None
                loss = call(torch.arange(3.0) + number)
                if number > 1:
                    world.setitem(globals(), variable, later)
                loss.backward()
                found.append(w.grad)
        assert torch.equal(*found), number
    assert compiled.statistics().hits >= 3


# --- code that is replaced between a call and its backward ---


def double_it(g):
    return g * 2


def double_later(g):
    return double_it(g)


def seven_times(ctx, g):
    return g * 7


REPLACED = {
    "the backward": (
        lambda ctx, g: g * 2,
        lambda world, custom: world.setattr(custom, "backward", staticmethod(seven_times)),
    ),
    "its code": (
        lambda ctx, g: g * 2,
        lambda world, custom: world.setattr(custom.backward, "__code__", seven_times.__code__),
    ),
    "a function": (
        lambda ctx, g: double_it(g),
        lambda world, _: world.setitem(globals(), "double_it", lambda g: g * 7),
    ),
    "a function of a function": (
        lambda ctx, g: double_later(g),
        lambda world, _: world.setitem(globals(), "double_it", lambda g: g * 7),
    ),
    "a default": (
        lambda ctx, g, by=2.0: g * by,
        lambda world, custom: world.setattr(custom.backward, "__defaults__", (7.0,)),
    ),
    "a module": (
        lambda ctx, g: g * math.floor(2.5),
        lambda world, _: world.setitem(globals(), "math", SimpleNamespace(floor=lambda v: 7)),
    ),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_backward_that_was_replaced_after_the_call_is_never_stale(
    name, backend, monkeypatch
) -> None:
    backward, replace = REPLACED[name]
    custom = make_function(lambda ctx, x: x * 1, backward)
    compiled = tripwire.compile(lambda x: custom.apply(x).sum(), backend=backend)

    def find_gradient(act=lambda: None):
        x = torch.ones(3, requires_grad=True)
        loss = compiled(x)
        act()
        loss.backward()
        return x.grad[0].item()

    assert [find_gradient() for _ in range(3)] == [2, 2, 2]
    with monkeypatch.context() as world:
        if backend == "eager":
            assert find_gradient(lambda: replace(world, custom)) == 7
        else:
            with pytest.raises(FunctionChanged, match="was replaced after the call"):
                find_gradient(lambda: replace(world, custom))
        assert [find_gradient() for _ in range(3)] == [7, 7, 7]
    assert [find_gradient() for _ in range(3)] == [2, 2, 2]


MODE = 0


class ByMode(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 10 if MODE else x * 2

    @staticmethod
    def backward(ctx, g):
        return g


def before_it(x):
    global MODE
    MODE = 1
    return ByMode.apply(x)


def before_it_and_back(x):
    global MODE
    MODE = 1
    made = ByMode.apply(x)
    MODE = 0
    return made


def after_it(x):
    global MODE
    made = ByMode.apply(x)
    MODE = 1
    return made


@pytest.mark.parametrize("program", [before_it, before_it_and_back, after_it])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_global_that_the_run_writes_is_read_as_it_was_then(program, backend, monkeypatch) -> None:
    compiled = tripwire.compile(program, backend=backend)
    for mode in (0, 0, 1, 0, 1, 0):
        found = []
        for call in (compiled, program):
            monkeypatch.setitem(globals(), "MODE", mode)
            found.append((call(torch.ones(3)).tolist(), MODE))
        assert found[0] == found[1]


def seeds(ctx, x):
    torch.manual_seed(3)
    return x * torch.rand(3)


def draws_twice(ctx, x):
    state = torch.get_rng_state()
    x = x * torch.rand(3)
    torch.set_rng_state(state)
    return x


def sets_a_dtype(ctx, x):
    torch.set_default_dtype(torch.float64)
    x = x * torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return x


@pytest.mark.parametrize("forward", [seeds, draws_twice, sets_a_dtype])
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_what_a_forward_sets_of_torch_it_sets_on_each_call(forward, backend) -> None:
    custom = make_function(forward, lambda ctx, g: g.float())
    compiled = tripwire.compile(lambda x: custom.apply(x.sin()) + torch.rand(3), backend=backend)
    for number in range(6):
        found = []
        for call in (compiled, lambda x: custom.apply(x.sin()) + torch.rand(3)):
            torch.manual_seed(number)
            found.append((call(torch.ones(3 if number < 2 else number, 3)), torch.rand(1)))
        torch.testing.assert_close(*found)


# --- objects that a function gets ---


class ByItem(Function):
    """Keeps what it is given for its backward."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * held[0]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.held[0], None


class ByAttribute(Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * held.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.held.factor, None


class Holding(nn.Module):
    def __init__(self, function, held):
        super().__init__()
        self.function = function
        self.held = held

    def forward(self, x):
        return self.function.apply(x, self.held) * 2


def put(held, factor):
    if isinstance(held, SimpleNamespace):
        held.factor = factor
    else:
        held[0] = factor


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [dict, list])
def test_a_backward_reads_the_container_itself_that_the_function_kept(make, backend) -> None:
    held = [make([(0, 1.0)]) if make is dict else [1.0] for _ in range(2)]
    plain, model = (Holding(ByItem, one) for one in held)
    compiled = tripwire.compile(model, backend=backend)
    for n in range(12):
        gradients = []
        for call, one in ((plain, held[0]), (compiled, held[1])):
            x = torch.ones(2, requires_grad=True)
            put(one, float(n // 4))
            result = call(x)
            put(one, n + 0.5)
            result.sum().backward()
            gradients.append((result.detach(), x.grad))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    assert compiled.statistics().hits >= 3


class Copying(ByItem):
    """Keeps what nobody else can change."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = list(held)
        return x * held[0]


class ByPlace(Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * held["factors"][0]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.held["factors"][0], None


# How a container gets from the call to the function; how its first element is put; whether it runs
# compiled where the caller passes the same one again, and where a new one each time.
PASSED = {
    "itself": (lambda: [1.0], lambda x, held: ByItem.apply(x, held), put, True, False),
    "a dict": (lambda: {0: 1.0}, lambda x, held: ByItem.apply(x, held), put, True, False),
    "out of another": (
        lambda: {"request": [1.0]},
        lambda x, held: ByItem.apply(x, held["request"]),
        lambda held, factor: put(held["request"], factor),
        True,
        False,
    ),
    "in another": (
        lambda: {"factors": [1.0]},
        lambda x, held: ByPlace.apply(x, held),
        lambda held, factor: put(held["factors"], factor),
        True,
        False,
    ),
    "in one that is new": (
        lambda: [1.0],
        lambda x, held: ByPlace.apply(x, {"factors": held}),
        put,
        False,
        False,
    ),
    "a tensor in it": (
        lambda: [torch.tensor(1.0)],
        lambda x, held: ByItem.apply(x, held),
        lambda held, factor: put(held, torch.tensor(factor)),
        False,
        False,
    ),
    "copied": (lambda: [1.0], lambda x, held: Copying.apply(x, held), put, True, True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", PASSED)
def test_a_backward_reads_the_callers_container_that_the_function_kept(
    name, is_new, backend
) -> None:
    make, call, write, hits, hits_new = PASSED[name]

    def fn(x, held):
        return call(x, held) * 2

    compiled = tripwire.compile(fn, backend=backend)
    held = [make(), make()]
    for n in range(9):
        if is_new:
            held = [make(), make()]
        found = []
        for run, one in zip((fn, compiled), held, strict=True):
            x = torch.ones(2, requires_grad=True)
            write(one, float(n // 4))
            result = run(x, one)
            write(one, n + 0.5)
            result.sum().backward()
            found.append((result.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert (compiled.statistics().hits >= 4) is (hits_new if is_new else hits)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("passed", [False, True])
def test_another_object_in_the_place_of_one_is_given_to_the_function(passed, backend) -> None:
    def fn(x, held):
        return ByAttribute.apply(x, held) * 2

    model = Holding(ByAttribute, SimpleNamespace(factor=0.0))
    compiled = tripwire.compile(fn if passed else model, backend=backend)
    for n in range(5):
        held = SimpleNamespace(factor=float(n))
        x = torch.ones(2, requires_grad=True)
        if not passed:
            model.held = held
        result = compiled(x, held) if passed else compiled(x)
        held.factor += 0.5
        result.sum().backward()
        torch.testing.assert_close(result, torch.full((2,), 2.0 * n))
        torch.testing.assert_close(x.grad, torch.full((2,), 2.0 * n + 1))


class ByKey(Function):
    @staticmethod
    def forward(ctx, x, held):
        return x * held["factor"] if held["on"] else x + len(held)


class Counting(Function):
    @staticmethod
    def forward(ctx, x, held):
        held |= {"n": held["n"] + 1}
        return x * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_reads_plain_values_out_of_a_dict_is_compiled_whole(backend) -> None:
    def measured(model, x):
        y = model(x)
        return y.view(*y.size()[:-1], 1, 2) + 1

    model = Holding(ByKey, {"factor": 2.0, "on": True})
    compiled = tripwire.compile(measured, backend=backend, fullgraph=True)
    with torch.no_grad():
        for write in ({}, {}, {"factor": 3.0}, {"on": False}, {"other": 1}, {"on": True}):
            model.held.update(write)
            for rows in (2, 3):
                x = torch.ones(rows, 2)
                torch.testing.assert_close(compiled(model, x), measured(model, x))
    assert compiled.statistics().hits >= 4


def test_a_function_that_changes_a_dict_changes_it_in_each_call() -> None:
    model = Holding(Counting, {"n": 0})
    compiled = tripwire.compile(lambda x: model(x).view(-1), backend="eager")
    with torch.no_grad():
        for n in range(4):
            torch.testing.assert_close(compiled(torch.ones(2, 2)), torch.full((4,), 4.0))
            assert model.held["n"] == n + 1
