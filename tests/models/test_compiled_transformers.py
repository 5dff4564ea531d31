"""Compiled models return what plain ones return, to the bit, whatever is written between calls.

Each model has a twin, copied before compiling. Every write is done to both, then both are
called. A write that changes what a model computes costs one trace; taking it back costs none,
for the retired entry comes back.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from support import check_same, tensors_of
from torch import nn

import tripwire

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
Inputs = dict[str, Any]

# Not compiled whole, and why. Their results are compared all the same.
REFUSED: dict[str, str] = {
    "switch-transformers": "tensor-branch: which experts are hit comes from deep inside",
}
# Every layer draws a number and compares it in Python, while training.
DROPS_LAYERS = frozenset(
    {"opt", "bart", "marian", "pegasus", "whisper", "wav2vec2", "hubert", "wavlm"}
)
# The first call that wants hidden states, here of a part, puts hooks on layers.
NEEDS_HOOKS = frozenset({"llava"})
SPREAD = [
    "llama",
    "qwen2",
    "gemma2",
    "gpt2",
    "bert",
    "modernbert",
    "bart",
    "mixtral",
    "mamba2",
    "vit",
    "swin",
    "resnet",
    "wav2vec2",
    "clip",
]


def _names(refused: dict[str, str], names: Iterable[str] = BY_NAME) -> list[Any]:
    """Architectures; of some it is known why they fail."""
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=refused[name]))
        if name in refused
        else name
        for name in names
    ]


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
        self.is_whole = name not in REFUSED if whole is None else whole
        self.model: Any = architecture.build()
        prepare(self.model)
        if hooks or name in NEEDS_HOOKS:
            with torch.no_grad():
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


# --- three calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _names(REFUSED))
def test_three_calls_are_one_trace_and_two_hits(name: str) -> None:
    twins = Twins(name, whole=True)
    for seed in range(3):
        twins.check(twins.inputs(seed=seed))
    statistics = twins.compiled.statistics()
    assert (statistics.traces, statistics.hits, statistics.entries) == (1, 2, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_compiled_whole_returns_the_same_while_its_modules_are_compiled(
    name: str,
) -> None:
    twins = Twins(name)
    for seed in range(3):
        twins.check(twins.inputs(seed=seed))


def test_a_first_call_that_installs_hooks_is_compiled_from_the_second_on() -> None:
    row = BY_NAME["llava"]
    plain, model = row.build(), row.build()
    compiled = tripwire.compile(model, backend="eager")
    with torch.no_grad():
        for seed in range(4):
            check_same(plain(**row.inputs(seed=seed)), compiled(**row.inputs(seed=seed)))
    statistics = compiled.statistics()
    assert (statistics.traces, statistics.hits) == (2, 2)


# --- writes ------------------------------------------------------------------------------------


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


def _are_equal(before: object, after: object) -> bool:
    left, right = tensors_of(before), tensors_of(after)
    return len(left) == len(right) and all(map(torch.equal, left, right))


class _Change:
    """One of many places to write to: the first at which a write changes the results."""

    def __init__(self, places: Callable[[nn.Module], Iterator[Any]], write: Any) -> None:
        self._places = places
        self._write = write
        self._index = 0

    def choose(self, twins: Twins) -> None:
        plain = copy.deepcopy(twins.plain)
        with torch.no_grad():
            before = plain(**twins.inputs())
            for self._index in range(sum(1 for _ in self._places(plain))):
                trial = copy.deepcopy(plain)
                self(trial)
                try:
                    after = trial(**twins.inputs())
                except (AttributeError, RuntimeError):  # a model that can't take this write
                    continue
                if type(after) is not type(before) or not _are_equal(before, after):
                    return
        pytest.skip("no such place")

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
                nn.init.constant_(weight, 0.1)

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

WRITES: dict[str, tuple[Callable[[nn.Module], Iterator[Any]], Any]] = {
    "a number that forward reads": (_floats, _write_float),
    "a config that asks for hidden states": (_configs, _ask_for_hidden_states),
    "a config that asks for tuples": (_configs, _return_tuples),
    "a parameter replaced": (_LINEARS, _replace_parameter),
    "an adapter": (_LINEARS, _insert_adapter),
    "a forward hook": (_LINEARS, _add_hook),
    "a forward pre-hook": (_LINEARS, _add_pre_hook),
    "a forward of one module's own": (_LINEARS, _replace_forward),
}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("what", WRITES)
def test_a_write_is_seen_and_so_is_its_undoing(what: str, name: str) -> None:
    _check_write(Twins(name, hooks="hidden states" in what), _Change(*WRITES[what]))


def _check_write(twins: Twins, change: _Change) -> None:
    twins.check()
    change.choose(twins)
    undo: list[Callable[[], None]] = []
    twins.write(lambda model: undo.append(change(model)))
    twins.check()
    twins.check(twins.inputs(seed=1))
    twins.check_traces(2)
    for step in undo:
        step()
    twins.check()
    twins.check(twins.inputs(seed=1))
    twins.check_traces(2)


def _lists(model: nn.Module) -> Iterator[tuple[nn.ModuleList]]:
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


def _freeze(model: nn.Module) -> Callable[[], None]:
    wanted = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(False)

    def undo() -> None:
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)

    return undo


MORE_WRITES: dict[str, tuple[Callable[[nn.Module], Iterator[Any]], Any]] = {
    "layers swapped": (_lists, _swap_layers),
    "a buffer replaced": (_buffers, _replace_buffer),
    "a class assigned": (_LINEARS, _subclass),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("what", MORE_WRITES)
def test_a_rarer_write_is_seen_and_so_is_its_undoing(what: str, name: str) -> None:
    _check_write(Twins(name), _Change(*MORE_WRITES[what]))


def _check_patched(name: str, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(name)
    twins.check()
    plain = cls.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return result * 2 if isinstance(result, torch.Tensor) else (result[0] * 2, *result[1:])

    monkeypatch.setattr(cls, "forward", forward)
    twins.check()
    twins.check()
    monkeypatch.undo()
    twins.check()
    twins.check_traces(2)


@pytest.mark.parametrize("name", SPREAD)
def test_a_method_of_a_class_that_is_replaced_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = [m for (m,) in _lists(BY_NAME[name].build())]
    layers = [type(layer) for layer in (lists[0] if lists else ())]
    layers = [cls for cls in layers if cls.__module__.startswith("transformers.")]
    if not layers:
        pytest.skip("no layers of its own")
    _check_patched(name, layers[0], monkeypatch)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_a_method_of_a_class_of_torch_that_is_replaced_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_patched(name, nn.LayerNorm, monkeypatch)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "bart"])
def test_another_function_in_the_table_of_attentions_is_seen(name: str) -> None:
    table = transformers.AttentionInterface()
    plain = table["sdpa"]

    def doubled(*args: Any, **kwargs: Any) -> Any:
        result, *rest = plain(*args, **kwargs)
        return result * 2, *rest

    twins = Twins(name)
    twins.check()
    try:
        table.register("sdpa", doubled)
        twins.check()
        twins.check()
    finally:
        table.register("sdpa", plain)
    twins.check()
    twins.check_traces(2)


@pytest.mark.parametrize("name", SPREAD)
def test_results_want_gradients_as_long_as_parameters_do(name: str) -> None:
    def check() -> None:
        check_same(twins.plain(**twins.inputs()), twins.compiled(**twins.inputs()))

    twins = Twins(name)
    check()
    undo: list[Callable[[], None]] = []
    twins.write(lambda model: undo.append(_freeze(model)))
    check()
    for step in undo:
        step()
    check()
    twins.check_traces(2)


@pytest.mark.parametrize("name", BY_NAME)
def test_parameters_changed_in_place_cost_no_trace(name: str) -> None:
    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.mul_(1.25)

    twins = Twins(name)
    twins.check()
    with torch.no_grad():
        before = twins.plain(**twins.inputs())
        twins.write(scale)
        assert not _are_equal(before, twins.plain(**twins.inputs()))
    twins.check()
    twins.check_traces(1)


def _silence(model: Any) -> None:
    """Take all that is random out of training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if type(value) is float and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in {id(config): config for config in configs}.values():
        for name, value in list(vars(config).items()):
            if type(value) is float and ("drop" in name or "jitter" in name):
                setattr(config, name, 0.0)
        if hasattr(config, "apply_spec_augment"):
            config.apply_spec_augment = False


