"""An equal list is the same list, unless somebody asks which one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import check_same
from torch import nn

import tripwire

pytestmark = pytest.mark.usefixtures("sentry")

BACKENDS = ["eager", "aot_eager"]
X = torch.arange(6.0).reshape(2, 3)


class Layer(nn.Module):
    """Adds the adapters that are active, as PEFT's layers do."""

    def __init__(self, active: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.full((3,), i + 1.0) for i, name in
                                         enumerate("abc")})  # fmt: skip
        self.active = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.active:
            x = x * self.weights[name]
        return x


def alternate(
    compiled: Any,
    plain: Callable[..., Any],
    put: Callable[[Any], None],
    values: list[Callable[[], Any]],
    *,
    traces: int,
) -> None:
    """Values are put in turn, made anew each time; each kind is traced once."""
    calls = 0
    for _ in range(4):
        for make in values:
            put(make())
            check_same(plain(X), compiled(X))
            calls += 1
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (traces, calls - traces)


MAKERS: dict[str, list[Callable[[], Any]]] = {
    "lists": [lambda: list("a"), lambda: list("b")],
    "three_lists": [lambda: list("a"), lambda: list("ab"), lambda: list("ba")],
    "one_list": [lambda: list("abc")],
    "tuples": [lambda: tuple("a"), lambda: tuple("bc")],
    "sets": [lambda: set("a"), lambda: set("b")],
    "frozensets": [lambda: frozenset("a"), lambda: frozenset("b")],
    "list_and_tuple": [lambda: list("a"), lambda: tuple("a")],
    "empty": [list, lambda: list("c")],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("makers", MAKERS.values(), ids=MAKERS)
def test_adapters_that_come_back_are_traced_once_each(makers: Any, backend: str) -> None:
    layer = Layer(makers[0]())
    compiled = tripwire.compile(layer, backend=backend)
    alternate(
        compiled, layer, lambda value: setattr(layer, "active", value), makers, traces=len(makers)
    )


def test_adapters_in_turn_behind_inductor() -> None:
    layer = Layer(["a"])
    compiled = tripwire.compile(layer, backend="inductor")
    put = lambda value: setattr(layer, "active", value)  # noqa: E731
    alternate(compiled, layer, put, MAKERS["lists"], traces=2)


def test_many_layers_switch_together() -> None:
    model = nn.Sequential(*(Layer(["a"]) for _ in range(4)))
    compiled = tripwire.compile(model, backend="eager")

    def put(value: list[str]) -> None:
        for layer in model:
            layer.active = list(value)  # type: ignore[union-attr]

    alternate(compiled, model, put, MAKERS["three_lists"], traces=3)


ACTIVE: Any = ["a"]


class Config:
    active: Any = ["a"]


class Slotted:
    __slots__ = ("active",)


WEIGHTS = {name: i + 1.0 for i, name in enumerate("abc")}


def scale_by(x: torch.Tensor, names: Any) -> torch.Tensor:
    for name in names:
        x = x * WEIGHTS[name]
    return x


def test_lists_in_globals_classes_slots_and_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    slotted = Slotted()
    cell: Any = ["a"]

    def put_cell(value: Any) -> None:
        nonlocal cell
        cell = value

    places: list[tuple[Callable[..., Any], Callable[[Any], None]]] = [
        (lambda x: scale_by(x, ACTIVE), lambda v: globals().__setitem__("ACTIVE", v)),
        (lambda x: scale_by(x, Config.active), lambda v: setattr(Config, "active", v)),
        (lambda x: scale_by(x, slotted.active), lambda v: setattr(slotted, "active", v)),
        (lambda x: scale_by(x, cell), put_cell),
    ]
    for fn, put in places:
        alternate(tripwire.compile(fn, backend="eager"), fn, put, MAKERS["lists"], traces=2)


@pytest.mark.parametrize(
    "makers",
    [
        [lambda: [["a"], ["b"]], lambda: [["a", "b"]]],
        [lambda: [("a",), ["b", "c"]], lambda: [["c"]]],
        [lambda: [{"a"}, ["b"]], lambda: [{"c"}]],
    ],
)
def test_nested_lists_come_back(makers: Any) -> None:
    config = Config()

    def fn(x: torch.Tensor) -> torch.Tensor:
        for names in config.active:
            x = scale_by(x, names) + 1
        return x

    put = lambda value: setattr(config, "active", value)  # noqa: E731
    alternate(tripwire.compile(fn, backend="eager"), fn, put, makers, traces=2)


# --- never stale ---


def test_the_list_that_came_is_watched_and_the_one_that_went_is_not() -> None:
    layer = Layer(["a"])
    compiled = tripwire.compile(layer, backend="eager")
    first = layer.active
    for _ in range(2):
        check_same(layer(X), compiled(X))
    layer.active = ["a"]
    check_same(layer(X), compiled(X))
    layer.active.append("b")
    check_same(layer(X), compiled(X))
    first.append("c")
    check_same(layer(X), compiled(X))
    layer.active = first
    check_same(layer(X), compiled(X))
    del first[1:]
    check_same(layer(X), compiled(X))
    layer.active = ["b"]
    layer.active[0] = "a"
    check_same(layer(X), compiled(X))


def test_an_inner_list_that_came_is_watched() -> None:
    config = Config()
    config.active = [["a"], ["b"]]

    def fn(x: torch.Tensor) -> torch.Tensor:
        for names in config.active:
            x = scale_by(x, names) + 1
        return x

    compiled = tripwire.compile(fn, backend="eager")
    for _ in range(2):
        check_same(fn(X), compiled(X))
    config.active = [["a"], ["b"]]
    check_same(fn(X), compiled(X))
    config.active[1].append("c")
    check_same(fn(X), compiled(X))
    config.active[0] = ["a"]
    config.active[1] = ["b"]
    check_same(fn(X), compiled(X))
    config.active[1][0] = "c"
    check_same(fn(X), compiled(X))
    assert compiled.statistics().traces == 3


@pytest.mark.parametrize("value", [1.0, True, "1", -1])
def test_equal_is_not_same(value: Any) -> None:
    config = Config()
    config.active = [1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if type(config.active[0]) is int else 3) + float(config.active[0])

    compiled = tripwire.compile(fn, backend="eager")
    for new in ([1], [value], [1], [value], [0.0], [-0.0]):
        config.active = new
        check_same(fn(X), compiled(X))


def test_a_list_that_is_asked_for_by_identity_is_itself() -> None:
    known = ["a"]
    config = Config()
    config.active = known

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if config.active is known else x * 3

    compiled = tripwire.compile(fn, backend="eager")
    for new in (known, known, ["a"], ["a"], known):
        config.active = new
        check_same(fn(X), compiled(X))


@pytest.mark.parametrize("make", [lambda: ["a"], lambda: ("a", "b")])
def test_a_list_that_is_handed_back_is_the_one_that_is_there(make: Any) -> None:
    config = Config()

    def fn(x: torch.Tensor) -> Any:
        return scale_by(x, config.active), config.active

    compiled = tripwire.compile(fn, backend="eager")
    for _ in range(4):
        config.active = make()
        assert compiled(X)[1] is config.active


def test_a_list_in_two_places_is_watched_in_both() -> None:
    one, two = Config(), Config()
    one.active = two.active = ["a"]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return scale_by(scale_by(x, one.active), two.active)

    compiled = tripwire.compile(fn, backend="eager")
    for _ in range(2):
        check_same(fn(X), compiled(X))
    one.active = ["a"]
    check_same(fn(X), compiled(X))
    two.active.append("b")
    check_same(fn(X), compiled(X))
    one.active.append("c")
    check_same(fn(X), compiled(X))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_that_all_layers_share_comes_back_with_each_adapter(backend: str) -> None:
    """PEFT's `set_adapter` gives one new list to all layers, on each call."""
    model = nn.Sequential(Layer(["a"]), Layer(["a"]), Layer(["a"]))

    def share(active: list[str]) -> None:
        for layer in model:
            layer.active = active

    compiled = tripwire.compile(model, backend=backend)
    share(["a"])
    alternate(compiled, model, share, MAKERS["lists"], traces=2)


def test_shared_lists_that_part_are_watched_each_in_its_place() -> None:
    one, two = Layer(["a"]), Layer(["a"])
    one.active = two.active = ["a"]
    model = nn.Sequential(one, two)
    compiled = tripwire.compile(model, backend="eager")
    check_same(model(X), compiled(X))
    one.active = ["a"]  # equal, and no longer two's
    check_same(model(X), compiled(X))
    assert compiled.statistics().hits == 1
    for layer in (one, two, one):
        layer.active.append("b")
        for _ in range(3):
            check_same(model(X), compiled(X))
    two.active = one.active
    one.active.append("c")
    for _ in range(3):
        check_same(model(X), compiled(X))


def test_a_list_in_a_tuple_and_in_a_default_is_watched_there() -> None:
    shared = ["a"]
    one, two = Config(), Config()
    one.active, two.active = shared, (shared, "b")

    def fn(x: torch.Tensor, names: list[str] = shared) -> torch.Tensor:
        return scale_by(scale_by(scale_by(x, one.active), two.active[0]), names)

    compiled = tripwire.compile(fn, backend="eager")
    for _ in range(2):
        check_same(fn(X), compiled(X))
    one.active = ["a"]
    check_same(fn(X), compiled(X))
    shared.append("b")
    check_same(fn(X), compiled(X))


def test_a_list_that_becomes_the_one_that_the_call_changes_is_another_case() -> None:
    runs = []
    for wrap in (lambda fn: fn, lambda fn: tripwire.compile(fn, backend="eager")):
        config, seen = Config(), []
        config.active, config.log = ["a"], []

        def fn(x: torch.Tensor, config: Any = config) -> torch.Tensor:
            config.log.append("b")
            return scale_by(x, config.active)

        called = wrap(fn)
        for i in range(6):
            config.log = []
            config.active = config.log if i % 2 else []
            seen.append(called(X))
        runs.append(seen)
    check_same(*runs)


def test_two_lists_with_a_nan_are_two() -> None:
    config, nan = Config(), float("nan")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if nan in config.active else x

    compiled = tripwire.compile(fn, backend="eager")
    for value in (nan, float("nan"), nan, float("nan")):
        config.active = [value]
        check_same(fn(X), compiled(X))


def test_a_list_that_the_call_changes_is_itself() -> None:
    runs: list[list[Any]] = []
    for wrap in (lambda fn: fn, lambda fn: tripwire.compile(fn, backend="eager")):
        config = Config()

        def fn(x: torch.Tensor, config: Any = config) -> torch.Tensor:
            config.active.append(len(config.active))
            return x * 2

        called, seen = wrap(fn), []
        for _ in range(4):
            config.active = ["a"]
            called(X)
            called(X)
            seen.append(list(config.active))
        runs.append(seen)
    assert runs[0] == runs[1]


def test_an_argument_that_is_the_new_list_is_another_case() -> None:
    runs = []
    for wrap in (lambda fn: fn, lambda fn: tripwire.compile(fn, backend="eager")):
        config = Config()

        def fn(x: torch.Tensor, names: list[str], config: Any = config) -> torch.Tensor:
            names.append("b")
            return scale_by(x, config.active)

        called, seen = wrap(fn), []
        for is_one in (False, False, True, False, True):
            config.active = ["a"]
            seen.append(called(X, config.active if is_one else ["a"]))
        runs.append(seen)
    check_same(*runs)


# --- entries that come back ---


class Scaled(nn.Module):
    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) * self.scale if self.training else x + self.scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "put",
    [
        lambda model, i: model.train(i % 2 == 0),
        lambda model, i: setattr(model, "scale", float(i % 2)),
        lambda model, i: setattr(Scaled, "scale", float(i % 2)),
        lambda model, i: setattr(model, "scale", [2.0, 1, 0.5][i % 3]),
        lambda model, i: model.dropout.train(i % 2 == 0),
        lambda model, i: model.requires_grad_(i % 2 == 0),
    ],
    ids=["train_and_eval", "attribute", "class_attribute", "three", "inside", "frozen"],
)
def test_what_comes_back_finds_its_entry(
    put: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "scale", 1.0)
    model = Scaled()
    compiled: Any = tripwire.compile(model, backend=backend)
    for i in range(12):
        put(model, i)
        check_same(model(X), compiled(X))
    statistics = compiled.statistics()
    assert statistics.traces <= 3
    assert statistics.hits == 12 - statistics.traces


