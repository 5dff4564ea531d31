"""What `tripwire.compile` takes, in which forms it can be applied, and what it hands on."""

import copy
import functools
import inspect
import pickle
from collections import OrderedDict

import pytest
import torch
from support import check_compiles, check_same, write
from torch import fx, nn

import tripwire
from tripwire import writes

X = torch.arange(6.0).reshape(2, 3)
SHARED = 2.0


def double(x):
    """Twice x."""
    return x * 2


class Scaler:
    """A plain class whose method reads an attribute."""

    def __init__(self, scale=2.0):
        self.scale = scale

    def apply(self, x):
        return x * self.scale

    def __call__(self, x):
        return x + self.scale


# --- function and decorator ---


def test_a_function_is_traced_once_for_equal_calls(sentry) -> None:
    check_compiles(double, calls=[X, X + 1, X], traces=1)


def test_a_decorator_without_arguments_compiles() -> None:
    @tripwire.compile
    def triple(x):
        return x * 3

    check_same(X * 3, triple(X))
    check_same(X * 3, triple(X))
    assert triple.statistics().hits == 1


def test_a_decorator_with_arguments_compiles() -> None:
    @tripwire.compile(backend="eager", fullgraph=True, cache_size=1)
    def triple(x):
        return x * 3

    check_same(X * 3, triple(X))
    check_same(X * 3, triple(X))
    assert triple.statistics().hits == 1


def test_keywords_and_defaults_reach_the_function(sentry) -> None:
    def affine(x, scale=2.0, *, shift=1.0):
        return x * scale + shift

    compiled = tripwire.compile(affine, fullgraph=True)
    for _ in range(2):
        check_same(affine(X), compiled(X))
        check_same(affine(X, 3.0), compiled(X, 3.0))
        check_same(affine(X, scale=3.0), compiled(X, scale=3.0))
        check_same(affine(x=X, shift=4.0), compiled(shift=4.0, x=X))
    assert compiled.statistics().traces == 4


def test_a_compiled_function_can_be_compiled_again(sentry) -> None:
    twice = tripwire.compile(tripwire.compile(double), fullgraph=True)
    check_same(X * 2, twice(X))
    check_same(X * 2, twice(X))
    assert twice.statistics().traces == 1


# --- what a compiled function looks like ---


def test_a_compiled_function_keeps_name_docstring_and_signature() -> None:
    compiled = tripwire.compile(double)
    assert compiled.__name__ == "double"
    assert compiled.__qualname__ == double.__qualname__
    assert compiled.__module__ == double.__module__
    assert compiled.__doc__ == "Twice x."
    assert compiled.__wrapped__ is double
    assert inspect.signature(compiled) == inspect.signature(double)


def test_attributes_of_a_function_can_be_read_from_the_compiled_one() -> None:
    def tagged(x):
        return x + 1

    tagged.tag = "a tag"
    assert tripwire.compile(tagged).tag == "a tag"


def test_repr_names_the_function() -> None:
    assert "double" in repr(tripwire.compile(double))


def test_the_given_name_is_used_in_messages(caplog) -> None:
    compiled = tripwire.compile(double, name="twice")
    with caplog.at_level("INFO", logger="tripwire.recompiles"):
        compiled(X)
        compiled(X[:1])
    assert caplog.messages[0].startswith("twice is traced again:")


def test_an_attribute_that_a_function_reads_from_its_compiled_self_is_watched(sentry) -> None:
    @tripwire.compile(fullgraph=True)
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 2.0
    check_same(X * 2, scaled(X))
    check_same(X * 2, scaled(X))
    scaled.scale = 3.0
    check_same(X * 3, scaled(X))


# --- methods, bound methods, partials, callable objects ---


class Decorated:
    def __init__(self, scale):
        self.scale = scale

    @tripwire.compile(fullgraph=True)
    def apply(self, x):
        return x * self.scale

    @staticmethod
    @tripwire.compile(fullgraph=True)
    def halve(x):
        return x / 2

    @classmethod
    @tripwire.compile(fullgraph=True)
    def build(cls, x):
        return cls(x.sum())


class DecoratedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = 2.0

    @tripwire.compile(fullgraph=True)
    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_method_decorated_in_its_class_serves_every_instance(sentry) -> None:
    two, three = Decorated(2.0), Decorated(3.0)
    before = Decorated.apply.statistics().traces
    for _ in range(3):
        check_same(X * 2, two.apply(X))
        check_same(X * 3, three.apply(X))
    assert Decorated.apply.statistics().traces <= before + 2
    two.scale = 5.0
    check_same(X * 5, two.apply(X))


def test_a_decorated_static_method_is_called_without_an_instance() -> None:
    check_same(X / 2, Decorated.halve(X))
    check_same(X / 2, Decorated(1.0).halve(X))


def test_a_decorated_class_method_gets_its_class() -> None:
    for _ in range(2):
        assert type(Decorated.build(X)) is Decorated
        check_same(X.sum(), Decorated.build(X).scale)


def test_a_decorated_forward_sees_writes_to_its_module(sentry) -> None:
    net = DecoratedNet()
    for scale in (2.0, 2.0, 3.0, 3.0):
        net.scale = scale
        check_same(net.linear(X) * scale, net(X))
    other = DecoratedNet()
    check_same(other.linear(X) * 2.0, other(X))


def test_a_bound_method_is_compiled_for_its_owner(sentry) -> None:
    owner = Scaler()
    check_compiles(owner.apply, calls=[X, X, write(owner, "scale", 3.0), X], traces=2)


def test_a_bound_method_of_a_module_is_compiled_for_its_owner(sentry) -> None:
    net = nn.Linear(3, 2)
    weight = nn.Parameter(torch.ones(2, 3))
    check_compiles(net.forward, calls=[X, X, write(net, "weight", weight), X], traces=1)


def test_a_partial_is_compiled_with_what_it_binds(sentry) -> None:
    owner = Scaler()
    partial = functools.partial(Scaler.apply, owner)
    check_compiles(partial, calls=[X, X, write(owner, "scale", 3.0), X], traces=2)


def test_a_callable_object_is_compiled_with_its_attributes(sentry) -> None:
    owner = Scaler()
    check_compiles(owner, calls=[X, X, write(owner, "scale", 3.0), X], traces=2)


def test_python_knows_what_kind_of_function_was_compiled() -> None:
    async def wait(x):
        return x

    def count(x):
        yield x

    async def count_slowly(x):
        yield x

    asked = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    for plain in (wait, count, count_slowly, double):
        fast = tripwire.compile(plain, backend="eager")
        assert [ask(fast) for ask in asked] == [ask(plain) for ask in asked]


def test_a_class_of_classes_is_refused() -> None:
    for cls in (type, type("Meta", (type,), {})):
        with pytest.raises(tripwire.BadOption) as raised:
            tripwire.compile(cls)
        assert raised.value.slug == "not-callable"


# --- options ---


def test_disable_returns_the_very_callable() -> None:
    net = nn.Linear(3, 2)
    assert tripwire.compile(double, disable=True) is double
    assert tripwire.compile(net, disable=True) is net
    assert tripwire.compile(disable=True)(double) is double


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({"mode": "default", "options": {}}, "bad-option"),
        ({"cache_size": 0}, "bad-option"),
        ({"cache_size": None}, "bad-option"),
        ({"cache_size": "32"}, "bad-option"),
        ({"recompile_limit": 1.5}, "bad-option"),
        ({"fullgraph": "false"}, "bad-option"),
        ({"dynamic": "false"}, "bad-option"),
        ({"check": "yes"}, "bad-option"),
        ({"wait": "no"}, "bad-option"),
        ({"mode": 3}, "bad-option"),
        ({"options": "freezing"}, "bad-option"),
        ({"name": 3}, "bad-option"),
        ({"record_on_error": {}}, "bad-option"),
        ({"backend": "no such thing"}, "unknown-backend"),
        ({"backend": 3}, "unknown-backend"),
    ],
    ids=str,
)
def test_an_option_that_means_nothing_is_refused(options, slug) -> None:
    with pytest.raises(tripwire.BadOption) as caught:
        tripwire.compile(double, **options)
    assert caught.value.slug == slug
    with pytest.raises(tripwire.BadOption):
        tripwire.compile(**options)(double)


