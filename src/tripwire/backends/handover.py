"""Handover: a graph as torch's compilers expect it from Dynamo, and what surrounds a compile.

The compilers need more than nodes. Their caches accept a graph only if its nodes carry example
values, and if it comes with a tracing context. CUDA graphs need to know which inputs keep their
place in memory.

AOTAutograd and Inductor save the state of torch's generators before a compile, and restore it at
the end. That would make other threads draw their numbers again: where the program has other
threads, `leaving_generators` prevents it. On a GPU Inductor then moves the generator if it times
kernels; elsewhere a compiler draws nothing itself.

CUDA graphs reuse the memory of a call's results when the next round begins. Each compiled call is a
round of its own. The exception is a call that was refused as a whole: its modules are compiled one
by one and pass results to each other, so the whole call is one round.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as modules

from tripwire.backends.backwards import Settling, trains
from tripwire.backends.floats import OWN_DROPOUT, is_better_unknown, spell_floats
from tripwire.errors import BackendFailed
from tripwire.imports import import_dynamo, importing
from tripwire.reading.tensors import OUTSIDE, TensorMeta
from tripwire.tracing.open.opening import NUMBER, OPEN_INPUT, NumberInput, OpenTensor
from tripwire.tracing.state import FACTS, HELD, STATE, NodeFacts
from tripwire.values.classes import isinstance
from tripwire.writes.patches import Patch, Patches

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from tripwire.tracing.open.shadow import Shadow


STAYS = "tripwire_stays"  # in the meta of an input: CUDA graphs are to use it where it is
# In the meta of a module:
OPEN = "tripwire_open"  # the Shadow of its run
FIXES = "tripwire_fixes"  # a compiler failed on floats of which it knows nothing: it may fix them


@contextmanager
def handing_over(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    shape_env: ShapeEnv | None = None,
) -> Iterator[tuple[fx.GraphModule, list[Any]]]:
    """A copy of a graph, which a compiler may change, with all that Dynamo would say of it.

    And its example inputs. Where sizes are open, these are fake tensors and symbols. Where none
    are, a compiler that gets a shape environment must be told to ignore it: sizes are numbers.
    """
    shadow: Shadow | None = module.meta.get(OPEN)
    copied = _copy(module)
    _spell_permutations(copied.graph)
    if shadow is None:
        with importing():
            from tripwire.tracing.open.fakes import make_mode  # imports sympy: 0.3 s

        fake_mode = make_mode(shape_env, static_shapes=True)
        examples = list(example_inputs)
        _add_examples(copied.graph, fake_mode)
    else:
        from tripwire.tracing.open.spellings import spell_calls  # imports sympy, as the shadow did

        fake_mode = shadow.fakes.mode
        spell_calls(copied.graph)
        spell_floats(copied.graph, own_dropout=bool(module.meta.get(OWN_DROPOUT)))
        examples = _find_open_examples(copied, shadow, example_inputs)
    _name_inputs(copied)
    try:
        with tracing(TracingContext(fake_mode)), _closing_floats(shadow):
            yield copied, examples
    finally:
        _forget_inputs(fake_mode)


@contextmanager
def _closing_floats(shadow: Shadow | None) -> Iterator[None]:
    """Let compilers fix floats that they have no code for, or that the graph doesn't get.

    They would ask Dynamo to begin again without these.
    """
    if shadow is None or not (names := shadow.float_names()):
        yield
        return
    import_dynamo()
    from torch._dynamo.symbolic_convert import TensorifyState

    before = TensorifyState.force_specializations
    TensorifyState.force_specializations = before | names
    try:
        yield
    finally:
        TensorifyState.force_specializations = before


def _find_open_examples(
    module: fx.GraphModule, shadow: Shadow, tensors: Sequence[torch.Tensor]
) -> list[Any]:
    inputs, given = module.graph.find_nodes(op="placeholder"), iter(tensors)
    may_hide = FIXES not in module.meta
    for node in inputs:
        number: NumberInput | None = node.meta.get(NUMBER)
        opened: OpenTensor | None = node.meta.get(OPEN_INPUT)
        example: Any = None if number is not None else next(given)
        if number is not None:
            is_known = not (may_hide and number.is_float and is_better_unknown(node))
            example = number.build_example(shadow.fakes.mode, is_known=is_known)
            if not is_known:
                settings = shadow.symbols.env.settings
                shadow.symbols.env.settings = replace(settings, allow_scalar_outputs=True)
        elif opened is not None:
            example = opened.fake
        elif not isinstance(example, FakeTensor):
            example = shadow.fakes.make_static(example)
        node.meta["example_value"] = example
    return [node.meta["example_value"] for node in inputs]


def _forget_inputs(fake_mode: FakeTensorMode) -> None:
    """Compiled code keeps the mode: its weak references would get in the way of swap_tensors."""
    describer = fake_mode.fake_tensor_converter.meta_converter.describer
    describer.lookup_tensor.clear()
    describer.lookup_storage.clear()


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """The constants stay the same objects: they are state, like the inputs."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = fx.GraphModule(module, graph)  # takes what the graph names from the module
    copied.meta = dict(module.meta)
    return copied


