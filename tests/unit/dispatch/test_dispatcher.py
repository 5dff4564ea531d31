"""A call goes to the entry that holds for it, newest first, or makes a new one."""

import abc
import contextlib
import gc
import linecache
import threading
import time
import types
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from support import check_compiles, check_same, write
from torch import fx, nn

import tripwire
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.validity import plan
from tripwire.writes import twin

pytestmark = pytest.mark.usefixtures("sentry")

X = torch.arange(6.0).reshape(2, 3)
SIZES = [torch.arange(float(n)) for n in range(6)]
SCALE = 2.0
MODEL = None


def add_one(x):
    return x + 1


def scale_by_global(x):
    return x * SCALE


def call_model(x):
    return MODEL(x)


class Tagged:
    """A back end whose runtimes say which of them ran."""

    def __init__(self):
        self.compiled = 0
        self.ran = []

    def __call__(self, module, example_inputs):
        number = self.compiled
        self.compiled += 1

        def run(*inputs):
            self.ran.append(number)
            return module(*inputs)

        return run


# --- entries ---


def test_shapes_alternate_without_retracing() -> None:
    calls = [SIZES[2], SIZES[3], SIZES[2], SIZES[3], SIZES[2]]
    check_compiles(add_one, calls=calls, traces=2, dynamic=False)


def test_each_call_runs_the_entry_of_its_shape() -> None:
    backend = Tagged()
    compiled = tripwire.compile(add_one, backend=backend, dynamic=False)
    for n in (2, 3, 2, 3, 3):
        compiled(SIZES[n])
    assert backend.ran == [0, 1, 1]


def test_of_two_entries_that_hold_the_newest_runs(monkeypatch) -> None:
    backend = Tagged()
    compiled = tripwire.compile(scale_by_global, backend=backend, dynamic=False)
    compiled(X)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    compiled(X)
    compiled(X)
    monkeypatch.setattr(f"{__name__}.SCALE", 2.0)
    compiled(X)
    assert backend.ran == [1, 0]
    assert [entry.hits for entry in compiled._dispatcher.entries] == [1, 1]


def test_no_more_than_cache_size_entries_are_kept() -> None:
    compiled = tripwire.compile(add_one, dynamic=False, cache_size=3)
    for n in (1, 2, 3, 4, 5):
        compiled(SIZES[n])
    assert compiled.statistics().entries == 3


def test_the_least_recently_used_entry_goes() -> None:
    calls = [SIZES[1], SIZES[2], SIZES[1], SIZES[3]]  # the entry of size 2 goes
    check_compiles(
        add_one, calls=[*calls, SIZES[1], SIZES[3]], traces=3, dynamic=False, cache_size=2
    )
    check_compiles(add_one, calls=[*calls, SIZES[2]], traces=4, dynamic=False, cache_size=2)


def test_hits_of_the_newest_entry_count_as_use() -> None:
    first, second, third = SIZES[1], SIZES[2], SIZES[3]
    calls = [first, second, first, second, second, third, second]
    check_compiles(add_one, calls=calls, traces=3, dynamic=False, cache_size=2)


def test_a_cache_of_one_holds_the_latest() -> None:
    calls = [SIZES[1], SIZES[1], SIZES[2], SIZES[2], SIZES[1]]
    check_compiles(add_one, calls=calls, traces=3, dynamic=False, cache_size=1)


def test_hits_of_entries_that_went_still_count() -> None:
    compiled = tripwire.compile(add_one, dynamic=False, cache_size=1)
    for n in (1, 1, 1, 2, 2):
        compiled(SIZES[n])
    assert compiled.statistics().hits == 3


# --- statistics ---


def test_statistics_of_a_new_callable_are_zero() -> None:
    statistics = tripwire.compile(add_one).statistics()
    assert (statistics.calls, statistics.hits, statistics.traces) == (0, 0, 0)
    assert (statistics.refusals, statistics.retired, statistics.entries) == (0, 0, 0)
    assert statistics.causes == ()