def test_an_unknown_back_end_is_told_which_are_known() -> None:
    with pytest.raises(tripwire.BadOption, match="'inducktor'. Did you mean 'inductor'.*eager"):
        tripwire.compile(double, backend="inducktor")


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(tripwire.BadOption) as caught:
        tripwire.compile(3)
    assert caught.value.slug == "not-callable"


def test_flags_may_be_none_or_ints() -> None:
    fast = tripwire.compile(double, backend="eager", fullgraph=None, check=1, wait=0)
    for _ in range(3):
        check_same(X * 2, fast(X))
    assert fast.statistics().hits


@pytest.mark.parametrize("wrap", [classmethod, property])
def test_what_goes_above_compile_is_told_so(wrap) -> None:
    with pytest.raises(tripwire.BadOption, match=rf"@{wrap.__name__} above @tripwire.compile"):
        tripwire.compile(wrap(double))


@pytest.mark.filterwarnings("ignore:functools.partial will be a method:FutureWarning")  # 3.13
def test_a_compiled_callable_in_a_class_becomes_a_method_where_the_plain_one_does() -> None:
    for plain in (double, staticmethod(double), Scaler().apply, functools.partial(double)):
        fast = tripwire.compile(plain, backend="eager")
        twin = type("Twin", (), {"call": plain, "__mul__": lambda self, by: by})
        owner = type("Owner", (), {"call": fast, "__mul__": lambda self, by: by})
        args = () if plain is double else (X,)
        for _ in range(3):
            check_same(twin().call(*args), owner().call(*args))


def test_dynamic_false_leaves_nothing_open() -> None:
    x = torch.randn(4, 3)
    check_compiles(double, calls=[x, x[:3], x[:2], x], traces=3, dynamic=False)


# --- back ends ---


class Spy:
    """A back end that keeps what it was given."""

    def __init__(self):
        self.seen = []
        self.runs = 0

    def __call__(self, module, example_inputs, **options):
        self.seen.append((module, example_inputs, options))

        def run(*inputs):
            self.runs += 1
            return module(*inputs)

        return run


def test_a_back_end_gets_a_graph_module_and_inputs_that_run(sentry) -> None:
    net, spy = nn.Linear(3, 2), Spy()
    check_compiles(net, calls=[X, X], traces=1, backend=spy)
    ((module, inputs, options),) = spy.seen
    assert isinstance(module, fx.GraphModule)
    assert all(isinstance(tensor, torch.Tensor) for tensor in inputs)
    assert options == {}
    check_same(net(X), module(*inputs)[0])


def test_hits_run_what_the_back_end_returned(sentry) -> None:
    spy = Spy()
    compiled = tripwire.compile(double, backend=spy)
    for _ in range(4):
        compiled(X)
    assert spy.runs == 3


@pytest.mark.parametrize("given", [{"mode": "max-autotune"}, {"options": {"level": 3}}], ids=str)
def test_mode_and_options_are_handed_to_the_back_end(given) -> None:
    spy = Spy()
    tripwire.compile(double, backend=spy, **given)(X)
    assert spy.seen[0][2] == given


def test_a_back_end_that_raises_is_named() -> None:
    def broken(module, example_inputs):
        raise ValueError("no such luck")

    with pytest.raises(tripwire.BackendFailed, match="broken.*double.*no such luck") as caught:
        tripwire.compile(double, backend=broken)(X)
    assert caught.value.slug == "backend-failed"
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_back_end_is_asked_again_after_it_failed() -> None:
    calls = []

    def moody(module, example_inputs):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not today")
        return module.forward

    compiled = tripwire.compile(double, backend=moody)
    with pytest.raises(tripwire.BackendFailed):
        compiled(X)
    for _ in range(3):
        check_same(X * 2, compiled(X))
    assert len(calls) == 2


