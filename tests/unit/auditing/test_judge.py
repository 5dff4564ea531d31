"""The judge: what it says of callables that are right, stale, wrong, or refused."""

from __future__ import annotations

import os
import random
import sys
import time
import types
import uuid
from collections import OrderedDict

import numpy as np
import pytest
import torch
from property.faults import FAULTS_BY_NAME
from torch import nn

import tripwire
from tripwire import Auditor, BadOption, Status
from tripwire.auditing.images import Camera, find_difference, image_of_error
from tripwire.auditing.judge import Subject

SCALE = 2.0
X = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    """Reads a parameter, a buffer, a number, a config, a list, a dict and a global."""

    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.config = Config()
        self.steps = [0.5, 2.0]
        self.table = {"a": 3.0}
        self.unread = 7

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    def forward(self, x: torch.Tensor, offset: float = 0.25) -> torch.Tensor:
        x = self.helper(self.first(x)) + self.shift * self.config.scale + offset
        return x * self.steps[0] * self.table["a"] * SCALE


class Config:
    def __init__(self) -> None:
        self.scale = 0.5
        self.name = "a config"


def compiled(target, backend="eager"):
    torch.manual_seed(0)
    return tripwire.compile(target() if isinstance(target, type) else target, backend=backend)


def by_place(audit):
    return {(f.place.path, f.place.change): f.status for f in audit.findings}


# --- what is right ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_follows_every_write_passes(backend) -> None:
    audit = Auditor(places=None if backend == "eager" else 12, seed=1).audit(
        compiled(Net, backend), X
    )
    assert audit.ok, str(audit)
    assert audit.count()[Status.FOLLOWED] > (30 if backend == "eager" else 2)
    assert audit.count()[Status.NO_EFFECT] > 1


def test_every_kind_of_place_is_written_and_followed() -> None:
    found = by_place(tripwire.audit(compiled(Net), X))
    followed = {place for place, status in found.items() if status is Status.FOLLOWED}
    assert followed >= {
        ("x", "replaced"),
        ("x", "another shape"),
        ("x", "values changed in place"),
        ("Net.first.weight", "replaced"),
        ("Net.first.bias", "another dtype"),
        ("Net.shift", "replaced"),
        ("Net.shift", "values changed in place"),
        ("Net.first", "an adapter around it"),
        ("Net.first", "another module"),
        ("Net.first", "a forward hook"),
        ("Net.first", "a forward pre-hook"),
        ("Net.first", "another class"),
        ("Net.first.forward", "its own method"),
        ("Net.forward", "another method"),
        ("Net.helper", "another method"),
        ("Net.helper", "its own method"),
        ("Linear.forward", "another method"),
        ("Net.gain", "another value"),
        ("Net.config", "None"),
        ("Net.config.scale", "another value"),
        ("Net.steps", "another value"),
        ("Net.steps[0]", "another value"),
        ("Net.steps", "turned round"),
        ("Net.table['a']", "another value"),
        ("Net.forward, default of offset", "another value"),
        ("Net.helper.__code__", "code that returns its last argument"),
        ("test_judge.SCALE", "another value"),
        ("torch.nn", "a forward hook on all modules"),
        ("grad mode", "the other way"),
        ("autocast", "the other way"),
    }
    assert found["Net.unread", "another value"] is Status.NO_EFFECT
    assert found["Net.config.name", "another value"] is Status.NO_EFFECT


def test_cells_keyword_defaults_slots_and_static_methods_are_places() -> None:
    class Slotted:
        __slots__ = ("factor",)

        def __init__(self) -> None:
            self.factor = 2.0

        @staticmethod
        def twice(x):
            return x * 2

        @property
        def half(self):
            return self.factor / 2

    held = Slotted()

    def f(x, *, bias=1.0):
        return held.twice(x) * held.half + bias

    found = by_place(tripwire.audit(compiled(f), X))
    name = f.__qualname__
    for place in (
        (f"{name}, closure's held", "None"),
        (f"{name}, closure's held.factor", "another value"),
        (f"{name}, default of bias", "another value"),
        (f"{Slotted.__qualname__}.twice", "another method"),
        (f"{Slotted.__qualname__}.half", "another property"),
    ):
        assert found[place] is Status.FOLLOWED, place


def test_arguments_of_all_kinds_are_places() -> None:
    def f(x, options, *rest, flag=False):
        return (x + rest[0] if flag else x) * options["scale"]

    found = by_place(tripwire.audit(compiled(f), X, {"scale": 2.0}, X + 1, flag=True))
    for place in (
        ("options['scale']", "another value"),
        ("options", "another value"),
        ("flag", "another value"),
        ("rest[0]", "replaced"),
    ):
        assert found[place] is Status.FOLLOWED, found


