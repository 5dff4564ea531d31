"""Programs that run plainly never raise here: they are compiled, or run as they are."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tripwire
from tripwire import env

tell = print  # under another name a compiled call doesn't print it: it is refused


BACKENDS = ["eager", "aot_eager"]


def check_like_plain(make, backend, calls=4, write=None, **options):
    """Both sides are made alike, and `write(side, n)` happens to both before the nth call."""
    plain, mine = make(), make()
    compiled = tripwire.compile(mine[0], backend=backend, **options)
    for n in range(calls):
        results = []
        for call, side in ((plain[0], plain), (compiled, mine)):
            if write is not None:
                write(side, n)
            torch.manual_seed(n)
            results.append(call(torch.arange(1.0, 4.0)))
        torch.testing.assert_close(results[1], results[0])
    return compiled


# --- arguments whose names are keywords --------------------------------------------------------


def from_and_to(x):
    return x + torch.empty(3).random_(**{"from": -10, "to": 10})


def from_alone(x):
    return x.clone().random_(to=5, **{"from": 2}) + x


def from_into_a_view(x):
    room = torch.zeros(2, 3)
    room[0].random_(**{"from": 0, "to": 100})
    return room * x


def from_by_a_function(x):
    return torch.Tensor.random_(torch.empty(3), **{"from": 1, "to": 9}) * x


def from_without_gradients(x):
    with torch.no_grad():
        return x * torch.empty(3).random_(**{"from": 1, "to": 3})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fn",
    [from_and_to, from_alone, from_into_a_view, from_by_a_function, from_without_gradients],
    ids=lambda fn: fn.__name__,
)
def test_an_argument_may_be_called_from(fn, backend) -> None:
    compiled = check_like_plain(lambda: (fn,), backend)
    assert compiled.statistics().hits == 3


def random_by_names(x):
    return x.random_(**{"from": -10, "to": 10})


def random_in_other_order(x):
    return x.random_(**{"to": 10, "from": -10})


def uniform_by_names(x):
    return x.uniform_(**{"from": -10, "to": 10})


def uniform_from_alone(x):
    return x.uniform_(**{"from": -1})


def uniform_with_one_position(x):
    return x.uniform_(-10, to=10)


def uniform_of_an_intermediate(x):
    return torch.empty(2, 3).uniform_(**{"from": 1.0, "to": 3.0}) + x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fn",
    [
        random_by_names,
        random_in_other_order,
        uniform_by_names,
        uniform_from_alone,
        uniform_with_one_position,
        uniform_of_an_intermediate,
    ],
)
def test_a_parameter_called_from_is_passed_by_its_name(fn, backend) -> None:
    compiled = check_like_plain(lambda: (fn,), backend, on_backend_error="eager")
    slugs = [refusal.slug for refusal in tripwire.explain(compiled).refusals]
    # AOTAutograd spells `aten.random.from`, which Python can't compile.
    assert slugs in ([], ["backend-failed"])


# --- lazy modules made inside ------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(2),
        lambda: nn.Sequential(nn.LazyLinear(2), nn.ReLU(), nn.LazyLinear(3)),
        lambda: nn.Sequential(nn.Unflatten(0, (1, 1, 3)), nn.LazyConv1d(2, 1)),
        lambda: nn.Sequential(nn.Unflatten(0, (3, 1)), nn.LazyBatchNorm1d(), nn.Flatten(0)),
        lambda: nn.LazyLinear(1, bias=False),
    ],
)
def test_a_lazy_module_is_made_inside(make, backend, caplog) -> None:
    def f(x):
        return make()(x) * x.sum()

    check_like_plain(lambda: (f,), backend)
    assert "[lazy-parameter]" in caplog.text


# --- metaclasses -------------------------------------------------------------------------------


class Hiding(type):
    def __getattribute__(cls, name):
        if name == "__mro__":
            raise AttributeError(name)
        return type.__getattribute__(cls, name)


class Empty(type):
    @property
    def __mro__(cls):
        return ()


class Number(type):
    __mro__ = 5


class Lying(type):
    __mro__ = (int, object)


class Raising(type):
    @property
    def __mro__(cls):
        raise RuntimeError("no such luck")


class Naming(type):
    """Nothing that Python keeps of a class is what its metaclass says."""

    @property
    def __dict__(cls):
        return {}

    @property
    def __module__(cls):
        return 3

    __name__ = property(lambda cls: "odd")
    __bases__ = property(lambda cls: ())


@pytest.mark.parametrize("base", [object, nn.Module])
@pytest.mark.parametrize("metaclass", [Hiding, Empty, Number, Lying, Raising, Naming])
def test_a_metaclass_says_what_it_likes_of_its_classes(metaclass, base) -> None:
    def make():
        class Scale(base, metaclass=metaclass):
            factor = 2.0

            def forward(self, x):
                return x * self.factor

        scale = Scale()
        return lambda x: scale.forward(x), Scale

    def write(side, n):
        if n == 2:
            side[1].factor = 3.0

    compiled = check_like_plain(make, "eager", write=write)
    assert compiled.statistics().hits == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metaclass", [Hiding, Empty, Number, Lying, Raising, Naming])
def test_a_module_whose_metaclass_says_what_it_likes_is_compiled(metaclass, backend) -> None:
    def make():
        class Child(metaclass=metaclass):
            factor = 2.0

        class Net(nn.Module, metaclass=metaclass):
            def __init__(self):
                super().__init__()
                self.children_ = [Child(), {"k": Child()}]

            def forward(self, x):
                return x * self.children_[0].factor + self.children_[1]["k"].factor

        return Net(), Child

    def write(side, n):
        if n == 2:
            side[1].factor = 3.0
        if n == 4:
            side[0].children_[1]["k"].factor = 5.0

    assert check_like_plain(make, backend, calls=6, write=write).statistics().hits == 3


# --- tensors whose class runs code -------------------------------------------------------------


class Refusing(torch.Tensor):
    """Nothing may be asked of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ValueError("never")