def _spell_permutations(graph: fx.Graph) -> None:
    """Add 0 to them. Inductor of torch 2.13 raises on `x[torch.randperm(len(x))]`.

    Its pattern is made for a part of a permutation (fx_passes/misc_patterns.py), matches a whole
    one, too, and then misses the part's length.
    """
    for node in graph.find_nodes(op="call_function", target=torch.randperm):
        if not node.kwargs.keys().isdisjoint(("out", "requires_grad")):
            continue
        with graph.inserting_after(node):
            made = graph.call_function(torch.add, (node, 0))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made, lambda user, made=made: user is not made)


def _add_examples(graph: fx.Graph, fake_mode: FakeTensorMode) -> None:
    with fake_mode:
        for node in graph.nodes:
            facts: NodeFacts | None = node.meta.get(FACTS)
            if facts is None or facts.value is None:
                continue
            if isinstance(facts.value, TensorMeta):
                node.meta["example_value"] = _build(facts.value)
            else:
                node.meta["example_value"] = tuple(map(_build, facts.value))


def _build(meta: TensorMeta | None) -> torch.Tensor | None:
    return None if meta is None or meta.stride is None else meta.build()


def _name_inputs(module: fx.GraphModule) -> None:
    """Say where each input comes from, and which are state: the same memory on every call."""
    import_dynamo()
    from torch._dynamo.source import LocalSource

    module.meta["dynamo_compile_id"] = None  # the sign of a graph whose inputs are named
    owned = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    module._param_name_to_source = {name: LocalSource(name) for name in owned}  # type: ignore[assignment]
    inputs = module.graph.find_nodes(op="placeholder")
    moving = _find_used_and_written(module.graph) if trains(module.graph) else set()
    for index, node in enumerate(inputs):
        node._dynamo_source = LocalSource(f"input_{index}")
        if (node.meta.get(STATE) or node.meta.get(STAYS)) and node not in moving:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def _find_used_and_written(graph: fx.Graph) -> set[fx.Node]:
    """The inputs that one call uses, and another one changes.

    What keeps its place in memory, AOTAutograd saves for the backward as it is, and has no eye on
    its version. The next call would write over it.
    """
    behind: dict[fx.Node, set[fx.Node]] = {}  # the inputs that a node is, or is a view of
    used: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            behind[node] = {node}
        found = [behind[given] for given in node.all_input_nodes if given in behind]
        if not found or node.op == "output":
            continue
        inputs, facts = set().union(*found), node.meta[FACTS]
        if OUTSIDE in facts.memory:
            behind[node] = inputs
        if OUTSIDE in facts.written:
            written |= inputs
        elif OUTSIDE not in facts.memory:
            used |= inputs
    return used & written


_MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices")


