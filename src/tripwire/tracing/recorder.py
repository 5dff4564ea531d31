"""Recorder: the torch-function mode that turns each torch call of a run into a node.

The call runs first and for real; its result is the run's. Recording looks at arguments and
result only, and holds neither. After a refusal, and while its state isn't current, the
recorder steps aside.
"""

from __future__ import annotations

import cmath
import functools
import keyword
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from tripwire.ranges import SourceRange, is_library_caller
from tripwire.reading.names import find_names
from tripwire.reading.tensors import (
    PLAIN_TENSORS,
    TensorMeta,
    find_leaf,
    holds_tensor,
    iter_given,
    meta_of,
    storage_of,
    version_of,
)
from tripwire.reading.torchstate import find_autocast
from tripwire.rulebook.refusals import Refusal, Refused
from tripwire.rulebook.rules import (
    GETATTR,
    RULES,
    Call,
    Query,
    Refuse,
    Rule,
    Target,
    find_original,
    rule_for,
    spell_original,
    words,
)
from tripwire.tracing.answers import Own
from tripwire.tracing.branches import Branch, warn_of
from tripwire.tracing.memory import OUTSIDE
from tripwire.tracing.observe import set_profile
from tripwire.tracing.sizes import find_decisive, find_inherited
from tripwire.tracing.state import (
    CURRENT,
    FACTS,
    Constant,
    Inside,
    NodeFacts,
    PythonCall,
    TracingState,
    check_class,
    create_node,
)
from tripwire.tracing.writes import (
    CAST,
    dtype_of_result,
    note_changes,
    note_writes,
    out_of_place,
)
from tripwire.values.classes import ids_of, is_namedtuple, isinstance, module_of, name_of
from tripwire.values.numbers import close_values, is_open

if TYPE_CHECKING:
    from tripwire.tracing.shadow import Shadow

# What an fx graph can spell as an argument. Everything else is a tensor, a container, or a
# constant that the graph's module holds.
_SPELLABLE = ids_of(
    *(int, float, bool, str, type(None), type(...), torch.dtype, torch.device),
    *(torch.layout, torch.memory_format, range),
)


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
        given = args, kwargs
        if state.shadow is not None:
            given = state.shadow.take(args), state.shadow.take(kwargs)
            args, kwargs = close_values(args), close_values(kwargs)
        if CURRENT.kept is not None:
            CURRENT.kept.before_call(func, args, kwargs)
        if CURRENT.state is not state or state.refusal is not None:
            if state.shadow is not None and state.refusal is None:
                state.shadow.close_given(given, "a call that isn't looked into")
            if state.inside is not None and state.inside.is_plain:
                return _look_inside(state, state.inside, func, args, kwargs)
            return _run_plainly(state, func, args, kwargs)
        rule = RULES.get(func) or _find_rule(state, func)
        if type(rule) is Query:
            value = _run_plainly(state, func, args, kwargs)
            if rule.of_size or rule.of_strides or rule.of_grad:
                self._note_query(rule, args, kwargs, value)
            if state.shadow is not None:
                value = state.shadow.answer(rule, given, args, kwargs, value)
            return value
        shadow = state.shadow
        if shadow is not None and type(rule) is Call and shadow.takes(rule, args, kwargs):
            return self._take_out(shadow, rule, args[0])
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
            begin = perf_counter_ns()
            try:
                value = func(*args, **kwargs)
            except Exception as error:
                state.raised = id(error)
                note_failure(state, rule, error, self._range())
                raise
            finally:
                note_time(state, func, args, perf_counter_ns() - begin)
            try:
                record(state, rule, nodes, args, kwargs, value, self._range(), varies=varies)
                if shadow is not None and varies:
                    shadow.follow(rule, func, *given, value)
            except Refused as refused:
                state.refuse(Refusal(refused.slug, refused.reason, self._range()))
            return value
        finally:
            CURRENT.state = state

    def _take_out(self, shadow: Shadow, rule: Call, tensor: torch.Tensor) -> Any:
        """What `item()` or `tolist()` gives, open: from a copy that nobody else can change."""
        copy = self._record(torch.Tensor.detach, tensor)
        copy = self._record(torch.Tensor.clone, copy)
        if rule.name == "tolist":
            count = tensor.numel()
            copies = [self._record(torch.Tensor.__getitem__, copy, i) for i in range(count)]
        else:
            copies = [self._record(torch.Tensor.reshape, copy, ()) if tensor.dim() else copy]
        plain = self.state.refusal is not None
        found = [one.item() if plain else shadow.hand_out(one) for one in copies]
        return found[0] if rule.name == "item" else found

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
            known = state.values.find(args[0])
            if known is not None and known.sized_by and known.node is not None:
                add_branch(
                    state,
                    rule.name,
                    functools.partial(_ask, rule.name),
                    (known.node, *args[1:]),
                    kwargs,
                    value,
                    self._range(),
                    instead=known.sized_by,
                )


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
        hands_out = not _is_recordable(value) or (
            isinstance(value, (tuple, list)) and any(map(_is_number, value))
        )
        inside.is_plain = not (
            hands_out
            or _may_be_elsewhere(rule)
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
    "be missing from the traced graph."
)


