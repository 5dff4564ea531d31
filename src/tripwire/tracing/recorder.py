"""Recorder: the torch-function mode that turns each torch call of a run into a node.

The call runs first and for real; its result is the run's. Recording looks at arguments and
result only, and holds neither. After a refusal, and while its state isn't current, the
recorder steps aside.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from tripwire.ranges import SourceRange, capture_range, is_library_caller
from tripwire.reading.tensors import PLAIN_TENSORS, GeneratorStates, iter_given, version_of
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.rulebook.rules import (
    RULES,
    Call,
    Query,
    Refuse,
    Rule,
    find_original,
    rule_for,
    spell_original,
    words,
)
from tripwire.tracing.observe import Started, set_profile
from tripwire.tracing.sizes import ask_tensor, find_decisive, find_inherited
from tripwire.tracing.state import CURRENT, Inside, PythonCall, TracingState
from tripwire.values.classes import find_in_class, is_exactly, isinstance
from tripwire.values.contents import attributes_of
from tripwire.values.functions import OF_NUMBERS
from tripwire.values.numbers import (
    OpenInt,
    close_values,
    is_open,
    is_taken,
    iter_leaves,
)

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow
from tripwire.tracing.branches import (
    add_branch,
    differentiates_elsewhere,
    note_gradients,
    note_length,
)
from tripwire.tracing.fxnodes import (
    Given,
    build_arguments,
    is_number,
    is_recordable,
    may_be_elsewhere,
    record,
)

_ITER = torch.Tensor.__iter__.__code__
_BASIC = (int, slice, type(None), type(...))


def _is_iteration(where: SourceRange) -> bool:
    """Whether `for`, unpacking or their like called: torch's `__iter__` unbinds the tensor."""
    return _ITER in where.raw[:1]


_NEW = torch.Tensor.new
_PAD_SEQUENCE = torch._C._nn.pad_sequence


def _find_picks(
    args: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[tuple[int, OpenInt]]] | None:
    """The index of `x[:, n]` without open places, and these, with dimensions of what is left.

    None where no place is open, or where torch is to say what is wrong with one.
    """
    tensor, plain = args
    plain = plain if is_exactly(plain, tuple) else (plain,)
    index = given[1] if is_exactly(given[1], tuple) else (given[1],)
    if not all(is_exactly(part, *_BASIC) for part in plain) or any(map(is_taken, index)):
        return None
    if sum(part is ... for part in plain) > 1:
        return None
    taken = sum(part is not None and part is not ... for part in plain)
    rest: list[Any] = []
    picks: list[tuple[int, OpenInt]] = []
    there = dim = 0  # the dimension of the tensor, and of what is left
    for place, part in zip(plain, index, strict=True):
        if is_exactly(part, OpenInt):
            if there >= tensor.dim() or not -tensor.shape[there] <= place < tensor.shape[there]:
                return None
            picks.append((dim, part))
            part = slice(None)
        rest.append(part)
        skipped = tensor.dim() - taken if part is ... else 1
        there += 0 if part is None else skipped
        dim += 0 if is_exactly(part, int) else skipped
    return (tuple(rest), picks) if picks else None


_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _ask_index(part: Any) -> Any:
    """A part of an index; of an object with an `__index__` of the user's, what that returns.

    C takes nothing but an int from it. So it has to start where no number stays open that it has.
    """
    if is_exactly(part, slice):
        return slice(*[_ask_index(bound) for bound in (part.start, part.stop, part.step)])
    cls = type(part)
    method = find_in_class(cls, "__index__")
    if type(method) is not FunctionType or issubclass(cls, _KNOWN):
        return part
    if find_in_class(cls, "__getitem__") is not None or not _may_give_open(part, method.__code__):
        return part
    return operator.index(part)


def _may_give_open(owner: object, code: CodeType) -> bool:
    """Whether a method returns more than what its object has of plain numbers and texts."""
    own = attributes_of(owner)
    is_own = own.keys() >= {*code.co_names} and not code.co_freevars
    return not is_own or not all(is_exactly(value, int, str) for value in own.values())