class Unmarked(Settling):
    """Compiled code without the marks that AOTAutograd puts on tensors of open sizes for Dynamo.

    It marks results, and inputs that it keeps for the backward. An input keeps the marks that it
    came with, in the same sets.
    """

    def __init__(self, runtime: Callable[..., Any], graph: fx.Graph) -> None:
        super().__init__(runtime)
        inputs = graph.find_nodes(op="placeholder")
        self._inputs: Sequence[int] = range(len(inputs))  # whose marks are kept; fewer after a run
        # State has fixed sizes, but where it is said to be open.
        self._fixed = {
            i
            for i, node in enumerate(inputs)
            if node.meta.get(OPEN_INPUT) is None and node.meta.get(STATE)
        }
        self._made: list[int] | None = None  # positions of results that are no inputs
        self._stays = True

    def __call__(self, *inputs: Any) -> Any:
        tensors = _find_tensors(inputs, self._inputs)
        before = [_find_marks(tensor) for tensor in tensors]
        outputs = self._runtime(*inputs)
        if self._made is None:
            given = set(map(id, inputs))
            found = [(i, o) for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)]
            self._made = [i for i, output in found if id(output) not in given]
            returned = {id(output) for _, output in found}
            self._inputs = [
                i for i in self._inputs if i not in self._fixed or id(inputs[i]) in returned
            ]
            touched = (*tensors, *(output for _, output in found))
            # In place of a view another tensor is kept, and marked.
            has_views = any(one._is_view() for one in _find_tensors(inputs, self._inputs))
            # Code that marked nothing in its first run never does.
            self._stays = has_views or any(one.__dict__.keys() & _MARKS for one in touched)
        for tensor, marks in zip(tensors, before, strict=True):
            _put_back(tensor, marks)
        for index in self._made:
            _put_back(outputs[index], {})
        return outputs


def _find_tensors(inputs: Sequence[object], positions: Sequence[int]) -> list[torch.Tensor]:
    return [one for i in positions if isinstance(one := inputs[i], torch.Tensor)]


def _put_back(tensor: torch.Tensor, marks: dict[str, tuple[set[int], frozenset[int]]]) -> None:
    """Leave a tensor with some marks and no others."""
    attributes = tensor.__dict__
    if not attributes:
        return
    for name in _MARKS:
        if name not in marks:
            attributes.pop(name, None)
        else:
            of_user, dims = marks[name]
            of_user.intersection_update(dims)
            attributes[name] = of_user


def _find_marks(value: torch.Tensor) -> dict[str, tuple[set[int], frozenset[int]]]:
    """The marks of a tensor: the sets themselves, and what is in them now."""
    held = value.__dict__
    return {name: (held[name], frozenset(held[name])) for name in _MARKS if name in held}


class LaidOut(Settling):
    """Compiled code whose results lie in memory as the run's did.

    Inductor lays `torch.cat([x, x])` out row by row, whatever the strides of `x` (torch 2.13).
    """

    def __init__(self, runtime: Callable[..., Any], graph: fx.Graph) -> None:
        super().__init__(runtime)
        self._wanted = _find_layouts(graph)
        self._moved: dict[int, tuple[int, ...]] | None = None

    def __call__(self, *inputs: Any) -> Any:
        outputs = self._runtime(*inputs)
        if self._moved is None:  # of code that returns too few, the entry says so
            self._moved = self._find_moved(outputs)
            self._stays = bool(self._moved)  # code that got them right once always does
        if not self._moved:
            return outputs
        laid_out = list(outputs)
        for index, stride in self._moved.items():
            made = laid_out[index]
            room = torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device)
            laid_out[index] = room.copy_(made)
        return tuple(laid_out)

    def _find_moved(self, outputs: Sequence[object]) -> dict[int, tuple[int, ...]]:
        moved = {}
        for index, made in enumerate(outputs):
            meta = self._wanted.get(index)
            if meta is None or meta.stride is None or not _is_strided(made):
                continue
            _check_form(made, meta)
            if _lies_elsewhere(made, meta):
                moved[index] = meta.stride
        return moved


