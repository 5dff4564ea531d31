"""Sizes and numbers that somebody needs the value of: what is learnt of it, and told."""

from typing import Any

import pytest
import torch
from support import check_same

import tripwire
from tripwire.tracing.open import fakes

SIZES = (3, 5, 6, 7, 8, 9, 10, 11)


def run(f: Any, calls: list[tuple[Any, ...]], **options: Any) -> Any:
    """Compile it, and make the calls beside the plain function."""
    compiled = tripwire.compile(f, **{"backend": "eager", **options})
    for call in calls:
        check_same(f(*call), compiled(*call))
    return compiled


def find_line(f: Any, line: int) -> str:
    return f"test_closed_sizes.py:{f.__code__.co_firstlineno + line}"


def fixing(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
    """A back end that has no code for a size that it doesn't know."""
    for one in examples:
        if isinstance(one, torch.Tensor) and one.dim():
            int(one.shape[0])
    return module.forward


def by_key(x):
    return x * len({x.shape[0]: None})


def test_explain_names_the_line_that_closed_a_size_after_its_entry_is_gone() -> None:
    compiled = run(by_key, [(torch.ones(n),) for n in SIZES], cache_size=1)
    found = tripwire.explain(compiled)
    assert not any(entry.summary.decisions for entry in found.entries)
    (told,) = found.closed
    assert told.startswith(f"L['x'].shape[0]: closed at {find_line(by_key, 1)} by hash(): ")
    assert told in str(found)


def upto(x):
    return x * torch.combinations(torch.arange(3.0), x.shape[0]).numel()


def test_a_torch_call_that_needs_a_size_closes_it_and_is_named() -> None:
    compiled = run(upto, [(torch.ones(n),) for n in (2, 3)])
    (told,) = tripwire.explain(compiled).closed
    assert f"closed at {find_line(upto, 1)} by combinations: " in told


def count(x, n):
    return x * torch.combinations(torch.arange(3.0), n).numel()


def in_windows(x, width):
    padded = torch.nn.functional.pad(x, (0, (width - x.shape[1] % width) % width))
    windows = padded.view(x.shape[0], padded.shape[1] // width, width).softmax(-1)
    return windows.reshape(x.shape[0], -1)[:, : x.shape[1]]


def test_sizes_that_torch_thinks_about_for_too_long_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [(torch.randn(2, n), 4) for n in SIZES]
    patient = run(in_windows, calls)
    assert tripwire.explain(patient).traces < len(calls)
    monkeypatch.setattr(fakes, "_PATIENCE", 0.0)
    compiled = run(in_windows, [*calls, calls[-1]])
    found = tripwire.explain(compiled)
    assert "L['x'].shape[1]: closed at " in found.closed[0]
    assert "thinks about it for too long" in found.closed[0]
    assert found.hits == 1


def test_a_torch_call_that_needs_a_number_is_named_and_not_the_back_end() -> None:
    compiled = run(count, [(torch.ones(2), n) for n in (2, 3)])
    (told,) = tripwire.explain(compiled).closed
    assert told.startswith(f"L['n']: closed at {find_line(count, 1)} by combinations: ")


def test_a_size_that_a_back_end_fixed_is_not_compiled_open_again_at_once() -> None:
    asked = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        asked.append(any(isinstance(one, torch.SymInt) for one in examples[0].shape))
        return fixing(module, examples)

    calls = [(torch.ones(n, 2),) for n in SIZES for _ in range(2)]
    compiled = run(lambda x: x * 2, calls, backend=backend)
    assert asked == [False, True, False, False, False, True, False, False]
    (told,) = tripwire.explain(compiled).closed
    assert told == "L['x'].shape[0]: closed by the back end: L['x'].shape[0] == 9"


def short_or_long(x):
    if x.shape[0] < 6:
        return x * len(range(x.shape[0]))
    return x * 2


def test_a_size_that_was_closed_is_open_where_other_code_runs_for_it() -> None:
    compiled = run(short_or_long, [(torch.ones(n),) for n in (3, 5, *range(6, 30))])
    assert compiled.statistics().traces <= 6
    assert tripwire.explain(compiled).closed == ()


def four_or_more(x, n):
    return x * 2 if n == 4 else x * n


def test_a_number_that_was_decided_on_stays_open() -> None:
    compiled = run(four_or_more, [(torch.ones(2), n) for n in (3, 4, *range(5, 12))])
    assert compiled.statistics().traces == 3
    assert tripwire.explain(compiled).closed == ()


def with_a_table(x, table):
    return x + table[: x.shape[0]]


def test_a_size_that_is_the_largest_of_a_table_leaves_others_open() -> None:
    table = torch.arange(8.0)
    compiled = run(with_a_table, [(torch.ones(n), table) for n in (3, 8, 4, 5, 6, 7)])
    assert compiled.statistics().traces == 2


class Counter:
    def __init__(self, period: int) -> None:
        self.at, self.period = 0, period

    def by_key(self, x):
        self.at = (self.at + 1) % self.period
        return x * dict.fromkeys(range(100), 2.0)[self.at]


def test_a_number_that_the_run_moves_and_needs_is_told_and_not_traced_for_ever() -> None:
    counter, twin = Counter(100), Counter(100)
    compiled = tripwire.compile(counter.by_key, backend="eager")
    for _ in range(40):
        check_same(twin.by_key(torch.ones(3)), compiled(torch.ones(3)))
    assert counter.at == twin.at
    found = tripwire.explain(compiled)
    assert [refusal.slug for refusal in found.refusals] == ["volatile-source"]
    assert found.traces <= 10
    assert found.closed[0].startswith("L['self'].at: closed at ")


def test_a_number_that_the_run_moves_to_and_fro_has_an_entry_for_each_value() -> None:
    counter, twin = Counter(2), Counter(2)
    compiled = tripwire.compile(counter.by_key, backend="eager")
    for _ in range(12):
        check_same(twin.by_key(torch.ones(3)), compiled(torch.ones(3)))
    assert tripwire.explain(compiled).hits == 9


class Repeating:
    """Needs its number on some calls, and computes with it on others."""

    def __init__(self, counts):
        self.at = 1
        self.counts = counts

    def __call__(self, x, repeats):
        if self.counts:
            self.at += 1
        if repeats:
            for _ in range(self.at % 3 + 1):
                x = x + 1
            return x
        return x + self.at


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("counts", [True, False])
def test_a_number_of_the_world_that_was_closed_is_tried_again(counts, backend) -> None:
    repeating, twin = Repeating(counts), Repeating(counts)
    compiled = tripwire.compile(repeating, backend=backend)
    for step in range(20):
        for one in (repeating, twin):
            one.at = one.at if counts else step + 2
        check_same(twin(torch.ones(3), step < 3), compiled(torch.ones(3), step < 3))
        assert repeating.at == twin.at
    assert compiled.statistics().traces == 6


def test_a_number_of_the_world_that_each_run_needs_is_opened_more_and_more_rarely() -> None:
    def by_key(x):
        return x * len({config["at"]: None})

    config = {"at": 0}
    compiled = tripwire.compile(by_key, backend="eager")
    opened = []
    for step in range(46):
        config["at"] = step
        check_same(by_key(torch.ones(3)), compiled(torch.ones(3)))
        decisions = tripwire.explain(compiled).entries[0].summary.decisions
        opened += [step] if decisions else []
    assert opened == [1, 5, 15, 43]


def test_as_tensor_takes_a_tensor_of_any_size() -> None:
    compiled = tripwire.compile(lambda x: torch.as_tensor(x) * 2, backend="eager")
    for rows in (4, 5, 6, 7):
        check_same(compiled(torch.ones(rows, 2)), torch.ones(rows, 2) * 2)
    assert compiled.statistics().traces == 2