class Counting(torch.Tensor):
    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def refusing():
    return torch.Tensor._make_subclass(Refusing, torch.ones(3))


def as_argument():
    held = refusing()
    return (lambda x, given=held: x * 2,)


def as_attribute():
    net = nn.ReLU()
    net.held = refusing()
    return (net,)


def in_a_list():
    held = [refusing()]
    return (lambda x: x * len(held),)


def caught():
    held = refusing()

    def f(x):
        try:
            return x + held
        except ValueError:
            return x * 3

    return (f,)


def made_inside():
    def f(x):
        torch.Tensor._make_subclass(Refusing, x)
        return x * 2

    return (f,)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [as_argument, as_attribute, in_a_list, caught, made_inside],
    ids=lambda make: make.__name__,
)
def test_a_tensor_that_answers_no_question(make, backend) -> None:
    check_like_plain(make, backend)


def test_a_tensors_class_is_asked_as_often_as_in_plain_code() -> None:
    compiled = tripwire.compile(lambda x: x * 2 + x.shape[0], backend="eager")
    x = torch.ones(3).as_subclass(Counting)
    asked = []
    for call in (compiled, lambda x: x * 2 + x.shape[0]):
        Counting.asked.clear()
        for _ in range(4):
            call(x)
        asked.append(list(Counting.asked))
    assert asked[0] == asked[1]


# --- swapped tensors ---------------------------------------------------------------------------


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Buffer(torch.zeros(3))
        self.parts = [torch.ones(3)]

    def forward(self, x):
        return x * self.scale * self.parts[0] + self.shift


def swap_parameter(side, n):
    torch.utils.swap_tensors(side[0].scale, nn.Parameter(torch.full((3,), n + 2.0)))


def swap_buffer(side, n):
    torch.utils.swap_tensors(side[0].shift, nn.Buffer(torch.full((3,), n + 2.0)))


def swap_element(side, n):
    torch.utils.swap_tensors(side[0].parts[0], torch.full((3,), n + 2.0))


