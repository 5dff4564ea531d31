"""A compiled module behaves like its original; only calling it runs compiled code."""

import collections
import copy
import io
import pickle

import pytest
import torch
from support import check_compiles, check_same, write
from torch import nn
from torch.nn.utils import parametrize

import tripwire

pytestmark = pytest.mark.usefixtures("sentry")

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Module):
    """A model with one of each: parameters, a buffer, submodules, plain attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(4))
        self.scale = 2.0

    def forward(self, x):
        return self.drop(self.act(self.linear(x))) * self.scale + self.shift


class Pair(nn.Module):
    """A container with a length, items and an order."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        return iter(self.parts)

    def __getitem__(self, index):
        return self.parts[index]

    def __contains__(self, part):
        return any(part is mine for mine in self.parts)

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def compiled(net):
    compiled = tripwire.compile(net, fullgraph=True)
    check_same(net(X), compiled(X))
    return compiled


def check_calls(net, compiled, traces) -> None:
    """Three calls agree with the plain module, and this many traces were made in all."""
    for _ in range(3):
        check_same(net(X), compiled(X))
    assert compiled.statistics().traces == traces


# --- what it shows ---


def test_parameters_and_buffers_are_the_originals(net, compiled) -> None:
    for list_them in (nn.Module.named_parameters, nn.Module.named_buffers):
        ours, theirs = dict(list_them(compiled)), dict(list_them(net))
        assert list(ours) == list(theirs)
        assert all(ours[name] is theirs[name] for name in theirs)
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in net.parameters()]


def test_state_dict_has_the_same_keys(net, compiled) -> None:
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert list(compiled.state_dict()) == ["shift", "linear.weight", "linear.bias"]


def test_named_modules_are_the_same(net, compiled) -> None:
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in net.named_modules()]
    assert list(compiled.children()) == list(net.children())


def test_isinstance_says_what_it_said(compiled) -> None:
    assert isinstance(compiled, Net)
    assert isinstance(compiled, nn.Module)
    assert type(compiled).__name__ == "Net"


def test_repr_is_the_originals(net, compiled) -> None:
    assert repr(compiled) == repr(net)


def test_dir_and_vars_are_the_originals(net, compiled) -> None:
    assert {"linear", "scale", "forward"} <= set(dir(compiled))
    assert vars(compiled) is vars(net)


def test_a_container_keeps_its_length_items_and_order() -> None:
    pair = Pair()
    compiled = tripwire.compile(pair, fullgraph=True)
    assert len(compiled) == 2
    assert list(compiled) == list(pair)
    assert compiled[0] is pair[0]
    assert pair[1] in compiled
    check_calls(pair, compiled, traces=1)


def test_a_compiled_sequential_is_indexed_written_and_extended() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = tripwire.compile(plain, fullgraph=True)
    compiled(X)
    assert len(compiled) == 2
    assert compiled[0] is plain[0]
    assert list(compiled) == list(plain)
    compiled[1] = nn.Tanh()
    check_calls(plain, compiled, traces=2)
    compiled.append(nn.Sigmoid())
    assert len(plain) == 3
    check_calls(plain, compiled, traces=3)
    del compiled[1]
    check_calls(plain, compiled, traces=4)


@pytest.mark.parametrize(
    "derive",
    [lambda parts: parts[:1], lambda parts: type(parts)(nn.ReLU())],
    ids=["slice", "class"],
)
def test_what_a_compiled_sequential_makes_of_its_class_can_be_called(derive) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    check_same(derive(plain)(X), derive(tripwire.compile(plain))(X))


# --- writes through it ---


def test_an_attribute_written_through_it_is_the_originals(net, compiled) -> None:
    compiled.scale = 3.0
    assert net.scale == 3.0
    check_calls(net, compiled, traces=2)


def test_an_attribute_written_on_the_original_is_its_own(net, compiled) -> None:
    net.scale = 3.0
    assert compiled.scale == 3.0
    check_calls(net, compiled, traces=2)


