"""What a graph repeats is handed over once, and computes what it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import tripwire
from tripwire.backends import blocks
from tripwire.backends.blocks import fold_blocks
from tripwire.backends.handover import handing_over

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # Inductor adds up in another order


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "LEAST_NODES", 2)
    torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, size=8, bias=True, gain=1.0):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size, bias=bias)
        self.down = nn.Linear(2 * size, size, bias=bias)
        self.gain = gain

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x)))) * self.gain


def fold(call, *args):
    """How often a block is called in a call's graph, and how many nodes are left of how many."""
    caught = []

    def catch(module, inputs):
        caught.append((module, inputs))
        return module.forward

    torch.manual_seed(0)
    wanted = call(*args)
    torch.manual_seed(0)
    tripwire.compile(call, backend=catch, fullgraph=True)(*args)
    ((module, inputs),) = caught
    before = module.code
    with handing_over(module, [], shape_env=ShapeEnv()) as (copied, _):
        fold_blocks(copied, inputs)
    assert module.code == before
    torch.manual_seed(0)
    (result,) = copied(*inputs)
    torch.testing.assert_close(result, wanted)
    folded = [node for node in copied.graph.nodes if "invoke_subgraph" in str(node.target)]
    return len(folded), len(copied.graph.nodes), len(module.graph.nodes)


@torch.no_grad()
def test_the_layers_of_a_model_become_one_block() -> None:
    model = nn.Sequential(*(Layer() for _ in range(10)))
    calls, after, before = fold(model, torch.randn(3, 8))
    assert calls == 9  # one layer's nodes lie before the first product, and after the last block
    assert after < before


@torch.no_grad()
def test_a_block_begins_with_a_product() -> None:
    caught = []

    def catch(module, inputs):
        with handing_over(module, [], shape_env=ShapeEnv()) as (copied, _):
            fold_blocks(copied, inputs)
        caught.append(copied)
        return module.forward

    model = nn.Sequential(*(Layer() for _ in range(10)))
    tripwire.compile(model, backend=catch)(torch.randn(3, 8))
    first = next(n for n in caught[0].repeated.graph.nodes if n.op != "placeholder")
    assert first.target is F.linear or "linear" in str(first.target)


@torch.no_grad()
def test_layers_of_two_kinds_by_turns_are_blocks_of_two() -> None:
    model = nn.Sequential(*(Layer(gain=1.0 + i % 2) for i in range(10)))
    calls, _, _ = fold(model, torch.randn(3, 8))
    assert calls == 4


@torch.no_grad()
def test_a_loop_needs_no_modules() -> None:
    weights = [torch.randn(8, 8) for _ in range(6)]

    def call(x):
        for weight in weights:
            x = torch.tanh(x @ weight) + 1
        return x

    assert fold(call, torch.randn(3, 8))[0] == 6


@torch.no_grad()
def test_one_layer_that_is_not_like_the_others_stays() -> None:
    model = nn.Sequential(*(Layer(bias=i != 7) for i in range(8)), Layer(gain=3.0))
    calls, _, _ = fold(model, torch.randn(3, 8))
    assert calls == 7


@torch.no_grad()
def test_a_value_that_only_one_block_hands_on_is_returned() -> None:
    layers = nn.ModuleList(Layer() for _ in range(8))

    def call(x):
        kept = None
        for i, layer in enumerate(layers):
            h = layer.up(layer.norm(x))
            kept = h if i == 3 else kept
            x = x + layer.down(F.silu(h))
        return x + kept.sum()

    assert fold(call, torch.randn(3, 8))[0] >= 7


def make_alternating(low, high):
    weights = [torch.randn(8, 8) for _ in range(8)]

    def call(x):
        for i, weight in enumerate(weights):
            x = low(x @ weight) if i % 2 else high(x @ weight)
        return x

    return call


BOUND = torch.zeros(8)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (lambda x: x.clamp(min=BOUND, max=None) + 1, lambda x: x.clamp(min=None, max=BOUND) + 1),
        (
            lambda x: F.layer_norm(x, (8,), BOUND, None),
            lambda x: F.layer_norm(x, (8,), None, BOUND),
        ),
        (lambda x: x.add(BOUND, alpha=2) + 1, lambda x: x.add(BOUND, alpha=3) + 1),
    ],
    ids=["clamp", "layer_norm", "alpha"],
)
@torch.no_grad()
def test_layers_that_differ_in_one_argument_are_not_alike(low, high) -> None:
    calls, _, _ = fold(make_alternating(low, high), torch.randn(3, 8))
    assert calls in (0, 3, 4)  # blocks of two layers, or none