@pytest.mark.parametrize("name", BY_NAME)
def test_training_mode_has_an_entry_of_its_own(name: str) -> None:
    whole = name not in DROPS_LAYERS and name not in REFUSED
    twins = Twins(name, _silence, whole=whole)
    twins.check()
    for mode in (True, True, False, False):
        twins.write(lambda model, mode=mode: model.train(mode))
        twins.check()
    twins.check_traces(2)


# --- other inputs ------------------------------------------------------------------------------

TEXT = [name for name, a in BY_NAME.items() if "attention_mask" in a.inputs()]


def _padded(inputs: Inputs) -> Inputs:
    """The mask leaves out some tokens at the end of the first row, and one within."""
    mask = inputs["attention_mask"].clone()
    mask[0, -3:] = 0
    mask[1, 4] = 0
    return inputs | {"attention_mask": mask}


def _unmasked(inputs: Inputs) -> Inputs:
    return {key: value for key, value in inputs.items() if key != "attention_mask"}


def _shortened(inputs: Inputs) -> Inputs:
    return inputs | {key: inputs[key][:, :9].clone() for key in ("input_ids", "attention_mask")}


def _alone(inputs: Inputs) -> Inputs:
    return {key: value[:1] for key, value in inputs.items()}


@pytest.mark.parametrize("name", TEXT)
def test_masks_lengths_and_batches_each_find_their_entry(name: str) -> None:
    twins = Twins(name)
    forms = [dict, _padded, _unmasked, _shortened]
    for seed in range(2):
        for form in forms:
            twins.check(form(twins.inputs(seed=seed)))
        if seed == 0:
            traces = twins.traces
    twins.check_traces(traces)
    twins.check_traces(len(forms))