def test_an_attribute_deleted_through_it_is_gone(net, compiled) -> None:
    del compiled.scale
    assert not hasattr(net, "scale")
    with pytest.raises(AttributeError, match="scale"):
        compiled(X)


def test_a_submodule_replaced_through_it_is_called(net, compiled) -> None:
    compiled.act = nn.Tanh()
    assert isinstance(net.act, nn.Tanh)
    check_calls(net, compiled, traces=2)


def test_a_parameter_replaced_through_it_is_used(net, compiled) -> None:
    compiled.linear.weight = nn.Parameter(torch.eye(4))
    check_calls(net, compiled, traces=1)


def test_a_registered_buffer_is_used(net, compiled) -> None:
    compiled.register_buffer("shift", torch.zeros(4))
    assert "shift" in dict(net.named_buffers())
    check_calls(net, compiled, traces=1)


def test_a_replaced_forward_is_called(net, compiled) -> None:
    compiled.forward = lambda x: x + 1
    check_same(X + 1, compiled(X))
    del net.forward
    check_calls(net, compiled, traces=2)


@pytest.mark.parametrize("through", ["compiled", "original"])
def test_train_and_eval_reach_both(net, compiled, through) -> None:
    side = compiled if through == "compiled" else net
    assert side.train() is side
    assert net.training
    assert compiled.training
    assert net.drop.training
    side.eval()
    assert not compiled.training
    check_calls(net, compiled, traces=1)


def test_dropout_follows_train_and_eval(net, compiled) -> None:
    compiled.train()
    for _ in range(2):
        torch.manual_seed(3)
        expected = net(X)
        torch.manual_seed(3)
        check_same(expected, compiled(X))
    compiled.eval()
    check_calls(net, compiled, traces=2)


def test_to_another_dtype_and_back_is_two_traces(net, compiled) -> None:
    assert compiled.to(torch.float64) is compiled
    for _ in range(2):
        check_same(net(X.double()), compiled(X.double()))
    compiled.float()
    check_calls(net, compiled, traces=2)


def test_load_state_dict_is_seen(net, compiled) -> None:
    other = Net().state_dict()
    assert str(compiled.load_state_dict(other)) == "<All keys matched successfully>"
    check_same(other["linear.weight"], net.state_dict()["linear.weight"])
    check_calls(net, compiled, traces=1)


def test_load_state_dict_with_assign_is_seen(net, compiled) -> None:
    compiled.load_state_dict(Net().state_dict(), assign=True)
    check_calls(net, compiled, traces=1)


def test_requires_grad_is_seen(net, compiled) -> None:
    compiled.requires_grad_(False)
    check_calls(net, compiled, traces=2)


def test_apply_reaches_the_originals_submodules(net, compiled) -> None:
    compiled.apply(lambda part: setattr(part, "seen", True))
    assert net.linear.seen
    check_calls(net, compiled, traces=1)


# --- hooks ---


def test_a_forward_hook_registered_on_it_runs_until_removed(net, compiled) -> None:
    handle = compiled.register_forward_hook(lambda module, args, output: output + 1)
    check_calls(net, compiled, traces=2)
    handle.remove()
    check_calls(net, compiled, traces=2)


def test_a_pre_hook_registered_on_it_runs(net, compiled) -> None:
    compiled.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    check_calls(net, compiled, traces=2)


def test_a_hook_on_a_submodule_runs(net, compiled) -> None:
    compiled.act.register_forward_hook(lambda module, args, output: output * 3)
    check_calls(net, compiled, traces=2)


class InOrder(nn.Module):
    """Everything that a table holds is used, one after the other."""

    def __init__(self, table, items):
        super().__init__()
        setattr(self, table, collections.OrderedDict(items))

    def forward(self, x):
        for parameter in self.parameters(recurse=False):
            x = x * parameter + 1
        for buffer in self.buffers(recurse=False):
            x = x * buffer + 1
        for child in self.children():
            x = child(x)
        return x


