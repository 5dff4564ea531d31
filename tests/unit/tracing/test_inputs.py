"""Inputs: every way in which a tensor reaches a function, with the path that reaches it again."""

import functools
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass

import pytest
import torch
from support import check_same, quiet_trace, refusal_of
from torch import nn
from torch.utils import _pytree as pytree
from unit.tracing import elsewhere

import tripwire

Pair = namedtuple("Pair", "left right")
SCALE = torch.tensor(3.0)
TABLE = {"rows": [torch.tensor(1.0), torch.tensor(2.0)]}


@dataclass
class Batch:
    x: torch.Tensor
    extra: dict


class Registered:
    def __init__(self, a, b):
        self.a, self.b = a, b


pytree.register_pytree_node(
    Registered, lambda r: ([r.a, r.b], None), lambda parts, _: Registered(*parts)
)


def ones(*shape):
    return torch.ones(*(shape or (2,)))


def sources(trace) -> list[str]:
    return [str(wanted.source) for wanted in trace.inputs]


def test_positional_keyword_and_default_arguments_name_their_inputs() -> None:
    def f(a, b, *, c, d=SCALE):
        return a + b + c + d

    trace = tripwire.trace(f, ones(), c=ones(), b=ones())
    assert sources(trace) == ["L['a']", "L['b']", "L['c']", "L['d']"]
    assert float(trace(ones(), ones(), c=ones() * 5)[0]) == 10


def test_named_inputs_keep_their_names_in_declaration_order() -> None:
    def f(second, first):
        return second - first

    trace = tripwire.trace(f, first=ones(), second=ones() * 2)
    placeholders = [n.name for n in trace.graph.nodes if n.op == "placeholder"]
    assert placeholders == ["second", "first"]


def test_sources_that_spell_alike_stay_two_inputs() -> None:
    def f(a, a_b, self, lambda_=None, **more):
        return a["b"] - a_b * self + more["class"]

    args = {"b": ones() * 5}, ones() * 2, ones()
    trace = tripwire.trace(f, *args, **{"class": ones()})
    check_same(f(*args, **{"class": ones()}), trace(*args, **{"class": ones()}))
    assert len({wanted.name for wanted in trace.inputs}) == 4


class Unspeakable:
    """A key whose `__repr__` raises."""

    def __repr__(self) -> str:
        raise AttributeError("missing")


def test_keys_that_cant_be_printed_change_nothing() -> None:
    key, other = Unspeakable(), Unspeakable()

    def total(table):
        return sum(table.values()) * 2

    def fails(table):
        raise ValueError(len(table))

    compiled = tripwire.compile(total, backend="eager")
    for keys in ((key,), (other,), (key, other), (key, other)):
        table = {one: torch.ones(2) for one in keys}
        assert torch.equal(compiled(table), total(table))
    found = tripwire.explain(compiled)
    sources = [wire.source for wire in found.entries[0].wires]
    assert any("L['table'][<test_inputs.Unspeakable object at" in source for source in sources)
    assert "L['table']: keys [<test_inputs.Unspeakable object at" in str(found)
    with pytest.raises(ValueError, match="^1$"):
        tripwire.compile(fails, backend="eager")({key: torch.ones(2)})


def test_star_arguments_name_their_inputs() -> None:
    def f(*args, **kwargs):
        return args[0] * args[1] + kwargs["w"]

    trace = tripwire.trace(f, ones(), ones(), w=ones())
    assert sources(trace) == ["L['args'][0]", "L['args'][1]", "L['kwargs']['w']"]