@pytest.mark.parametrize(
    "name",
    TEXT,
)
def test_a_batch_of_one_has_an_entry_of_its_own(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        twins.check(_alone(twins.inputs(seed=seed)))
        twins.check(twins.inputs(seed=seed))
    twins.check_traces(2)


@pytest.mark.parametrize("name", BY_NAME)
def test_keywords_in_another_order_give_the_same_and_one_entry_more_at_most(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        twins.check(twins.inputs(seed=seed))
        twins.check(dict(reversed(twins.inputs(seed=seed).items())))
    twins.check_traces(2)


@pytest.mark.parametrize("name", SPREAD)
def test_keywords_that_ask_for_more_outputs_find_their_entries(name: str) -> None:
    twins = Twins(name, hooks=True)
    asked: list[Inputs] = [
        {},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"return_dict": False},
    ]
    if name in TEXT and "pixel_values" not in twins.inputs():
        given = twins.inputs(seed=3)
        labels = given.get("decoder_input_ids", given["input_ids"])
        asked += [{"use_cache": True}, {"labels": labels}]
    for _ in range(2):
        for more in asked:
            twins.check(**more)
    twins.check_traces(len(asked))


# --- decoding ----------------------------------------------------------------------------------


def _decode(call: Any, cache: Any, ids: torch.Tensor) -> list[Any]:
    """What a few steps return, and what they leave in the cache."""
    seen: list[Any] = []
    with torch.no_grad():
        for _ in range(5):
            result = call(input_ids=ids, past_key_values=cache, use_cache=True)
            assert result.past_key_values is cache
            seen.append(result.logits)
            ids = result.logits[:, -1:].argmax(-1)
    return [*seen, *[(layer.keys, layer.values) for layer in cache.layers]]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "opt", "mistral"])
def test_steps_of_decoding_fill_a_growing_cache_alike(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        ids = twins.inputs(seed=seed)["input_ids"]
        caches = [transformers.DynamicCache(config=twins.plain.config) for _ in range(2)]
        check_same(_decode(twins.plain, caches[0], ids), _decode(twins.compiled, caches[1], ids))
    twins.check_traces(5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_decoding_fill_a_cache_of_fixed_size_alike(name: str) -> None:
    twins = Twins(name)
    for seed in range(2):
        ids = twins.inputs(seed=seed)["input_ids"]
        caches = [
            transformers.StaticCache(config=twins.plain.config, max_cache_len=24) for _ in range(2)
        ]
        check_same(_decode(twins.plain, caches[0], ids), _decode(twins.compiled, caches[1], ids))


@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_generate_makes_the_same_tokens(how: dict[str, Any]) -> None:
    twins = Twins("llama", whole=False)
    given = {**twins.inputs(), "max_new_tokens": 6, "use_cache": True, **how}
    for _ in range(2):
        made = []
        for model in (twins.plain, twins.compiled):
            torch.manual_seed(0)
            made.append(model.generate(**copy.deepcopy(given)))
        assert torch.equal(*made)


# --- gradients ---------------------------------------------------------------------------------

TRAINED = [
    "llama",
    "qwen2",
    "gemma2",
    "gpt2",
    "bert",
    "modernbert",
    "bart",
    "mixtral",
    "mamba2",
    "vit",
    "convnext",
    "wav2vec2",
    "clip",
]


def _train(call: Any, model: nn.Module, inputs: Inputs) -> list[torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    outputs = [t for t in tensors_of(call(**inputs)) if t.requires_grad]
    loss = torch.stack([(t * t).mean() for t in outputs]).sum()
    loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_equal_plain_ones_while_an_optimizer_steps(name: str) -> None:
    twins = Twins(name)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twins.plain, twins.model)]
    for seed in range(3):
        plain = _train(twins.plain, twins.plain, twins.inputs(seed=seed))
        compiled = _train(twins.compiled, twins.model, twins.inputs(seed=seed))
        assert any(gradient is not None for gradient in plain)
        for left, right in zip(plain, compiled, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                assert torch.equal(left, right)
        for step in steps:
            step.step()
    twins.check_traces(1)


def test_a_compiled_model_shares_the_state_of_its_model() -> None:
    twins = Twins("llama")
    twins.check()
    twins.compiled.lm_head.weight.data.zero_()
    with torch.no_grad():
        assert not twins.compiled(**twins.inputs()).logits.any()
        assert not twins.model(**twins.inputs()).logits.any()
