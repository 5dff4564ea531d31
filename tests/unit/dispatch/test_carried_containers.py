"""A container of tensors that a call replaces by its next state, as an LSTM's `(h, c)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tripwire


class Carrier(nn.Module):
    """Keeps what it computed for the next call."""

    def __init__(self, begun: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(3, 4)
        self.state: Any = self.pack(torch.zeros(2, 4), torch.zeros(2, 4)) if begun else None

    def pack(self, h, c):
        return h, c

    def unpack(self, state):
        return None if state is None else tuple(state)

    def forward(self, x):
        h, c = self.cell(x, self.unpack(self.state))
        self.state = self.pack(h.detach(), c.detach())
        return h


class InList(Carrier):
    def pack(self, h, c):
        return [h, c]


class InDict(Carrier):
    def pack(self, h, c):
        return {"h": h, "c": c}

    def unpack(self, state):
        return None if state is None else (state["h"], state["c"])


class Nested(Carrier):
    def pack(self, h, c):
        return [(h,), {"c": c}]

    def unpack(self, state):
        return None if state is None else (state[0][0], state[1]["c"])


class Returned(Carrier):
    def forward(self, x):
        h, c = self.cell(x, self.state)
        self.state = (h.detach(), c.detach())
        return h, self.state


class Window(Carrier):
    """Keeps a tensor of the state before, and one that is passed."""

    def forward(self, x):
        if self.state is None:
            self.state = (x.new_zeros(2, 4), x.new_zeros(2, 4))
        before, last = self.state
        self.state = (last, x[:, :1].expand(2, 4))
        return self.cell(x, (before, last))[0] + last


class WithGradient(Carrier):
    def forward(self, x):
        h, c = self.cell(x, self.state)
        self.state = (h, c)
        return h


FORMS = [Carrier, InList, InDict, Nested, Returned, Window]


def play(form, backend, between=lambda model, step: None, begun=True, calls=10):
    mine, plain = form(begun), form(begun)
    compiled = tripwire.compile(mine, backend=backend)
    for step in range(calls):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        for model in (mine, plain):
            between(model, step)
        torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(mine.state, plain.state)
        assert type(mine.state) is type(plain.state)
    return compiled


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_replaces_its_state_hits(form, begun, backend) -> None:
    assert play(form, backend, begun=begun).statistics().hits >= 6


def change(model, step):
    match step:
        case 3:
            model.state = None
        case 5:
            model.state = model.pack(torch.ones(2, 4), torch.full((2, 4), 2.0))
        case 6:
            same = torch.ones(2, 4)
            model.state = model.pack(same, same)
        case 8:
            model.cell.weight_hh.data.mul_(2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
def test_what_others_put_there_is_used(form, backend) -> None:
    assert play(form, backend, change, calls=12).statistics().hits >= 3


def test_the_state_of_the_call_before_stays_as_it_was() -> None:
    """Compiled calls make a new container each time, and write to no tensor of the last."""
    model = Carrier()
    compiled = tripwire.compile(model, backend="aot_eager")
    states = []
    for step in range(6):
        compiled(torch.full((2, 3), float(step)))
        states.append((model.state, [part.clone() for part in model.state]))
    assert len({id(state) for state, _ in states}) == len(states)
    for state, copies in states:
        torch.testing.assert_close(list(state), copies)
    assert compiled.statistics().hits >= 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_flow_through_a_state_that_is_carried(backend) -> None:
    grads = []
    for compile_it in (True, False):
        model = WithGradient()
        call = tripwire.compile(model, backend=backend) if compile_it else model
        total = torch.zeros(())
        for step in range(6):
            total = total + call(torch.full((2, 3), step / 6)).sum()
        total.backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


STATE: Any = None


def test_so_it_is_for_globals_closures_and_items() -> None:
    def build():
        kept: Any = (torch.zeros(2), torch.ones(2))
        table = {"state": [torch.zeros(2), torch.ones(2)]}

        def fn(x):
            global STATE
            nonlocal kept
            a, b = kept
            kept = (b + x, a * 0.5)
            c, d = table["state"]
            table["state"] = [d - x, c + 1]
            e, f = STATE
            STATE = (f * x, e + x)
            return a + c + e

        return fn

    global STATE
    found = []
    for compile_it in (True, False):
        STATE = (torch.zeros(2), torch.ones(2))
        fn = build()
        call = tripwire.compile(fn, backend="eager") if compile_it else fn
        found.append([call(torch.full((2,), step / 3)) for step in range(9)])
        if compile_it:
            assert call.statistics().hits >= 5
    torch.testing.assert_close(*found)