def test_nested_structures_of_every_kind() -> None:
    def f(d, pair, batch, reg, many):
        total = d["a"][0] + d["b"]["c"][1] + pair.left * pair.right
        return total + batch.x + batch.extra["y"] + reg.a * reg.b + many[1]

    def make(k):
        return (
            {"a": [ones() * k], "b": OrderedDict(c=(1, ones() * 2))},
            Pair(ones() * k, ones()),
            Batch(ones(), {"y": ones() * k}),
            Registered(ones(), ones() * k),
            deque([ones(), ones()]),
        )

    trace = tripwire.trace(f, *make(1))
    assert sources(trace) == [
        "L['d']['a'][0]",
        "L['d']['b']['c'][1]",
        "L['pair'].left",
        "L['pair'].right",
        "L['batch'].x",
        "L['batch'].extra['y']",
        "L['reg']<0>",
        "L['reg']<1>",
        "L['many'][0]",
        "L['many'][1]",
    ]
    check_same(f(*make(4)), trace(*make(4)))


def test_the_same_tensor_passed_twice_is_one_input() -> None:
    def f(x, y):
        return x + y

    x = ones()
    trace = tripwire.trace(f, x, x)
    assert len(trace.inputs) == 1
    assert [str(a) for a in trace.inputs[0].aliases] == ["L['y']"]
    with pytest.raises(tripwire.InputMismatch, match="was one tensor when traced"):
        trace(ones(), ones())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.table = nn.ParameterDict({"k": nn.Parameter(ones())})
        self.plain = ones()  # an attribute, neither parameter nor buffer
        self.cached = {"deep": [ones()]}
        self.register_buffer("buffer", ones())

    def forward(self, x):
        y = self.second(self.first(x))
        return (
            self.blocks[0](y) * self.table["k"] + self.plain + self.cached["deep"][0] + self.buffer
        )


def test_parameters_and_buffers_are_inputs_with_their_paths() -> None:
    model = Tied()
    trace = tripwire.trace(model, ones(1, 2))
    assert sources(trace) == [
        "L['x']",
        "L['self'].first.weight",
        "L['self'].blocks[0].weight",
        "L['self'].blocks[0].bias",
        "L['self'].table['k']",
        "L['self'].plain",
        "L['self'].cached['deep'][0]",
        "L['self'].buffer",
    ]
    assert [str(a) for a in trace.inputs[1].aliases] == ["L['self'].second.weight"]
    model.plain = ones() * 10
    model.first.weight.data.mul_(2)
    check_same(model(ones(1, 2)), trace(ones(1, 2)))


def test_untying_a_weight_is_noticed() -> None:
    model = Tied()
    trace = tripwire.trace(model, ones(1, 2))
    model.second.weight = nn.Parameter(ones(2, 2))
    with pytest.raises(tripwire.InputMismatch) as caught:
        trace(ones(1, 2))
    assert caught.value.slug == "input-alias"


def test_globals_closures_and_defaults_of_helpers() -> None:
    beta = torch.tensor(5.0)

    def helper(x, w=torch.tensor(7.0)):
        return x * w * TABLE["rows"][1]

    def f(x):
        return helper(x) * SCALE + beta

    trace = tripwire.trace(f, ones())
    assert sources(trace) == [
        "L['x']",
        "C['helper'].__defaults__[0]",
        "G['TABLE']['rows'][1]",
        "G['SCALE']",
        "C['beta']",
    ]
    check_same(f(ones() * 2), trace(ones() * 2))


def test_globals_of_other_modules_also_of_helpers_that_have_returned() -> None:
    def f(x):
        table = elsewhere.get_table()  # the frame that read it is gone when it is used
        return x * table + elsewhere.config.OFFSET

    trace = tripwire.trace(f, ones())
    assert sources(trace)[1:] == [
        "G[unit.tracing.elsewhere]['TABLE']",
        "G['elsewhere'].config.OFFSET",
    ]


class Base:
    __slots__ = ()
    shared = torch.tensor(2.0)


class Holder(Base):
    __slots__ = ("inner", "weight")

    def __init__(self):
        self.weight = torch.tensor(3.0)
        self.inner = Batch(ones(), {})

    def method(self, x):
        return x * self.weight + self.inner.x * self.shared

    def __call__(self, x):
        return self.method(x)