# --- what is compared with `is` ---


class Marker:
    pass


ITEMS: object = Marker


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [1, 2]
        self.other = self.sizes


def against_functions(net):
    def helper(x):
        return x

    def ask(x):
        same = net.sizes is helper or type(net).forward is helper or net.sizes is Marker
        return x * sum(net.sizes) + same

    return ask


def against_a_free_list(net):
    kept = net.sizes

    def ask(x):
        return x * sum(net.sizes) + (net.sizes is kept)

    return ask


def against_what_becomes_a_list(net):
    last = Marker

    def ask(x):
        nonlocal last
        same = net.sizes is last
        last = net.sizes
        return x * sum(net.sizes) + same + (net.sizes is last)

    return ask


def against_an_attribute(net):
    return lambda x: x * sum(net.sizes) + (net.sizes is net.other)


def against_a_global(net):
    return lambda x: x * sum(net.sizes) + (net.sizes is ITEMS)


def by_identity(net):
    return lambda x: x * sum(net.sizes) + (id(net.sizes) == id(net.other))


ASKING = [
    against_functions,
    against_a_free_list,
    against_what_becomes_a_list,
    against_an_attribute,
    against_a_global,
    by_identity,
]


@pytest.mark.parametrize("make", ASKING)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_lists_are_told_apart_where_is_may_be_about_them(make, backend) -> None:
    first, second = Holder(), Holder()
    compiled, plain = tripwire.compile(make(first), backend=backend), make(second)
    x = torch.ones(2)

    def check() -> None:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), plain(x))

    check()
    for net in (first, second):
        net.sizes = [1, 2]  # an equal one
    check()
    for net in (first, second):
        net.other = net.sizes
    check()
    if make is against_functions:
        assert compiled.statistics().traces == 1