_KNOWN = (torch.Tensor, torch.SymInt, int)


def _nest(numbers: list[Any], shape: Sequence[int]) -> list[Any]:
    """The lists that a tensor of this shape gives."""
    for size in reversed(shape[1:]):
        numbers = [numbers[at : at + size] for at in range(0, len(numbers), size)]
    return numbers


def _is_whole(part: Any) -> bool:
    """Whether a part of an index leaves its dimension as it is."""
    return type(part) is slice and part.start is part.stop is part.step is None


class Recorder(TorchFunctionMode):
    """Records the calls of one thread into one state."""

    def __init__(self, state: TracingState) -> None:
        super().__init__()
        self.state = state
        self._left = False

    def leave(self) -> None:
        """Go from the mode stack before the `with` ends, where nothing was put on top.

        Dynamo would look through any mode that is active when it compiles.
        """
        if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._left = True

    def __exit__(self, *error: Any) -> None:
        if not self._left:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        state = self.state
        if func not in RULES:
            func = find_original(func)
        if func is _NEW and len(args) == 2 and is_exactly(args[1], torch.Size):
            func = torch.Tensor.new_empty  # a graph has tuples for sizes, and takes them for values
        if state.shadow is not None and func in _INDEXING and CURRENT.state is state:
            index = args[1]
            is_several = is_exactly(index, tuple)
            index = (*map(_ask_index, index),) if is_several else _ask_index(index)
            args = args[0], index, *args[2:]
        given = args, kwargs
        if state.shadow is not None and any(map(is_open, iter_leaves(given))):
            given = state.shadow.take(given)
            args, kwargs = close_values((args, kwargs))
            is_recording = CURRENT.state is state and not state.refusal
            if func is torch.Tensor.__getitem__ and is_recording:
                for leaf in filter(is_taken, iter_leaves(given[0][1:])):
                    state.shadow.soundings.sound(leaf)
                picks = _find_picks(args, given[0])
                if picks is not None:
                    return self._pick(args[0], *picks)
            if func in OF_NUMBERS and is_recording:
                _run_plainly(state, func, args, kwargs)  # raises what torch raises
                return OF_NUMBERS[func](*given[0], **given[1])
        if CURRENT.kept is not None:
            CURRENT.kept.before_call(func, args, kwargs)
        if func in _DIFFERENTIATING and kwargs.get("create_graph"):  # torch passes it by its name
            state.differentiates_again = True
        if CURRENT.state is not state or state.refusal is not None:
            if state.shadow is not None and state.refusal is None:
                state.shadow.close_given(given, "a call that isn't looked into")
            if state.inside is not None and state.inside.is_plain:
                return _look_inside(state, state.inside, func, args, kwargs)
            return _run_plainly(state, func, args, kwargs)
        rule = RULES.get(func) or _find_rule(state, func)
        if type(rule) is Query:
            if not args and "input" in kwargs:  # `torch.numel(input=x)`
                args, kwargs, given = (kwargs["input"],), {}, ((kwargs["input"],), {})
            value = _run_plainly(state, func, args, kwargs)
            if rule.of_size and state.shadow is not None and state.met_data_sizes:
                taken = self._take_size(state.shadow, rule.name, args, kwargs, value)
                if taken is not None:
                    return taken
            noted = len(state.branches)
            if rule.of_size or rule.of_strides or rule.of_grad:
                self._note_query(rule, args, kwargs, value)
            if func is torch.Tensor.__len__ and not state.quiet and len(state.branches) == noted:
                note_length(state, "__len__", args[0], value, self._range())
            if state.shadow is not None:
                value = state.shadow.answer(rule, given, args, kwargs, value)
            return value
        shadow = state.shadow
        if shadow is not None and type(rule) is Call:
            if shadow.takes(rule.name, args, kwargs):
                return self.take_out(shadow, rule.name, args[0])
            if func is _PAD_SEQUENCE and not kwargs and shadow.has_lengths(args[0]):
                return self._pad(shadow, *args)
        observer = state.observer
        if observer is None:
            return self._call(rule, func, args, kwargs, given)
        # Recording makes a hundred Python calls, and each would be an event. This is pause() and
        # resume() without their own calls, which are events too: 36 layers, 45 → 20 ms.
        observer.paused = True
        profile = observer.profile
        if profile is not None and sys.getprofile() is profile:
            sys.setprofile(None)
        else:
            profile = None
        try:
            return self._call(rule, func, args, kwargs, given)
        finally:
            observer.paused = False
            if profile is not None and observer.profile is not None:
                set_profile(profile)

    def _call(
        self,
        rule: Rule,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Given,
    ) -> Any:
        """Make a call, and record it. `given`: its arguments with open numbers among them."""
        state, shadow = self.state, self.state.shadow
        if type(rule) is Refuse:
            state.refuse(Refusal(rule.slug, rule.reason, self._range()))
            return _run_plainly(state, func, args, kwargs)
        assert type(rule) is Call
        CURRENT.state = None  # what runs inside an op isn't the run's, nor is what recording asks
        try:
            rule = spell_original(rule, func)
            if shadow is not None:
                shadow.close_sizes(rule, given)
            try:
                nodes = build_arguments(state, rule, *given, self._range)
                varies = shadow is not None and shadow.has_open(given)
            except Refused as refused:
                state.refuse(Refusal(refused.slug, refused.reason, self._range()))
                return _run_plainly(state, func, args, kwargs)
            if rule.name == "backward":
                note_gradients(state, self._range())
            python: PythonCall | None = None
            runs_python = rule.opaque or rule.name in _RUNS_PYTHON
            generators = GeneratorStates() if runs_python or rule.may_draw else None
            begin = perf_counter_ns()
            state.is_inside = True
            try:
                if runs_python:
                    with _noting_python(state) as started:
                        value = func(*args, **kwargs)
                    python = PythonCall(func) if started else None
                else:
                    value = func(*args, **kwargs)
            except Exception as error:
                state.raised = id(error)
                note_failure(state, rule, error, self._range())
                raise
            finally:
                state.is_inside = False
                if state.quiet:  # nobody else asks
                    note_time(state, func, args, perf_counter_ns() - begin)
            try:
                where = capture_range(2, state.ends, state.outer)  # _range(), without two calls
                draws = generators is not None and generators.have_moved()
                outcome = value, where, python
                record(state, rule, nodes, args, kwargs, *outcome, varies=varies, draws=draws)
                if rule.name == "unbind" and not state.quiet and _is_iteration(where):
                    note_length(state, "__iter__", args[0], len(value), where)
                if shadow is not None and varies:
                    shadow.follow(rule, func, *given, value)
            except Refused as refused:
                state.refuse(Refusal(refused.slug, refused.reason, self._range()))
            return value
        finally:
            CURRENT.state = state

    def take_out(self, shadow: Shadow, name: str, tensor: torch.Tensor) -> Any:
        """What `item()` or `tolist()` gives, open: from a copy that nobody else can change."""
        copy = self._record(torch.Tensor.detach, tensor)
        copy = self._record(torch.Tensor.clone, copy)
        if name == "tolist":
            count = tensor.numel()
            self._note_size("size", (tensor,), {}, tensor.size())
            if tensor.dim() > 1:
                copy = self._record(torch.Tensor.reshape, copy, (count,))
            copies = [self._record(torch.Tensor.__getitem__, copy, i) for i in range(count)]
        else:
            copies = [self._record(torch.Tensor.reshape, copy, ()) if tensor.dim() else copy]
        plain = self.state.refusal is not None
        if plain:
            found = [one.item() for one in copies]
        else:
            where = self._range()
            found = [shadow.hand_out(one, where) for one in copies]
        return found[0] if name == "item" else _nest(found, tensor.shape)

    def _take_size(
        self, shadow: Shadow, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> Any:
        """A size that values decide on, as a number out of a tensor; None: it isn't left open."""
        tensor, rest = args[0], args[1:]
        if kwargs or not shadow.takes_sizes(tensor) or name not in ("shape", "size", "numel"):
            return None
        if not all(is_exactly(one, int) for one in rest):
            return None
        dims = rest if rest and name == "size" else range(tensor.dim())
        sizes = self._record(torch._shape_as_tensor, tensor)
        parts = [self._record(torch.Tensor.__getitem__, sizes, dim) for dim in dims]
        if self.state.refusal is not None:
            return None
        where = self._range()
        numbers = [shadow.hand_out(part, where) for part in parts]
        if name == "numel":
            return math.prod(numbers)
        return numbers[0] if is_exactly(value, int) else type(value)(numbers)

    def _pick(
        self, tensor: torch.Tensor, rest: tuple[Any, ...], picks: list[tuple[int, OpenInt]]
    ) -> torch.Tensor:
        """`x[:, n]` as calls that leave n open: torch's own spelling fixes it."""
        if not all(map(_is_whole, rest)):
            tensor = self._record(torch.Tensor.__getitem__, tensor, rest)
        for dim, place in reversed(picks):
            tensor = self._record(torch.select, tensor, dim, place)
        return tensor

    def _pad(
        self,
        shadow: Shadow,
        sequences: Any,
        batch_first: bool = False,
        padding_value: float = 0.0,
        padding_side: str = "right",
    ) -> torch.Tensor:
        """`pad_sequence` as calls that leave open which sequence is the longest."""
        lengths: list[Any] = [self._record(torch.Tensor.size, one, 0) for one in sequences]
        longest = shadow.compute((max, *lengths), max(one.size(0) for one in sequences))
        before = [0, 0] * (sequences[0].dim() - 1)
        padded = []
        for one, length in zip(sequences, lengths, strict=True):
            sides = [0, longest - length] if padding_side == "right" else [longest - length, 0]
            padding = (before + sides, "constant", padding_value)
            padded.append(self._record(torch.nn.functional.pad, one, *padding))
        return self._record(torch.stack, padded, 0 if batch_first else 1)

    def _record(self, func: Callable[..., Any], *args: Any) -> torch.Tensor:
        result: torch.Tensor = self.__torch_function__(func, (), args)
        return result

    def _range(self) -> SourceRange:
        return self.state.capture_range(3)  # past this, _call and __torch_function__

    def _note_query(
        self, rule: Query, args: tuple[Any, ...], kwargs: dict[str, Any], value: object
    ) -> None:
        state = self.state
        if rule.of_strides:
            state.strides_matter = True
        if rule.of_grad:
            state.requires_grad_matters = True
            if rule.name == "grad_fn" and value is not None and not is_library_caller(3):
                state.refuse(Refusal("autograd-graph", _GRAD_FN, self._range()))
        if rule.of_size and state.met_data_sizes and isinstance(args[0], torch.Tensor):
            self._note_size(rule.name, args, kwargs, value)

    def _note_size(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: object
    ) -> None:
        """Python uses a size of a tensor: if values decide on it, that is a branch."""
        known = self.state.values.find(args[0])
        if known is not None and known.sized_by and known.node is not None:
            add_branch(
                self.state,
                name,
                functools.partial(ask_tensor, name),
                (known.node, *args[1:]),
                kwargs,
                value,
                self._range(),
                instead=known.sized_by,
            )


_DIFFERENTIATING: frozenset[Any] = frozenset({torch.Tensor.backward, torch.autograd.grad})
# Calls of torch that run hooks, and what custom functions have for a backward.
_RUNS_PYTHON = frozenset({"backward", "grad"})


@contextmanager
def _noting_python(state: TracingState) -> Iterator[Started]:
    """Torch may run code of the user's in here, which isn't observed: each call runs it again.

    Compiled code runs it before the run's own writes are repeated, so it may depend on none.
    """
    holders = state.reach.holders
    if not state.quiet or state.observer is None:
        with holders.uprooted():
            yield []
        return
    written = state.inner.look()
    with state.observer.noting() as started, holders.uprooted():
        yield started
    if started or differentiates_elsewhere(state):
        holders.open_number = None  # what is met from now on may be what it wrote
        for code, namespace in started:
            state.stores.add(code, namespace, None)
        state.inner.note(written)


def _find_rule(state: TracingState, func: Callable[..., Any]) -> Rule:
    """A rule that may have to be made; what that asks isn't the run's."""
    CURRENT.state = None
    try:
        return rule_for(func)
    finally:
        CURRENT.state = state


# Nested tensors have no sizes, and a subclass may run code of its own when it is asked.


def note_time(
    state: TracingState, func: Callable[..., Any], args: tuple[Any, ...], took_ns: int
) -> None:
    """What a call took. The first of its kind is often slow: the fastest stands for all of them."""
    shapes = [arg.shape for arg in args if id(type(arg)) in PLAIN_TENSORS and not arg.is_nested]
    key = func, *shapes
    count, least = state.durations.get(key, (0, took_ns))
    state.durations[key] = count + 1, min(least, took_ns)


def _run_plainly(
    state: TracingState, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return func(*args, **kwargs)
    except Exception as error:
        state.raised = id(error)
        raise


def _look_inside(
    state: TracingState,
    inside: Inside,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call of a custom autograd function's own; it may show that values decide sizes."""
    inside.is_plain = False  # if it raises
    given = [(tensor, version_of(tensor)) for tensor in iter_given((args, kwargs))]
    value = _run_plainly(state, func, args, kwargs)
    rule = rule_for(func)
    if type(rule) is Query:
        inside.is_plain = not (rule.of_strides or rule.of_grad)
    elif type(rule) is Call:
        hands_out = not is_recordable(value) or (
            isinstance(value, (tuple, list)) and any(map(is_number, value))
        )
        inside.is_plain = not (
            hands_out
            or may_be_elsewhere(rule)
            or find_decisive(rule, args, kwargs) != ()
            or find_inherited(state, rule, args, kwargs)
        )
        if not rule.writes and rule.name not in _HANDS_BACK_COMPILED:
            if any(value is one and version_of(one) == version for one, version in given):
                inside.copied = rule.name
    return value


# What returns its argument itself where it has nothing to do, behind compilers as well.
_HANDS_BACK_COMPILED = words(
    "contiguous to type type_as float double half bfloat16 int long bool cpu flatten positive "
    "real conj resolve_conj resolve_neg sum_to_size atleast_1d"
)

_GRAD_FN = (
    "`grad_fn` gives access to the autograd graph. Hooks on it, and what is read from it, would "
    "be missing from the traced graph. Read it outside."
)


def note_failure(state: TracingState, rule: Call, error: Exception, where: SourceRange) -> None:
    """If the run goes on, it caught the error: what it does then depends on values."""
    if rule.name == "__index__":  # torch itself asks, and dtype and size alone decide
        return
    state.refuse(
        Refusal(
            "caught-exception",
            f"`{rule.name}` raised {type(error).__name__} here and the function caught it. "
            "Whether it raises may depend on values, and a graph can't take the other way. "
            "Test the condition before the call.",
            where,
        )
    )


@contextmanager
def recording(state: TracingState) -> Iterator[Recorder]:
    """Record every torch call of this thread that a torch-function mode sees into `state`.

    The tracer adds hooks.installed() for what a mode doesn't see: module scopes, custom
    autograd functions, autocast.
    """
    before = CURRENT.state
    CURRENT.state = state
    try:
        with Recorder(state) as recorder:
            yield recorder
    finally:
        CURRENT.state = before


def stop_recording(state: TracingState) -> None:
    """Record nothing more into a state; where nothing does, nothing changes."""
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    if isinstance(mode, Recorder) and mode.state is state:
        mode.leave()
    CURRENT.state = None
