"""Entries are kept while they are used, compiled once they are used, and traced for a reason."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import check_same
from torch import fx, nn
from torch.overrides import TorchFunctionMode

import tripwire
from tripwire.dispatch import dispatcher
from tripwire.dispatch.patience import ALL_SOURCES, HITS_THAT_PAY, SHARE

BACKENDS = ["eager", "aot_eager"]
KEPT = 32  # entries, by default


@pytest.fixture
def clock(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """It stands still, but for traces: each takes a second."""
    begin = dispatcher.Pipeline.begin

    def begin_slowly(*args: Any) -> Any:
        clock.seconds += 1
        return begin(*args)

    monkeypatch.setattr(dispatcher.Pipeline, "begin", begin_slowly)
    return clock


class Counting:
    """A back end that counts what it is asked to compile."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
        self.compiled += 1
        return module.forward


class Box:
    scale: Any = 0.0


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * Box.scale


def of(n: int) -> torch.Tensor:
    return torch.arange(float(n))


# --- what is used is kept ---


def in_turn(
    fn: Callable[..., Any], calls: list[tuple[Any, ...]], backend: str, rounds: int = 3
) -> Any:
    """Each call is traced once, whatever comes between; all later ones hit."""
    compiled: Any = tripwire.compile(fn, dynamic=False, backend=backend)
    for _ in range(rounds):
        for args in calls:
            check_same(fn(*args), compiled(*args))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (len(calls), (rounds - 1) * len(calls))
    return compiled


def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = (x @ x.transpose(-1, -2)).masked_fill(mask, -1e9)
    return scores.softmax(-1) @ x


IN_TURN: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "nine_lengths": (lambda x: x * 2 + x.sum(), [(of(n),) for n in range(2, 11)]),
    "sixteen_lengths": (lambda x: x.cumsum(0), [(of(n),) for n in range(2, 18)]),
    "batches": (nn.Linear(3, 2), [(torch.ones(n, 3),) for n in range(1, 13)]),
    "masks": (attend, [(torch.ones(2, n, 3), torch.zeros(n, n, dtype=torch.bool))
                       for n in range(2, 12)]),
    "numbers": (lambda x, k: x.roll(k) * k, [(of(4), k) for k in range(10)]),
    "dicts": (lambda batch: batch["x"] + 1, [({"x": of(n), "n": n},) for n in range(9)]),
    "ranks": (lambda x: x.sum(-1), [(torch.ones([2] * n),) for n in range(1, 10)]),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("fn", "calls"), IN_TURN.values(), ids=IN_TURN)
def test_many_kinds_of_calls_in_turn_are_traced_once_each(
    fn: Any, calls: Any, backend: str
) -> None:
    in_turn(fn, calls, backend)


@pytest.mark.slow
def test_nine_shapes_in_turn_behind_the_default_back_end() -> None:
    in_turn(lambda x: x * 2 + x.sum(), [(of(n),) for n in range(2, 11)], "inductor")


@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("count", [17, 64])
def test_a_warm_up_over_many_kinds_in_order_gives_each_its_entry(count: int, dynamic: Any) -> None:
    compiled: Any = tripwire.compile(
        lambda x: x + 1, dynamic=dynamic, backend="eager", cache_size=64
    )
    sizes = range(2, count + 2)
    for n in sizes:
        check_same(of(n) + 1, compiled(of(n)))
    before = compiled.statistics()
    for n in sizes:
        check_same(of(n) + 1, compiled(of(n)))
    after = compiled.statistics()
    assert after.traces == before.traces
    assert after.hits - before.hits == count


def test_of_more_kinds_than_are_kept_some_hit_all_the_time(clock: Any) -> None:
    compiled: Any = tripwire.compile(lambda x: x + 1, dynamic=False, backend="eager", cache_size=8)
    for _ in range(20):
        for n in range(1, 17):
            check_same(of(n) + 1, compiled(of(n)))
    statistics = compiled.statistics()
    assert statistics.traces < 3 * 8
    assert statistics.hits > statistics.calls / 3


