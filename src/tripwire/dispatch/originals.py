"""Originals: inputs are kept as they were, so that compiled code can be checked, or undone.

Checking (`check=True`): new code runs once after the observed run that it was compiled from. The
run goes first: it is the call (L4). During the run, the memory of each input is copied before a
torch call can change it. Then the code gets the copies, and the random generators as they were. It
must return and write what the run returned and wrote. No user code runs again, and the generators
are left as the run left them.

Undoing: if compiled code fails on a hit, its writes are undone, and the plain call is made instead.
That raises the same error at the user's line, after all the effects that came before it (L3). Small
tensors that the code changes in place are copied before each run: compiled code may write at any
moment, and Inductor's doesn't count its writes. Only if the runtime is the graph itself do the
tensors' version counters tell whether anything was written, except by batch norms and through
`.data`.

Not undone: large tensors, gradients, what user code did inside a custom autograd function, and
anything on another device than the CPU, where values raise no error that a call could catch. Then
the error is raised as it is, and effects outside tensors that came before it are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from msgspec import Struct
from torch import fx

from tripwire.backends.registry import Runtime
from tripwire.errors import WrongResult, raise_interruption
from tripwire.reading.sources import Local
from tripwire.reading.tensors import (
    Copies,
    Copy,
    GeneratorStates,
    Memory,
    TensorMeta,
    iter_given,
    iter_tensors,
    memory_of,
    meta_of,
    version_of,
)
from tripwire.rulebook.written import writes_uncounted
from tripwire.tracing.result import Input, Run, Trace, acts, draws, name_of
from tripwire.tracing.state import CURRENT, FACTS, CallKeeper, TracingState
from tripwire.validity.ways import COST_OF_A_COPY, Done, OtherWay, bytes_of
from tripwire.values.classes import isinstance

_DRAWN = (
    "The call drew random numbers. Inductor draws other numbers than eager code does, unless "
    "torch._inductor.config.fallback_random is True."
)

Code = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


class ChainedKeeper:
    """Keeps something of a call. Stands before whoever else keeps it (tracing.state.CallKeeper)."""

    def __init__(self, inner: CallKeeper | None) -> None:
        self._inner = inner
        self._state: TracingState | None = None

    def iter_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Of a call's tensors, those that the run didn't make."""
        self._state = CURRENT.state or self._state
        for tensor in iter_given((args, kwargs)):
            known = None if self._state is None else self._state.values.find(tensor)
            if known is None or known.node is None or known.sources:
                yield tensor

    def before_run(self) -> None:
        if self._inner is not None:
            self._inner.before_run()

    def before_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._inner is not None:
            self._inner.before_call(func, args, kwargs)

    def before_write(self, tensor: torch.Tensor) -> None:
        if self._inner is not None:
            self._inner.before_write(tensor)

    def before_draw(self, generators: Iterable[torch.Generator]) -> None:
        if self._inner is not None:
            self._inner.before_draw(generators)

    def run_plainly(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inner is not None:
            return self._inner.run_plainly(fn, args, kwargs)
        return fn(*args, **kwargs)

    def note_code_failed(self, error: BaseException) -> None:
        if self._inner is not None:
            self._inner.note_code_failed(error)

    def find_own_mode(self) -> AbstractContextManager[None] | None:
        return None if self._inner is None else self._inner.find_own_mode()

    def is_for_failures(self) -> bool:
        return self._inner is not None


class Originals(ChainedKeeper):
    """A run's inputs as they were before it."""

    def __init__(self, inner: CallKeeper | None) -> None:
        super().__init__(inner)
        self._copies: Copies = {}
        self._others: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # not strided
        # The memory that each tensor had: `x.data = y` gives it another.
        self._memories: dict[int, tuple[torch.Tensor, Memory]] = {}
        self._generators = GeneratorStates()

    def before_call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for tensor in self.iter_inputs(args, kwargs):
            self._keep_plainly(tensor)
        self._generators.keep(v for v in (*args, *kwargs.values()) if type(v) is torch.Generator)
        super().before_call(func, args, kwargs)

    def before_write(self, tensor: torch.Tensor) -> None:
        self._keep_plainly(tensor)
        super().before_write(tensor)

    # --- copies ---

    def _keep_plainly(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        if tensor.layout is not torch.strided:
            if id(tensor) not in self._others:
                self._others[id(tensor)] = tensor, tensor.detach().clone()
            return
        storage = tensor.untyped_storage()
        memory = memory_of(storage)
        self._memories.setdefault(id(tensor), (tensor, memory))
        if memory not in self._copies:
            self._copies[memory] = Copy.of(storage)

    def _copy(self, tensor: torch.Tensor, wanted: Input) -> torch.Tensor:
        """An input as it was; those that shared memory share that of their copies."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._keep(tensor)  # one that no call has seen is as it was
            if tensor.device.type == "meta":
                made = torch.empty_like(tensor)
            elif tensor.layout is not torch.strided:
                made = self._others[id(tensor)][1]
            else:
                made = self._build(self._memories[id(tensor)][1], wanted)
        return made

    def _build(self, memory: Memory, wanted: Input) -> torch.Tensor:
        """In the form that it had: the run may have given it another."""
        meta, (is_conj, is_neg, _) = wanted.meta, wanted.traits.lazy_bits
        assert meta.stride is not None
        made = torch.empty(0, dtype=meta.dtype, device=meta.device)
        made.set_(self._copies[memory].copied, wanted.traits.offset or 0, meta.shape, meta.stride)
        made = torch._conj(made) if is_conj else made
        return torch._neg_view(made) if is_neg else made

    # --- the check ---

    def check(self, run: Run, code: Code, name: str, backend: str) -> None:
        """Raise WrongResult where the code does something else than the run did."""
        trace = run.trace
        assert trace is not None
        assert trace.completion is not None
        inputs = trace.completion.tensors
        copies = [
            None if tensor is None else self._copy(tensor, wanted)
            for tensor, wanted in zip(inputs, trace.inputs, strict=True)
        ]
        if any(copy is None for copy in copies):
            raise WrongResult(
                f"{name}: the code that {backend} compiled can't be checked, because an input of "
                "the observed call no longer exists. Keep it alive, or compile without check=True.",
                slug="unchecked",
            )
        for copy, wanted in zip(copies, trace.inputs, strict=True):
            # What is written to can't be a leaf that requires grad; its history isn't there.
            if copy is not None and wanted.meta.requires_grad and not wanted.written:
                copy.requires_grad_()
        given = tuple(copy for copy in copies if copy is not None)
        with self._generators.as_before():
            try:
                got = code(given)
            except OtherWay:
                return  # it computes a little differently, and would turn back on a hit
            except Exception as error:
                raise_interruption(error)
                raise WrongResult(
                    f"{name}: the observed call returned, but the code that {backend} compiled "
                    f"raised {type(error).__name__}: {error}",
                    slug="wrong-result",
                ) from error
        found = _find_difference(run, trace, tuple(got), given)
        if found and any(self._generators.find_moved()):
            found += f"\n{_DRAWN}"
        if found:
            raise WrongResult(
                f"{name}: the code that {backend} compiled differs from the observed call. "
                f"{found}\nThe call was right; the code was discarded.",
                slug="wrong-result",
            )


def _find_difference(
    run: Run, trace: Trace, got: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]
) -> str:
    """The first difference in words, or nothing."""
    wanted = run.outputs
    if len(got) != len(wanted):
        return f"It returns {len(got)} tensors, where the graph has {len(wanted)}."
    assert trace.completion is not None
    inputs = tuple(t for t in trace.completion.tensors if t is not None)
    root = Local("result")
    paths = {
        id(tensor): f"result{str(path).removeprefix(str(root))}"
        for tensor, path in iter_tensors(run.result, root)
    }
    nodes: Any = next(node for node in trace.graph.nodes if node.op == "output").args[0]
    tracks_grad = not any(i.written and i.meta.requires_grad for i in trace.inputs)
    for number, (left, right) in enumerate(zip(got, wanted, strict=True)):
        found = _differ(left, right)
        if not found and tracks_grad and left.requires_grad != right.requires_grad:
            found = f"requires_grad is {left.requires_grad}, not {right.requires_grad}"
        if not found and _shared(left, given) != _shared(right, inputs):
            found = "it shares memory with other inputs than in the observed call"
        if found:
            path = paths.get(id(right), f"output {number}")
            return f"{path}, {_describe(nodes[number])}: {found}"
    for known, left, right in zip(trace.inputs, given, inputs, strict=True):
        found = _differ(left, right)
        if found:
            return f"The input {known.source}, changed in place: {found}"
    return ""


def _describe(node: fx.Node) -> str:
    facts = node.meta.get(FACTS)
    place = None if facts is None else facts.where.place
    return f"node {node.name}" + ("" if place is None else f" at {place.file}:{place.line}")


def _differ(got: object, wanted: torch.Tensor) -> str:
    if not isinstance(got, torch.Tensor):
        return f"it is a {type(got).__name__}, not a tensor"
    with torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            torch.testing.assert_close(got.detach(), wanted.detach(), equal_nan=True)
        except AssertionError as error:
            return str(error)
        except (RuntimeError, NotImplementedError, TypeError):  # a dtype without arithmetic
            same = got.shape == wanted.shape and got.dtype == wanted.dtype
            return "" if same and _bits(got) == _bits(wanted) else "its bits differ"
    return ""


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().cpu().untyped_storage())


def _shared(tensor: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> list[int]:
    """Which inputs a tensor has its memory from."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return []
    memory = memory_of(tensor.untyped_storage())
    strided = ((i, t) for i, t in enumerate(inputs) if t.layout is torch.strided and t.numel())
    return [i for i, t in strided if memory_of(t.untyped_storage()) == memory]


# --- undo ---


LARGEST_COPY = 1 << 18  # bytes that are copied before each run, at most


class _TensorBefore(Struct, frozen=True):
    """A tensor as it was before a run."""

    tensor: torch.Tensor
    meta: TensorMeta
    maker: object  # its grad_fn
    version: int | None  # None: doesn't tell
    counted: int | None  # writes so far: autograd asks that of what it saved
    copy: torch.Tensor | None  # None: too large

    @staticmethod
    def of(tensor: torch.Tensor, counts: bool, copies: bool) -> _TensorBefore:
        counted = version_of(tensor)
        copy = tensor.detach().clone() if copies else None
        version = counted if counts else None
        return _TensorBefore(tensor, meta_of(tensor), tensor.grad_fn, version, counted, copy)

    def is_unwritten(self) -> bool:
        return self.version is not None and version_of(self.tensor) == self.version

    def can_return(self) -> bool:
        tensor = self.tensor
        return self.is_unwritten() or (
            self.copy is not None and meta_of(tensor) == self.meta and tensor.grad_fn is self.maker
        )

    def put_back(self) -> None:
        if not self.is_unwritten():
            assert self.copy is not None
            self.tensor.data.copy_(self.copy)  # through .data: not counted as a write
            if self.counted is not None:
                counted = (self.tensor,), (self.counted,)
                torch._C._autograd._unsafe_set_version_counter(*counted)


class _GradBefore(Struct, frozen=True):
    """The `.grad` of a tensor as it was before a run."""

    tensor: torch.Tensor
    grad: torch.Tensor | None
    kept: _TensorBefore | None  # what it held; None: that isn't changed

    @staticmethod
    def of(tensor: torch.Tensor, is_let_go: bool) -> _GradBefore:
        grad = tensor.grad
        if grad is None or is_let_go:
            return _GradBefore(tensor, grad, None)
        return _GradBefore(tensor, grad, _TensorBefore.of(grad, counts=False, copies=True))

    def put_back(self) -> None:
        self.tensor.grad = self.grad
        if self.kept is not None:
            self.kept.put_back()


class Saved(Struct, frozen=True):
    """What a run may change, as it was before."""

    kept: tuple[_TensorBefore, ...]
    states: tuple[tuple[torch.Generator, torch.Tensor], ...]
    grads: tuple[_GradBefore, ...]

    def restore(self) -> bool:
        """Whether everything could be put back."""
        if not all(kept.can_return() for kept in self.kept):
            return False
        with torch.inference_mode():  # which tensors made there ask for
            for kept in self.kept:
                kept.put_back()
        for generator, state in self.states:
            generator.set_state(state)
        for grad in self.grads:
            grad.put_back()
        return True


class Undo(Struct, frozen=True):
    """Knows what one entry's runs change."""

    written: tuple[int, ...]  # positions among the inputs
    generators: tuple[torch.Generator, ...]
    counts: bool  # every write is counted by its tensor
    copies: bool
    leaves: tuple[tuple[int, bool], ...] = ()  # see validity/ways.Done

    def save(self, inputs: tuple[torch.Tensor, ...]) -> Saved:
        """What is there before a run with these inputs."""
        return Saved(
            tuple(_TensorBefore.of(inputs[i], self.counts, self.copies) for i in self.written),
            tuple((generator, generator.get_state()) for generator in self.generators),
            tuple(_GradBefore.of(inputs[i], is_let_go) for i, is_let_go in self.leaves),
        )


def build_undo(
    trace: Trace, runtime: Runtime, *, has_effects: bool, answers: bool = False
) -> Undo | None:
    """How to undo a run. None where that is not needed, or not possible.

    answers: custom functions that ran are no hindrance (tracing/answers.py).
    """
    is_graph = getattr(runtime, "__self__", None) is trace.graph_module
    if not answers and (acts(trace) or (is_graph and not has_effects)):
        return None  # the graph alone leaves what plain code does
    written = tuple(i for i, wanted in enumerate(trace.inputs) if wanted.written)
    counts = is_graph and not any(map(_may_write_uncounted, trace.graph.nodes))
    if not written and not draws(trace):
        return Undo((), (), counts, False)
    metas = [trace.inputs[i].meta for i in written]
    copies = sum(COST_OF_A_COPY + bytes_of(meta) for meta in metas) <= LARGEST_COPY
    if not copies and not counts:
        return None
    if any(wanted.meta.device.type != "cpu" for wanted in trace.inputs):
        return None
    count = len(trace.numbers)
    generators = _find_generators(trace) if draws(trace) else ()
    return Undo(tuple(count + i for i in written), generators, counts, copies)


def _may_write_uncounted(node: fx.Node) -> bool:
    """A batch norm's statistics; and what `x.data` is changes with `x`, but has its own counter."""
    return writes_uncounted(name_of(node)) or (node.target is getattr and node.args[1] == "data")


def add_turning(undo: Undo | None, trace: Trace, done: Done) -> Undo | None:
    """How to undo a run that may also turn back at a crossing."""
    if not done:
        return undo
    before = Undo((), (), counts=False, copies=False) if undo is None else undo
    count = len(trace.numbers)
    return Undo(
        tuple(sorted({*before.written, *(count + i for i in done.written)})),
        _find_generators(trace) if done.draws else before.generators,
        before.counts,
        copies=before.copies or bool(done.written),
        leaves=tuple((count + i, is_let_go) for i, is_let_go in done.leaves),
    )


def _find_generators(trace: Trace) -> tuple[torch.Generator, ...]:
    """The generators that a graph may draw from."""
    given = (constant.value for constant in trace.constants)
    return (
        torch.default_generator,
        *(value for value in given if isinstance(value, torch.Generator)),
    )