def test_statistics_count_calls_hits_traces_and_entries() -> None:
    compiled = tripwire.compile(add_one)
    for n in (1, 1, 2, 1):
        compiled(SIZES[n])
    statistics = compiled.statistics()
    assert (statistics.calls, statistics.hits, statistics.traces) == (4, 2, 2)
    assert (statistics.refusals, statistics.retired, statistics.entries) == (0, 0, 2)


def test_statistics_count_retirements(monkeypatch) -> None:
    compiled = tripwire.compile(scale_by_global)
    compiled(X)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    compiled(X)
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.retired, statistics.entries) == (2, 1, 1)
    assert len(statistics.causes) == 1


def test_statistics_are_a_record_that_does_not_change() -> None:
    compiled = tripwire.compile(add_one)
    before = compiled.statistics()
    compiled(X)
    assert before.calls == 0
    with pytest.raises(AttributeError):
        before.calls = 1


# --- retirement and return ---


def test_a_write_of_the_same_value_retires_nothing() -> None:
    net = nn.Dropout(0.5)
    compiled = check_compiles(net, calls=[X, write(net, "training", True), X], traces=1)
    assert compiled.statistics().retired == 0


def test_a_write_to_what_was_not_read_retires_nothing() -> None:
    net = nn.Linear(3, 2)
    compiled = check_compiles(net, calls=[X, write(net, "note", "hello"), X], traces=1)
    assert compiled.statistics().retired == 0


def test_many_toggles_of_train_and_eval_make_two_traces() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    compiled = tripwire.compile(net, fullgraph=True)
    for _ in range(10):
        for switch in (net.train, net.eval):
            switch()
            torch.manual_seed(0)
            expected = net(X)
            torch.manual_seed(0)
            check_same(expected, compiled(X))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (2, 18)


def test_a_retired_entry_comes_back_with_the_old_value() -> None:
    net = nn.Linear(3, 2)
    old, new = net.weight, nn.Parameter(torch.ones(2, 3), requires_grad=False)
    back = [write(net, "weight", new), X, write(net, "weight", old), X]
    check_compiles(net, calls=[X, *back, *back], traces=2)


def test_a_retired_entry_whose_state_died_does_not_come_back() -> None:
    class Asks(nn.Linear):
        def forward(self, x):
            return x * 2 if self.weight is self.bias else super().forward(x)

    net = Asks(3, 2)
    compiled = tripwire.compile(net, fullgraph=True)
    for _ in range(4):
        net.weight = nn.Parameter(torch.randn(2, 3))
        check_same(net(X), compiled(X))
        check_same(net(X), compiled(X))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits, statistics.entries) == (4, 4, 1)


def test_an_abstract_class_registered_elsewhere_matters_where_it_can_be_asked() -> None:
    class Shape(abc.ABC):
        pass

    class Square:
        pass

    def grow(x, shape):
        return x + 1 if isinstance(shape, Shape) else x + 2

    square = Square()
    compiled = tripwire.compile(grow, fullgraph=True)
    check_same(X + 2, compiled(X, square))
    check_same(X + 2, compiled(X, square))
    Shape.register(Square)
    check_same(X + 1, compiled(X, square))


def test_an_abstract_class_registered_elsewhere_retires_nothing_else() -> None:
    class Shape(abc.ABC):
        pass

    compiled = tripwire.compile(add_one)
    compiled(X)
    Shape.register(int)
    compiled(X)
    assert compiled.statistics().traces == 1


# --- Python modules ---


