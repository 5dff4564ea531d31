"""Outputs: any structure of tensors and plain values comes back in its own shape."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from support import quiet_trace, refusal_of
from torch import nn

import tripwire
from tripwire import CannotTrace, Tracer

Pair = namedtuple("Pair", "left right")


class Typed(NamedTuple):
    x: torch.Tensor
    n: int


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str


class Plain:
    def __init__(self, x):
        self.x = x
        self.inner = {"twice": x * 2, "n": 3}


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x):
        self.x = x


def ones():
    return torch.ones(2)


RESULTS = {
    "tuple": lambda y: (y, 1, "s", None),
    "list": lambda y: [y, [y * 2]],
    "dict": lambda y: {"a": y, 3: (y * 2,)},
    "ordered dict": lambda y: OrderedDict(a=y),
    "default dict": lambda y: defaultdict(list, a=y),
    "deque": lambda y: deque([y], maxlen=3),
    "namedtuple": lambda y: Pair(y, 2),
    "typed namedtuple": lambda y: Typed(y, 2),
    "dataclass": lambda y: Frozen(y, "label"),
    "plain object": lambda y: Plain(y),
    "slotted object": lambda y: Slotted(y),
    "torch's own named results": lambda y: torch.max(y[None], dim=0),
    "set of plain values": lambda y: (y, {1, 2}),
}


def shape_of(value):
    """Structure and values without identity."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return type(value), {k: shape_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque, set)):
        return type(value), [shape_of(v) for v in value]
    if hasattr(value, "__dict__"):
        return type(value), shape_of(vars(value))
    if hasattr(type(value), "__slots__"):
        names = [n for n in type(value).__slots__ if hasattr(value, n)]
        return type(value), {n: shape_of(getattr(value, n)) for n in names}
    return value


@pytest.mark.parametrize("name", RESULTS)
def test_result_comes_back_in_its_own_shape(name: str) -> None:
    def f(x):
        return RESULTS[name](x + 1)

    trace = tripwire.trace(f, ones())
    got = trace(ones() * 5)
    assert shape_of(got) == shape_of(f(ones() * 5))
    assert shape_of(trace.result) == shape_of(f(ones()))


def test_each_call_builds_new_containers() -> None:
    trace = tripwire.trace(lambda x: {"y": [x + 1]}, ones())
    first = trace(ones())
    first["y"].append("mine")
    first["z"] = 1
    assert len(trace(ones())["y"]) == 1
    assert set(trace(ones())) == {"y"}


def test_one_container_in_two_places_stays_one() -> None:
    def f(x):
        inner = [x + 1]
        return {"a": inner, "b": inner, "c": [x + 1]}

    got = tripwire.trace(f, ones())(ones())
    assert got["a"] is got["b"]
    assert got["a"] is not got["c"]


def test_an_object_that_came_in_goes_out_as_itself() -> None:
    def f(x, box, config):
        return x + 1, box, config

    config = Plain(ones())
    trace = tripwire.trace(f, ones(), [1, 2], config)
    box = [1, 2]
    got = trace(ones(), box, config)
    assert got[1] is box
    assert got[2] is config


def test_model_outputs_of_transformers_come_out_as_themselves() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def f(x):
        return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))

    got = tripwire.trace(f, ones())(ones() * 3)
    assert type(got) is outputs.BaseModelOutput
    assert got.last_hidden_state.tolist() == [6, 6]
    assert got["hidden_states"][1].tolist() == [4, 4]
    assert got.attentions is None


def test_results_that_cant_be_built_again_are_refused() -> None:
    def loops(x):
        result = [x + 1]
        result.append(result)
        return result

    assert refusal_of(loops, ones()) == "unbuildable-result"
    assert refusal_of(lambda x: iter([x + 1]), ones()) == "unbuildable-result"
    assert refusal_of(lambda x: nn.Linear(2, 2), ones()) == "unbuildable-result"


