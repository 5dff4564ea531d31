"""Twins: a compiled model and a plain copy of it that is written to alike.

Every write is done to both, then both are called. A write that changes what a model computes
costs one trace; taking it back costs none, for the retired entry comes back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models.architectures import ARCHITECTURES
from models.handmade import HANDMADE
from support import check_same, tensors_of
from torch import nn

import tripwire

BY_NAME = {row.name: row for row in (*ARCHITECTURES, *HANDMADE)}
Inputs = dict[str, Any]

# Not compiled whole: the slug, and why. Their results are compared all the same.
REFUSED: dict[str, tuple[str, str]] = {
    "reformer": ("opaque-object", "layers are handed to a custom autograd function"),
    "vilt": ("tensor-branch", "patches are chosen at random, and then counted"),
}
# Which experts are hit, and by how many tokens, comes from deep inside: each outcome is a trace.
BRANCHES = frozenset({"switch-transformers", "jetmoe"})
# Every layer draws a number and compares it in Python, while training.
DROPS_LAYERS = frozenset(
    {"opt", "bart", "marian", "pegasus", "whisper", "wav2vec2", "hubert", "wavlm"}
    | {"xglm", "mbart", "m2m-100", "blenderbot", "led", "speech-to-text", "blip-2"}
    | {"wav2vec2-masked", "unispeech-sat", "sew", "data2vec-audio"}
)
# These draw with NumPy, while training.
MASKS_BY_NUMPY = frozenset(
    {"wav2vec2", "hubert", "wavlm", "wav2vec2-masked", "unispeech-sat", "sew", "data2vec-audio"}
)
# While training, Python asks deep inside whether values are finite.
ASKS_DEEPLY = frozenset({"ibert", "detr", "conditional-detr", "deformable-detr"})
# The first call leaves something behind: hooks, tables of positions, weights in another scale.
SETTLES = frozenset(
    {"llava", "funnel", "rwkv", "recurrent-gemma", "qwen2-vl", "qwen2.5-vl", "clipseg"}
)


class Twins:
    """A compiled model, the model itself, and a plain copy that is written to alike."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[Any], object] = nn.Module.eval,
        *,
        hooks: bool = False,
        whole: bool | None = None,
    ) -> None:
        architecture = BY_NAME[name]
        self.inputs = architecture.inputs
        self.is_whole = name not in REFUSED.keys() | BRANCHES if whole is None else whole
        self.model: Any = architecture.build()
        prepare(self.model)
        with torch.no_grad():
            if name in SETTLES:
                self.model(**self.inputs())
            if hooks and hasattr(self.model, "config"):
                with contextlib.suppress(TypeError):  # some don't take this
                    self.model(**self.inputs(), output_hidden_states=True)
        self.plain: Any = copy.deepcopy(self.model)
        self.compiled: Any = tripwire.compile(self.model, backend="eager", fullgraph=self.is_whole)

    def write(self, change: Callable[[Any], object]) -> None:
        """Change both models alike."""
        with torch.no_grad():
            change(self.plain)
            change(self.model)

    def check(self, inputs: Inputs | None = None, **more: Any) -> None:
        """Call both; they return the same. What isn't whole needs calls to settle."""
        inputs = (self.inputs() if inputs is None else inputs) | more
        for _ in range(1 if self.is_whole else 4):
            results = []
            for model in (self.plain, self.compiled):
                torch.manual_seed(0)
                with torch.no_grad():
                    results.append(model(**copy.deepcopy(inputs)))
            check_same(*results)

    @property
    def traces(self) -> int:
        return int(self.compiled.statistics().traces)

    def check_traces(self, at_most: int) -> None:
        if self.is_whole:
            assert self.traces <= at_most, self.compiled.statistics().causes


# --- writes ---