@pytest.mark.parametrize(
    "way", ["a closure", "an attribute", "a default", "an argument", "a list", "a class"]
)
def test_an_attribute_of_a_python_module_is_watched_however_it_was_reached(way) -> None:
    config = types.ModuleType("config")
    config.scale = 2.0

    class Holder:
        module = config

    holder, listed = Holder(), [config]
    holder.own = config
    calls = {
        "a closure": lambda x: x * config.scale,
        "an attribute": lambda x: x * holder.own.scale,
        "a default": lambda x, module=config: x * module.scale,
        "an argument": lambda x, module=None: x * module.scale,
        "a list": lambda x: x * listed[0].scale,
        "a class": lambda x: x * Holder.module.scale,
    }
    args = (X, config) if way == "an argument" else (X,)
    check_compiles(calls[way], calls=[args, args, write(config, "scale", 3.0), args], traces=2)


# --- value guards ---


def test_lengths_select_their_entry() -> None:
    def split(x, lengths):
        return torch.cat([x[:n] for n in lengths.tolist()])

    one, two = torch.tensor([1, 2]), torch.tensor([2, 2])
    calls = [(X, one), (X, two), (X, one), (X, two), (X, one.clone())]
    check_compiles(split, calls=calls, traces=2)


def test_a_size_read_from_a_tensor_selects_its_entry() -> None:
    def reshape(x, grid):
        return x.reshape(int(grid[0, 1]), -1)

    two, three = torch.tensor([[1, 2]]), torch.tensor([[1, 3]])
    check_compiles(reshape, calls=[(X, two), (X, three), (X, two), (X, three)], traces=2)


def test_a_branch_on_a_mask_selects_its_entry() -> None:
    def attend(x, mask):
        return x if mask.all() else x.masked_fill(~mask, 0.0)

    full, holey = torch.ones(2, 3, dtype=torch.bool), X > 2
    calls = [(X, full), (X, holey), (X, full), (X, X > 3), (X, holey)]
    check_compiles(attend, calls=calls, traces=2)


def test_a_loop_over_indices_selects_its_entry() -> None:
    def gather(x, indices):
        total = torch.zeros(3)
        for i in indices.tolist():
            total = total + x[i] * (i + 1)
        return total

    first, second = torch.tensor([0, 1]), torch.tensor([1, 1])
    calls = [(X, first), (X, second), (X, first), (X, second)]
    check_compiles(gather, calls=calls, traces=2)


def test_a_value_of_a_parameter_is_probed_after_it_was_changed_in_place() -> None:
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * 2 if self.gate > 0 else x * 3

    net = Gate()
    compiled = tripwire.compile(net, fullgraph=True)
    for value in (1.0, 1.0, -1.0, -1.0, 1.0):
        with torch.no_grad():
            net.gate.fill_(value)
        check_same(net(X), compiled(X))
    assert compiled.statistics().traces == 2


def test_equal_probes_are_computed_once_per_call(monkeypatch) -> None:
    from tripwire.validity.probes import Probe

    def pick(x, index):
        return x[int(index)] * 2

    compiled = tripwire.compile(pick, fullgraph=True, dynamic=False)
    rows = torch.arange(8.0).reshape(4, 2)
    for n in range(4):
        compiled(rows, torch.tensor(n))
    computed = []
    values = Probe.values
    monkeypatch.setattr(
        Probe, "values", lambda self, inputs: computed.append(self) or values(self, inputs)
    )
    check_same(rows[0] * 2, compiled(rows, torch.tensor(0)))
    assert compiled.statistics().traces == 4
    assert len(computed) == 1


def test_values_compare_by_type_and_bits() -> None:
    def sign(x, t):
        return x + 1 if str(t.item()) == "-0.0" else x + 2

    zero, minus, nan = (torch.tensor(v) for v in (0.0, -0.0, float("nan")))
    check_compiles(sign, calls=[(X, zero), (X, minus), (X, nan), (X, nan), (X, minus)], traces=3)


# --- lifetime ---