def test_a_compiled_method_is_audited_with_its_object() -> None:
    class Model:
        def __init__(self) -> None:
            self.scale = 3.0

        @tripwire.compile(backend="eager")
        def run(self, x):
            return x * self.scale

    found = by_place(tripwire.audit(Model().run, X))
    assert found["self.scale", "another value"] is Status.FOLLOWED


IMPORTS = {
    "import shelf.box": ("shelf.box.k", "shelf.box.k"),
    "from shelf import box": ("box.k", "shelf.box.k"),
    "from .box import k": ("k", "shelf.box.k"),
    "from . import box": ("box.k", "shelf.box.k"),
    "from . import top": ("top", "shelf.top"),
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_what_a_function_imports_is_a_place(statement, monkeypatch) -> None:
    factor, place = IMPORTS[statement]
    package, box = types.ModuleType("shelf"), types.ModuleType("shelf.box")
    package.__path__, package.box, package.top, box.k = [], box, 2.0, 2.0
    for module in (package, box):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    space = {"__name__": "shelf.user", "__package__": "shelf"}
    exec(f"def f(x):\n    {statement}\n    return x * {factor}\n", space)
    found = by_place(tripwire.audit(compiled(space["f"]), X))
    assert found[place, "another value"] is Status.FOLLOWED


def test_an_exception_after_a_write_is_an_answer() -> None:
    def f(x, size):
        return x.view(size)

    found = by_place(tripwire.audit(compiled(f), X, 8))
    assert found["size", "another value"] is Status.FOLLOWED


def test_training_with_dropout_and_running_statistics_is_judged_alike_on_both_sides() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    audit = Auditor(places=12, seed=0, gradients=True).audit(compiled(model), X)
    assert audit.ok, str(audit)


def test_a_refusal_is_told_with_its_reason() -> None:
    def f(x):
        if x.sum() > 0.5:
            return x * open("/dev/null").fileno()
        return x * SCALE

    audit = tripwire.audit(compiled(f), X)
    assert audit.ok, str(audit)
    refused = [f for f in audit.findings if f.status is Status.REFUSED]
    assert refused
    assert all(f.detail for f in refused)


# --- what is broken on purpose ---


class Asking(nn.Module):
    """Asks for what a graph follows by itself where nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * x.shape[0] if torch.is_autocast_enabled("cpu") else x + x.shape[0]
        return x + self.bias if self.bias.requires_grad else x - self.bias


@pytest.mark.parametrize(
    ("fault", "model", "kind", "path"),
    [
        ("instance attributes: tables of modules", Net, "parameter", "Net.first.weight"),
        ("instance attributes: tables of modules", Net, "submodule", "Net.first"),
        ("instance attributes: wires", Net, "attribute", "Net.config.scale"),
        ("instance attributes: hooks", Net, "hook", "Net.first"),
        ("instance attributes: form of tensors", Asking, "parameter", "Asking.bias"),
        ("class attributes: wires", Net, "class attribute", "Net.gain"),
        ("class attributes: wires", Net, "method", "Net.helper"),
        ("globals: wires", Net, "global", "test_judge.SCALE"),
        ("cells, defaults, code: code and defaults", Net, "code", "Net.helper.__code__"),
        (
            "cells, defaults, code: code and defaults",
            Net,
            "default",
            "Net.forward, default of offset",
        ),
        ("containers: items of dicts", Net, "item", "Net.table['a']"),
        ("containers: elements of lists", Net, "item", "Net.steps[0]"),
        ("torch's state: autocast", Asking, "torch's flag", "autocast"),
        ("tensor arguments: shape", Asking, "argument", "x"),
    ],
)
def test_what_is_not_watched_is_found_stale(fault, model, kind, path, monkeypatch) -> None:
    FAULTS_BY_NAME[fault].apply(monkeypatch)
    audit = Auditor(kinds=(kind,)).audit(compiled(model), X)
    assert path in {f.place.path for f in audit.faults}, audit


def test_a_lost_effect_is_wrong(monkeypatch) -> None:
    FAULTS_BY_NAME["L3: no effects"].apply(monkeypatch)
    log = []

    def f(x):
        log.append(1)
        return x * 2

    audit = tripwire.audit(compiled(f), X)
    assert not audit.ok
    assert audit.faults[0].status is Status.WRONG
    assert "log" in audit.faults[0].detail
    assert log == []


def test_a_copy_where_plain_code_returns_its_argument_is_wrong(monkeypatch) -> None:
    FAULTS_BY_NAME["L1: results are copies"].apply(monkeypatch)
    audit = tripwire.audit(compiled(lambda x: (x * 2, x.view(-1))), X)
    assert "shares memory" in audit.faults[0].detail


class _Blind:
    """Stands in for a compiled callable: gives its first answer for ever."""

    def __init__(self, monkeypatch, change=lambda result: result) -> None:
        self._answer = None
        monkeypatch.setattr(Subject, "run_compiled", self._run)
        monkeypatch.setattr(Subject, "did_hit", lambda *_: True)
        self._change = change

    def _run(self, args, kwargs):
        if self._answer is None:
            self._answer = compiled(Net)._call_impl(*args, **kwargs).detach()
        return self._change(self._answer.clone())


def test_a_callable_that_remembers_its_first_answer_is_stale(monkeypatch) -> None:
    _Blind(monkeypatch)
    with torch.no_grad():
        audit = tripwire.audit(compiled(Net), X)
    assert {f.status for f in audit.findings} == {Status.STALE, Status.NO_EFFECT}
    stale = {f.place.path for f in audit.faults}
    assert stale >= {"Net.config.scale", "Net.first.weight", "test_judge.SCALE", "grad mode"}


def test_a_callable_that_is_wrong_from_the_start_is_told_at_once(monkeypatch) -> None:
    _Blind(monkeypatch, lambda result: result + 1)
    with torch.no_grad():
        audit = tripwire.audit(compiled(Net), X)
    (finding,) = audit.findings
    assert finding.status is Status.WRONG
    assert finding.place.change == "nothing written"


def test_gradients_are_compared_where_asked_for(monkeypatch) -> None:
    whole = Subject.run_compiled

    def run(self, args, kwargs):
        result = whole(self, args, kwargs)
        return result + (result - result.detach())

    monkeypatch.setattr(Subject, "run_compiled", run)
    assert Auditor(places=10, seed=0).audit(compiled(Net), X).ok
    audit = Auditor(places=10, seed=0, gradients=True).audit(compiled(Net), X)
    assert "gradient" in audit.faults[0].detail


def count_down(n, depth):
    return 0 if n == 0 else count_down(n - 1, depth) + depth


def test_where_the_limit_of_recursion_is_met_is_chance() -> None:
    def f(x, stop):
        return x * count_down(stop, 1)

    audit = Auditor(kinds=("code",), seed=0).audit(compiled(f), X, 3)
    assert audit.ok, str(audit)

    errors = [
        RecursionError("maximum recursion depth exceeded" + more) for more in ("", " in comparison")
    ]
    assert not find_difference(*map(image_of_error, errors))
    assert find_difference(image_of_error(ValueError("a")), image_of_error(ValueError("b")))


@pytest.mark.parametrize("layer", [nn.LSTM(4, 3), nn.LSTM(4, 3, 2, bidirectional=True)], ids=str)
def test_no_write_makes_a_recurrent_layer_write_over_foreign_memory(layer) -> None:
    auditor = Auditor(kinds=("parameter", "attribute"), seed=0, gradients=True)
    audit = auditor.audit(compiled(layer), X)
    assert audit.ok, str(audit)
    told = {item.path for item in audit.unreached if "foreign memory" in item.why}
    name = type(layer).__name__
    assert {f"{name}.weight_ih_l0", f"{name}.bias", f"{name}.hidden_size"} <= told


def test_what_was_computed_in_few_bits_is_compared_in_few() -> None:
    exact, rough = torch.linspace(0, 1, 5), torch.linspace(0, 1, 5) * 1.002
    for beside, is_close in ((None, False), (exact.double(), False), (exact.bfloat16(), True)):
        sides = [Camera({}, {}).take([tensor, beside], "") for tensor in (exact, rough)]
        assert (not find_difference(*sides)) is is_close


UNREPEATABLE = {
    "a fresh seed": "self.seed = torch.seed(); torch.manual_seed(0)",
    "a clock": "self.seed = time.perf_counter_ns()",
    "the system's random numbers": "self.seed = random.SystemRandom().random()",
    "the system's random bytes": "self.seed = os.urandom(8)",
    "a number for one object alone": "self.seed = uuid.uuid4().hex",
}


@pytest.mark.parametrize("form", UNREPEATABLE)
def test_a_write_after_which_plain_calls_differ_is_no_fault_of_compiled_code(form) -> None:
    space = {"torch": torch, "time": time, "random": random, "os": os, "uuid": uuid}
    source = f"""
def forward(self, x):
    if self.training:
        {UNREPEATABLE[form]}
    return self.first(x)
"""
    exec(source, space)
    cls = type("Seeded", (Net,), {"forward": space["forward"], "seed": None})
    model = compiled(cls().eval())
    audit = Auditor(kinds=("attribute",), seed=0).audit(model, X)
    assert audit.ok, str(audit)
    assert audit.count()[Status.NO_EFFECT]
    told = [item.why for item in audit.unreached if item.path == "Seeded.training"]
    assert "two plain calls after the write gave two answers" in told[0]


# --- the world is left as it was ---


class Busy(nn.Module):
    """Writes wherever a call can write."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.seen: list[int] = []
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(self.seen))
        x.add_(1)
        return self.norm(x) + torch.rand(4)


