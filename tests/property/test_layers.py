"""Random numbers that no name tells of: in layers, initialisations, distributions and functions.

What a call decides by them may be another thing each time; compilers
must draw what plain code does.
"""

from __future__ import annotations

import pytest
from property.twins import Call, Do, Figures, Scenario, check

BEHIND = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
ONE = "new(4), new(4)"

NOISE = (
    "class Noise(torch.autograd.Function):\n    @staticmethod\n"
    "    def forward(ctx, t): return t + torch.randn_like(t)\n    @staticmethod\n"
    "    def backward(ctx, g): return g\n"
)
# A setup, and something that is drawn.
DRAWN = {
    "attention": (
        "net = nn.MultiheadAttention(4, 2, dropout=0.5)",
        "net(x[None], x[None], y[None])[0].sum()",
    ),
    "recurrent layers": ("net = nn.GRU(4, 4, 2, dropout=0.5)", "net(x[None])[0].sum()"),
    "a beta distribution": ("", "torch.distributions.Beta(1.0, 1.0).sample() - 0.5"),
    "a Dirichlet distribution": ("", "torch.distributions.Dirichlet(torch.ones(4)).sample()[0]"),
    "a custom function": (NOISE, "Noise.apply(torch.zeros(4)).sum()"),
    "an initialisation": ("net = nn.Linear(4, 4)", "nn.init.kaiming_uniform_(net.weight).sum()"),
    "one with a name": ("net = nn.Linear(4, 4)", "nn.init.uniform_(net.weight, -1, 1).sum()"),
    "a layer's own": ("net = nn.Linear(4, 4)", "(net.reset_parameters(), net.weight.sum())[1]"),
}


def _play(setup: str, body: str, backend: str, times: int = 8) -> None:
    program = f"torch.manual_seed(0)\n{setup}\ndef call(x, y):\n    {body}\n"
    check(Scenario(program, (Call(ONE, times=times),), backend))


@BEHIND
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_unseen_decides_anew_on_each_call(backend, name) -> None:
    setup, drawn = DRAWN[name]
    chosen = f"drawn = {drawn}\n    if drawn > 0: x = x + 1"
    _play(setup, f"{chosen}\n    return x + drawn.detach() + torch.rand(4)", backend)


@BEHIND
@pytest.mark.parametrize("name", DRAWN)
def test_a_number_that_is_drawn_unseen_is_another_one_on_each_call(backend, name) -> None:
    setup, drawn = DRAWN[name]
    _play(setup, f"k = ({drawn}).item()\n    return x * k + (1 - k) * y", backend)


@BEHIND
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_unseen_and_not_used_is_drawn(backend, name) -> None:
    setup, drawn = DRAWN[name]
    _play(setup, f"{drawn}\n    return x + torch.rand(4)", backend)


# torch's compilers take these layers apart, and leave the dropout between them out.
RECURRENT = {
    "LSTM": "nn.LSTM(4, 4, 2, dropout=0.5)",
    "GRU": "nn.GRU(4, 4, 2, dropout=0.5, bidirectional=True)",
    "RNN": "nn.RNN(4, 4, 3, dropout=0.5, batch_first=True)",
    "ReLU": "nn.RNN(4, 4, 2, dropout=0.25, nonlinearity='relu')",
}


@pytest.mark.parametrize("layers", RECURRENT)
@pytest.mark.parametrize("arguments", [ONE, "new(4).requires_grad_(), new(4)"])
def test_recurrent_layers_keep_their_dropout_behind_compilers(layers, arguments) -> None:
    program = (
        f"torch.manual_seed(0)\nnet = {RECURRENT[layers]}\n"
        "def call(x, y):\n    return net(x.reshape(1, 1, 4))[0] + torch.rand(1)\n"
    )
    call, figures = Call(arguments, times=3), Figures()
    steps = (call, Do("net.eval()"), call, Do("net.train()"), call, Do("net.dropout = 0.0"), call)
    check(Scenario(program, steps, "aot_eager"), figures)
    assert figures.hits > 5
