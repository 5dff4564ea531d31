"""A value in the middle of a call decides: compiled code turns back there, and leaves no trace."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import tripwire
from tripwire.validity import probes, ways

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _nothing_is_cheap(monkeypatch):
    """What costs anything is compared on the way."""
    monkeypatch.setattr(probes, "LARGEST_COST", 0)
    monkeypatch.setattr(probes, "LARGEST_WHOLE_COST", 0)
    with inductor_config.patch(fallback_random=True):  # else Inductor draws other numbers
        yield


class Checked(nn.Module):
    """Running statistics, and a look at what comes out."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.norm(self.one(x))
        if not torch.isfinite(h).all():
            return h.nan_to_num()
        return self.two(h)


class Counting(nn.Module):
    """Running statistics, which no version counter shows, beside a counter in Python."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.calls = nn.BatchNorm1d(4), nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        h = self.norm(x)
        return self.layer(h) * self.calls if self.layer(h).sum() > 0 else h


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if x.norm() > 3:
                return x, number
        return x, None


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = torch.dropout(layer(x), 0.5, True)
        return x + torch.rand(4)


class Switches(nn.Module):
    """Leaves another grad mode behind."""

    def forward(self, x):
        x = x * 2 if torch.rand(()) > 0.5 else x - 1
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return x


class Clipped(nn.Module):
    """Writes before it decides, and a memory of what it decided."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        y = self.layer(x)
        self.largest.copy_(torch.maximum(self.largest, y.detach().abs().max()))
        self.seen.append(len(self.seen))
        if self.largest > 2:
            self.largest.zero_()
            self.seen.clear()
        return y * (1 + self.largest)