@pytest.fixture
def no_cycles():
    """Whatever dies in the test dies by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_model_that_a_global_held_dies_with_the_global(monkeypatch, no_cycles) -> None:
    monkeypatch.setattr(f"{__name__}.MODEL", None)
    globals()["MODEL"] = nn.Linear(3, 2)
    compiled = tripwire.compile(call_model, fullgraph=True)
    compiled(X)
    compiled(X)
    died = weakref.ref(MODEL), weakref.ref(MODEL.weight)
    del globals()["MODEL"]
    assert [ref() for ref in died] == [None, None]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("end", ["raises", "is refused", "returns what can't be built"])
def test_what_a_call_held_dies_whatever_becomes_of_the_call(end, dynamic, no_cycles) -> None:
    def call(x):
        y = x * x.shape[0] * holder.held.scale
        if end == "raises":
            raise ValueError
        if end == "is refused":
            time.time()
        return y if end == "is refused" else (i for i in y)

    class Scale:
        scale = 2.0

    for _ in range(2):  # the first symbols of a process leave a circle behind, in sympy
        holder = SimpleNamespace(held=Scale())
        died = weakref.ref(holder.held)
        compiled = tripwire.compile(call, backend="eager", dynamic=dynamic)
        for size in (2, 3, 4, 5):
            with contextlib.suppress(ValueError):
                compiled(torch.ones(size, 2))
        holder.held = Scale()
        with contextlib.suppress(ValueError):
            compiled(torch.ones(2, 2))
        found = died()
    assert found is None


def test_a_compiled_function_follows_its_global_to_a_new_model(monkeypatch) -> None:
    compiled = tripwire.compile(call_model, fullgraph=True)
    for _ in range(3):
        monkeypatch.setattr(f"{__name__}.MODEL", model := nn.Linear(3, 2))
        check_same(model(X), compiled(X))
        check_same(model(X), compiled(X))
    monkeypatch.delattr(f"{__name__}.MODEL")
    with pytest.raises(NameError, match="MODEL"):
        compiled(X)


def test_a_replaced_parameter_dies_at_the_next_call(no_cycles) -> None:
    net = nn.Linear(3, 2)
    compiled = tripwire.compile(net)
    compiled(X)
    old = weakref.ref(net.weight)
    net.weight = nn.Parameter(torch.ones(2, 3))
    compiled(X)
    assert old() is None


def test_a_replaced_submodule_dies_at_once(no_cycles) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = tripwire.compile(net)
    compiled(X)
    old = weakref.ref(net[1])
    net[1] = nn.Tanh()
    assert old() is None
    check_same(net(X), compiled(X))


class Slotted:
    __slots__ = ("__weakref__", "scale")


def make_getter(value):
    return lambda: value


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (Slotted, lambda x, held: x * held[0].scale),
        (lambda: make_getter(2.0), lambda x, held: x * held[0]()),
        (lambda: {"a"}, lambda x, held: x * len(held[0])),
        (lambda: deque([2.0]), lambda x, held: x * held[0][0]),
    ],
    ids=["slots", "cell", "set", "deque"],
)
def test_what_no_sentry_watches_dies_when_it_is_replaced(make, use, no_cycles) -> None:
    held = [make()]
    if isinstance(held[0], Slotted):
        held[0].scale = 2.0
    compiled = tripwire.compile(lambda x: use(x, held), fullgraph=True)
    compiled(X)
    compiled(X)
    assert compiled.statistics().hits == 1
    old = weakref.ref(held[0])
    held.clear()
    assert old() is None


def test_arguments_die_after_the_call(no_cycles) -> None:
    compiled = tripwire.compile(add_one)
    for _ in range(2):
        x = torch.ones(5)
        died = weakref.ref(x)
        compiled(x)
        del x
        assert died() is None


def test_a_dropped_compiled_module_releases_everything() -> None:
    net = nn.Linear(3, 2)
    compiled = tripwire.compile(net)
    compiled(X)
    compiled(X)
    died = weakref.ref(net), weakref.ref(net.weight)
    del net, compiled
    gc.collect()
    assert [ref() for ref in died] == [None, None]


def test_a_dropped_compiled_function_releases_its_function() -> None:
    net = nn.Linear(3, 2)

    def call(x):
        return net(x)

    compiled = tripwire.compile(call)
    compiled(X)
    died = [weakref.ref(call), weakref.ref(compiled._dispatcher.entries[0])]
    del call, compiled
    gc.collect()
    assert [ref() for ref in died] == [None, None]
    net.weight = nn.Parameter(torch.ones(2, 3))  # nobody listens any more
    net.train()


def test_a_class_of_modules_dies_when_its_compiled_modules_are_gone() -> None:
    class Local(nn.Module):
        def forward(self, x):
            return x + 1

    died = weakref.ref(Local)
    tripwire.compile(Local())(X)
    del Local
    gc.collect()
    assert died() is None


def test_a_compiled_function_can_be_dropped_while_its_entry_runs() -> None:
    held = []

    def dropping(module, example_inputs):
        def run(*inputs):
            held.clear()
            gc.collect()
            return module(*inputs)

        return run

    held.append(tripwire.compile(add_one, backend=dropping))
    held[0](X)
    check_same(X + 1, held[0](X))
    assert held == []


def test_an_entry_can_go_while_it_runs() -> None:
    def nested(module, example_inputs):
        def run(*inputs):
            if inputs[0].numel() == 2:
                compiled(SIZES[3])
                compiled(SIZES[4])
            return module(*inputs)

        return run

    compiled = tripwire.compile(add_one, backend=nested, cache_size=1)
    for _ in range(3):
        check_same(SIZES[2] + 1, compiled(SIZES[2]))
        check_same(SIZES[2] + 1, compiled(SIZES[2]))


# --- threads and recursion ---


def test_threads_share_entries_and_agree() -> None:
    net = nn.Linear(3, 2)
    compiled = tripwire.compile(net)
    expected = [net(X * n) for n in range(8)]
    got = {}

    def work(n):
        for _ in range(20):
            got[n] = compiled(X * n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        check_same(expected[n], got[n])


def test_a_compiled_function_that_calls_itself_is_right() -> None:
    @tripwire.compile
    def power(x, n):
        return x if n == 0 else x * power(x, n - 1)

    for n in (0, 1, 3, 1, 3):
        check_same(X ** (n + 1), power(X, n))


# --- what becomes of the sentry --------------------------------------------------------------


class Scales(nn.Module):
    """Reads a mark on its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)
        self.weight.scale = 2.0

    def forward(self, x):
        return x * self.weight * self.weight.scale


