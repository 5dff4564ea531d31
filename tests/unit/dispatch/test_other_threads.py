"""What another thread writes while a call is traced is no part of what the call read or did."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from support import elsewhere
from torch import nn

import tripwire
from tripwire.reading.kinds import ITEMS
from tripwire.reading.sources import Attr, Local
from tripwire.tracing import session
from tripwire.validity import plan, standing
from tripwire.validity.kept import Held
from tripwire.validity.wires import DictWire
from tripwire.writes import sentry as sentry_module
from tripwire.writes import twin

X = torch.ones(2)


@pytest.fixture(autouse=True)
def another_thread(request, monkeypatch):
    """One that waits: the twin takes it that a thread which is there may write."""
    if "sentry" in request.fixturenames and request.getfixturevalue("sentry") is twin.Sentry:
        monkeypatch.setattr(sentry_module, "count_switches", twin.count_switches)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.fixture
def during_run(monkeypatch):
    """Do something in another thread while the first run is observed: before it, or after it."""

    def arrange(write, *, after: bool = False) -> None:
        execute = session.Session.execute

        def run(self, fn, args, kwargs):
            monkeypatch.setattr(session.Session, "execute", execute)
            if not after:
                elsewhere(write)
            result = execute(self, fn, args, kwargs)
            if after:
                elsewhere(write)
            return result

        monkeypatch.setattr(session.Session, "execute", run)

    return arrange


@pytest.fixture
def before_arming(monkeypatch):
    """Do something in another thread between the first run and its wires."""

    def arrange(write) -> None:
        find_inputs = plan._PlanBuilder.find_inputs

        def find(self):
            monkeypatch.setattr(plan._PlanBuilder, "find_inputs", find_inputs)
            elsewhere(write)
            return find_inputs(self)

        monkeypatch.setattr(plan._PlanBuilder, "find_inputs", find)

    return arrange


def compile_scaled(scale: float):
    config = SimpleNamespace(scale=scale)

    def scaled(x):
        return x * config.scale

    return config, tripwire.compile(scaled, backend="eager")


@pytest.mark.parametrize("after", [False, True])
def test_a_value_that_another_thread_wrote_during_the_run_is_not_taken_for_the_old_one(
    sentry, during_run, after
) -> None:
    config, compiled = compile_scaled(2.0)
    during_run(lambda: setattr(config, "scale", 3.0), after=after)
    compiled(X)
    for value in (2.0, 3.0, 2.0):
        config.scale = value
        assert torch.equal(compiled(X), X * value)


def test_a_value_that_another_thread_wrote_before_wires_were_armed_is_not_taken_for_what_was_read(
    sentry, before_arming
) -> None:
    config, compiled = compile_scaled(2.0)
    before_arming(lambda: setattr(config, "scale", 3.0))
    assert torch.equal(compiled(X), X * 2)
    assert torch.equal(compiled(X), X * 3)


def test_a_hook_that_another_thread_added_before_wires_were_armed_runs(
    sentry, before_arming
) -> None:
    net = nn.Sequential(nn.ReLU())
    compiled = tripwire.compile(net, backend="eager")
    hook = lambda module, args, result: result + 1
    before_arming(lambda: net[0].register_forward_hook(hook))
    assert torch.equal(compiled(X), X)
    assert torch.equal(compiled(X), X + 1)


@pytest.mark.parametrize("after", [False, True])
def test_what_another_thread_counted_is_not_counted_again(sentry, during_run, after) -> None:
    class Net(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x + 1

    net = Net()
    net.calls = 0
    compiled = tripwire.compile(net, backend="eager")
    during_run(lambda: setattr(net, "calls", net.calls + 1), after=after)
    compiled(X)
    assert net.calls == 2
    for calls in (3, 4, 5):
        compiled(X)
        assert net.calls == calls
    if sentry is not twin.Sentry:  # which can't tell whether a thread that is there did anything
        assert tripwire.statistics(compiled).hits


def test_what_another_thread_appended_is_not_appended_again(sentry, during_run) -> None:
    seen: list[str] = []

    def note(x):
        seen.append("call")
        return x + 1

    compiled = tripwire.compile(note, backend="eager")
    during_run(lambda: seen.append("other"), after=True)
    for _ in range(3):
        compiled(X)
    assert seen == ["call", "other", "call", "call"]


def test_a_call_is_compiled_once_other_threads_are_quiet(sentry, during_run) -> None:
    config, compiled = compile_scaled(2.0)
    during_run(lambda: setattr(config, "scale", 3.0))
    for _ in range(3):
        assert torch.equal(compiled(X), X * 3)
    found = tripwire.statistics(compiled)
    assert (found.traces, found.hits, found.refusals) == (2, 1, 0)


def test_other_threads_that_write_nothing_are_no_hindrance(sentry, during_run) -> None:
    _, compiled = compile_scaled(2.0)
    during_run(lambda: X + 1)
    compiled(X)
    compiled(X)
    assert tripwire.statistics(compiled).hits == 1


class Grows:
    """A key that adds to its dict whenever it is looked at, as another thread may."""

    def __init__(self, space) -> None:
        self.space = space

    def __hash__(self) -> int:
        self.space[f"key {len(self.space)}"] = None
        return 1


def test_a_dict_can_grow_while_it_is_read() -> None:
    space: dict = {}
    growing = Grows({})
    space[growing] = 1
    growing.space = space
    wanted = frozenset({"a"})
    wire = DictWire(space, wanted, lambda key: Attr(Local("x"), key), frozenset(), Held(()), {})
    assert wire.rows() == []
    keys, values = ITEMS.read(space)
    assert len(keys) == len(values)


# --- written, read and put back: as it was, and the run read something else ---

MEANWHILE: list = []  # what another thread does at the next steps of a run


@torch.library.custom_op("tripwire_other_threads::step", mutates_args=())
def step(x: torch.Tensor) -> torch.Tensor:
    if MEANWHILE:
        elsewhere(MEANWHILE.pop(0))
    return x.clone()


@step.register_fake
def _(x):
    return torch.empty_like(x)


RATE = 2.0


class Scaled(nn.Module):
    rate = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.rates = {"a": 2.0}
        self.inner = nn.Identity()
        self.parts = nn.ModuleDict({"a": nn.Flatten(0)})
        self.register_buffer("weight", torch.tensor(2.0))


def write_global(value) -> None:
    global RATE
    RATE = value


def hook(net, value) -> None:
    for handle in list(net.inner._forward_hooks):
        del net.inner._forward_hooks[handle]
    if value != 2.0:
        net.inner.register_forward_hook(lambda module, args, result: result * value / 2.0)


PLACES = {
    "an attribute": (lambda net, x: x * net.scale, lambda net, v: setattr(net, "scale", v)),
    "an item": (lambda net, x: x * net.rates["a"], lambda net, v: net.rates.update(a=v)),
    "a global": (lambda net, x: x * RATE, lambda net, v: write_global(v)),
    "of a class": (lambda net, x: x * type(net).rate, lambda net, v: setattr(Scaled, "rate", v)),
    "a hook": (lambda net, x: net.inner(x * 2.0), hook),
}


@pytest.mark.skipif(not sentry_module.IS_COMPILED, reason="the twin sees no writes")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("place", PLACES)
def test_what_another_thread_writes_and_puts_back_is_not_taken_for_what_was_read(
    place, backend
) -> None:
    read, write = PLACES[place]
    net = Scaled()

    def scaled(x):
        return step(read(net, step(x)))

    compiled = tripwire.compile(scaled, backend=backend)
    MEANWHILE[:] = [lambda: write(net, 3.0), lambda: write(net, 2.0)]
    assert torch.equal(compiled(X), X * 3)
    for value in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0):
        write(net, value)
        assert torch.equal(compiled(X), X * value)
    assert compiled.statistics().hits >= 2


@pytest.mark.parametrize("place", ["an attribute", "an item", "a global", "of a class"])
def test_an_open_number_is_no_write_of_a_thread_that_runs_meanwhile(place) -> None:
    read, write = PLACES[place]
    net = Scaled()

    def scaled(x):
        return read(net, x) + step(x) - x

    compiled = tripwire.compile(scaled, backend="eager")
    for value in (2.0, 3.0, 4.0, 5.0, 6.0):
        write(net, value)
        MEANWHILE[:] = [lambda: None]
        assert torch.equal(compiled(X), X * value)
    write(net, 2.0)
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (2, 3)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.bias = 0.0

    def forward(self, x):
        return x * self.weight + self.bias


def test_a_call_sees_no_weight_that_is_newer_than_its_attributes(monkeypatch) -> None:
    """Another thread takes over new weights between the question to an entry and its run.

    Plain code reads the weight first: whoever sees the new one sees the new bias as well.
    """
    net = Affine()
    compiled = tripwire.compile(net, backend="eager")
    with torch.no_grad():
        compiled(X)
        compiled(X)
    (entry,) = compiled._tripwire_dispatcher.entries
    admits, compare = entry.standing.admits, standing.Standing._compare
    taken_over, may_go_on = threading.Event(), threading.Event()

    def wait_and_compare(*args) -> None:
        taken_over.set()
        may_go_on.wait(1)
        compare(*args)

    def write() -> None:
        net.bias = 10.0
        net.weight = nn.Parameter(torch.ones(2))
        with torch.no_grad():
            compiled(X)

    threads = [threading.Thread(target=write)]

    def admit(args, kwargs):
        found = admits(args, kwargs)
        monkeypatch.setattr(entry.standing, "admits", admits)
        threads[0].start()
        taken_over.wait()
        return found

    monkeypatch.setattr(standing.Standing, "_compare", wait_and_compare)
    monkeypatch.setattr(entry.standing, "admits", admit)
    with torch.no_grad():
        seen = compiled(X)[0].item()
    may_go_on.set()
    threads[0].join()
    assert seen in (0.0, 10.0, 11.0)
    with torch.no_grad():
        assert [compiled(X)[0].item() for _ in range(3)] == [11.0] * 3