def note_failure(state: TracingState, rule: Call, error: Exception, where: SourceRange) -> None:
    """A run that goes on after this caught the error: what it did then hangs on values."""
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


_PART = Call("call_function", operator.getitem, "getitem")


# --- one call → one node -------------------------------------------------------------------

Given = tuple[tuple[Any, ...], dict[str, Any]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def build_arguments(
    state: TracingState,
    rule: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Callable[[], SourceRange],
) -> Arguments:
    """A call's arguments as a graph spells them. Raises Refused."""
    if rule.name == "deepcopy":
        args = args[:1]
    converted = [
        value if id(type(value)) in _SPELLABLE else _convert(state, rule, value, where)
        for value in args
    ]
    if rule.attribute is not None:
        converted.insert(1, rule.attribute)
    if not kwargs:
        return tuple(converted), kwargs
    return tuple(converted), {k: _convert(state, rule, v, where) for k, v in kwargs.items()}


def _convert(state: TracingState, rule: Call, value: Any, where: Callable[[], SourceRange]) -> Any:
    if isinstance(value, torch.Tensor):
        return state.node_of(value)
    kind = type(value)
    if id(kind) in _SPELLABLE:
        return value
    if is_open(value):  # without a shadow, it is another run's, and plain by now
        return value.value if state.shadow is None else state.shadow.formulas.node_of(value)
    if kind is complex and cmath.isfinite(value) and repr(eval(repr(value))) == repr(value):
        return value  # fx spells nan and inf, and the sign of zero, not in complex
    if kind is list:
        return [_convert(state, rule, item, where) for item in value]
    if kind is tuple or kind is torch.Size:
        return tuple([_convert(state, rule, item, where) for item in value])
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return slice(*[_convert(state, rule, bound, where) for bound in bounds])
    if kind is dict:
        return {key: _convert(state, rule, item, where) for key, item in value.items()}
    if isinstance(value, (tuple, list)):  # a namedtuple, or another subclass
        items = [_convert(state, rule, item, where) for item in value]
        return kind(*items) if is_namedtuple(kind) else tuple(items)
    return _constant(state, rule, value, where)


_SHARES_MEMORY = frozenset({"as_tensor", "asarray", "from_numpy"})
_FROM_ELSEWHERE = _SHARES_MEMORY | {"frombuffer", "from_dlpack", "from_file", "grad"}


def _constant(
    state: TracingState, rule: Call, value: Any, where: Callable[[], SourceRange]
) -> fx.Node:
    if holds_tensor(value):
        raise Refused(
            "opaque-object",
            f"`{rule.name}` takes a {name_of(type(value))} with tensors in it, and the graph "
            "would keep these tensors. Pass the tensors themselves.",
        )
    if callable(value) and not isinstance(value, type):
        raise Refused(
            "callable-argument",
            f"`{rule.name}` takes a Python function "
            f"({getattr(value, '__qualname__', value)!s}), which would run where this trace "
            "can't see it.",
        )
    if module_of(type(value)) == "numpy":
        if rule.name in _SHARES_MEMORY and not (state.quiet and state.reach.is_anchored(value)):
            raise Refused(
                "numpy-memory",
                f"`{rule.name}` shares memory with a NumPy array, and writes to that array can't "
                "be followed. Use torch.tensor, which copies.",
            )
        if rule.name not in _SHARES_MEMORY:
            value = value.copy()
    source = state.reach.find_source(value)
    if isinstance(value, torch.Generator) and source is None:
        raise Refused(
            "generator-made-inside",
            f"`{rule.name}` draws from a torch.Generator that the run made itself, and the "
            "graph would keep drawing from this one. Make it outside, and seed it before each "
            "call.",
        )
    name = f"_constant{len(state.constants)}"
    state.constants.append(Constant(name, value, where(), source))
    node = state.graph().create_node("get_attr", name)
    node.meta[FACTS] = NodeFacts(state.constants[-1].where, state.scopes.current, None)
    return node


def record(
    state: TracingState,
    rule: Call,
    nodes: Arguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Any,
    where: SourceRange,
    python: PythonCall | None = None,
    *,
    varies: bool = False,
) -> fx.Node | None:
    """Append the node of a call that ran, and let it stand for what the call returned.

    varies: sizes or numbers that it got may be others on the next call.
    """
    if find_autocast() != state.autocast:
        raise Refused("torch-state-changed", AUTOCAST_BY_HAND)
    if type(value) is not torch.Tensor:
        check_class(value)
    if not _is_recordable(value):
        inputs = _tensor_nodes(nodes)
        if inputs:
            taken = tuple(iter_given((args, kwargs)))
            add_branch(state, rule.name, _taker(rule), nodes[0], nodes[1], value, where, taken)
        return None
    if value is None and rule.target is GETATTR:  # `.grad is None` asks what ran before
        add_branch(state, rule.name, _taker(rule), nodes[0], nodes[1], value, where)
        return None
    state.calls += 1
    state.written = {}
    deciders, makes_size = _find_deciders(state, rule, args, kwargs, where)
    if rule.writes_also is not None:
        note_writes(state, rule.writes_also.find(args, kwargs))
    if rule.may_write or kwargs:
        note_changes(state, rule, args, kwargs)
    cast = None
    in_place = rule.writes or kwargs.get("out") is not None
    if in_place:
        if state.force_outplace:
            cast = dtype_of_result(rule, args, kwargs)
            rule = out_of_place(state, rule, args, kwargs)
        elif not (rule.attribute == "data" and args[0] is args[1]):  # `module.to` a dtype it has
            note_writes(state, kwargs.get("out", args[:1] or tuple(kwargs.values())[:1]))
    if rule.name == "backward":  # into `.grad` of anything
        state.written[OUTSIDE] = None
    if not in_place and python is None and _hands_back(state, rule, args, kwargs, value):
        # A node would stand for a copy where the back end says so: `dropout` in eval mode.
        state.strides_matter = True  # `contiguous` returns its argument for some strides only
        return state.node_of(value)
    if not nodes[1].keys().isdisjoint(keyword.kwlist):
        rule, nodes = _spell_keywords(rule, nodes)
    names = _choose_names(state, value, where)
    first = names if isinstance(names, str) else None
    node = _create_node(state.graph(), rule, nodes, first or _hint(rule))
    if cast is not None:
        node = _create_node(state.graph(), CAST, ((node, cast), {}), node.name)
    node.meta[FACTS] = NodeFacts(
        where,
        state.scopes.current,
        describe(value),
        state.regions[-1].number if state.regions else None,
        python,
        state.memory.add_results(value, _may_be_outside(rule)),
        tuple(state.written),
        rule.opaque,
        deciders if rule.of_shapes and not varies else None,
        deciders != () and _has_sizes(value),
        makes_size,
        rule.as_it_is or _find_special(rule, args, kwargs, value),
    )
    state.writes += bool(state.written)
    if state.regions and any(number <= state.regions[-1].older for number in state.written):
        raise Refused("checkpoint-writes", CHECKPOINT_WRITES)
    _stand_for(state, node, value, deciders, names if isinstance(names, tuple) else ())
    is_attribute = rule.target is GETATTR and rule.name not in _ALWAYS_THERE
    if state.quiet and is_attribute and isinstance(value, torch.Tensor):
        # `.grad` may be None next time
        state.attribute_at = state.attribute_at or where
        seen = str(describe(value))
        add_branch(state, rule.name, _describe_attribute, *nodes, seen, where)
    if rule.attribute == "data" and rule.writes and deciders != ():
        _stand_for(state, state.node_of(args[0]), args[0], deciders, ())
    if rule.name == "deepcopy":
        _check_copied_once(state, value)
    if isinstance(value, (tuple, list)):
        plain = tuple(filter(_is_number, value))
        if python is not None and rule.opaque and state.quiet:  # it would run twice: see answers.py
            if plain and (not isinstance(rule.target, Own) or rule.target.place is None):
                raise Refused("tensor-branch", _ALSO_NUMBERS.format(rule.name))
        elif plain or (deciders != () and (rule.splits or rule.opaque)):
            if state.written:
                raise Refused("tensor-branch", _WRITES_AND_RETURNS.format(rule.name))
            take = functools.partial(_count_parts, _taker(rule))
            count = (len(value), *plain)
            instead = () if plain or deciders is None else deciders
            add_branch(state, rule.name, take, *nodes, count, where, instead=instead)
    return node


CHECKPOINT_WRITES = (
    "a checkpointed function writes to something that was there before it. Its backward runs it "
    "again, and writes once more; a compiled call wouldn't. Write outside of `checkpoint`."
)
AUTOCAST_BY_HAND = (
    "autocast was set by hand before this call (torch.set_autocast_enabled, "
    "torch.set_autocast_dtype), and a graph wouldn't set it again. Use `with torch.autocast(...)`."
)


def _hands_back(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> bool:
    """Whether a call did nothing but return its argument, the tensor itself."""
    given = args[0] if args else next(iter(kwargs.values()), None)
    if value is not given or not isinstance(value, torch.Tensor):
        return False
    if rule.opaque or state.written:
        return False
    # One without a count of its changes may have been changed.
    return not rule.may_write or rule.writes_also is not None or version_of(value) is not None


# Attributes that are made of the tensor itself.
_ALWAYS_THERE = frozenset({"data", "real", "imag", "T", "mT", "H", "mH"})

_WRITES_AND_RETURNS = (
    "`{}` changes a tensor in place and returns numbers, or a number of tensors, to Python. They "
    "can't be computed before the call."
)

_ALSO_NUMBERS = (
    "`{}`, a custom autograd function, returns numbers to Python, and changes its arguments, hands "
    "out views of them or writes to something that the call reads. Return tensors alone."
)


def _spell_keywords(rule: Call, nodes: Arguments) -> tuple[Call, Arguments]:
    """`random_(**{"from": 0})`: an argument's name that generated code can't spell."""
    call = functools.partial(_call_with, _taker(rule), tuple(nodes[1]))
    spelled = replace(rule, op="call_function", target=Target(call, rule.name))
    return spelled, ((*nodes[1].values(), *nodes[0]), {})


def _call_with(call: Callable[..., Any], names: tuple[str, ...], *args: Any) -> Any:
    given = dict(zip(names, args, strict=False))
    return call(*args[len(names) :], **given)


def _has_sizes(value: object) -> bool:
    """Whether a result holds more than numbers."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, (tuple, list)) and any(map(_has_sizes, value))


def _find_special(
    rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any], value: object
) -> str | None:
    """What a result has that a compiler of functions of values would lose."""
    if type(value) is torch.Tensor:
        if not (value.requires_grad and find_leaf(value)):
            return None
        why = LEAF
    elif isinstance(value, torch.Tensor):
        why = _SUBCLASS
    elif isinstance(value, (tuple, list)):
        return next(filter(None, (_find_special(rule, args, kwargs, v) for v in value)), None)
    else:
        return LEAF if rule.attribute == "requires_grad" and rule.writes else None
    had_before = any(value is given for given in iter_given((args, kwargs)))
    return None if had_before and rule.name != "requires_grad_" else why


LEAF = "it makes a tensor that gets a gradient of its own"
_SUBCLASS = "it makes a tensor of another class"


def _may_be_outside(rule: Call) -> bool:
    """Whether a call can return memory that neither it made nor its arguments have."""
    return _may_be_elsewhere(rule) or rule.target is GETATTR


def _may_be_elsewhere(rule: Call) -> bool:
    return rule.opaque or rule.name in _FROM_ELSEWHERE


def _is_number(item: object) -> bool:
    return isinstance(item, (bool, int, float, str))


def _taker(rule: Call) -> Callable[..., Any]:
    """The call itself, as a function."""
    if rule.op == "call_method":
        return functools.partial(_call_method, rule.target)
    return rule.target  # type: ignore[no-any-return]  # a callable, then


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> object:
    return getattr(owner, name)(*args, **kwargs)


def _describe_attribute(owner: torch.Tensor, name: str) -> str:
    return str(describe(getattr(owner, name)))


def _ask(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:
    answer = getattr(tensor, name)
    return answer(*args, **kwargs) if callable(answer) else answer


def _count_parts(call: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    value = call(*args, **kwargs)
    return (len(value), *filter(_is_number, value))


def _check_copied_once(state: TracingState, copied: torch.Tensor) -> None:
    storage = storage_of(copied)
    if storage in state.copied_storages:
        raise Refused(
            "tensor-memory",
            "deepcopy of tensors that share memory: in a graph, their copies would not share it.",
        )
    if copied.layout is torch.strided:
        state.copied_storages.add(storage)


def _create_node(graph: fx.Graph, rule: Call, nodes: Arguments, name: str) -> fx.Node:
    return create_node(graph, rule.op, rule.target, *nodes, name)


def _hint(rule: Call) -> str:
    return rule.name.strip("_") or rule.name


def _is_recordable(value: Any) -> bool:
    """Whether a result holds a tensor; None is the result of calls made for their effect."""
    if value is None or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(isinstance(item, torch.Tensor) or _is_nested(item) for item in value)
    return False


def _is_nested(item: object) -> bool:
    return isinstance(item, (tuple, list)) and _is_recordable(item)


def describe(value: Any) -> TensorMeta | tuple[TensorMeta | None, ...] | None:
    """Metadata of a result; None in the place of what is no tensor."""
    if isinstance(value, torch.Tensor):
        return meta_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(meta_of(v) if isinstance(v, torch.Tensor) else None for v in value)
    return None


def _choose_names(
    state: TracingState, value: Any, where: SourceRange
) -> str | tuple[str, ...] | None:
    if state.name_fn is not None:
        return state.name_fn(value) if isinstance(value, torch.Tensor) else None
    if value is None:
        return None
    return find_names(where)


def _stand_for(
    state: TracingState,
    node: fx.Node,
    value: Any,
    deciders: tuple[Branch, ...] | None,
    names: tuple[str, ...],
) -> None:
    if isinstance(value, torch.Tensor):
        known = state.values.add(value)
        known.node = node
        known.seen_at = state.calls
        if deciders != () and value.dim() > 0:
            known.sized_by = (_shape_of(state, node),) if deciders is None else deciders
            state.met_data_sizes = True
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor) or _is_nested(item):
                name = names[index] if len(names) == len(value) else f"{node.name}_{index}"
                part = _create_node(state.graph(), _PART, ((node, index), {}), name)
                facts: NodeFacts = node.meta[FACTS]
                part.meta[FACTS] = facts._replace(
                    value=describe(item),
                    python=None,
                    memory=state.memory.add_results(item, may_be_outside=True),
                    written=(),
                    opaque=False,
                )
                state.parts.append(part)
                _stand_for(state, part, item, deciders, ())


def _tensor_nodes(nodes: Arguments) -> tuple[fx.Node, ...]:
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(nodes, lambda node: found.setdefault(node))
    return tuple(node for node in found if node.op != "get_attr")


def add_branch(
    state: TracingState,
    op: str,
    take: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Any,
    where: SourceRange,
    taken: tuple[torch.Tensor, ...] = (),
    instead: tuple[Branch, ...] = (),
) -> None:
    """Note that Python used a tensor's value, and warn at the user's line.

    instead: other values that settle this one, where it is a size.
    """
    if module_of(type(value)) == "numpy":
        value = value.copy()  # it shares the tensor's memory
        for tensor in taken:
            state.exposed.append((tensor, version_of(tensor), tensor.detach().clone()))
    inputs = _tensor_nodes((args, kwargs))
    branch = Branch(
        op,
        take,
        inputs,
        args,
        kwargs,
        value,
        where,
        state.scopes.current,
        state.writes,
        instead,
    )
    state.branches.append(branch)
    if not state.quiet:
        warn_of(branch)


def _find_deciders(
    state: TracingState,
    rule: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: SourceRange,
) -> tuple[tuple[Branch, ...] | None, bool]:
    """What decides on the shape of a call's result by values; None: nothing but the result.

    And whether this very call makes a size of values. Custom operators say so to compilers.
    """
    if rule.opaque:
        return None, rule.as_it_is is not None
    decisive = find_decisive(rule, args, kwargs)
    if decisive is None:
        return None, True
    inherited = find_inherited(state, rule, args, kwargs)
    if not decisive:
        return inherited, False
    found = []
    for op, tensor in decisive:
        node, take = state.node_of(tensor), functools.partial(_take_number, op)
        value, scope = take(tensor), state.scopes.current
        found.append(Branch(op, take, (node,), (node,), {}, value, where, scope, state.writes))
    return (*inherited, *found), True


def _take_number(op: str, tensor: torch.Tensor) -> object:
    value = getattr(tensor.detach(), op)()
    return value.item() if isinstance(value, torch.Tensor) else value


def _shape_of(state: TracingState, node: fx.Node) -> Branch:
    """The shape of a call's result, as it was made."""
    facts: NodeFacts = node.meta[FACTS]
    assert isinstance(facts.value, TensorMeta)
    shape, take = torch.Size(facts.value.shape), functools.partial(_ask, "shape")
    where, scope = facts.where, facts.scope
    return Branch("shape", take, (node,), (node,), {}, shape, where, scope, state.writes)