class Routed(nn.Module):
    """Experts by name, each for the rows that are its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(4, 4) for i in range(3)})

    def forward(self, x):
        x = self.first(x)
        chosen = x.argmax(-1) % 3
        out = torch.zeros_like(x)
        for index in chosen.unique():
            rows = torch.where(chosen == index)[0]
            out[rows] = self.experts[f"expert_{index}"](x[rows])
        return out


class Best(nn.Module):
    """A number out of a tensor is compared, and kept."""

    def __init__(self):
        super().__init__()
        self.layer, self.best, self.rounds = nn.Linear(4, 4), 0.0, 0

    def forward(self, x):
        y = self.layer(x)
        score = y.mean().item()
        if score > self.best:
            self.best, self.rounds = score, 0
        else:
            self.rounds += 1
        return y * 2


MODELS = [Checked, Counting, EarlyExit, LayerDrop, Clipped, Routed, Best]


def batches(count):
    torch.manual_seed(1)
    made = [torch.randn(6, 4) * (1 + 3 * (n % 3 == 2)) for n in range(count)]
    for n in range(5, count, 6):
        made[n][0, 0] = float("inf")
    return made


def state_of(model):
    held = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    return held, dict(model.named_parameters()), dict(model.named_buffers())


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("trains", [False, True])
def test_every_way_is_as_plain(model, backend, trains):
    torch.manual_seed(0)
    plain = model()
    torch.manual_seed(0)
    twin = model()
    compiled = tripwire.compile(twin, backend=backend)
    for number, x in enumerate(batches(24)):
        outcomes = []
        for net, call in ((plain, plain), (twin, compiled)):
            torch.manual_seed(number)
            with torch.set_grad_enabled(trains):
                result = call(x.clone().requires_grad_(trains))
            if trains:
                (result[0] if isinstance(result, tuple) else result).nan_to_num().sum().backward()
            outcomes.append((result, state_of(net), gradients_of(net), torch.get_rng_state()))
        torch.testing.assert_close(outcomes[1], outcomes[0], equal_nan=True)
    assert tripwire.statistics(compiled).hits >= 8


def test_a_run_that_turns_back_leaves_the_grad_mode_alone():
    model = Switches()
    compiled = tripwire.compile(model, backend="eager")
    with torch.enable_grad():
        for number in range(12):
            for call in (model, compiled):
                torch.manual_seed(number)
                before = torch.is_grad_enabled()
                call(torch.ones(4))
                assert torch.is_grad_enabled() is not before
    assert compiled.statistics().hits >= 6


def make_step(optimizer, *, zeroes=True):
    torch.manual_seed(0)
    # No bias before the norm: its gradient is rounding, which AdamW makes large.
    first = nn.Linear(4, 8, bias=False)
    net = nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    opt = optimizer(net.parameters())

    def step(x):
        if zeroes:
            opt.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if torch.isfinite(norm):
            opt.step()
        else:
            opt.zero_grad()
        return loss.detach(), norm

    return net, opt, step


OPTIMIZERS = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zeroes", [True, False])
def test_a_training_step_that_skips_bad_batches(name, backend, zeroes):
    sides = [make_step(OPTIMIZERS[name], zeroes=zeroes) for _ in range(2)]
    compiled = tripwire.compile(sides[1][2], backend=backend)
    torch.manual_seed(1)
    for number in range(16):
        x = torch.randn(6, 4)
        if number % 5 == 4:
            x[0, 0] = float("nan")
        results = [sides[0][2](x), compiled(x)]
        torch.testing.assert_close(results[1], results[0], equal_nan=True)
        states = [(net.state_dict(), gradients_of(net), opt.state_dict()) for net, opt, _ in sides]
        torch.testing.assert_close(states[1], states[0], equal_nan=True)
    assert tripwire.statistics(compiled).hits >= 6


def halve_in_place(weight):
    weight.grad.mul_(0.5)


def halve_by_new(weight):
    weight.grad = weight.grad * 0.5


def halve_data(weight):
    weight.grad.data.mul_(0.5)


def halve_alias(weight):
    held = weight.grad
    held *= 0.5


def halve_view(weight):
    weight.grad[:].mul_(0.5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "change", [halve_in_place, halve_by_new, halve_data, halve_alias, halve_view]
)
def test_a_gradient_that_is_changed_and_then_let_go_is_put_back(change, backend):
    def make():
        weight = nn.Parameter(torch.ones(4))

        def call(x):
            if weight.grad is not None:
                change(weight)
                x = x * 2 if weight.grad.sum() > 1 else x
            weight.grad = None
            (weight * x).sum().backward()
            if weight.grad.sum() > 0:
                x = x - 1
            return x

        return weight, call

    (plain_weight, plain), (weight, call) = make(), make()
    compiled = tripwire.compile(call, backend=backend)
    torch.manual_seed(0)
    for _ in range(24):
        x = torch.randn(4)
        assert torch.equal(compiled(x), plain(x))
        assert torch.equal(weight.grad, plain_weight.grad)
    assert tripwire.statistics(compiled).hits >= 8


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_run_that_turns_back_counts_no_write(backend):
    """Autograd asks how often what it saved was written."""
    kept, layer = torch.zeros(4), nn.Linear(4, 4)

    def call(x):
        kept.add_(layer(x).detach())
        return x * 2 if kept.sum() > 3 else x * 3

    compiled = tripwire.compile(call, backend=backend)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    for value in (0.1, 0.1, 0.1, -0.1, 1.0, 1.0, -3.0, 2.0):
        before = kept._version, kept.clone()
        compiled(torch.full((4,), value))
        assert kept._version == before[0] + 1
        assert torch.equal(kept, before[1] + layer(torch.full((4,), value)))
    assert tripwire.statistics(compiled).hits >= 5


def test_ways_that_begin_alike_rule_each_other_out(monkeypatch):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def call(x, exit_at):
        for number, layer in enumerate(model):
            x = layer(x)
            if exit_at[number] > 0:
                return x + exit_at.sum()
        return x

    def leave(number):
        return torch.zeros(6).index_fill(0, torch.tensor(number), 1.0)

    monkeypatch.setattr(probes, "LARGEST_PROBE", 0)
    compiled = tripwire.compile(call, backend="eager")
    x = torch.randn(4)
    for number in range(6):
        compiled(x, leave(number))
    turned = []
    init = ways.OtherWay.__init__
    monkeypatch.setattr(
        ways.OtherWay, "__init__", lambda self, *args: turned.append(1) or init(self, *args)
    )
    for number in range(6):
        assert torch.equal(compiled(x, leave(number)), call(x, leave(number)))
    assert tripwire.statistics(compiled).traces == 6
    # First the entry that took the last call, then the longest way, then the right one.
    assert len(turned) <= 2 * 6


def test_a_way_that_is_never_gone_again_is_seldom_tried():
    layer = nn.Linear(4, 4)

    def call(x):
        y = layer(x)
        return y + 1 if y.sum() > 0 else y - 1

    compiled = tripwire.compile(call, backend="eager")
    up, down = torch.full((4,), 9.0), torch.full((4,), -9.0)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    for x in (up, up, *[down] * 40, up):
        assert torch.equal(compiled(x), call(x))
    statistics = tripwire.statistics(compiled)
    assert (statistics.traces, statistics.hits) == (2, 41)


def test_fullgraph_says_where():
    layer = nn.Linear(4, 4)

    def call(x):
        return x if layer(x).sum() > 0 else -x

    with pytest.raises(tripwire.CannotTrace, match="costs too much to run twice"):
        tripwire.compile(call, backend="eager", fullgraph=True)(torch.ones(4))


def deep(x, layers):
    for layer in layers:
        x = layer(x).relu()
    return x


DECIDERS = {
    "a comparison": lambda y: bool(y.sum() > 3),
    "an index": lambda y: int(y.argmax()),
    "rows": lambda y: sum(int(row) for row in (y > 0.1).nonzero()),
    "a size": lambda y: len(y[y > 0.1]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decide", DECIDERS)
def test_a_graph_that_may_not_be_cut_computes_before_the_call_what_costs_more(
    backend, decide, monkeypatch
) -> None:
    monkeypatch.setattr(probes, "LARGEST_WHOLE_COST", 1_000_000)
    monkeypatch.setattr(probes, "LARGEST_PROBE", 8)
    if backend != "eager" and decide in ("rows", "a size"):
        pytest.skip("compilers can't take their sizes")
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))

    def call(x):
        y = deep(x, layers)
        return y * DECIDERS[decide](y)

    compiled = tripwire.compile(call, backend=backend, fullgraph=True)
    inputs = [torch.randn(4) for _ in range(4)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(4) + 0.1)
        for turn in range(5):
            for x in inputs:
                torch.testing.assert_close(compiled(x), call(x))
            if turn == 2:
                layers[0].bias.add_(0.5)
    counts = tripwire.statistics(compiled)
    assert counts.refusals == 0
    assert counts.hits > 5


def test_a_graph_that_may_be_cut_is_compared_in_its_middle_as_ever(monkeypatch) -> None:
    monkeypatch.setattr(probes, "LARGEST_WHOLE_COST", 1_000_000)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    compiled = tripwire.compile(lambda x: x + 1 if layers[0](x).sum() > 0 else x, backend="eager")
    turned = []
    init = ways.OtherWay.__init__
    monkeypatch.setattr(
        ways.OtherWay, "__init__", lambda self, *args: turned.append(1) or init(self, *args)
    )
    with torch.no_grad():
        layers[0].weight.fill_(1.0)
    for sign in (1, -1, 1, -1):
        compiled(torch.full((4,), 9.0 * sign))
    assert turned


def test_what_cannot_be_undone_is_refused_with_both_reasons(caplog):
    layer, cache = nn.Linear(4, 4), torch.zeros(2_000_000)

    def call(x):
        cache.add_(1)
        return x if layer(x).sum() + cache[0] > 0 else -x

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(3):
        compiled(torch.ones(4))
    assert "can't turn back" in caplog.text
    assert "large tensors" in caplog.text
    assert tripwire.statistics(compiled).hits == 0
    assert cache[0] == 3


def test_draws_on_another_device_are_not_undone(caplog):
    def call(x):
        torch.rand(4, device="meta")  # as on a GPU: another generator's
        return x if torch.rand(()) > 0.5 else -x

    compiled = tripwire.compile(call, backend="eager")
    for _ in range(3):
        compiled(torch.ones(4))
    assert "another device" in caplog.text
    assert compiled.statistics().hits == 0


def test_an_error_after_a_crossing_is_the_programs():
    layer = nn.Linear(4, 4)

    def call(x, index):
        y = layer(x)
        if y.sum() > 1e9:
            return y
        return y[index]

    compiled = tripwire.compile(call, backend="eager")
    for index in (0, 1, 2):
        compiled(torch.ones(4), torch.tensor(index))
    with pytest.raises(IndexError):
        compiled(torch.ones(4), torch.tensor(9))


def test_threads_go_their_ways():
    torch.manual_seed(0)
    model = EarlyExit()
    compiled = tripwire.compile(model, backend="eager")
    wrong = []

    def run(scale):
        for _ in range(30):
            x = torch.randn(6, 4) * scale
            got, wanted = compiled(x), model(x)
            if got[1] != wanted[1] or not torch.allclose(got[0], wanted[0]):
                wrong.append(scale)

    threads = [threading.Thread(target=run, args=(scale,)) for scale in (0.1, 1.0, 5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_miss_names_the_value_that_decided():
    layer = nn.Linear(4, 4)

    def call(x):
        y = layer(x)
        return y if y.sum() > 0 else -y

    compiled = tripwire.compile(call, backend="eager")
    with torch.no_grad():
        layer.weight.fill_(1.0)
    compiled(torch.ones(4))
    compiled(-torch.ones(4))
    told = str(tripwire.explain(compiled))
    assert "(compared in the middle of the call)" in told
    assert ": True → False" in told