def _find_layouts(graph: fx.Graph) -> dict[int, TensorMeta]:
    """What the results of a graph were, by position: those that share no memory."""
    results: Any = graph.output_node().args[0]
    nodes = [node for node in results if isinstance(node, fx.Node)]
    uses = Counter(memory for node in nodes for memory in node.meta[FACTS].memory)
    return {
        index: node.meta[FACTS].value
        for index, node in enumerate(results)
        if isinstance(node, fx.Node)
        and isinstance(node.meta[FACTS].value, TensorMeta)
        and all(memory != OUTSIDE and uses[memory] == 1 for memory in node.meta[FACTS].memory)
    }


def _is_strided(made: object) -> TypeGuard[torch.Tensor]:
    return isinstance(made, torch.Tensor) and made.layout is torch.strided


def _check_form(made: torch.Tensor, meta: TensorMeta) -> None:
    """Code whose results have another form than the run's is wrong: nobody gets them."""
    if made.shape != meta.shape or made.dtype != meta.dtype:
        raise BackendFailed(
            f"Compiled code returned a tensor {made.dtype} of {tuple(made.shape)}, where the call "
            f"itself had {meta.dtype} of {tuple(meta.shape)}.",
            slug="backend-failed",
        )


def _lies_elsewhere(made: torch.Tensor, meta: TensorMeta) -> bool:
    """Whether a result has other strides than the run's, where it has more than one element."""
    assert meta.stride is not None
    sides = zip(made.shape, made.stride(), meta.stride, strict=True)
    steps = [(step, wanted) for size, step, wanted in sides if size > 1]
    is_whole = bool(made.numel()) and all(wanted for _, wanted in steps)  # and isn't expanded
    return is_whole and any(step != wanted for step, wanted in steps)


def tell_apart(graph: fx.Graph, runtime: Callable[..., Any]) -> Callable[..., Any]:
    """Two results that share memory are two tensors, as in plain code. Inductor may hand out one.

    So it does for `y, y.detach()` and for views that show the whole of a tensor.
    """
    (output,) = graph.find_nodes(op="output")
    seen: set[int] = set()
    shared = []
    for position, node in enumerate(output.args[0]):
        memory = node.meta[FACTS].memory
        if not seen.isdisjoint(memory):
            shared.append(position)
        seen.update(memory)
    if not shared:
        return runtime

    def run(*inputs: Any) -> Any:
        results = list(runtime(*inputs))
        for position in shared:
            one = results[position]
            if any(one is other for other in results[:position]):
                results[position] = one.detach() if one.grad_fn is None else one.view_as(one)
        return results

    return run


# --- torch's generators while a compiler works ---


@contextmanager
def leaving_generators() -> Iterator[None]:
    """Inside, compilers don't set torch's generators back, if another thread may draw from them."""
    if not _may_draw_elsewhere():
        yield
        return
    user = object()
    _leaving_generators.enter(id(user))
    try:
        yield
    finally:
        _leaving_generators.leave(id(user))


def _may_draw_elsewhere() -> bool:
    """Whether there is another thread of the program's, which isn't waiting for this one.

    On a GPU, Inductor draws numbers to time kernels with. Its own threads stay after its first
    compile. A backward is compiled in a thread of autograd's, while the thread that asked for it
    waits. Python doesn't know autograd's threads, or has dummies for them.
    """
    threads = [one for one in threading.enumerate() if not isinstance(one, threading._DummyThread)]
    others = [thread for thread in threads if thread.ident != threading.get_ident()]
    waiting = len(others) == len(threads)
    return sum(not _only_compiles(thread) for thread in others) > waiting


def _only_compiles(thread: threading.Thread) -> bool:
    """Whether a thread is Inductor's, a data loader's that moves tensors, or a progress bar's."""
    runs = vars(thread).get("_target") or type(thread)
    if str(getattr(runs, "__module__", None)).startswith(_HELPERS):
        return True
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is None or not compiler.AsyncCompile.pool.cache_info().currsize:
        return False
    return thread in compiler.AsyncCompile.pool()._threads