def _shortened():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh())
    del net[1]  # torch keeps an OrderedDict from here on
    return net


@pytest.mark.parametrize(
    ("net", "table"),
    [
        (_shortened(), "_modules"),
        (InOrder("_modules", {"a": nn.Linear(4, 4), "b": nn.Tanh()}), "_modules"),
        (InOrder("_parameters", {k: nn.Parameter(torch.rand(4)) for k in "ab"}), "_parameters"),
        (InOrder("_buffers", {k: torch.rand(4) for k in "ab"}), "_buffers"),
    ],
)
def test_another_order_of_a_modules_table_is_seen(net, table) -> None:
    compiled = tripwire.compile(net, fullgraph=True)
    for _ in range(2):
        before = net(X)
        check_same(before, compiled(X))
        check_same(before, compiled(X))
        getattr(net, table).move_to_end(next(iter(getattr(net, table))))
        assert not torch.equal(before, net(X))
    check_same(net(X), compiled(X))


def test_another_order_of_hooks_on_all_modules_is_seen(net, compiled) -> None:
    on_forward = nn.modules.module.register_module_forward_hook
    handles = [on_forward(lambda m, args, out: out * 2), on_forward(lambda m, args, out: out + 1)]
    try:
        before = net(X)
        check_same(before, compiled(X))
        nn.modules.module._global_forward_hooks.move_to_end(handles[0].id)
        assert not torch.equal(before, net(X))
        check_same(net(X), compiled(X))
    finally:
        for handle in handles:
            handle.remove()


def test_a_state_dict_hook_registered_on_it_runs(net, compiled) -> None:
    def leave_out(module, state, prefix, metadata):
        del state["shift"]

    compiled.register_state_dict_post_hook(leave_out)
    assert "shift" not in net.state_dict()
    assert "shift" not in compiled.state_dict()


# --- classes with ways of their own ---


def test_a_class_that_overrides_call_keeps_it() -> None:
    class Doubling(nn.Module):
        def __call__(self, x):
            return super().__call__(x) * 2

        def forward(self, x):
            return x + 1

    check_compiles(Doubling(), calls=[X, X, X], traces=1)


def test_a_class_with_properties_keeps_them() -> None:
    class Factored(nn.Module):
        @property
        def factor(self):
            return self._factor * 2

        @factor.setter
        def factor(self, value):
            self._factor = value

        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def forward(self, x):
            return x * self.factor

    net = Factored()
    compiled = check_compiles(net, calls=[X, X, write(net, "factor", 3.0), X], traces=2)
    compiled.factor = 4.0
    assert net.factor == 8.0
    check_same(X * 8, compiled(X))


def test_a_slot_of_the_class_is_shared() -> None:
    class Slotted(nn.Module):
        __slots__ = ("factor",)

        def forward(self, x):
            return x * self.factor

    net = Slotted()
    net.factor = 2.0
    assert tripwire.compile(net).factor == 2.0


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("through", ["compiled", "original"])
def test_a_parametrization_reaches_both(through) -> None:
    net = nn.Linear(4, 2)
    compiled = tripwire.compile(net)
    compiled(X)
    side = compiled if through == "compiled" else net
    parametrize.register_parametrization(side, "weight", Doubled())
    weight = net.parametrizations.weight.original * 2
    check_same(weight, compiled.weight)
    check_same(nn.functional.linear(X, weight, net.bias), compiled(X))


def test_a_compiled_module_can_be_compiled_again(net, compiled) -> None:
    again = tripwire.compile(compiled, backend="aot_eager", name="again")
    net.eval()
    for scale in (2.0, 2.0, 3.0, 3.0):
        net.scale = scale
        check_same(net(X), again(X))
        check_same(net(X), compiled(X))
    assert again._orig_mod is net
    assert again.statistics().hits == 2


