"""Threads that call at once: one compiles, all get what plain code gives; nobody gives up."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from support import check_same, elsewhere
from torch import fx, nn
from torch._dynamo.backends import registry as dynamo_registry
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import tripwire
from tripwire.backends import dynamo
from tripwire.dispatch import telling
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.dispatch.patience import FIRST_REST, LONGEST_MOMENT, REFUSALS_ALLOWED
from tripwire.dispatch.pipeline import UNUSED_ALLOWED
from tripwire.dispatch.turns import Turn
from tripwire.imports import importing
from tripwire.tracing import hooks, observe
from tripwire.tracing.state import TracingState
from tripwire.writes import subscriptions

tell = print  # under another name a compiled call doesn't print it: it is refused


X = torch.arange(6.0).reshape(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Gate:
    """A back end that waits until it may go on, and counts."""

    def __init__(self) -> None:
        self.compiled = 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
        self.compiled += 1
        self.begun.set()
        assert self.may_end.wait(30)
        return module.forward


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# --- one compile at a time ---


def test_others_run_plainly_while_one_thread_compiles_and_hit_afterwards() -> None:
    net, gate = Net(), Gate()
    compiled = tripwire.compile(net, backend=gate)
    first = start(lambda: compiled(X))
    assert gate.begun.wait(30)
    for _ in range(7):
        check_same(net(X), elsewhere(lambda: compiled(X)))
    gate.may_end.set()
    first.join()
    for _ in range(3):
        check_same(net(X), elsewhere(lambda: compiled(X)))
    found = tripwire.statistics(compiled)
    assert (gate.compiled, found.traces, found.hits, found.calls) == (1, 1, 3, 11)


@pytest.mark.parametrize("options", [{"wait": True}, {"fullgraph": True}])
def test_others_wait_where_that_is_asked_for(options: Any) -> None:
    net, gate = Net(), Gate()
    compiled = tripwire.compile(net, backend=gate, **options)
    found: list[torch.Tensor] = []
    first = start(lambda: compiled(X))
    assert gate.begun.wait(30)
    others = [start(lambda: found.append(compiled(X))) for _ in range(5)]
    gate.may_end.set()
    for thread in (first, *others):
        thread.join(30)
    assert len(found) == 5
    for result in found:
        check_same(net(X), result)
    assert (gate.compiled, tripwire.statistics(compiled).hits) == (1, 5)


def test_a_back_end_that_calls_what_it_compiles_does_not_wait_for_itself() -> None:
    found = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
        found.append(compiled(X))
        return module.forward

    compiled = tripwire.compile(lambda x: x + 1, backend=backend, wait=True)
    for _ in range(3):
        check_same(X + 1, compiled(X))
    check_same(X + 1, found[0])


def test_twenty_threads_from_cold_compile_once_and_all_answers_are_right() -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    want, wrong = net(X), []

    def call() -> None:
        begin.wait()
        for _ in range(51):
            result = compiled(X)
            if not torch.equal(result, want):
                wrong.append(result)

    hits = []
    for _ in range(2):
        begin = threading.Barrier(20)
        for thread in [start(call) for _ in range(20)]:
            thread.join()
        hits.append(tripwire.statistics(compiled).hits)
    assert not wrong
    assert hits[1] - hits[0] == 1020
    assert tripwire.statistics(compiled).traces == 1


def test_a_call_that_raises_gives_its_turn_back() -> None:
    def backend(module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
        if fails:
            raise ValueError("not yet")
        return module.forward

    fails, kept = True, []
    compiled: Any = tripwire.compile(lambda x: x + 1, backend=backend)
    with pytest.raises(tripwire.BackendFailed) as caught:
        compiled(X)
    kept.append(caught)  # and with it the frames
    fails = False
    for _ in range(3):
        check_same(X + 1, compiled(X))
    assert compiled.statistics().hits == 2


def test_a_turn_ends_with_its_token() -> None:
    turn = Turn()
    token = turn.take()
    assert token is not None
    assert turn.take() is None
    assert not turn.wait()  # its own
    del token
    gc.collect()
    assert turn.take() is not None


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Have torch know a compiler, under the name that is returned."""

    def register_as(compiler: Any) -> str:
        monkeypatch.setitem(dynamo_registry._BACKENDS, "of_a_test", None)
        monkeypatch.setitem(dynamo_registry._COMPILER_FNS, "of_a_test", compiler)
        return "of_a_test"

    return register_as