def swap_shapes(side, n):
    torch.utils.swap_tensors(side[0].parts[0], torch.full((1,), n + 2.0))


def convert(side, n):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        side[0].to(torch.float64 if n % 2 else torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "swap",
    [swap_parameter, swap_buffer, swap_element, swap_shapes, convert],
    ids=lambda swap: swap.__name__,
)
def test_state_is_swapped_after_a_hit(swap, backend) -> None:
    def write(side, n):
        if n >= 3:
            swap(side, n)

    compiled = check_like_plain(lambda: (Scaling(),), backend, calls=6, write=write)
    assert compiled.statistics().hits >= 2


# --- views that autograd forbids ---------------------------------------------------------------


def make_forbidden(base):
    with torch.no_grad():
        view = base[0]
    base.add_(1)  # where gradients are on
    return view


def used():
    view = make_forbidden(torch.ones(2, 3, requires_grad=True).clone())
    return (lambda x: x * view,)


def not_used():
    view = make_forbidden(torch.ones(2, 3, requires_grad=True).clone())
    return (lambda x: x * len([view]),)


def in_an_attribute():
    net = nn.ReLU()
    net.view = make_forbidden(torch.ones(2, 3, requires_grad=True).clone())
    return (net,)


def changed_by_the_run():
    base = torch.ones(2, 3, requires_grad=True).clone()
    view = base[0]
    return (lambda x: (base.add_(1), x * view)[1],)


def only_its_form():
    view = make_forbidden(torch.ones(2, 3, requires_grad=True).clone())
    return (lambda x: x * view.shape[0],)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [used, not_used, in_an_attribute, changed_by_the_run, only_its_form],
    ids=lambda make: make.__name__,
)
def test_a_view_of_what_was_changed_under_no_grad(make, backend) -> None:
    with torch.no_grad():
        sides = []
        for _ in range(2):
            with torch.enable_grad():
                sides.append(make())
        check_like_plain(lambda: sides.pop(), backend)


# --- errors that can't be pickled --------------------------------------------------------------


class NoReduce(Exception):
    def __reduce__(self):
        raise TypeError("can't be pickled")


class HoldsLock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class HoldsTensor(Exception):
    def __init__(self):
        super().__init__(torch.ones(2))


class NoState(Exception):
    def __getstate__(self):
        raise RuntimeError("no state")


class NoRepr(Exception):
    def __repr__(self):
        raise ValueError("no text")

    __str__ = __repr__