def test_a_class_derived_from_a_compiled_modules_class_can_be_compiled(compiled) -> None:
    class Derived(type(compiled)):  # type: ignore[misc]
        def forward(self, x):
            return super().forward(x) + 1

    plain = Derived().eval()
    fast = tripwire.compile(plain, backend="eager")
    for scale in (2.0, 2.0, 3.0, 3.0):
        plain.scale = scale
        check_same(plain(X), fast(X))
    assert fast.statistics().hits == 2
    assert fast._orig_mod is plain


def test_compiling_runs_no_init_subclass() -> None:
    class Base(nn.Module):
        def __init_subclass__(cls, *, tag, **more):
            super().__init_subclass__(**more)

    class Tagged(Base, tag="a"):
        def forward(self, x):
            return x + 1

    check_compiles(Tagged(), calls=[X, X], traces=1)


def test_a_method_called_statistics_is_the_originals() -> None:
    class Counting(nn.Module):
        def statistics(self):
            return "mine"

        def forward(self, x):
            return x + 1

    assert tripwire.compile(Counting()).statistics() == "mine"


# --- copies and pickles ---


def by_pickle(compiled):
    return pickle.loads(pickle.dumps(compiled))


def by_torch_save(compiled):
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
def test_a_duplicate_is_compiled_and_independent(net, compiled, duplicate) -> None:
    twin = duplicate(compiled)
    assert isinstance(twin, Net)
    assert twin.statistics().traces == 0
    for _ in range(2):
        check_same(net(X), twin(X))
    assert twin.statistics().hits == 1
    twin.scale = 5.0
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert net.scale == 2.0
    check_calls(net, compiled, traces=1)
    check_same(Net.forward(twin, X), twin(X))


def test_a_deep_copy_of_a_container_keeps_what_is_shared(net, compiled) -> None:
    copied = copy.deepcopy({"compiled": compiled, "net": net})
    copied["net"].scale = 5.0
    assert copied["compiled"].scale == 5.0
    check_same(copied["net"](X), copied["compiled"](X))


def test_one_compiled_module_in_two_places_is_copied_once(compiled) -> None:
    first, second = copy.deepcopy([compiled, compiled])
    assert first is second


def test_a_shallow_copy_has_attributes_of_its_own(net, compiled) -> None:
    twin = copy.copy(compiled)
    twin.scale = 5.0
    assert net.scale == 2.0


def test_a_shallow_copy_is_compiled_and_shares_parameters(net, compiled) -> None:
    twin = copy.copy(compiled)
    assert twin.linear is net.linear
    for _ in range(2):
        check_same(net(X), twin(X))
    assert twin.statistics().hits == 1


# --- models inside models ---


def test_a_compiled_module_inside_a_plain_one_has_no_prefix(compiled) -> None:
    outer = nn.Sequential(collections.OrderedDict(first=compiled, second=nn.Linear(4, 2)))
    assert "first.linear.weight" in outer.state_dict()
    check_same(outer.second(compiled(X)), outer(X))
    assert compiled.statistics().traces == 1


def test_a_compiled_module_inside_a_compiled_one_is_part_of_its_trace(net) -> None:
    inner = tripwire.compile(net)
    plain = nn.Sequential(net, nn.Linear(4, 2))
    outer = tripwire.compile(nn.Sequential(inner, plain[1]), fullgraph=True)
    for scale in (2.0, 2.0, 3.0, 3.0):
        inner.scale = scale
        check_same(plain(X), outer(X))
    assert outer.statistics().traces == 2
    assert inner.statistics().traces == 0


def test_a_compiled_module_that_has_entries_can_be_part_of_a_trace(compiled) -> None:
    outer = tripwire.compile(nn.Sequential(compiled, nn.Linear(4, 2)), fullgraph=True)
    outer(X)


def test_a_compiled_module_with_entries_inside_a_compiled_one_is_never_stale(net) -> None:
    plain, head = copy.deepcopy(net), nn.Linear(4, 2)
    inner = tripwire.compile(net)
    inner(X)
    outer = tripwire.compile(nn.Sequential(inner, head))
    for scale in (2.0, 2.0, 3.0, 3.0, 4.0, 4.0):
        inner.scale = plain.scale = scale
        check_same(head(plain(X)), outer(X))