def _state(model, x):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        [(name, id(value)) for name, value in model.named_parameters()],
        {name: value for name, value in vars(model).items() if type(value) in (int, bool)},
        list(model.seen),
        x.clone(),
        torch.get_rng_state(),
        random.getstate(),
        dict(vars(Busy)),
        [list(m._forward_hooks) for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )


def _assert_same(before, after) -> None:
    for left, right in zip(before, after, strict=True):
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right)
        elif isinstance(left, dict) and any(isinstance(v, torch.Tensor) for v in left.values()):
            assert all(torch.equal(left[name], right[name]) for name in left)
        else:
            assert left == right


def test_nothing_of_an_audit_is_left() -> None:
    model, x = Busy().train(), X.clone()
    fast = compiled(model)
    before = _state(model, x)
    audit = Auditor(places=25, seed=0).audit(fast, x)
    assert audit.ok, str(audit)
    _assert_same(before, _state(model, x))
    assert fast.statistics().calls == 0


def _read_only(array):
    array.flags.writeable = False
    return array


NUMPY = {
    "int64": lambda: np.int64(3),
    "bool": lambda: np.bool_(True),
    "float32": lambda: np.float32(1.5),
    "date": lambda: np.datetime64("2020-01-01"),
    "array": lambda: np.ones(3),
    "array of no dimensions": lambda: np.array(2.0),
    "read-only array": lambda: _read_only(np.ones(3)),
    "broadcast": lambda: np.broadcast_to(np.ones(1), (3,)),
    "another's bytes": lambda: np.frombuffer(b"8 bytes.", dtype=np.float64),
}


