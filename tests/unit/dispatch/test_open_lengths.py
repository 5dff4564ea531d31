"""Recurrent layers and CTC: torch needs a length to compute them, but not to tell their form."""

import pytest
import torch
from support import check_same
from torch import nn
from torch.nn import functional

import tripwire
from tripwire.backends import cuts

BACKENDS = ["eager", "aot_eager"]
LENGTHS = (5, 9, 12, 7, 16, 3, 8, 11)


class Tagger(nn.Module):
    """Reads a sequence, and says something of each step and of the whole."""

    def __init__(self, cell, *, batch_first=True, begins=False, **options):
        super().__init__()
        self.cell = cell(4, 6, batch_first=batch_first, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 3)
        self.batch_first = batch_first
        self.begins = begins

    def forward(self, x):
        x = x.tanh()
        batch = x.shape[0 if self.batch_first else 1]
        given = (torch.zeros(1, batch, 6),) if self.begins else ()
        steps, last = self.cell(x, *given)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(steps).relu(), last[-1] * 2, steps.shape


TAGGERS = {
    "gru": lambda: Tagger(nn.GRU),
    "time first": lambda: Tagger(nn.GRU, batch_first=False),
    "two layers, both ways": lambda: Tagger(nn.GRU, num_layers=2, bidirectional=True),
    "a state that is passed": lambda: Tagger(nn.GRU, begins=True),
    "lstm": lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm, time first": lambda: Tagger(nn.LSTM, batch_first=False, bias=False),
    "rnn": lambda: Tagger(nn.RNN),
    "rnn with relu": lambda: Tagger(nn.RNN, nonlinearity="relu", batch_first=False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TAGGERS)
def test_recurrent_layers_train_at_all_lengths(name, backend) -> None:
    torch.manual_seed(0)
    net = TAGGERS[name]()
    compiled = tripwire.compile(net, backend=backend)
    for turn, length in enumerate(LENGTHS):
        batch = 2 + turn % 3
        shape = (batch, length, 4) if net.batch_first else (length, batch, 4)
        x = torch.randn(shape, requires_grad=True)
        expected, found = net(x), compiled(x)
        torch.testing.assert_close(found, expected)
        assert found[0].stride() == expected[0].stride()
        leaves = (x, *net.parameters())
        wanted, got = (
            torch.autograd.grad(y[0].square().sum() + y[1].sum(), leaves) for y in (expected, found)
        )
        torch.testing.assert_close(got, wanted)
    assert compiled.statistics().traces == 2
    assert not tripwire.explain(compiled).closed


@pytest.mark.parametrize("name", TAGGERS)
def test_recurrent_layers_run_at_all_lengths(name) -> None:
    net = TAGGERS[name]().eval()
    compiled = tripwire.compile(net, backend="aot_eager")
    with torch.no_grad():
        for length in LENGTHS:
            x = torch.randn((3, length, 4) if net.batch_first else (length, 3, 4))
            torch.testing.assert_close(compiled(x), net(x))
    assert compiled.statistics().traces == 2


def test_an_lstm_that_trains_runs_as_it_is_where_compilers_change_its_states(monkeypatch) -> None:
    """As with torch 2.11."""
    monkeypatch.setattr(cuts, "LSTM_KEEPS_ITS_SHAPE", False)
    net = Tagger(nn.LSTM)
    compiled = tripwire.compile(net, backend="aot_eager")
    x = torch.randn(2, 5, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), net(x))
    assert "a dimension more" in str(tripwire.explain(compiled))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
        torch.testing.assert_close(compiled(x), net(x))
    assert compiled.statistics().hits == 3


def test_under_fullgraph_each_length_has_code_of_its_own() -> None:
    net = Tagger(nn.GRU)
    compiled = tripwire.compile(net, backend="aot_eager", fullgraph=True)
    for length in (5, 9, 5, 9, 7):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(compiled(x), net(x))
    assert compiled.statistics().traces == 3
    assert any("by gru: " in one for one in tripwire.explain(compiled).closed)


head = nn.Linear(8, 6)
LOSSES = {
    "mean": lambda *given: functional.ctc_loss(*given),
    "each": lambda *given: functional.ctc_loss(*given, reduction="none"),
    "module": lambda *given: nn.CTCLoss(zero_infinity=True)(*given) * given[0].shape[0],
    "torch's own": lambda *given: torch.ctc_loss(*given, 0, 2, True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_ctc_loss_leaves_lengths_open(name, backend) -> None:
    def loss(x, labels, lengths, counts):
        return LOSSES[name](head(x).log_softmax(-1), labels, lengths, counts)

    compiled = tripwire.compile(loss, backend=backend)
    for turn, length in enumerate(LENGTHS):
        batch, count = 2 + turn % 3, 2 + length % 4
        x = torch.randn(10 + length, batch, 8, requires_grad=True)
        labels = torch.randint(1, 6, (batch, count))
        given = x, labels, torch.full((batch,), 10 + length), torch.full((batch,), count)
        expected, found = loss(*given), compiled(*given)
        check_same(expected, found)
        wanted, got = (torch.autograd.grad(y.sum(), x) for y in (expected, found))
        torch.testing.assert_close(got, wanted)
    assert compiled.statistics().traces <= 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("lengths", [(6, 6, 6, 6), (5, 7, 8, 9)])
def test_dropout_between_recurrent_layers_is_drawn(lengths, cell, backend) -> None:
    """torch's own decomposition leaves it out."""
    torch.manual_seed(0)
    net = Tagger(cell, num_layers=2, dropout=0.5)
    compiled = tripwire.compile(net, backend=backend)
    for length in lengths:
        x, found = torch.randn(3, length, 4), []
        for call in (net, compiled):
            torch.manual_seed(length)
            found.append((call(x), torch.rand(2)))
        torch.testing.assert_close(found[1], found[0])
    net.eval()
    check_same(net(x), compiled(x))
    assert compiled.statistics().hits >= 2