def test_deep_copies_and_pickles_of_a_model_keep_what_is_compiled_inside(compiled) -> None:
    outer = nn.Sequential(compiled, nn.Linear(4, 2))
    for twin in (copy.deepcopy(outer), by_pickle(outer), by_torch_save(outer)):
        check_same(outer(X), twin(X))
        check_same(outer(X), twin(X))
        assert twin[0].statistics().hits == 1


# --- training ---


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1)
    )


def train(model, make_optimizer):
    """Losses of 20 steps, to the bit."""
    torch.manual_seed(1)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    ],
    ids=["SGD", "Adam", "AdamW foreach"],
)
def test_twenty_training_steps_equal_the_plain_twins(make_optimizer) -> None:
    plain, model = build_model(), build_model()
    compiled = tripwire.compile(model, backend="eager", fullgraph=True)
    assert train(plain, make_optimizer) == train(compiled, make_optimizer)
    check_same(plain.state_dict(), compiled.state_dict())
    assert compiled.statistics().traces == 1


def test_training_and_evaluation_take_turns_without_retracing() -> None:
    plain, model = build_model(), build_model()
    compiled = tripwire.compile(model, fullgraph=True)
    for _ in range(4):
        for side in (plain, compiled):
            side.train()
            train(side, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
            side.eval()
        with torch.no_grad():
            check_same(plain(X), compiled(X))
    assert compiled.statistics().traces == 2


def test_zero_grad_clears_the_originals_gradients(net, compiled) -> None:
    compiled(X).sum().backward()
    assert net.linear.weight.grad is not None
    compiled.zero_grad()
    assert net.linear.weight.grad is None
    check_calls(net, compiled, traces=1)


def test_gradients_of_hits_are_those_of_the_plain_module(net, compiled) -> None:
    twin = copy.deepcopy(net)
    for _ in range(3):
        twin(X).sum().backward()
        compiled(X).sum().backward()
    check_same(twin.linear.weight.grad, net.linear.weight.grad)
    assert compiled.statistics().traces == 1


class Counts:
    """Hooks with state, under a name that the model's code uses for something else."""

    def __init__(self) -> None:
        self.weight = 0

    def before(self, module, args) -> None:
        self.weight += 1


def test_hooks_of_a_module_that_is_not_called_are_no_business_of_its_forward() -> None:
    """fully_shard's hooks are like that: their state changes on every call."""
    net, counts = Block(), Counts()
    net.register_forward_pre_hook(counts.before)
    net.forward = tripwire.compile(net.forward, backend="eager", fullgraph=True)
    for _ in range(4):
        check_same(Block.forward(net, X), net(X))
    assert net.forward.statistics().traces == 1
    assert counts.weight == 4


def test_hooks_of_a_module_that_is_called_inside_are() -> None:
    net = Block()
    forward = tripwire.compile(net.forward, backend="eager", fullgraph=True)
    check_same(Block.forward(net, X), forward(X))
    for change in (2.0, 3.0):
        handle = net.linear.register_forward_hook(lambda m, args, result: result * change)
        for _ in range(2):
            check_same(Block.forward(net, X), forward(X))
        handle.remove()
    check_same(Block.forward(net, X), forward(X))
    assert forward.statistics().traces >= 3


def test_hooks_of_a_module_that_is_called_under_another_name_are() -> None:
    call = nn.Module.__call__  # bound before any patch
    net = nn.Linear(4, 4)
    scale = [2.0]
    net.register_forward_hook(lambda module, args, result: result * scale[0])

    def f(x):
        return call(net, x) + 1

    compiled = tripwire.compile(f, backend="eager", fullgraph=True)
    for value in (2.0, 2.0, 5.0, 5.0):
        scale[0] = value
        check_same(f(X), compiled(X))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()