def test_a_mode_is_not_told_of_the_search_among_many_entries() -> None:
    class Listens(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.heard.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = in_turn(fn, [(of(n),) for n in range(1, 8)], "eager")
    heard = []
    for called in (fn, compiled):
        with Listens() as mode:
            called(of(3))
        heard.append(mode.heard)
    assert heard[0] == heard[1]


def test_nested_tensors_are_looked_up_among_many_entries() -> None:
    compiled: Any = tripwire.compile(lambda x: x * 2, dynamic=False, backend="eager")
    for n in range(1, 8):
        compiled(of(n))
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own notice
            nested = torch.nested.nested_tensor([of(2), of(3)])
        for part, plain in zip(compiled(nested).unbind(), (nested * 2).unbind(), strict=True):
            check_same(plain, part)


# --- what is used is compiled ---


def test_after_two_unused_entries_the_next_is_compiled_when_it_is_hit() -> None:
    backend = Counting()
    compiled: Any = tripwire.compile(lambda x: x * 2, dynamic=False, backend=backend)
    for n in range(1, 7):
        check_same(of(n) * 2, compiled(of(n)))
    assert backend.compiled == 2
    for n in (5, 5, 6, 5):
        check_same(of(n) * 2, compiled(of(n)))
    assert backend.compiled == 4
    assert (compiled.statistics().traces, compiled.statistics().hits) == (6, 4)


def test_a_callable_that_never_comes_back_is_compiled_twice_at_most() -> None:
    backend = Counting()
    compiled = tripwire.compile(scaled, dynamic=False, backend=backend)
    for n in range(60):
        Box.scale = float(n)
        check_same(of(3) * n, compiled(of(3)))
    assert backend.compiled == 2


def test_used_entries_leave_the_next_one_to_be_compiled_at_once() -> None:
    backend = Counting()
    compiled = tripwire.compile(lambda x: x * 2, dynamic=False, backend=backend)
    for n in (1, 1, 2, 2, 3, 3, 4):
        compiled(of(n))
    assert backend.compiled == 4


def test_explain_says_what_waits_to_be_compiled() -> None:
    compiled = tripwire.compile(lambda x: x * 2, dynamic=False, backend=Counting())
    for n in (1, 2, 3):
        compiled(of(n))
    states = [entry.state for entry in tripwire.explain(compiled).entries]
    assert states == ["in use, compiled when first hit", "in use", "in use"]
    compiled(of(3))
    assert [entry.state for entry in tripwire.explain(compiled).entries] == ["in use"] * 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_are_right_in_what_is_compiled_later(backend: str) -> None:
    weight = torch.arange(1.0, 4.0, requires_grad=True)
    bias = torch.ones(3, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * weight + bias).relu().sum()

    compiled: Any = tripwire.compile(fn, dynamic=False, backend=backend)
    sizes = (1, 2, 3, 4) if backend == "aot_eager" else (1, 2, 3)
    for _ in range(3):
        for n in sizes:
            x = torch.linspace(-1, 1, 3 * n).reshape(n, 3)
            plain = torch.autograd.grad(fn(x), (weight, bias))
            check_same(plain, torch.autograd.grad(compiled(x), (weight, bias)))
    assert compiled.statistics().traces == len(sizes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_effects_are_repeated_in_what_is_compiled_later(backend: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.total += x.sum()
            x.mul_(2)
            return x + self.total

    plain, model = Counts(), Counts()
    compiled = tripwire.compile(model, dynamic=False, backend=backend)
    for n in (1, 2, 3, 4, 3, 4, 3, 1, 4):
        left, right = of(n), of(n)
        check_same(plain(left), compiled(right))
        check_same(left, right)
        check_same(plain.total, model.total)
        assert plain.calls == model.calls


def test_a_back_end_that_fails_later_raises_then_and_undoes_nothing() -> None:
    calls = 0

    def fails_on_fours(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        if inputs[0].numel() == 4:
            raise ValueError("no fours")
        return module.forward

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x + 1

    compiled = tripwire.compile(fn, dynamic=False, backend=fails_on_fours)
    for n in (1, 2, 4):
        compiled(of(n))
    for _ in range(2):
        with pytest.raises(tripwire.BackendFailed, match="no fours"):
            compiled(of(4))
    assert calls == 3
    check_same(of(2) + 1, compiled(of(2)))


def test_two_threads_that_hit_first_compile_once() -> None:
    begun = threading.Barrier(2)

    class Slow(Counting):
        def __call__(self, module: fx.GraphModule, example_inputs: Any) -> Any:
            if self.compiled >= 2:
                entered.wait(5)
            return super().__call__(module, example_inputs)

    entered, backend = threading.Event(), Slow()
    compiled = tripwire.compile(lambda x: x * 3, dynamic=False, backend=backend)
    for n in (1, 2, 3):
        compiled(of(n))
    found: list[torch.Tensor] = []

    def call() -> None:
        begun.wait()
        found.append(compiled(of(3)))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.set()
    for thread in threads:
        thread.join()
    assert backend.compiled == 3
    for result in found:
        check_same(of(3) * 3, result)


def test_checked_code_is_compiled_at_once() -> None:
    backend = Counting()
    compiled = tripwire.compile(lambda x: x * 2, dynamic=False, backend=backend, check=True)
    for n in range(1, 6):
        compiled(of(n))
    assert backend.compiled == 5


# --- what keeps changing ---


def churn(compiled: Any, count: int, change: Callable[[int], torch.Tensor]) -> None:
    for n in range(count):
        compiled(change(n))


def set_scale(n: int) -> torch.Tensor:
    Box.scale = n + 0.5
    return of(3)


def of_a_new_dtype(n: int) -> torch.Tensor:
    return torch.ones(n + 1, dtype=[torch.float64, torch.int32][n % 2])


def set_text(n: int) -> torch.Tensor:
    Box.scale = "a" * n
    return of(3)


_NUMBER, _LATEST = r": [\d.]+ → [\d.]+", r", the latest of \d+ changes\."
CHANGES: dict[str, tuple[Callable[..., Any], Callable[[int], torch.Tensor], str]] = {
    "attribute": (scaled, set_scale,
                  rf"scale{_NUMBER}{_LATEST} Each number is compiled on its own"),
    "size": (lambda x: x + 1, lambda n: of(n + 1), r"L\['x'\]: Tensor float32\[\d+\].* → "
             rf"Tensor float32\[\d+\].*{_LATEST}.*pad to a few sizes"),
    "branch": (lambda x: x * 2 if x.sum().item() else x, lambda n: of(3) + n,
               rf"item at .*{_NUMBER}{_LATEST}"),
    "dtype": (lambda x: x + 1, of_a_new_dtype, r"L\['x'\]: Tensor"),
    "text": (lambda x: x + len(Box.scale), set_text, rf"scale: 'a+' → 'a+'{_LATEST}"),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "change", "told"), CHANGES.values(), ids=CHANGES)
def test_one_message_says_what_keeps_changing(
    fn: Any, change: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = tripwire.compile(fn, dynamic=False, backend="eager")
    with caplog.at_level(logging.WARNING):
        churn(compiled, 120, change)
    (record,) = [record for record in caplog.records if record.name == "tripwire.refusals"]
    assert "[keeps-changing]" in record.message
    assert re.search(told, record.message), record.message


def test_what_keeps_changing_is_right_and_rarely_traced(clock: Any) -> None:
    compiled: Any = tripwire.compile(scaled, dynamic=False, backend="eager")
    for n in range(400):
        Box.scale = float(n)
        check_same(of(3) * n, compiled(of(3)))
    assert KEPT <= compiled.statistics().traces <= KEPT + 10


def test_many_sources_that_change_in_turn_cost_no_more_than_a_few_caches(clock: Any) -> None:
    class Many:
        pass

    many = Many()
    for index in range(40):
        setattr(many, f"a{index}", 0.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + sum(vars(many).values())

    compiled: Any = tripwire.compile(fn, dynamic=False, backend="eager", cache_size=4)
    for n in range(400):
        setattr(many, f"a{n % 40}", n + 0.5)
        check_same(fn(of(3)), compiled(of(3)))
    assert compiled.statistics().traces <= (ALL_SOURCES + 1) * 4 + 10


def test_a_call_that_an_entry_fits_hits_while_others_run_plainly(clock: Any) -> None:
    compiled: Any = tripwire.compile(lambda x: x * 2, dynamic=False, backend="eager", cache_size=8)
    for n in range(1, 40):
        compiled(of(n))
    before = compiled.statistics()
    for n in range(5, 9):
        check_same(of(n) * 2, compiled(of(n)))
    after = compiled.statistics()
    assert after.hits - before.hits == 4
    assert after.traces == before.traces < 20


def test_it_compiles_again_once_time_has_passed(clock: Any) -> None:
    backend = Counting()
    compiled: Any = tripwire.compile(scaled, dynamic=False, backend=backend)
    for n in range(500):
        Box.scale = float(n)
        compiled(of(3))
    assert backend.compiled == 2
    before = compiled.statistics()
    compiled(of(3))
    assert compiled.statistics().traces == before.traces
    clock.seconds += SHARE
    for _ in range(3):
        check_same(of(3) * 499, compiled(of(3)))
    after = compiled.statistics()
    assert (after.traces - before.traces, after.hits - before.hits) == (1, 2)
    assert backend.compiled == 3


def test_another_source_is_trusted_while_one_keeps_changing(clock: Any) -> None:
    compiled: Any = tripwire.compile(scaled, dynamic=False, backend="eager")
    churn(compiled, 200, set_scale)
    Box.scale = 20.5  # an entry has that
    before = compiled.statistics()
    for _ in range(3):
        for n in (5, 6, 7):
            check_same(of(n) * 20.5, compiled(of(n)))
    after = compiled.statistics()
    assert (after.traces - before.traces, after.hits - before.hits) == (3, 6)


@pytest.mark.parametrize("calls", [1, 5])
def test_many_hits_long_ago_pay_for_few_traces(calls: int, clock: Any) -> None:
    compiled: Any = tripwire.compile(scaled, dynamic=False, backend="eager")
    Box.scale = -1.0
    for _ in range(5000):
        compiled(of(3))
    for n in range(1000):
        Box.scale = n + 0.5
        for _ in range(calls):
            check_same(of(3) * Box.scale, compiled(of(3)))
    assert compiled.statistics().traces < 2 * KEPT


def test_entries_that_are_used_pay_for_more(clock: Any) -> None:
    compiled: Any = tripwire.compile(scaled, dynamic=False, backend="eager", cache_size=4)
    for n in range(60):
        Box.scale = n + 0.5
        for _ in range(HITS_THAT_PAY + 1):
            check_same(of(3) * Box.scale, compiled(of(3)))
    assert compiled.statistics().traces == 60


def test_with_fullgraph_what_keeps_changing_raises() -> None:
    compiled = tripwire.compile(scaled, dynamic=False, backend="eager", fullgraph=True)
    with pytest.raises(
        tripwire.CannotTrace, match=r"Box'\]\.scale: [\d.]+ → [\d.]+, the"
    ) as caught:
        churn(compiled, 100, set_scale)
    assert caught.value.slug == "keeps-changing"


def test_the_message_names_a_cache_that_is_too_small(caplog: pytest.LogCaptureFixture) -> None:
    compiled: Any = tripwire.compile(lambda x: x * 2, dynamic=False, backend="eager", cache_size=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            for n in range(1, 6):
                check_same(of(n) * 2, compiled(of(n)))
    assert "cache_size: raise it" in caplog.text
    assert compiled.statistics().entries == 3


def test_an_entry_in_use_outlives_any_number_of_values_that_come_once() -> None:
    compiled = tripwire.compile(lambda x, name: x * len(name), backend="eager", cache_size=8)
    x = torch.ones(2)
    for _ in range(100):
        compiled(x, "mine")
    for number in range(50):
        compiled(x, f"other {number}")
    before = compiled.statistics().hits
    for _ in range(5):
        assert torch.equal(compiled(x, "mine"), x * 4)
    assert compiled.statistics().hits == before + 5


def test_new_values_that_come_again_take_the_places_of_old_ones() -> None:
    compiled = tripwire.compile(lambda x, name: x * len(name), backend="eager", cache_size=4)
    x = torch.ones(2)
    for name in ("a", "b", "c", "d") * 10:
        compiled(x, name)
    before = compiled.statistics()
    for name in ("e", "f") * 10:
        assert torch.equal(compiled(x, name), x)
    after = compiled.statistics()
    assert after.traces == before.traces + 2
    assert after.hits == before.hits + 18


def step_against(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = y.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad((z * z).sum(), z)
    return x - g if g.abs().max() > 2 else x + g


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_gradient_that_decides_is_compared_on_its_way(backend: str) -> None:
    """Before a call there is nothing to ask it of: each call was traced, untold."""
    compiled = tripwire.compile(step_against, backend=backend)
    x = torch.ones(4)
    for size in (3.0, 0.5) * 6:
        assert torch.equal(compiled(x, x * size), step_against(x, x * size))
    found = compiled.statistics()
    assert found.traces <= 3
    assert found.hits >= 9
