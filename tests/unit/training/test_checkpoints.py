"""Activation checkpointing around compiled code, and inside it."""

from __future__ import annotations

import copy

import pytest
import torch
from support import check_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from unit.training.pairs import BACKENDS, WIDTH, Mlp, Pair, square

import tripwire
from tripwire.tracing.hooks import find_checkpoint

backends = pytest.mark.parametrize("backend", BACKENDS)
both = pytest.mark.parametrize("reentrant", [False, True])


@backends
@both
def test_a_compiled_module_in_a_checkpointed_region(backend, reentrant) -> None:
    def loss(call, x):
        return checkpoint(call, x, use_reentrant=reentrant).square().mean()

    pair = Pair(Mlp, backend)
    for _ in range(4):
        pair.step(loss)
    pair.evaluate()
    pair.step(loss)
    pair.step()
    found = pair.compiled.statistics()
    assert found.refusals == 0
    assert found.traces == (3 if reentrant else 2)  # re-entrant: the first run is without grad
    assert found.hits >= 8


@backends
def test_one_region_with_several_calls_some_of_them_traced(backend) -> None:
    """A region that was traced in part runs again as it ran before."""

    def loss(call, x):
        def region(x):
            y = call(x).tanh()
            return call(y) * 2  # no leaf: it is traced in the second step

        return checkpoint(region, x, use_reentrant=False).square().mean()

    pair = Pair(Mlp, backend)
    for _ in range(3):
        pair.step(loss)
    pair.shape = (5, *pair.shape[1:])
    for _ in range(3):
        pair.step(loss)
    assert pair.compiled.statistics().traces == 4
    assert pair.compiled.statistics().hits >= 10


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dropout_in_a_checkpointed_region_draws_the_same_twice(backend) -> None:
    def loss(call, x):
        return checkpoint(call, x, use_reentrant=False).square().mean()

    pair = Pair(lambda: Mlp(dropout=0.4), backend)
    for _ in range(4):
        pair.step(loss)
    assert pair.compiled.statistics().traces == 1


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(dropout), Mlp(dropout)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@backends
def test_checkpointed_blocks_inside_train_as_plain_ones(backend) -> None:
    dropout = 0.0 if backend == "inductor" else 0.3
    pair = Pair(lambda: Checkpointed(False, dropout), backend)
    pair.play()
    pair.check(traces=2, hits=4)


def test_re_entrant_checkpointing_inside_is_refused_and_the_blocks_are_compiled(caplog) -> None:
    pair = Pair(lambda: Checkpointed(True), "aot_eager")
    for _ in range(8):
        pair.step()
    assert pair.compiled.statistics().hits == 0
    assert "[reentrant-checkpoint]" in caplog.text
    blocks = pair.sides[0].model.blocks
    assert all(block._compiled_call_impl.statistics().hits >= 2 for block in blocks)


class Holding(nn.Module):
    """A part that may be compiled on its own, in a checkpointed region inside or outside."""

    def __init__(self, part, inside) -> None:
        super().__init__()
        self.part = part
        self.inside = inside

    def forward(self, x):
        if self.inside:
            return checkpoint(self.part, x, use_reentrant=False)
        return self.part(x)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_parts_of_what_was_traced_in_a_region_run_again_as_they_ran(
    backend, inside
) -> None:
    torch.manual_seed(0)
    plain = Holding(Mlp(), inside)
    model = copy.deepcopy(plain)
    model.part = tripwire.compile(model.part, backend=backend)
    x = torch.randn(3, WIDTH)
    for call in (model, model, tripwire.compile(model, backend=backend)):
        for _ in range(3):
            gradients = []
            for net in (plain, call):
                net.zero_grad()
                checkpoint(net, x, use_reentrant=False).square().sum().backward()
                gradients.append([parameter.grad for parameter in net.parameters()])
            torch.testing.assert_close(gradients[1], gradients[0])


class Writing(nn.Module):
    """A checkpointed part that writes in some way, and a counter outside of it."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("sums", torch.zeros(4))
        self.shapes: list[torch.Size] = []
        self.inner = self.calls = 0

    def part(self, x, given):
        return self.linear(self.write(self, x, given)).sin()

    def forward(self, x):
        self.calls += 1
        given = x.detach() + 1
        result = checkpoint(lambda x: self.part(x, given), x, use_reentrant=False)
        return result, given


def _count(net, x, given):
    net.inner += 1
    return x


def _append(net, x, given):
    net.shapes.append(x.shape)
    return x


def _add_to_a_view(net, x, given):
    net.sums[0].add_(1)
    return x


def _double_what_was_made_before(net, x, given):
    given.mul_(2)
    return x


def _normalise(net, x, given):
    return net.norm(x)


def _write_to_its_own(net, x, given):
    y = x.sin()
    y[0].zero_()
    return y.cos()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("write", "hits"),
    [
        (_count, 0),
        (_append, 0),
        (_add_to_a_view, 0),
        (_double_what_was_made_before, 0),
        (_normalise, 0),
        (_write_to_its_own, 5),
    ],
)
def test_what_a_checkpointed_part_writes_is_written_as_often_as_in_plain_code(
    write, hits, backend
) -> None:
    plain = Writing(write)
    model = copy.deepcopy(plain)
    compiled = tripwire.compile(model, backend=backend)
    for seed in range(6):  # after some refusals the submodules are compiled
        others = []
        for call in (plain, compiled):
            torch.manual_seed(seed)
            result, given = call(torch.randn(5, 4, requires_grad=True))
            result.square().sum().backward()
            others.append(given)
        check_same(*others)
        assert (model.inner, model.shapes, model.calls) == (plain.inner, plain.shapes, plain.calls)
        check_same(dict(plain.state_dict()), dict(model.state_dict()))
    assert compiled.statistics().hits == hits


def test_the_frame_of_a_region_is_found_only_while_it_runs_first() -> None:
    found = []

    def region(x):
        found.append(find_checkpoint())
        return x.sin()

    assert find_checkpoint() is None
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(region, x, use_reentrant=False)
    assert find_checkpoint() is None
    y.sum().backward()
    assert type(found[0]).__name__ == "_CheckpointFrame"
    assert found[1:] == [None]


def test_other_hooks_on_saved_tensors_are_no_checkpoint() -> None:
    compiled = tripwire.compile(Mlp(), backend="aot_eager")
    packed = []
    for step in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            assert find_checkpoint() is None
            square(compiled, torch.ones(2, 6)).backward()
    assert compiled.statistics().hits == 2
    assert packed