def returns_parts_of_one_tensor(x):
    a = b = x
    for _ in range(8):
        both = torch.cat([a @ torch.ones(8, 8), b])
        a, b = both[:3], both[3:]
    return a + b


@torch.no_grad()
def test_results_that_share_memory_are_not_folded() -> None:
    assert fold(returns_parts_of_one_tensor, torch.randn(3, 8))[0] == 0


@pytest.mark.parametrize(("offset", "calls"), [(4, 8), (1, 0)])
@torch.no_grad()
def test_on_a_gpu_blocks_find_their_operands_at_like_places(monkeypatch, offset, calls) -> None:
    monkeypatch.setattr(blocks, "_needs_alignment", lambda device: True)
    flat = torch.randn(8 * 68)
    weights = [flat[i * (64 + offset) :][:64].view(8, 8) for i in range(8)]

    def call(x):
        for weight in weights:
            x = torch.tanh(x @ weight) + 1
        return x

    assert fold(call, torch.randn(3, 8))[0] == calls


@torch.no_grad()
def test_values_with_a_graph_of_autograds_stay_outside() -> None:
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(8)]

    def call(x):
        with torch.enable_grad():
            for weight in weights:
                x = torch.tanh(x @ weight) + 1
        return x

    assert fold(call, torch.randn(3, 8))[0] == 0


@torch.no_grad()
def test_blocks_on_two_devices_are_not_folded() -> None:
    def call(x):
        for _ in range(8):
            x = torch.tanh(x @ torch.eye(8))
            torch.ones(2, device="meta")
        return x

    assert fold(call, torch.randn(3, 8))[0] == 0


def make_counting(n):
    layers = nn.ModuleList(Layer() for _ in range(n))

    def call(x, count):
        for layer in layers:
            x = layer(x)
            count[0].add_(1)
        return x

    return call


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (nn.Sequential(*(Layer() for _ in range(2))), ()),
        (lambda x: [x := x.sin() * 2 for _ in range(20)][-1], ()),  # all of it can be fused
        (lambda x: [x := F.dropout(x @ torch.eye(8)) for _ in range(9)][-1], ()),
        (make_counting(9), (torch.zeros(1),)),
        (
            lambda x: [x := F.conv1d(x, torch.ones(3, 3, 1)) @ torch.eye(8) for _ in range(9)][-1],
            (),
        ),
    ],
    ids=["two layers", "no product", "random", "writes", "layouts"],
)
def test_what_is_left_alone(call, args) -> None:
    with torch.no_grad():
        assert fold(call, torch.randn(3, 8), *args)[0] == 0


# --- with Inductor -----------------------------------------------------------------------------


@pytest.fixture
def folded(monkeypatch):
    """What `fold_blocks` answered, each time that Inductor was asked for code."""
    answers = []
    inductor = pytest.importorskip("tripwire.backends.inductor")

    def note(module, inputs):
        answers.append(fold_blocks(module, inputs))
        return answers[-1]

    monkeypatch.setattr(inductor, "fold_blocks", note)
    return answers


def check_twice(model, x):
    compiled = tripwire.compile(model, backend="inductor", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), **CLOSE)


@torch.no_grad()
def test_inductor_compiles_blocks(folded) -> None:
    check_twice(nn.Sequential(*(Layer() for _ in range(6))), torch.randn(3, 8))
    assert folded == [True]


@torch.no_grad()
def test_what_inductor_makes_of_blocks_is_kept(folded, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRIPWIRE_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(*(Layer(12) for _ in range(6)))
    for _ in range(2):
        check_twice(model, torch.randn(3, 12))
    assert folded == [True]  # the second was read
    assert len(list(tmp_path.rglob("*.bin"))) == 1


@torch.no_grad()
def test_what_inductor_cannot_compile_in_blocks_is_compiled_whole(folded, monkeypatch) -> None:
    from torch._inductor import compile_fx as inductor

    whole = inductor.compile_fx

    def fail(module, *args, **kwargs):
        if hasattr(module, "repeated"):
            raise RuntimeError("no blocks, please")
        return whole(module, *args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx", fail)
    check_twice(nn.Sequential(*(Layer() for _ in range(6))), torch.randn(3, 8))
    assert folded == [True]


def test_nothing_is_folded_where_gradients_are_needed(folded) -> None:
    model = nn.Sequential(*(Layer() for _ in range(4)))
    compiled = tripwire.compile(model, backend="inductor", fullgraph=True)
    gradients = []
    for call in (compiled, compiled, model):
        x = torch.linspace(0, 1, 24).view(3, 8).requires_grad_()
        model.zero_grad()
        call(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(gradients[1], gradients[2], **CLOSE)
    assert folded == []
