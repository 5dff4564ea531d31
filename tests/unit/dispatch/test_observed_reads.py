"""What no line of code names is read all the same; what no run reads is no read."""

from __future__ import annotations

import copy
import operator
import random
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tripwire
from tripwire.reading.reader import Reader, Twin

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def named() -> nn.Sequential:
    """As torchvision's models are made."""
    layers = OrderedDict(conv=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), act=nn.LeakyReLU(0.1))
    return nn.Sequential(layers).eval()


class Subclassed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(OrderedDict(conv=nn.Linear(4, 4), act=nn.LeakyReLU(0.1)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(OrderedDict(block=Subclassed(), last=named()))

    def forward(self, x):
        return self.features(x).flatten(1)

    @property
    def conv(self):
        return self.features.block.conv

    @property
    def act(self):
        return self.features.block.act


class ByChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Linear(4, 4), nn.LeakyReLU(0.1)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


class ByDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"conv": nn.Linear(4, 4), "act": nn.LeakyReLU(0.1)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x

    @property
    def conv(self):
        return self.layers["conv"]

    @property
    def act(self):
        return self.layers["act"]


class ByComputedName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step0, self.step1 = nn.Linear(4, 4), nn.LeakyReLU(0.1)

    def forward(self, x):
        for index in range(2):
            x = getattr(self, f"step{index}")(x)
        return x

    @property
    def conv(self):
        return self.step0

    @property
    def act(self):
        return self.step1


class ByTable(ByChildren):
    def forward(self, x):
        for name in sorted(self._modules, reverse=True):
            x = self._modules[name](x)
        return x


class ByGetter(ByChildren):
    def forward(self, x):
        for name in ("conv", "act"):
            x = operator.attrgetter(name)(self)(x)
        return x


MODELS = [named, Subclassed, Nested, ByChildren, ByDict, ByComputedName, ByTable, ByGetter]


def replace_bias(model) -> None:
    model.conv.bias = nn.Parameter(torch.full((4,), 2.0))


def add_hook(model) -> None:
    model.conv.register_forward_hook(lambda module, args, output: output * 3)


def add_pre_hook(model) -> None:
    model.conv.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def change_slope(model) -> None:
    model.act.negative_slope = 0.7


def replace_forward(model) -> None:
    model.act.forward = lambda x: x - 1


def drop_bias(model) -> None:
    model.conv.bias = None


WRITES = [replace_bias, add_hook, add_pre_hook, change_slope, replace_forward, drop_bias]


def check_follows(model, write, backend) -> None:
    torch.manual_seed(0)
    plain = model()
    twin = copy.deepcopy(plain)
    compiled = tripwire.compile(twin, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), plain(X))
    write(plain), write(twin)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), plain(X))
    statistics = compiled.statistics()
    is_taken = write is replace_bias and model is not ByGetter  # whose names are computed
    traces = 1 if is_taken else 2
    assert (statistics.traces, statistics.hits) == (traces, 6 - traces)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_write_to_a_child_that_no_line_names_is_followed(model, write, backend) -> None:
    check_follows(model, write, backend)


@pytest.mark.parametrize(
    "model",
    [MODELS[0], *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS[1:])],
    ids=lambda model: model.__name__,
)
def test_it_is_followed_behind_inductor(model) -> None:
    check_follows(model, replace_bias, "inductor")


# --- what isn't read ---

observed = pytest.mark.skipif(Reader is Twin, reason="the twin tells by names, and too much")


def check_survives(fn, args, write) -> None:
    compiled = tripwire.compile(fn, backend="eager", fullgraph=True)
    compiled(*args)
    write()
    compiled(*args)
    compiled(*args)
    assert (compiled.statistics().traces, compiled.statistics().hits) == (1, 2)


class Config:
    def __init__(self) -> None:
        self.scale, self.other = 2.0, 3.0


class Pair:
    def __init__(self) -> None:
        self.first, self.second = Config(), Config()


def test_names_in_a_branch_that_did_not_run_refuse_nothing() -> None:
    def augment(x, aug=False):
        if aug:
            x = x * np.sqrt(2) * random.random()
        return x + 1

    check_survives(augment, (X,), lambda: None)


def test_an_attribute_of_another_object_under_the_same_name_is_no_read() -> None:
    pair = Pair()

    def call(x):
        return x * pair.first.scale

    check_survives(call, (X,), lambda: setattr(pair.second, "scale", 5.0))


@observed
def test_an_attribute_in_a_branch_that_did_not_run_is_no_read() -> None:
    config = Config()

    def call(x):
        return x * config.scale if x.dim() == 2 else x * config.other

    check_survives(call, (X,), lambda: setattr(config, "other", 5.0))


def test_a_child_that_was_not_called_is_no_read() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    holder = SimpleNamespace(model=model, active="a")

    def call(x):
        return holder.model[holder.active](x)

    check_survives(call, (X,), lambda: setattr(model["b"], "in_features", 7))


@observed
def test_hooks_of_a_module_that_was_not_called_are_no_read() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return x @ self.layer.weight

    tied = Tied()
    check_survives(tied, (X,), lambda: tied.layer.register_forward_hook(lambda *_: None))


@observed
def test_an_attribute_that_the_run_makes_itself_is_no_read() -> None:
    class Keeps:
        last: object = None

        def __call__(self, x):
            self.last = Config()
            return x * self.last.scale

    keeps = Keeps()
    check_survives(keeps, (X,), lambda: setattr(keeps.last, "scale", 9.0))