def test_a_refusal_says_whether_it_is_the_result_or_what_the_run_writes_where() -> None:
    kept = SimpleNamespace(count=0, items=[])

    def keep(x):
        kept.count += 1
        kept.items.append(iter([1]))
        return x + 1

    def give(x):
        return iter([x + 1])

    run = tripwire.Tracer().run(keep, (ones(),), {}, complete=True)
    assert "what the run writes to C['kept'].items[0] holds a list_iterator" in str(run.refusal)
    run = tripwire.Tracer().run(give, (ones(),), {}, complete=True)
    assert "the result holds a list_iterator" in str(run.refusal)


@pytest.mark.parametrize("name", ["strict", "force_outplace", "check", "name_fn"])
def test_a_tracer_takes_no_option_of_another_kind(name) -> None:
    with pytest.raises(tripwire.BadOption) as raised:
        tripwire.Tracer(**{name: "no"})
    assert raised.value.slug == "bad-option"


def test_generators_and_coroutines_are_refused() -> None:
    def generator(x):
        yield x

    async def coroutine(x):
        return x

    async def async_generator(x):
        yield x

    assert refusal_of(generator, ones()) == "generator-function"
    assert refusal_of(coroutine, ones()) == "coroutine-function"
    assert refusal_of(async_generator, ones()) == "generator-function"
    assert refusal_of(lambda x: (t for t in [x]), ones()) == "lazy-result"


def test_functions_without_a_tensor_and_without_a_result_are_refused() -> None:
    def nothing(x):
        x + 1

    def number(x):
        return float(x.sum())

    assert refusal_of(nothing, ones()) == "returns-nothing"
    assert refusal_of(number, ones()) == "no-tensors"
    assert refusal_of(lambda: 3) == "no-tensors"
    with pytest.raises(CannotTrace, match="needs a callable"):
        tripwire.trace(3)  # type: ignore[arg-type]


def test_a_function_that_only_changes_a_tensor_is_a_graph_unless_strict() -> None:
    def bump(x):
        x.add_(1)

    trace = tripwire.trace(bump, ones())
    x = ones()
    assert trace(x) is None
    assert x.tolist() == [2, 2]
    with pytest.raises(CannotTrace, match="strict"):
        Tracer(strict=True).trace(bump, ones())


def test_strict_tracing_allows_no_mutable_containers() -> None:
    strict = Tracer(strict=True)
    assert strict.trace(lambda x: (x + 1, x), ones())(ones())[0].tolist() == [2, 2]
    for make in (lambda x: [x + 1], lambda x: {"a": x + 1}, lambda x: (x, [x + 1])):
        with pytest.raises(CannotTrace) as caught:
            strict.trace(make, ones())
        assert caught.value.slug == "mutable-result"


def test_writes_outside_tensors_are_told() -> None:
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = 1000
            self.seen = {}
            self.log = []

        def forward(self, x):
            self.steps += 1
            self.seen["last"] = x
            self.log.append(1)
            return x + 1

    with pytest.warns(tripwire.TracerWarning, match="steps"):
        trace = tripwire.trace(Counter(), ones())
    written = [str(effect) for effect in trace.effects]
    assert sorted(written) == ["L['self'].log[0]", "L['self'].seen['last']", "L['self'].steps"]


COUNTER = 1000


class Shared:
    calls = 1000


def test_writes_to_globals_closures_classes_sets_and_defaults_are_told() -> None:
    steps = 1000
    seen = {1}

    def f(x, acc=[]):  # noqa: B006
        nonlocal steps
        global COUNTER
        steps += 1
        COUNTER += 1
        Shared.calls += 1
        seen.add(2)
        acc.append(1)
        return x + 1

    written = {str(effect) for effect in quiet_trace(f, ones()).effects}
    assert written == {
        "C['steps']",
        "G['COUNTER']",
        "G['Shared'].calls",
        "C['seen'][2]",
        "L['acc'][0]",
    }


def test_a_run_that_writes_nothing_tells_nothing() -> None:
    trace = quiet_trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert trace.effects == ()