def test_objects_methods_and_callables_name_their_inputs() -> None:
    holder = Holder()
    trace = tripwire.trace(holder.method, ones())
    assert sources(trace) == [
        "L['x']",
        "L['self'].weight",
        "L['self'].inner.x",
        "T[L['self']].shared",
    ]
    assert sources(tripwire.trace(holder, ones())) == sources(trace)

    def f(x, h):
        return h.method(x)

    assert sources(tripwire.trace(f, ones(), holder))[1] == "L['h'].weight"


def test_partial_objects_name_their_inputs() -> None:
    def f(w, x, *, b):
        return w * x + b

    trace = tripwire.trace(functools.partial(f, ones(), b=ones()), ones())
    # inspect.signature shows what a partial fixed by keyword as a default
    assert set(sources(trace)) == {"L['x']", "L['b']", "L['self'].args[0]"}


def test_builtin_callables_have_numbered_arguments() -> None:
    trace = tripwire.trace(torch.relu, ones())
    assert sources(trace) == ["L['arg0']"]


def test_other_shapes_structures_and_plain_values_are_refused_with_their_path() -> None:
    def f(x, k, flags):
        return x * k

    trace = tripwire.trace(f, ones(), 2, {"a": 1.0})
    cases = {
        "input-shape": (ones(3), 2, {"a": 1.0}),
        "input-structure": (ones(), 3, {"a": 1.0}),
    }
    for slug, args in cases.items():
        with pytest.raises(tripwire.InputMismatch) as caught:
            trace(*args)
        assert caught.value.slug == slug
    for other in ({"a": -1.0}, {"b": 1.0}, {"a": 1}, {}, {"a": True}):
        with pytest.raises(tripwire.InputMismatch, match="flags"):
            trace(ones(), 2, other)
    with pytest.raises(TypeError):
        trace(ones())
    with pytest.raises(tripwire.InputMismatch, match="float64") as caught:
        trace(ones().double(), 2, {"a": 1.0})
    assert "traits" not in str(caught.value)
    assert "Sizes" not in str(caught.value)


def test_a_path_that_is_gone_is_an_error() -> None:
    model = Tied()
    trace = tripwire.trace(model, ones(1, 2))
    del model.plain
    with pytest.raises(tripwire.InputMismatch) as caught:
        trace(ones(1, 2))
    assert caught.value.slug == "input-gone"


# --- unknown origins ---------------------------------------------------------------------------


def test_a_tensor_of_unknown_origin_is_an_error_with_its_line() -> None:
    hidden = iter([torch.ones(2)])  # an iterator isn't looked into

    def f(x):
        return x * next(hidden)  # HERE

    with pytest.raises(tripwire.CannotTrace) as caught:
        quiet_trace(f, ones())
    assert caught.value.slug == "unknown-origin"
    assert "HERE" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


def make_unseen() -> torch.Tensor:
    return torch.frombuffer(bytearray(8), dtype=torch.float32)


def test_makers_that_cant_be_seen_give_unknown_origins() -> None:
    assert refusal_of(lambda x: x * make_unseen(), ones()) == "unknown-origin"


def test_a_tensor_made_unseen_and_kept_in_an_attribute_is_no_input() -> None:
    model = Tied()

    def f(x):
        model.plain = make_unseen()  # made by the run; no path led to it before
        return x * model.plain

    assert refusal_of(f, ones()) == "unknown-origin"


def test_a_result_of_unknown_origin_is_an_error() -> None:
    assert refusal_of(lambda x: (x + 1, make_unseen()), ones()) == "unknown-origin"


def test_numpy_memory_is_refused() -> None:
    np = pytest.importorskip("numpy")
    array = np.ones(2, dtype=np.float32)
    assert refusal_of(lambda x: x * torch.as_tensor(array), ones()) == "numpy-memory"
    assert refusal_of(lambda x: x * torch.from_numpy(array), ones()) == "unknown-origin"


def test_large_containers_are_left_alone() -> None:
    many = [ones() for _ in range(10_001)]
    assert refusal_of(lambda x: x * many[5], ones()) == "unknown-origin"