_HELPERS = ("torch._inductor.", "torch.utils.data._utils.pin_memory", "tqdm.")


def _find_keepers() -> tuple[Patch, ...]:
    """Where torch keeps the state around a whole compile, if that is loaded."""
    autograd = sys.modules.get("torch._functorch.aot_autograd")
    compiler = sys.modules.get("torch._inductor.compile_fx")
    return (
        *((Patch(autograd, "preserve_rng_state", lambda _: nullcontext),) if autograd else ()),
        *((Patch(compiler, "dynamo_utils", _WithoutKeeping),) if compiler else ()),
    )


class _WithoutKeeping:
    """A module, but for one function of it."""

    preserve_rng_state = nullcontext

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_leaving_generators = Patches(_find_keepers)


# --- hooks on all modules while a compiler works ---


@contextmanager
def hiding_module_hooks() -> Iterator[None]:
    """Inside, what the program hooked to all modules isn't called for modules of a compiler's own.

    AOTAutograd makes modules while it records. A hook that computes with what is registered there
    would be recorded, registered, recorded again, and so on without end.
    """
    if not any(vars(modules)[name] for name in _HOOKS_ON_ALL):
        yield
        return
    user = object()
    _hidden_hooks.enter(id(user))
    try:
        yield
    finally:
        _hidden_hooks.leave(id(user))


_HOOKS_ON_ALL = [name for name in vars(modules) if re.fullmatch("_global_.*_hooks", name)]
_hidden_hooks = Patches(
    lambda: tuple(Patch(modules, name, lambda _: OrderedDict()) for name in _HOOKS_ON_ALL)
)


# --- rounds of CUDA graphs ---


class _Rounds(threading.local):
    in_round = False


_THREAD = _Rounds()


@contextmanager
def one_round() -> Iterator[None]:
    """Compiled calls inside are one round."""
    outermost = not _THREAD.in_round
    if outermost:
        _begin()
        _THREAD.in_round = True
    try:
        yield
    finally:
        if outermost:
            _THREAD.in_round = False


def mark_staying(graph: fx.Graph, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Mark the inputs, beside state, that CUDA graphs are to use where they are; their indices.

    Those that `torch._dynamo.mark_static_address` marked, and those that an object which is passed
    holds and the call changes: caches. A CUDA graph copies other inputs, and can't be recorded if
    one of these is changed. It compares the addresses, and is recorded again for another one.
    """
    found = []
    inputs = graph.find_nodes(op="placeholder")
    first = len(inputs) - len(tensors)  # behind the open sizes
    for index, (node, tensor) in enumerate(zip(inputs[first:], tensors, strict=True), first):
        marked = getattr(tensor, "_dynamo_static_input_type", None) is not None
        is_open = node.meta.get(OPEN_INPUT) is not None
        stays = (marked or node.meta.get(HELD)) and not node.meta.get(STATE) and not is_open
        if stays and is_aligned(tensor):
            node.meta[STAYS] = True
            found.append(index)
    return found


def in_rounds(
    runtime: Callable[..., Any], stay: Sequence[int], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """A runtime that uses CUDA graphs: each call begins a round.

    Kernels take the inputs at `stay` where they are, and trust them to begin at a multiple of 16
    bytes. For those that don't, the plain graph runs.
    """

    @functools.wraps(runtime)
    def run(*inputs: Any) -> Any:
        if stay and not all(is_aligned(inputs[index]) for index in stay):
            return plain(*inputs)
        if not _THREAD.in_round:
            _begin()
        return runtime(*inputs)

    return run


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins where Inductor's kernels want it to."""
    return tensor.data_ptr() % 16 == 0


def _begin() -> None:
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    if guard is not None:  # else nothing of torch's compilers is there
        guard.GenerationTracker.generation += 1