@pytest.mark.parametrize("form", NUMPY)
def test_scalars_and_arrays_of_numpy_can_be_held(form) -> None:
    model = Net()
    model.held = NUMPY[form]()
    audit = Auditor(kinds=("attribute",), seed=0).audit(tripwire.compile(model, backend="eager"), X)
    assert audit.ok, str(audit)
    assert any(finding.place.path == "Net.held" for finding in audit.findings)


def test_an_array_that_is_seen_through_a_read_only_view_is_put_back() -> None:
    base = np.ones(3)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.view = _read_only(base[:])

        def forward(self, x):
            self.view.base[0] += 1
            return x * float(self.view[0])

    Auditor(places=3, seed=0).audit(compiled(Counts), X)
    assert base.tolist() == [1, 1, 1]


@pytest.mark.parametrize("call", range(3, 12, 2))
def test_an_interrupt_undoes_the_write(call, monkeypatch) -> None:
    model, x = Busy().train(), X.clone()
    fast = compiled(model)
    before = _state(model, x)
    whole, made = Subject.run_compiled, []

    def run(self, args, kwargs):
        made.append(1)
        if len(made) == call + 4:
            raise KeyboardInterrupt
        return whole(self, args, kwargs)

    monkeypatch.setattr(Subject, "run_compiled", run)
    with pytest.raises(KeyboardInterrupt):
        tripwire.audit(fast, x)
    _assert_same(before, _state(model, x))


def test_compiled_code_inside_the_model_runs_plainly_on_the_plain_side(monkeypatch) -> None:
    FAULTS_BY_NAME["instance attributes: tables of modules"].apply(monkeypatch)
    inner = compiled(nn.Linear(4, 4))

    def f(x):
        return inner(x) * 2

    for _ in range(3):
        inner(X)
    audit = Auditor(kinds=("parameter",)).audit(compiled(f), X)
    assert any(f.place.path.endswith("weight") for f in audit.faults)


# --- budgets ---


def test_a_budget_of_places_is_a_sample_that_its_seed_repeats() -> None:
    first = Auditor(places=12, seed=5).audit(compiled(Net), X)
    again = Auditor(places=12, seed=5).audit(compiled(Net), X)
    other = Auditor(places=12, seed=6).audit(compiled(Net), X)
    places = [[f.place for f in audit.findings] for audit in (first, again, other)]
    assert places[0] == places[1] != places[2]
    assert len(first.findings) == 12 < first.found
    assert "seed 5" in str(first)
    assert len({place.kind for place in places[0]}) > 8