def test_what_a_back_end_writes_while_it_compiles_retires_the_entry(sentry) -> None:
    scaler = Scaler()

    def writing(module, example_inputs):
        scaler.scale += 1.0
        return module.forward

    compiled = tripwire.compile(scaler.apply, backend=writing)
    for _ in range(4):
        scale = scaler.scale
        check_same(X * scale, compiled(X))


# --- copies ---


def test_a_copied_compiled_function_compiles_on_its_own() -> None:
    compiled = tripwire.compile(double)
    compiled(X)
    for twin in (copy.copy(compiled), copy.deepcopy(compiled)):
        assert twin.statistics().traces == 0
        check_same(X * 2, twin(X))
    assert compiled.statistics().calls == 1


def test_a_deep_copy_of_a_compiled_callable_object_reads_its_own_attributes(sentry) -> None:
    scaler = Scaler(2.0)
    compiled = tripwire.compile(scaler, fullgraph=True)
    compiled(X)
    twin = copy.deepcopy(compiled)
    scaler.scale = 5.0
    for _ in range(2):
        check_same(X + 2, twin(X))
        check_same(X + 5, compiled(X))


def test_a_compiled_function_is_pickled_with_its_target() -> None:
    loaded = pickle.loads(pickle.dumps(tripwire.compile(double, cache_size=3)))
    check_same(X * 2, loaded(X))
    check_same(X * 2, loaded(X))
    assert loaded.statistics().hits == 1


@tripwire.compile
def decorated(x):
    return x - 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_compiled_by_a_named_back_end_is_pickled(backend) -> None:
    loaded = pickle.loads(pickle.dumps(tripwire.compile(double, backend=backend)))
    for _ in range(3):
        check_same(X * 2, loaded(X))
    assert loaded.statistics().hits == 2


def test_a_decorated_function_is_pickled_by_its_name() -> None:
    check_same(X - 1, pickle.loads(pickle.dumps(decorated))(X))


# --- functions inside functions ---


def shift_by_shared(x):
    return x * SHARED


def test_a_compiled_function_inside_a_compiled_one_is_part_of_its_trace(
    sentry, monkeypatch
) -> None:
    inner = tripwire.compile(shift_by_shared)
    outer = tripwire.compile(lambda x: inner(x) + 1, fullgraph=True)
    for _ in range(2):
        check_same(X * 2 + 1, outer(X))
    monkeypatch.setattr(f"{__name__}.SHARED", 3.0)
    for _ in range(2):
        check_same(X * 3 + 1, outer(X))
    assert outer.statistics().traces == 2
    assert inner.statistics().traces == 0


def test_a_compiled_function_that_has_entries_can_be_part_of_a_trace(sentry) -> None:
    inner = tripwire.compile(shift_by_shared)
    inner(X)
    check_compiles(lambda x: inner(x) + 1, calls=[X, X], traces=1)


# --- names ---


def test_watch_and_the_trackers_can_be_imported() -> None:
    assert tripwire.watch is writes.watch
    assert {
        "MutationTracker",
        "GenerationTracker",
        "ExactWeakKeyDictionary",
        "is_dynamic_nn_module",
    } <= set(writes.__all__)
    for name in writes.__all__:
        assert hasattr(writes, name)


class Factory(OrderedDict):
    """Makes what is asked for, like the table of activations in `transformers`."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


FACTORY = Factory(relu=torch.nn.ReLU, tanh=torch.nn.Tanh)


def test_a_dict_that_makes_its_values_is_read_without_its_own_code(sentry) -> None:
    def f(x):
        return FACTORY["tanh"](FACTORY["relu"](x)) * len(FACTORY)

    expected = torch.tanh(torch.relu(X)) * 2
    compiled = tripwire.compile(f, backend="eager", fullgraph=True)
    for _ in range(3):
        check_same(expected, compiled(X))
    assert compiled.statistics().hits == 2