@pytest.mark.parametrize("options", [{}, {"check": True}, {"record_on_error": True}])
@pytest.mark.parametrize("error", [NoReduce, HoldsLock, HoldsTensor, NoState, NoRepr])
def test_an_error_that_cannot_be_pickled_comes_out_as_it_is(
    error, options, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TRIPWIRE_RECORD_CHECK", "0")
    given = {"record_on_error": tmp_path} if "record_on_error" in options else options

    def raises(x):
        y = x * 2
        raise error()
        return y

    def catches(x):
        try:
            raise error()
        except error:
            return x * 2

    for _ in range(3):
        with pytest.raises(error):
            tripwire.compile(raises, backend="eager", **given)(torch.ones(2))
    compiled = tripwire.compile(catches, backend="eager", **given)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


# --- symbolic tracing --------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.inner = tripwire.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend=backend)
        self.double = tripwire.compile(lambda x: x * 2, backend=backend)

    def forward(self, x):
        return self.double(self.inner(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("called_before", [False, True])
def test_torch_fx_traces_what_is_compiled(called_before, backend) -> None:
    outer, x = Outer(backend), torch.ones(2, 3)
    for _ in range(2 * called_before):
        outer(x)
    for traced in (outer, outer.inner):
        torch.testing.assert_close(torch.fx.symbolic_trace(traced)(x), traced(x))
    traced = torch.fx.symbolic_trace(lambda x: outer.double(x) + 1)
    assert traced(torch.ones(2)).tolist() == [3.0, 3.0]
    assert [node.op for node in traced.graph.nodes].count("call_function") == 2
    assert not env.is_fx_tracing()
    for _ in range(3):
        outer(x)
    assert outer.double.statistics().hits >= 2


# --- gradients of gradients ---------------------------------------------------------------------


def make_penalized(penalize):
    """A discriminator with a gradient penalty; what it prints keeps it from being compiled."""

    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

        def step(x):
            x = x.clone().requires_grad_()
            penalty = (penalize(net(x).sum(), x).norm() - 1).pow(2)
            net.zero_grad()
            penalty.backward()
            tell("")
            return penalty.detach(), [p.grad for p in net.parameters() if p.grad is not None]

        return (step,)

    return make


def by_grad(loss, x):
    return torch.autograd.grad(loss, x, create_graph=True)[0]


def by_grad_in_order(loss, x):
    return torch.autograd.grad(loss, x, None, True, True)[0]


def by_backward(loss, x):
    loss.backward(create_graph=True)
    return x.grad


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("penalize", [by_grad, by_grad_in_order, by_backward])
def test_modules_of_a_refused_call_arent_compiled_where_it_differentiates_twice(penalize) -> None:
    check_like_plain(make_penalized(penalize), "aot_eager", calls=7)


def test_the_code_says_so_where_a_call_was_refused_before() -> None:
    def make():
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        net.requires_grad_(False)

        def step(x):
            tell("")
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            return torch.autograd.grad(slope.norm(), x)[0]

        torch.manual_seed(0)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        return (step,)

    check_like_plain(make, "aot_eager", calls=7)


def test_modules_of_a_refused_call_are_compiled_where_it_differentiates_once() -> None:
    def once(loss, x):
        return x * torch.autograd.grad(loss, x, retain_graph=True)[0].sum() + loss

    make = make_penalized(once)
    check_like_plain(make, "aot_eager", calls=7)
    step = make()[0]
    compiled = tripwire.compile(step, backend="aot_eager")
    for _ in range(5):
        compiled(torch.ones(3))
    (net,) = (cell.cell_contents for cell in step.__closure__ if cell.cell_contents is not once)
    assert net._compiled_call_impl is not None


# --- writes that plain code doesn't count ------------------------------------------------------
# The observed call ran plain code and saved what the next call, compiled, writes to.


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def normed_behind_a_cut():
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = normed()

        def forward(self, x):
            return self.layers(x) * x[x > -100].mean()

    return Cut()


def without_gradients():
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = normed()

        def forward(self, x):
            return self.layers(x.detach())

    return Halved()


def written_through_data():
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x):
            y = x * 2
            self.scale.data.clamp_(-0.5, 0.5)
            return y * self.scale.detach() + x

    return Clipped()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [normed, normed_behind_a_cut, without_gradients])
def test_two_calls_before_one_backward(make, backend) -> None:
    plain, mine = make(), make()
    compiled = tripwire.compile(mine, backend=backend)
    for n in range(3):
        for call in (plain, compiled):
            torch.manual_seed(n)
            (call(torch.randn(5, 3)).sum() - call(torch.randn(5, 3)).pow(2).sum()).backward()
    assert compiled.statistics().hits == 5
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_through_data_isnt_counted(backend) -> None:
    net, x = written_through_data(), torch.randn(3, requires_grad=True)
    compiled = tripwire.compile(net, backend=backend)
    compiled(x)
    loss = (net.scale * x).sum()
    compiled(x)
    loss.backward()
    assert compiled.statistics().hits == 1
    torch.testing.assert_close(x.grad, net.scale.detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nested_tensor_may_come_after_a_plain_one(backend) -> None:
    def call(x):
        return (x * 2).to_padded_tensor(0.0) if x.is_nested else x * 2

    compiled = tripwire.compile(call, backend=backend)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for x in (torch.ones(3), torch.ones(3), nested, torch.ones(4), nested):
        torch.testing.assert_close(compiled(x), call(x))