def test_a_tensors_dict_that_is_replaced_is_seen():
    module = Scales()
    compiled = tripwire.compile(module, backend="eager")
    x = torch.ones(2)
    assert compiled(x).tolist() == compiled(x).tolist() == [2.0, 2.0]
    module.weight.__dict__ = {"scale": 5.0}
    assert compiled(x).tolist() == compiled(x).tolist() == [5.0, 5.0]


def test_parameters_of_a_compiled_module_can_be_swapped():
    module, other = Scales(), nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
    other.scale = 1.0
    compiled = tripwire.compile(module, backend="eager")
    x = torch.ones(2)
    compiled(x), compiled(x)
    torch.utils.swap_tensors(module.weight, other)
    assert compiled(x).tolist() == compiled(x).tolist() == [3.0, 3.0]


@pytest.mark.skipif(plan.Sentry is twin.Sentry, reason="only C hides weak references")
def test_tensors_that_a_retired_entry_knows_can_be_swapped():
    tensors = [torch.ones(2), torch.full((2,), 2.0)]
    unused = [torch.zeros(2), torch.zeros(2)]

    def call(x):
        return x * tensors[0] + tensors[1] * 10 + len(unused[0])

    compiled = tripwire.compile(call, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for _ in range(4):
        assert compiled(x).tolist() == compiled(x).tolist() == call(x).tolist()
        torch.utils.swap_tensors(*tensors)
        torch.utils.swap_tensors(*unused)
    theirs = weakref.ref(tensors[0])
    assert weakref.getweakrefs(tensors[0]) == [theirs]


def test_a_sentry_that_is_spent_is_replaced_at_the_next_call():
    module = Scales()
    compiled = tripwire.compile(module, backend="eager", fullgraph=True)
    x = torch.ones(2)
    compiled(x), compiled(x)
    weakref.getweakrefs(module.weight)  # drops what the sentry knew it by
    compiled(x)
    (entry,) = find_dispatcher(compiled).entries
    sentry = entry.standing.plan.sentry
    assert not sentry.is_spent
    assert sentry.is_quiet() == (plan.Sentry is not twin.Sentry)
    module.weight.scale = 4.0
    assert compiled(x).tolist() == [4.0, 4.0]
    assert compiled.statistics().retired == 1


def test_a_call_of_all_modules_that_somebody_replaces_is_seen(monkeypatch) -> None:
    plain = nn.Module.__call__

    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            return self.net(x)

    def replaced(self, *args, **kwargs):
        return plain(self, *args, **kwargs) + (1 if type(self) is Net else 0)

    model = Outer()
    compiled = tripwire.compile(model, fullgraph=True)
    for _ in range(2):
        check_same(X * 2, compiled(X))
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", replaced)
        for _ in range(2):
            check_same(X * 2 + 1, compiled(X))
    for _ in range(2):
        check_same(X * 2, compiled(X))


def test_what_a_proxy_that_is_passed_in_stands_for_may_change_and_die() -> None:
    class Config:
        def __init__(self):
            self.scale = 2.0

    def f(x, config):
        try:
            return x * config.scale
        except ReferenceError:
            return x * 7

    compiled = tripwire.compile(f)
    config = Config()
    proxy = weakref.proxy(config)
    for scale in (2.0, 2.0, 3.0, 3.0):
        config.scale = scale
        check_same(X * scale, compiled(X, proxy))
    assert compiled.statistics().hits == 2
    del config
    for _ in range(5):
        check_same(X * 7, compiled(X, proxy))


def test_the_source_of_a_dropped_graph_is_forgotten() -> None:
    box = types.SimpleNamespace(scale=0.0)

    def scaled(x):
        return x * box.scale if x.sum() > 0 else x  # with a probe, which is a graph as well

    gc.collect()
    before = len(fx.graph_module._loader.eval_cache), generated_sources()
    compiled = tripwire.compile(scaled, fullgraph=True)
    for box.scale in (1.0, 2.0, 3.0):
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert len(generated_sources()) > len(before[1])
    del compiled
    gc.collect()
    assert (len(fx.graph_module._loader.eval_cache), generated_sources()) == before


def generated_sources():
    return [name for name in linecache.cache if "eval_with_key" in name]


class _Holder:
    pass


def test_a_tensor_on_the_class_of_an_argument_is_state() -> None:
    def call(x, holder):
        return x * holder.weight

    compiled = tripwire.compile(call, fullgraph=True)
    try:
        for value in (2.0, 2.0, 3.0):
            _Holder.weight = torch.full((2,), value)
            assert compiled(torch.ones(2), _Holder()).tolist() == [value, value]
    finally:
        del _Holder.weight


def test_looking_by_name_reads_pythons_own_functions() -> None:
    """Hooks are in their place while a run is observed."""

    def call(x, holder):
        setattr(holder, "value", x * 2)  # noqa: B010
        return getattr(holder, "value") + len(dir(holder)) * 0  # noqa: B009

    compiled = tripwire.compile(call)
    holder = _Holder()
    holder.value = torch.ones(2)
    for _ in range(4):
        assert compiled(torch.ones(2), holder).tolist() == [2.0, 2.0]
    assert compiled.statistics().causes == ()
