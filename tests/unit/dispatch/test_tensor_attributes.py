"""Python attributes of tensors: what a run puts on one, every compiled call puts on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tripwire
from tripwire.reading.reach import Reach


def compiled(fn: Any, **options: Any) -> Any:
    return tripwire.compile(fn, backend="eager", **{"fullgraph": True, **options})


def attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return dict(tensor.__dict__)


def test_an_attribute_of_a_result_is_on_every_result(sentry) -> None:
    def f(x):
        y = x * 2
        y.label = "doubled"
        return y

    call = compiled(f)
    results = [call(torch.ones(2)) for _ in range(3)]
    assert [attributes(result) for result in results] == [{"label": "doubled"}] * 3
    assert call.statistics().hits == 2


def test_an_attribute_of_an_argument_is_put_on_each_calls_own(sentry) -> None:
    def f(x):
        x.seen = True
        return x * 2

    call = compiled(f)
    for _ in range(3):
        x = torch.ones(2)
        call(x)
        assert attributes(x) == {"seen": True}
    assert call.statistics().hits == 2


def test_an_attribute_that_was_taken_away_is_taken_away_on_every_call(sentry) -> None:
    def f(x):
        del x.label
        return x * 2

    call = compiled(f)
    for _ in range(3):
        x = torch.ones(2)
        x.label, x.other = "a", "b"
        call(x)
        assert attributes(x) == {"other": "b"}
    assert call.statistics().hits == 2


def test_an_attribute_that_holds_a_tensor_holds_this_calls_tensor(sentry) -> None:
    def f(x):
        y = x * 2
        y.source = x
        y.more = {"half": x / 2}
        y.more["half"].label = "half"
        y.itself = y
        return y

    call = compiled(f)
    for value in range(3):
        x = torch.full((2,), float(value))
        y = call(x)
        assert y.source is x
        assert y.itself is y
        assert torch.equal(y.more["half"], x / 2)
        assert y.more["half"].label == "half"
        assert y.more is not call(x).more
    assert call.statistics().traces == 1


def test_an_attribute_of_a_stored_tensor_is_on_every_stored_tensor(sentry) -> None:
    class Net(nn.Module):
        def forward(self, x):
            self.last = x + 1
            self.last.step = "last"
            return x * 2

    net = Net()
    call = compiled(net)
    seen = set()
    for value in range(3):
        call(torch.full((2,), float(value)))
        assert attributes(net.last) == {"step": "last"}
        seen.add(float(net.last[0]))
    assert seen == {1.0, 2.0, 3.0}


def test_a_number_that_is_read_and_counted_on_is_never_stale(sentry) -> None:
    def f(x):
        x.count = getattr(x, "count", 0) + 1
        return x * x.count

    call, mine, plain = compiled(f), torch.ones(2), torch.ones(2)
    for _ in range(5):
        assert torch.equal(call(mine), f(plain))
        assert mine.count == plain.count
        fresh = torch.ones(2)
        assert torch.equal(call(fresh), torch.ones(2))
        assert fresh.count == 1


def test_an_attribute_of_a_tensor_that_is_carried_over_is_checked(sentry) -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(2)

        def forward(self, x):
            factor = getattr(self.state, "factor", 1)
            self.state = self.state + x
            self.state.factor = 3
            return self.state * factor

    mine, plain = Net(), Net()
    call = compiled(mine, fullgraph=False)
    for _ in range(5):
        x = torch.ones(2)
        assert torch.equal(call(x), plain(x))
        assert attributes(mine.state) == attributes(plain.state)


def test_an_attribute_put_on_state_is_refused_until_it_is_there(sentry) -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            self.weight.used = True
            return x * self.weight

    net = Net()
    call = compiled(net)
    for _ in range(4):
        assert torch.equal(call(torch.ones(2)), torch.ones(2))
        assert net.weight.used
    statistics = call.statistics()
    assert (statistics.traces, statistics.hits, statistics.refusals) == (2, 2, 0)


def test_an_attribute_put_on_state_that_differs_on_every_call_is_a_refusal() -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            self.weight.used = [1]
            return x * self.weight

    call = compiled(Net())
    call(torch.ones(2))
    call(torch.ones(2))
    with pytest.raises(tripwire.CannotTrace, match="sets an attribute") as raised:
        call(torch.ones(2))
    assert raised.value.slug == "tensor-attribute"


# --- what an attribute of a tensor leads to is read like anything else ---


class Label:
    bonus = 2.0

    def __init__(self, value: float, **others: Any) -> None:
        self.value = value
        self.__dict__.update(others)


def labelled(value: object) -> Any:
    tensor: Any = torch.ones(2)
    tensor.label = value
    return tensor


def test_an_object_on_a_tensor_that_is_state_is_watched(sentry) -> None:
    weight = labelled(Label(2.0))

    def f(x):
        return x * weight.label.value * weight.label.bonus

    def check(factor: float) -> None:
        for _ in range(3):
            assert call(torch.ones(2)).tolist() == [factor] * 2

    call = compiled(f)
    check(4.0)
    weight.label.value = 3.0
    check(6.0)
    weight.label.bonus = 5.0  # hides the class's
    check(15.0)
    del weight.label.bonus
    weight.label.unrelated = 1.0
    check(6.0)
    weight.label = Label(7.0)
    check(14.0)
    assert call.statistics().hits >= 10


@pytest.mark.parametrize("hold", [lambda v: {"k": v}, lambda v: [v]], ids=["dict", "list"])
def test_a_container_on_a_tensor_that_is_state_is_watched(sentry, hold) -> None:
    weight = labelled(hold(2.0))
    (key,) = weight.label if isinstance(weight.label, dict) else (0,)

    def f(x):
        return x * weight.label[key]

    call = compiled(f)
    for value in (2.0, 3.0, 4.0):
        weight.label[key] = value
        for _ in range(2):
            assert call(torch.ones(2)).tolist() == [value] * 2
    assert call.statistics().hits >= 3


@pytest.mark.parametrize("hold", [lambda v: v, lambda v: [v]], ids=["itself", "in a list"])
def test_an_object_on_an_argument_is_compared(sentry, hold) -> None:
    def f(x):
        label = x.label[0] if isinstance(x.label, list) else x.label
        return x * label.value * label.bonus

    call = compiled(f)
    labels = [Label(2.0), Label(3.0), Label(3.0, bonus=7.0), Label(2.0), Label(3.0)]
    for label, factor in zip(labels, (4.0, 6.0, 21.0, 4.0, 6.0), strict=True):
        for _ in range(2):
            assert call(labelled(hold(label))).tolist() == [factor] * 2
    assert call.statistics().traces == 3


def test_tensors_and_effects_below_a_tensor(sentry) -> None:
    weight = labelled(Label(0, scale=torch.full((2,), 2.0)))

    def f(x):
        weight.label.value += 1
        return x * weight.label.scale

    call = compiled(f)
    for n in range(3):
        assert call(torch.ones(2)).tolist() == [2.0, 2.0]
        assert weight.label.value == n + 1
    weight.label.scale.fill_(3.0)
    assert call(torch.ones(2)).tolist() == [3.0, 3.0]
    weight.label.scale = torch.full((2,), 4.0)
    assert call(torch.ones(2)).tolist() == [4.0, 4.0]


def test_a_tensor_that_holds_itself_is_no_trap(sentry) -> None:
    weight = labelled(None)
    weight.label = [weight, {"again": weight}]
    call = compiled(lambda x: x * weight.label[0])
    assert call(torch.ones(2)).tolist() == call(torch.ones(2)).tolist() == [1.0, 1.0]


def test_what_was_not_looked_at_before_the_run_must_be_the_same_object(sentry, monkeypatch) -> None:
    monkeypatch.setattr(Reach, "_below_tensor", lambda *_: ())
    call = tripwire.compile(lambda x: x * x.label.value, backend="eager")
    first, second = Label(2.0), Label(3.0)
    for label in (first, first, second, first):
        assert call(labelled(label)).tolist() == [label.value] * 2