def _modules(model: nn.Module, cls: type[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Submodules of a class, with the modules that hold them, from the middle on."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is cls
    ]
    yield from found[len(found) // 2 :]
    yield from found[: len(found) // 2]


def _floats(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Numbers that a forward may read: an epsilon, a scale."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is float and "drop" not in name and value != 0:
                yield module, name


def are_equal(before: object, after: object) -> bool:
    left, right = tensors_of(before), tensors_of(after)
    return len(left) == len(right) and all(map(torch.equal, left, right))


Places = tuple[Callable[[nn.Module], Iterator[Any]], Any]  # where to write, and how


class Change:
    """One of many places to write to: the first at which a write changes the results."""

    def __init__(self, places: Callable[[nn.Module], Iterator[Any]], write: Any) -> None:
        self._places = places
        self._write = write
        self._index = 0

    def choose(self, twins: Twins) -> bool:
        """Whether there is such a place."""
        plain = copy.deepcopy(twins.plain)
        with torch.no_grad():
            before = plain(**twins.inputs())
            for self._index in range(sum(1 for _ in self._places(plain))):
                trial = copy.deepcopy(plain)
                self(trial)
                try:
                    after = trial(**twins.inputs())
                except (AttributeError, RuntimeError, TypeError):  # it can't take this write
                    continue
                if type(after) is not type(before) or not are_equal(before, after):
                    return True
        return False

    def __call__(self, model: nn.Module) -> object:
        place = list(self._places(model))[self._index]
        return self._write(*place)


def _write_float(module: nn.Module, name: str) -> Callable[[], None]:
    value = getattr(module, name)
    setattr(module, name, value * 4)
    return lambda: setattr(module, name, value)


def _replace_parameter(parent: nn.Module, name: str) -> Callable[[], None]:
    linear = getattr(parent, name)
    before = linear.weight
    linear.weight = nn.Parameter(before.detach() * 1.5)

    def undo() -> None:
        linear.weight = before

    return undo


class Adapter(nn.Module):
    """A linear layer, and a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = 0.5
        for weight in self.parameters():
            if weight is not base.weight and weight is not base.bias:
                weight.data.copy_(torch.linspace(-0.1, 0.2, weight.numel()).view_as(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) * self.scale


def _insert_adapter(parent: nn.Module, name: str) -> Callable[[], None]:
    base = getattr(parent, name)
    setattr(parent, name, Adapter(base).eval())
    return lambda: setattr(parent, name, base)


def _double(module: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
    return result * 2


def _add_hook(parent: nn.Module, name: str) -> Callable[[], None]:
    return getattr(parent, name).register_forward_hook(_double).remove


def _add_pre_hook(parent: nn.Module, name: str) -> Callable[[], None]:
    def triple(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        return args[0] * 3

    return getattr(parent, name).register_forward_pre_hook(triple).remove


def _replace_forward(parent: nn.Module, name: str) -> Callable[[], None]:
    module = getattr(parent, name)
    plain = type(module).forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) - 1

    module.forward = types.MethodType(forward, module)

    def undo() -> None:
        del module.forward

    return undo


def _configs(model: nn.Module) -> Iterator[tuple[nn.Module]]:
    if hasattr(model, "config"):
        yield (model,)


def _ask_for_hidden_states(model: Any) -> Callable[[], None]:
    before = model.config.output_hidden_states
    model.config.output_hidden_states = True
    return lambda: setattr(model.config, "output_hidden_states", before)


def _return_tuples(model: Any) -> Callable[[], None]:
    before = model.config.return_dict
    model.config.return_dict = False
    return lambda: setattr(model.config, "return_dict", before)


_LINEARS = functools.partial(_modules, cls=nn.Linear)

WRITES: dict[str, Places] = {
    "a number that forward reads": (_floats, _write_float),
    "a config that asks for hidden states": (_configs, _ask_for_hidden_states),
    "a config that asks for tuples": (_configs, _return_tuples),
    "a parameter replaced": (_LINEARS, _replace_parameter),
    "an adapter": (_LINEARS, _insert_adapter),
    "a forward hook": (_LINEARS, _add_hook),
    "a forward pre-hook": (_LINEARS, _add_pre_hook),
    "a forward of one module's own": (_LINEARS, _replace_forward),
}


def lists_of(model: nn.Module) -> Iterator[tuple[nn.ModuleList]]:
    yield from ((m,) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)


def _swap_layers(layers: nn.ModuleList) -> Callable[[], None]:
    def swap() -> None:
        first, second = layers[0], layers[1]
        layers[0], layers[1] = second, first

    swap()
    return swap


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                yield module, name


def _replace_buffer(module: nn.Module, name: str) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, before * 1.5 + 1)
    return lambda: setattr(module, name, before)


def _subclass(parent: nn.Module, name: str) -> Callable[[], None]:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    module = getattr(parent, name)
    module.__class__ = Doubling

    def undo() -> None:
        module.__class__ = nn.Linear

    return undo


def freeze(model: nn.Module) -> Callable[[], None]:
    wanted = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(False)

    def undo() -> None:
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)

    return undo


MORE_WRITES: dict[str, Places] = {
    "layers swapped": (lists_of, _swap_layers),
    "a buffer replaced": (_buffers, _replace_buffer),
    "a class assigned": (_LINEARS, _subclass),
}


def check_write(twins: Twins, change: Change) -> bool:
    """Write, call, take it back, call; whether the model has a place for the write.

    It costs one trace, where the results are new to the callable.
    """
    twins.check()
    if not change.choose(twins):
        return False
    before = twins.traces
    undo: list[Callable[[], None]] = []
    twins.write(lambda model: undo.append(change(model)))
    twins.check()
    twins.check(twins.inputs(seed=1))
    twins.check_traces(before + 1)
    for step in undo:
        step()
    twins.check()
    twins.check(twins.inputs(seed=1))
    twins.check_traces(before + 1)
    return True


def check_writes(name: str, tables: dict[str, Places]) -> set[str]:
    """One write after the other, on one model; those that it has a place for."""
    twins = Twins(name, hooks=True)
    return {what for what, table in tables.items() if check_write(twins, Change(*table))}


def check_in_place(name: str) -> None:
    """Parameters changed in place cost no trace."""

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(1.25)

    twins = Twins(name)
    twins.check()
    with torch.no_grad():
        before = copy.deepcopy(twins.plain)(**twins.inputs())
        twins.write(scale)
        assert not are_equal(before, copy.deepcopy(twins.plain)(**twins.inputs()))
    twins.check()
    twins.check_traces(1)


def check_modes(name: str) -> None:
    """Training and evaluation have an entry each."""
    refused = DROPS_LAYERS | ASKS_DEEPLY | REFUSED.keys() | BRANCHES
    refused |= {"rwkv"}  # which rescales its weights
    whole = name not in refused
    twins = Twins(name, silence, whole=whole)
    twins.check()
    for mode in (True, True, False, False):
        twins.write(lambda model, mode=mode: model.train(mode))
        twins.check()
    twins.check_traces(2)


def check_three_calls(name: str) -> None:
    """One trace, two hits."""
    twins = Twins(name, whole=True)
    for seed in range(3):
        twins.check(twins.inputs(seed=seed))
    statistics = twins.compiled.statistics()
    assert (statistics.traces, statistics.hits, statistics.entries) == (1, 2, 1)


def check_gradients(name: str) -> None:
    """Of parameters and of float inputs, to the bit, while an optimizer steps."""
    twins = Twins(name)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twins.plain, twins.model)]
    for seed in range(3):
        plain = train(twins.plain, twins.plain, twins.inputs(seed=seed))
        compiled = train(twins.compiled, twins.model, twins.inputs(seed=seed))
        assert any(gradient is not None for gradient in plain)
        for left, right in zip(plain, compiled, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                assert torch.equal(left, right)
        for step in steps:
            step.step()
    twins.check_traces(1)


# --- training ---


_RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")


def silence(model: Any) -> None:
    """Take all that is random out of training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if type(value) is float and any(word in name for word in _RANDOM):
                setattr(module, name, 0.0)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in {id(config): config for config in configs}.values():
        for name, value in list(vars(config).items()):
            if type(value) is float and any(word in name for word in _RANDOM):
                setattr(config, name, 0.0)
        if hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False


def train(call: Any, model: nn.Module, inputs: Inputs) -> list[torch.Tensor | None]:
    """The gradients of a loss with respect to the parameters and to inputs that are floats."""
    model.zero_grad(set_to_none=True)
    leaves = [t.requires_grad_() for t in inputs.values() if t.is_floating_point()]
    outputs = [t for t in tensors_of(call(**inputs)) if t.requires_grad]
    loss = torch.stack([(t * t).mean() for t in outputs]).sum()
    loss.backward()
    return [t.grad for t in (*model.parameters(), *leaves)]
