"""What hits saved: timed on the first few, estimated on the careful side, free afterwards."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import tripwire
from tripwire.dispatch import entry as entries
from tripwire.dispatch.compiled import find_dispatcher
from tripwire.dispatch.entry import TIMED
from tripwire.dispatch.tally import Balance, Saving, add_saving

X = torch.arange(4.0)


def compiled_after(calls, function=lambda x: x * 2 + x * 3, **options):
    compiled = tripwire.compile(function, **options)
    for _ in range(calls):
        compiled(X)
    return compiled


def entry_of(compiled):
    return find_dispatcher(compiled).entries[0]


@pytest.mark.parametrize(
    ("torch_ns", "once_ns", "hit_ns", "expected"),
    [
        (500, 0, 300, 200),  # calls that repeat count in full
        (500, 150, 300, 50),  # what ran once is worth nothing where the rest is enough
        (500, 400, 300, 0),  # it may have been slow: nothing is certain
        (500, 500, 900, -400),  # even with it a hit costs more
        (500, 0, 900, -400),
    ],
)
def test_a_saving_takes_what_is_nearest_to_none(torch_ns, once_ns, hit_ns, expected) -> None:
    assert Saving(10, 5, torch_ns, once_ns, hit_ns).ns == 10 * expected


def test_nothing_is_said_before_enough_hits_were_timed() -> None:
    compiled = compiled_after(1 + TIMED)  # a trace, a first run, one too few
    assert tripwire.explain(compiled).saved_us is None
    assert "saved" not in str(tripwire.explain(compiled))
    compiled(X)
    assert tripwire.explain(compiled).saved_us is not None


def test_only_the_first_hits_read_a_clock(monkeypatch) -> None:
    compiled = compiled_after(2 + TIMED)
    monkeypatch.setattr(entries, "perf_counter_ns", None)  # calling it raises
    compiled(X)
    assert type(entry_of(compiled)) is entries.Entry
    assert entry_of(compiled).find_saving().hits == TIMED + 1


def test_a_hit_is_timed_from_its_guards_to_its_result(monkeypatch) -> None:
    compiled = compiled_after(2)
    now = iter(range(0, 10_000, 70))
    monkeypatch.setattr(entries, "perf_counter_ns", lambda: next(now))
    for _ in range(TIMED):
        compiled(X)
    assert entry_of(compiled).find_saving().hit_ns == 70


def test_torch_calls_alike_count_as_the_fastest_of_them(monkeypatch) -> None:
    from tripwire.tracing import recorder

    times = iter([0, 900, 1000, 1040, 2000, 2300])  # mul 900, mul 40, add 300
    monkeypatch.setattr(recorder, "perf_counter_ns", lambda: next(times))
    compiled = tripwire.compile(lambda x: x * 2 + x * 3)
    compiled(X)
    monkeypatch.undo()
    for _ in range(1 + TIMED):
        compiled(X)
    saving = entry_of(compiled).find_saving()
    assert (saving.torch_ns, saving.once_ns) == (40 + 40 + 300, 300)


def test_an_explanation_says_what_was_saved_and_from_what() -> None:
    compiled = compiled_after(20)
    found = tripwire.explain(compiled)
    (entry,) = found.entries
    assert found.saved_us == entry.saving.ns // 1000 == compiled.statistics().saved_us
    assert f"(estimated from {TIMED} hits)" in str(found)
    data = json.loads(json.dumps(found.data()))
    assert data["saved_us"] == found.saved_us
    assert data["entries"][0]["saving"]["hits"] == 18


def test_what_dropped_entries_saved_stays() -> None:
    compiled = compiled_after(10, cache_size=1)
    before = compiled.statistics().saved_us
    compiled(torch.arange(7.0))  # another shape: the only place is taken
    assert len(find_dispatcher(compiled).entries) == 1
    assert compiled.statistics().saved_us == before


def test_savings_and_costs_are_added_apart() -> None:
    balance = add_saving(None, None)
    assert balance is None
    balance = add_saving(balance, Saving(10, 5, 500, 0, 300))
    balance = add_saving(balance, Saving(1, 5, 500, 0, 900))
    assert add_saving(balance, None) == Balance(2000, 400)


def test_telemetry_counts_what_was_saved_once(monkeypatch) -> None:
    from tripwire import telemetry
    from tripwire.dispatch.telling import count_hits

    count_hits()
    before = telemetry.statistics().groups.get("frames", {})
    compiled = compiled_after(2)
    now = iter([0, 9_000_000] * TIMED)  # nine milliseconds a hit
    monkeypatch.setattr(entries, "perf_counter_ns", lambda: next(now))
    for _ in range(TIMED):
        compiled(X)
    count_hits()
    count_hits()
    after = telemetry.statistics().groups["frames"]
    lost = after["lost_us"] - before.get("lost_us", 0)
    assert TIMED * 8_000 < lost <= TIMED * 9_000


def test_another_threads_look_is_not_mistaken_for_the_own() -> None:
    compiled = compiled_after(2)
    entry = entry_of(compiled)
    look = threading.Thread(target=lambda: entry.standing)
    fetched = entry.standing.admits((X,), {})
    look.start()
    look.join()
    entry.run(fetched, entry.held.tensors, (X,), {})
    assert entry._took_ns == []