def test_without_a_seed_one_is_drawn_and_told() -> None:
    audit = Auditor(places=1).audit(compiled(Net), X)
    assert f"seed {audit.seed}" in str(audit)


def test_a_budget_of_seconds_ends_the_audit() -> None:
    audit = Auditor(seconds=1e-9).audit(compiled(Net), X)
    assert audit.findings == ()
    assert audit.found > 50


def test_only_the_kinds_that_are_asked_for_are_tried() -> None:
    audit = Auditor(kinds=("hook", "global")).audit(compiled(Net), X)
    assert {f.place.kind for f in audit.findings} == {"hook", "global"}


def test_progress_is_told_of_every_place() -> None:
    told = []
    audit = Auditor(places=4, progress=lambda *step: told.append(step)).audit(compiled(Net), X)
    assert [(done, total) for done, total, _ in told] == [(i, 4) for i in range(4)]
    assert [place for *_, place in told] == [str(f.place) for f in audit.findings]


# --- bad input ---


@pytest.mark.parametrize("thing", [Net(), print, 3, torch.ones(1)], ids=str)
def test_what_is_not_compiled_is_an_error(thing) -> None:
    with pytest.raises(BadOption, match="not-compiled"):
        tripwire.audit(thing, X)


def test_a_call_that_raises_by_itself_is_an_error() -> None:
    with pytest.raises(BadOption, match=r"mat1 and mat2.*audit-call-raises"):
        tripwire.audit(compiled(Net), torch.ones(2, 5))


def test_a_call_that_does_not_repeat_is_an_error() -> None:
    import itertools

    numbers = itertools.count()

    def f(x):
        return x * next(numbers)

    with pytest.raises(BadOption, match="audit-not-repeatable"):
        tripwire.audit(compiled(f), X)


@pytest.mark.parametrize(
    "options",
    [
        {"seconds": 0},
        {"seconds": "60"},
        {"places": -1},
        {"places": True},
        {"places": 1.5},
        {"seed": "seven"},
        {"gradients": "no"},
        {"kinds": ("hooks",)},
        {"kinds": "hook"},
        {"kinds": 3},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_errors(options) -> None:
    with pytest.raises(BadOption, match="bad-option"):
        Auditor(**options)


# --- what it prints ---


def test_it_prints_a_table_with_both_answers(monkeypatch) -> None:
    FAULTS_BY_NAME["globals: wires"].apply(monkeypatch)
    audit = Auditor(kinds=("global", "attribute")).audit(compiled(Net), X)
    text = str(audit)
    assert "followed" in text
    assert "stale  test_judge.SCALE: another value" in text
    assert "plain:    float32[2, 4]" in text
    assert "compiled: float32[2, 4]" in text
    assert "FAULTS" in repr(audit)
    assert "Net.unread" in audit.render(every=True)
    assert "Net.unread" not in text


def test_what_is_not_reached_is_told() -> None:
    import threading

    lock = threading.Lock()

    def f(x):
        with lock:
            return x * 2

    audit = tripwire.audit(compiled(f), X)
    assert any(item.path.endswith("lock") for item in audit.unreached)
    assert "not reached" in str(audit)


def test_named_layers_of_a_sequential_are_places() -> None:
    model = nn.Sequential(OrderedDict(conv=nn.Linear(4, 4), act=nn.LeakyReLU()))
    audit = tripwire.audit(compiled(model), X)
    places = {(f.place.path, f.place.change) for f in audit.findings}
    assert places >= {
        ("Sequential.conv.bias", "replaced"),
        ("Sequential.conv", "a forward hook"),
        ("Sequential.act.negative_slope", "another value"),
    }


def test_the_order_of_an_ordered_dict_is_put_back() -> None:
    weights = OrderedDict(a=1.0, b=2.0)
    audit = tripwire.audit(compiled(lambda x: x * next(iter(weights.values()))), X)
    assert audit.ok, audit
    assert "moved to the end" in {f.place.change for f in audit.findings}
    assert list(weights) == ["a", "b"]


def test_the_judge_asks_nothing_that_finds_or_watches_what_was_read() -> None:
    import re
    from pathlib import Path

    import tripwire.auditing

    (folder,) = tripwire.auditing.__path__
    for path in Path(folder).glob("*.py"):
        imports = set(re.findall(r"^from tripwire\.(\w+)", path.read_text(), re.MULTILINE))
        assert not imports & {"reading", "tracing", "validity", "writes"}, path
        assert "tripwire.values.contents" not in path.read_text(), path