def test_a_list_that_a_global_becomes_is_told_from_its_equal(monkeypatch) -> None:
    net = Holder()
    compiled = tripwire.compile(against_a_global(net), backend="eager")
    x = torch.zeros(1)
    assert [float(compiled(x)) for _ in range(3)] == [0, 0, 0]
    monkeypatch.setitem(globals(), "ITEMS", net.sizes)
    assert [float(compiled(x)) for _ in range(3)] == [1, 1, 1]
    net.sizes = [1, 2]
    assert [float(compiled(x)) for _ in range(3)] == [0, 0, 0]


# --- methods and views of containers: each look at one makes another ---

COUNTED: list[float] = []


def add_up(x: torch.Tensor, items: Any) -> torch.Tensor:
    for name, value in items:
        x = x * value if name == "b" else x + value
    return x


def hand_out(kind: str, *, every: int = 0, number: bool = False) -> Callable[..., Any]:
    def make(turn: int, _: Any) -> Any:
        held: Any = {"a": turn + 1.5 if number else torch.full((3,), turn + 1.0), "b": 2.0}
        if every and turn % every == 0:
            held["c"] = 3.0
        return getattr(held, kind)()

    return make


# The function, what it is passed in each turn beside a tensor, and how many traces at most.
HANDED: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "append": (lambda x, f: (x * 2, f(x.sum().item()))[0], lambda t, log: log.append, 2),
    "append a tensor": (lambda x, f: (x * 2, f(x))[0], lambda t, log: log.append, 1),
    "append, called by C": (lambda x, f: (x, list(map(f, [1]))), lambda t, log: log.append, 1),
    "append to another list": (
        lambda x, f: (x * 2, f(1.0))[0],
        lambda t, log: (log if t % 3 else [0.0] * t).append,
        1,
    ),
    "append, in a list": (lambda x, f: (x, f[0](2.0))[0], lambda t, log: [log.append], 1),
    "append, and look": (lambda x, f: (f(1.0), x * len(f.__self__)), lambda t, log: log.append, 12),
    "append to what is read": (
        lambda x, f: (f(1.0), x * len(COUNTED)),
        lambda t, log: (COUNTED if t % 4 == 3 else log).append,
        12,
    ),
    "handed back": (lambda x, f: (x * 2, f)[1](1.0), lambda t, log: log.append, 1),
    "get": (lambda x, f: x * f("a"), lambda t, log: {"a": t + 1.5, "b": t}.get, 2),
    "pop": (lambda x, f: x * f(), lambda t, log: [1.0, t + 0.5].pop, 2),
    "another method": (
        lambda x, f: (x * 2, f(5.0))[0],
        lambda t, log: log.remove if 5.0 in log else log.append,
        2,
    ),
    "items": (add_up, hand_out("items"), 1),
    "items, more of them": (add_up, hand_out("items", every=3), 2),
    "numbers": (add_up, hand_out("items", number=True), 2),
    "values": (lambda x, held: x + sum(held), hand_out("values", every=4), 2),
    "keys": (lambda x, held: x * len(held) if "c" in held else x, hand_out("keys", every=3), 2),
    "of other lengths": (
        lambda x, held: x + sum(one.sum() for one in held),
        lambda t, log: {"a": torch.ones(2 + t), "b": torch.ones(2 + t)}.values(),
        2,
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HANDED)
def test_methods_and_views_of_containers_are_taken_for_what_they_belong_to(name, backend) -> None:
    function, hand, traces = HANDED[name]
    compiled = tripwire.compile(function, backend=backend)
    seen: dict[Any, list[Any]] = {}
    for run in (function, compiled):
        COUNTED.clear()
        log: list[Any] = []
        seen[run] = [(run(X + turn, hand(turn, log)), [*log], [*COUNTED]) for turn in range(12)]
    check_same(seen[function], seen[compiled])
    assert compiled.statistics().traces <= traces


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_of_what_the_call_writes_shows_it(backend) -> None:
    def run(x: torch.Tensor, held: dict[str, torch.Tensor], values: Any) -> torch.Tensor:
        held["k"] = held["k"] * 2
        return x + sum(values)

    compiled = tripwire.compile(run, backend=backend)
    for turn in range(9):
        found = []
        for function in (run, compiled):
            one, other = {"k": torch.ones(3)}, {"k": torch.full((3,), 5.0)}
            seen = function(X, one, (one if turn % 3 == 2 else other).values())
            found.append((seen, one, other))
        check_same(*found)
    assert compiled.statistics().traces == 2