def test_compilers_of_torch_work_for_one_thread_at_a_time(register) -> None:
    at_work, most = [], []

    def compiler(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        at_work.append(module)
        threading.Event().wait(0.1)  # the others come as far as they can
        most.append(len(at_work))
        at_work.pop()
        return module.forward

    name = register(compiler)
    functions = [lambda x, n=n: x * n for n in range(4)]
    compiled = [tripwire.compile(function, backend=name, wait=True) for function in functions]
    threads = [start(lambda one=one: one(X)) for one in compiled]
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_no_run_is_observed_while_a_compiler_of_torch_works_in_another_thread(register) -> None:
    gate = Gate()
    first = tripwire.compile(lambda x: x + 1, backend=register(gate))
    second = tripwire.compile(lambda x: x + 2, backend="eager")
    thread = start(lambda: first(X))
    assert gate.begun.wait(30)
    check_same(X + 2, second(X))
    assert tripwire.statistics(second).traces == 0
    gate.may_end.set()
    thread.join()
    for _ in range(2):
        check_same(X + 2, second(X))
    assert (tripwire.statistics(second).traces, tripwire.statistics(second).hits) == (1, 1)


def test_a_call_waits_for_another_threads_compiler_where_that_is_asked_for(register) -> None:
    gate = Gate()
    first = tripwire.compile(lambda x: x + 1, backend=register(gate))
    second = tripwire.compile(lambda x: x + 2, backend="eager", wait=True)
    threads = [start(lambda: first(X))]
    assert gate.begun.wait(30)
    threads.append(start(lambda: second(X)))
    gate.may_end.set()
    for thread in threads:
        thread.join(30)
    assert tripwire.statistics(second).traces == 1


@pytest.mark.parametrize("longest", [30.0, 0.0])
def test_a_compiler_of_torch_waits_for_a_run_of_another_thread_but_not_for_ever(
    register, monkeypatch, longest
) -> None:
    monkeypatch.setattr(dynamo, "_LONGEST_WAIT", longest)
    steps: list[str] = []
    runs, may_end = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.set()
            may_end.wait(30)
            steps.append("ran")
            return x + 1

    def compiler(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        steps.append("compiled")
        return module.forward

    slow = tripwire.compile(Slow(), backend="eager")
    quick = tripwire.compile(lambda x: x + 2, backend=register(compiler))
    threads = [start(lambda: slow(X))]
    assert runs.wait(30)
    threads.append(start(lambda: quick(X)))
    threads[1].join(0.3 if longest else 30)
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert steps == (["ran", "compiled"] if longest else ["compiled", "ran"])


def test_calls_hit_while_another_thread_compiles() -> None:
    """make_fx, with which torch's compilers trace, patches nn.Module for all threads."""
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(2):
        compiled(X)

    def call_elsewhere(x: torch.Tensor) -> torch.Tensor:
        elsewhere(lambda: compiled(X))
        return x + 1

    make_fx(call_elsewhere)(X)
    check_same(net(X), compiled(X))
    found = tripwire.statistics(compiled)
    assert (found.hits, found.traces, found.retired) == (3, 1, 0)


ELSEWHERE = {"compiles": dynamo.compiling_alone, "observes": dynamo.observing}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
@pytest.mark.parametrize("does", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_child_that_was_forked_while_another_thread_compiled_hits_and_compiles_nothing(
    does, caplog
) -> None:
    """The parent compiles afterwards."""

    def hold() -> None:
        with does():
            has.set()
            may_end.wait(30)

    def call(function: Any) -> tuple[int, int]:
        for _ in range(3):
            check_same(X + 1, function(X))
        found = tripwire.statistics(function)
        return found.traces, found.hits

    known, new, whole = (
        tripwire.compile(lambda x: x + 1, backend="eager", fullgraph=fullgraph)
        for fullgraph in (False, False, True)
    )
    assert call(known) == (1, 2)
    has, may_end = threading.Event(), threading.Event()
    thread = start(hold)
    assert has.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        assert call(known) == (1, 5)
        assert call(new) == (0, 0)
        assert caplog.text.count("[forked-while-compiling]") == 1
        with pytest.raises(tripwire.CannotTrace, match="forked-while-compiling"):
            whole(X)
        with dynamo.compiling_alone():
            os._exit(0)
    may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert call(new) == (1, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_that_waits_for_its_first_hit_is_not_compiled_in_such_a_child() -> None:
    compiled = tripwire.compile(lambda x, n: x * n, backend="aot_eager", dynamic=False)
    for n in range(UNUSED_ALLOWED + 1):
        compiled(X, n)
    has, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with dynamo.compiling_alone():
            has.set()
            may_end.wait(30)

    thread = start(hold)
    assert has.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        check_same(X * UNUSED_ALLOWED, compiled(X, UNUSED_ALLOWED))
        os._exit(0 if tripwire.statistics(compiled).hits == 0 else 1)
    may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    compiled(X, UNUSED_ALLOWED)
    assert tripwire.statistics(compiled).hits == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    net, gate = Net(), Gate()
    compiled = tripwire.compile(net, backend=gate, wait=True)
    first = start(lambda: compiled(X))
    assert gate.begun.wait(30)
    child = os.fork()
    if child == 0:
        gate.may_end.set()
        for _ in range(3):
            compiled(X)
        os._exit(0 if tripwire.statistics(compiled).hits == 2 else 1)
    gate.may_end.set()
    first.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


LOCKS = {
    "of an entry": lambda compiled: find_dispatcher(compiled).entries[0].standing._lock,
    "of a callable": lambda compiled: find_dispatcher(compiled)._lock,
    "of its turn": lambda compiled: find_dispatcher(compiled)._turn._changed,
    "of patches": lambda compiled: hooks._OF_TORCH._lock,
    "of the collector": lambda compiled: observe._lock,
    "of subscriptions": lambda compiled: subscriptions._lock,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("find", LOCKS.values(), ids=LOCKS)
def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_had(find) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(2):
        compiled(X)
    has, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with find(compiled):
            has.set()
            may_end.wait()

    holder = start(hold)
    assert has.wait(30)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        net.layers[0].weight = nn.Parameter(net.layers[0].weight.detach() * 2)
        for _ in range(3):
            result = compiled(X)
        tripwire.compile(lambda x: x + 1, backend="eager")(X)
        os._exit(0 if torch.equal(result, net(X)) else 1)
    may_end.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_waits_until_what_a_call_imports_is_there() -> None:
    has, may_end = threading.Event(), threading.Event()
    steps = []

    def hold() -> None:
        with importing():
            has.set()
            may_end.wait()
            steps.append("imported")

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if steps else 1)
        steps.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    holder = start(hold)
    assert has.wait(30)
    forker = start(fork)
    forker.join(0.2)
    may_end.set()
    holder.join()
    forker.join()
    assert steps == ["imported", 0]


def test_a_region_that_began_plainly_beside_a_compile_runs_again_plainly() -> None:
    net, gate = Net(), Gate()
    compiled = tripwire.compile(net, backend=gate)
    x = X.clone().requires_grad_()
    first = start(lambda: compiled(X.clone().requires_grad_()))
    assert gate.begun.wait(30)
    result = checkpoint(compiled, x, use_reentrant=False)
    gate.may_end.set()
    first.join()
    (got,) = torch.autograd.grad(result.sum(), x)
    (want,) = torch.autograd.grad(net(x).sum(), x)
    check_same(want, got)


def test_a_call_does_not_trip_over_dynamo_while_a_thread_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch._dynamo.eval_frame"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # as it is when its import begins
    compiled: Any = tripwire.compile(lambda x: x + 1, backend="eager")
    for _ in range(3):
        check_same(X + 1, compiled(X))
    assert compiled.statistics().hits == 2


# --- code that is compiled when it is first hit ---


def test_others_run_plainly_while_one_thread_compiles_what_was_put_off() -> None:
    gate = Gate()
    gate.may_end.set()
    compiled: Any = tripwire.compile(lambda x: x * 3, dynamic=False, backend=gate)
    sizes = [torch.arange(float(n)) for n in (1, 2, 3)]
    for x in sizes:
        compiled(x)
    gate.begun.clear()
    gate.may_end.clear()
    first = start(lambda: compiled(sizes[2]))
    assert gate.begun.wait(30)
    check_same(sizes[2] * 3, elsewhere(lambda: compiled(sizes[2])))
    gate.may_end.set()
    first.join()
    for _ in range(2):
        check_same(sizes[2] * 3, compiled(sizes[2]))
    assert gate.compiled == 3
    assert compiled.statistics().hits == 3


# --- refusals that pass ---


@pytest.fixture
def swaps_in_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another thread replaces a module's weights in the midst of the next observed runs."""

    def arrange(net: nn.Module, runs: int) -> None:
        lift = TracingState.lift
        states = [Net().state_dict() for _ in range(runs)]

        def lift_and_swap(self: TracingState, tensor: torch.Tensor, known: Any) -> Any:
            node = lift(self, tensor, known)
            if states and isinstance(tensor, nn.Parameter):
                elsewhere(lambda: net.load_state_dict(states.pop(), assign=True))
            return node

        monkeypatch.setattr(TracingState, "lift", lift_and_swap)

    return arrange


def test_weights_that_are_swapped_in_the_midst_of_a_trace_spoil_that_trace_alone(
    swaps_in_runs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    swaps_in_runs(net, 1)
    compiled(X)  # one layer of before, two of after, as in plain code
    for _ in range(3):
        check_same(net(X), compiled(X))
    found = tripwire.statistics(compiled)
    assert (found.traces, found.hits, found.refusals) == (2, 2, 0)
    assert not caplog.records


def test_a_trace_that_was_spoilt_leaves_open_what_varies(swaps_in_runs: Any) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    compiled(torch.ones(2, 3))
    swaps_in_runs(net, 1)
    compiled(torch.ones(4, 3))
    for n in range(4, 20):
        check_same(net(torch.ones(n, 3)), compiled(torch.ones(n, 3)))
    found = tripwire.statistics(compiled)
    assert found.traces <= 4
    assert found.hits >= 14


class Asking(Net):
    """Asks which weight it has, so that no other can take its place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_tied = self.layers[0].weight is self.layers[1].weight
        return super().forward(x) * (2 if is_tied else 3)


def test_code_for_weights_that_are_gone_is_dropped_and_is_no_burden() -> None:
    net = Asking()
    compiled = tripwire.compile(net, backend="eager")
    for _ in range(5):
        net.load_state_dict(Net().state_dict(), assign=True)
        for _ in range(3):
            check_same(net(X), compiled(X))
    states = [entry.state for entry in tripwire.explain(compiled).entries]
    assert states[0] == "in use"
    assert len(states) <= 2
    assert tripwire.statistics(compiled).hits == 10


def test_weights_that_somebody_keeps_bring_their_code_back() -> None:
    net = Asking()
    compiled = tripwire.compile(net, backend="eager")
    weights = [nn.Parameter(torch.randn(3, 3)) for _ in range(3)]
    for _ in range(3):
        for weight in weights:
            net.layers[0].weight = weight
            check_same(net(X), compiled(X))
    found = tripwire.statistics(compiled)
    assert (found.traces, found.hits) == (3, 6)


def test_weights_that_are_swapped_in_many_traces_are_waited_for(
    swaps_in_runs: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    swaps_in_runs(net, REFUSALS_ALLOWED + 2)
    for _ in range(20):
        compiled(X)
        clock.seconds += LONGEST_MOMENT / 10
    for _ in range(3):
        clock.seconds += LONGEST_MOMENT
        check_same(net(X), compiled(X))
    assert tripwire.statistics(compiled).hits > 0
    assert not tripwire.explain(compiled).resting
    (record,) = caplog.records  # once, not once a trace
    assert "for a moment, then it is tried again" in record.message


def test_explain_says_when_a_refused_call_is_tried_again(capsys: Any, clock: Any) -> None:
    def prints(x: torch.Tensor) -> torch.Tensor:
        tell("hello")
        return x + 1

    compiled = tripwire.compile(prints, backend="eager")
    for _ in range(REFUSALS_ALLOWED):
        compiled(X)
    clock.seconds += 10.5
    (line,) = tripwire.explain(compiled).resting
    assert line.endswith("[prints]: tried again in 50 s")
    assert line in str(tripwire.explain(compiled))


def test_a_callable_that_was_refused_is_compiled_once_the_reason_is_gone(
    capsys: Any, clock: Any
) -> None:
    class Box:
        verbose = True

    def prints(x: torch.Tensor) -> torch.Tensor:
        if Box.verbose:
            tell("hello")
        return x + 1

    compiled: Any = tripwire.compile(prints, backend="eager")
    for _ in range(10):
        compiled(X)
    assert compiled.statistics().traces == REFUSALS_ALLOWED
    clock.seconds += FIRST_REST
    for _ in range(10):  # refused once more, and rests twice as long
        compiled(X)
    assert compiled.statistics().traces == REFUSALS_ALLOWED + 1
    Box.verbose = False
    clock.seconds += FIRST_REST
    compiled(X)
    assert compiled.statistics().hits == 0
    clock.seconds += FIRST_REST
    for _ in range(3):
        check_same(X + 1, compiled(X))
    assert compiled.statistics().hits == 2


def test_entries_are_used_while_other_calls_of_their_form_rest(capsys: Any) -> None:
    def prints(x: torch.Tensor, loud: bool) -> torch.Tensor:
        if loud:
            tell("hello")
        return x + 1

    compiled: Any = tripwire.compile(prints, backend="eager")
    compiled(X, False)
    for _ in range(2 * REFUSALS_ALLOWED):
        compiled(X, True)
    assert compiled.statistics().hits == 0
    for _ in range(3):
        check_same(X + 1, compiled(X, False))
    assert compiled.statistics().hits == 3
    assert capsys.readouterr().out == "hello\n" * 2 * REFUSALS_ALLOWED


@pytest.mark.slow
def test_weights_that_are_swapped_while_eight_threads_call_are_followed() -> None:
    net = Net()
    compiled = tripwire.compile(net, backend="eager")
    states = [Net().state_dict() for _ in range(3)]
    ended, wrong = threading.Event(), []

    def call() -> None:
        while not ended.is_set():
            compiled(X)  # a mixture of two states is an answer, too: plain code gives it

    threads = [start(call) for _ in range(8)]
    for n in range(60):
        net.load_state_dict(states[n % 3], assign=True)
        time.sleep(0.05)
        if not torch.equal(compiled(X), net(X)):
            wrong.append(n)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    before = tripwire.statistics(compiled).hits
    for _ in range(10 * int(LONGEST_MOMENT)):
        check_same(net(X), compiled(X))
        if tripwire.statistics(compiled).hits > before:
            return
        time.sleep(0.1)
    raise AssertionError("no hit after a minute")


class Uncalled(telling.Followed):
    def count_hits(self) -> int:
        return 0

    def find_balance(self) -> None:
        return None


def test_what_was_compiled_is_listed_while_other_threads_compile_and_let_go() -> None:
    kept = [Uncalled() for _ in range(200)]
    for each in kept:
        telling.follow(each)
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            some = [Uncalled() for _ in range(50)]
            for each in some:
                telling.follow(each)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [start(come_and_go) for _ in range(2)]
    try:
        for _ in range(1000):
            assert set(kept) <= set(telling.list_followed())
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join(30)
    gone = weakref.ref(kept.pop())
    del each
    assert gone() is None, "to be listed keeps nothing alive"
    assert len([one for one in telling.list_followed() if isinstance(one, Uncalled)]) == len(kept)
