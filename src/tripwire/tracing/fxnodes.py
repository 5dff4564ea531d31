"""fx nodes: a torch call that ran becomes a node of the graph, and stands for its result.

Arguments become arguments of the node, or are refused. A value that Python takes out of a tensor is
a branch. The node notes which tensors the call wrote to, and which results have sizes that depend
on values.
"""

from __future__ import annotations

import cmath
import functools
import keyword
import operator
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from tripwire.ranges import SourceRange
from tripwire.reading.names import find_names
from tripwire.reading.tensors import (
    OUTSIDE,
    PLAIN_TENSORS,
    describe,
    find_leaf,
    holds_tensor,
    is_wrapped,
    iter_given,
    storage_of,
    version_of,
)
from tripwire.reading.torchstate import find_autocast
from tripwire.rulebook.refusals import Refused
from tripwire.rulebook.rules import GETATTR, RESULT_IS_CAST, Call, Target, find_out_of_place, words
from tripwire.tracing.answers import Own
from tripwire.tracing.bodies import iter_containers
from tripwire.tracing.branches import (
    WRAPPED,
    Branch,
    add_branch,
    describe_attribute,
    is_settled,
    note_accumulated,
    tensor_nodes,
)
from tripwire.tracing.sizes import find_deciders, shape_of
from tripwire.tracing.state import (
    FACTS,
    Constant,
    NodeFacts,
    PythonCall,
    TracingState,
    check_class,
    create_node,
)
from tripwire.values.classes import (
    ids_of,
    is_namedtuple,
    isinstance,
    module_of,
    name_of,
)
from tripwire.values.numbers import close_values, is_open

# What an fx graph can spell as an argument. Everything else is a tensor, a container, or a
# constant that the graph's module holds.
_SPELLABLE = ids_of(
    *(int, float, bool, str, type(None), type(...), torch.dtype, torch.device),
    *(torch.layout, torch.memory_format, range),
)
_PART = Call("call_function", operator.getitem, "getitem")
# Beside a generator, even if it is None, these take no symbolic sizes, which compilers have.
_OF_SIZES = words("rand randn randint randperm")

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
    if "generator" in kwargs and kwargs["generator"] is None and rule.name in _OF_SIZES:
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if rule.name == "deepcopy":
        args = args[:1]
    converted: list[Any] = []
    for value in args:
        kind = id(type(value))
        if kind in PLAIN_TENSORS:
            converted.append(state.node_of(value))
        else:
            spelled = kind in _SPELLABLE
            converted.append(value if spelled else _convert(state, rule, value, where))
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
        return value.value if state.shadow is None else state.shadow.node_of(value)
    if kind is complex and cmath.isfinite(value) and repr(eval(repr(value))) == repr(value):
        return value  # fx spells nan and inf, and the sign of zero, not in complex
    if (kind is list or kind is dict) and rule.opaque and _is_kept(state, value):
        return _constant(state, rule, value, where)
    if kind is list:
        return [_convert(state, rule, item, where) for item in value]
    if kind is torch.Size and rule.opaque:  # which fx has no word for, and Python code asks
        return _constant(state, rule, close_values(value), where)
    if kind is tuple or kind is torch.Size:
        return tuple([_convert(state, rule, item, where) for item in value])
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return slice(*[_convert(state, rule, bound, where) for bound in bounds])
    if kind is dict:
        return {key: _convert(state, rule, item, where) for key, item in value.items()}
    if isinstance(value, (tuple, list)):  # a namedtuple, or another subclass
        if rule.opaque and not is_namedtuple(kind):  # Python code asks what it is
            return _constant(state, rule, value, where)
        items = [_convert(state, rule, item, where) for item in value]
        return kind(*items) if is_namedtuple(kind) else tuple(items)
    return _constant(state, rule, value, where)


def _is_kept(state: TracingState, container: object) -> bool:
    """Whether it is the program's, so that code which gets it may look at it later."""
    return state.quiet and not holds_tensor(container) and state.reach.is_anchored(container)


def hand_over(
    state: TracingState,
    rule: Call,
    nodes: Arguments,
    given: Given,
    kept: list[object],
    where: SourceRange,
) -> Arguments:
    """The same arguments; those that are kept are the caller's own lists and dicts.

    Guards then want the same ones in each call. Raises Refused.
    """
    inner = {id(one) for value in kept for one in iter_containers(value)}
    callers = inner & state.reach.fresh.keys()

    def spell(value: Any, spelled: Any) -> Any:
        if callers.isdisjoint(map(id, iter_containers(value))):
            return spelled
        if id(value) not in state.reach.fresh:
            raise Refused(
                "opaque-object",
                f"`{rule.name}` keeps a list or dict of the caller's, in a "
                f"{name_of(type(value))} that is new in each call. Pass it directly.",
            )
        return _constant(state, rule, value, lambda: where)

    args = tuple([spell(*one) for one in zip(given[0], nodes[0], strict=True)])
    return args, {name: spell(given[1][name], node) for name, node in nodes[1].items()}


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
            "can't see it. Write what it does with functions of tensors, or call it outside the "
            "traced function.",
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
    draws: bool = False,
) -> fx.Node | None:
    """Append the node of a call that ran, and let it stand for what the call returned.

    varies: sizes or numbers that it got may be others on the next call.
    draws: the random generators have moved.
    """
    if find_autocast() != state.autocast:
        raise Refused("torch-state-changed", AUTOCAST_BY_HAND)
    if type(value) is not torch.Tensor:
        check_class(value)
        if not is_recordable(value):
            inputs = tensor_nodes(nodes)
            if inputs:
                taken = tuple(iter_given((args, kwargs)))
                add_branch(state, rule.name, _taker(rule), *nodes, value, where, taken)
            return None
        if value is None and rule.target is GETATTR:  # `.grad is None` asks what ran before
            if not is_settled(state, rule.name, args[0]):
                add_branch(state, rule.name, _taker(rule), *nodes, value, where)
            return None
    state.calls += 1
    state.written = {}
    deciders, makes_size = find_deciders(state, rule, args, kwargs, where)
    if rule.writes_also is not None:
        _note_writes(state, rule.writes_also.find(args, kwargs))
    if rule.may_write or kwargs:
        _note_changes(state, rule, args, kwargs)
    cast = None
    in_place = rule.writes or kwargs.get("out") is not None
    if in_place:
        if state.force_outplace:
            cast = _dtype_of_result(rule, args, kwargs)
            rule = _out_of_place(state, rule, args, kwargs)
        elif not _leaves_memory(rule, args):
            _note_writes(state, kwargs.get("out", args[:1] or tuple(kwargs.values())[:1]))
    if rule.name == "backward":  # into `.grad` of anything
        state.written[OUTSIDE] = None
        note_accumulated(state)
    if not in_place and python is None and _hands_back(state, rule, args, kwargs, value):
        # A node would stand for a copy where the back end says so: `dropout` in eval mode.
        state.strides_matter = True  # `contiguous` returns its argument for some strides only
        return state.node_of(value)
    if nodes[1] and not nodes[1].keys().isdisjoint(keyword.kwlist):
        rule, nodes = _spell_keywords(rule, nodes)
    names = _choose_names(state, value, where)
    first = names if isinstance(names, str) else None
    node = _create_node(state.graph(), rule, nodes, first or _hint(rule))
    if cast is not None:
        node = _create_node(state.graph(), _CAST, ((node, cast), {}), node.name)
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
        rule.as_it_is or _find_special(rule, args, kwargs, value) or _find_generator(args, kwargs),
        draws,
    )
    state.writes += bool(state.written)
    if state.regions and any(number <= state.regions[-1].older for number in state.written):
        raise Refused("checkpoint-writes", CHECKPOINT_WRITES)
    _stand_for(state, node, value, deciders, names if isinstance(names, tuple) else ())
    _note_answers(state, rule, nodes, args, value, where, python, deciders)
    return node


def _note_answers(
    state: TracingState,
    rule: Call,
    nodes: Arguments,
    args: tuple[Any, ...],
    value: Any,
    where: SourceRange,
    python: PythonCall | None,
    deciders: tuple[Branch, ...] | None,
) -> None:
    """What a recorded call tells Python beside its tensors: that one is there, counts, numbers."""
    is_attribute = rule.target is GETATTR and rule.name not in _ALWAYS_THERE
    if state.quiet and is_attribute and isinstance(value, torch.Tensor):
        # `.grad` may be None next time
        state.attribute_at = state.attribute_at or where
        if not is_settled(state, rule.name, args[0]):
            seen = str(describe(value))
            add_branch(state, rule.name, describe_attribute, *nodes, seen, where)
    if rule.attribute == "data" and rule.writes and deciders != ():
        _stand_for(state, state.node_of(args[0]), args[0], deciders, ())
    if rule.name == "deepcopy":
        _check_copied_once(state, value)
    if isinstance(value, (tuple, list)):
        plain = tuple(filter(is_number, value))
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


def _leaves_memory(rule: Call, args: tuple[Any, ...]) -> bool:
    """Whether a call that is spelled as one in place changes no value."""
    if rule.attribute == "data":
        return args[0] is args[1]  # `module.to` a dtype it has
    return rule.name == "requires_grad_" and is_wrapped(args[0])  # by a transform


CHECKPOINT_WRITES = (
    "a checkpointed function writes to something that existed before it ran. The backward runs it "
    "again and writes a second time; a compiled call wouldn't. Write outside of `checkpoint`."
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
    "`{}` changes a tensor in place, and returns numbers or a varying count of tensors to Python. "
    "tripwire can't compute these before the call."
)

_ALSO_NUMBERS = (
    "the custom autograd function `{}` returns numbers to Python, and also changes its arguments, "
    "returns views of them or writes to something that the call reads. Return tensors only."
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


def _find_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Whether a call draws from a generator that it is given.

    Code that AOTAutograd and Inductor find in their caches has lost it, and draws from torch's own.
    """
    given = (*args, *kwargs.values())
    return _GENERATOR if any(isinstance(one, torch.Generator) for one in given) else None


LEAF = "it makes a leaf tensor, which gets a gradient of its own"
_GENERATOR = "it draws from a torch.Generator, which compilers lose when they use their caches"
_SUBCLASS = "it makes a tensor of another class"


def _may_be_outside(rule: Call) -> bool:
    """Whether a call can return memory that neither it made nor its arguments have."""
    return may_be_elsewhere(rule) or rule.target is GETATTR


def may_be_elsewhere(rule: Call) -> bool:
    """Whether a call may return memory that is kept somewhere else."""
    return rule.opaque or rule.name in _FROM_ELSEWHERE


def is_number(item: object) -> bool:
    """Whether a part of a result is a plain number or text."""
    return isinstance(item, (bool, int, float, str))


def _taker(rule: Call) -> Callable[..., Any]:
    """The call itself, as a function."""
    if rule.op == "call_method":
        return functools.partial(_call_method, rule.target)
    return rule.target  # type: ignore[no-any-return]  # a callable, then


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> object:
    return getattr(owner, name)(*args, **kwargs)


def _count_parts(call: Callable[..., Any], *args: Any, **kwargs: Any) -> object:
    value = call(*args, **kwargs)
    return (len(value), *filter(is_number, value))


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


def is_recordable(value: Any) -> bool:
    """Whether a result holds a tensor; None is the result of calls made for their effect."""
    if value is None or isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(isinstance(item, torch.Tensor) or _is_nested(item) for item in value)
    return False


def _is_nested(item: object) -> bool:
    return isinstance(item, (tuple, list)) and is_recordable(item)


def _choose_names(
    state: TracingState, value: Any, where: SourceRange
) -> str | tuple[str, ...] | None:
    if state.name_fn is not None:
        return state.name_fn(value) if isinstance(value, torch.Tensor) else None
    if value is None:
        return None
    return find_names(where, state.callers)


def _stand_for(
    state: TracingState,
    node: fx.Node,
    value: Any,
    deciders: tuple[Branch, ...] | None,
    names: tuple[str, ...],
) -> None:
    if isinstance(value, torch.Tensor):
        known = state.values.add(value)
        if known.version != version_of(value):  # a `.grad` again, changed through a view of it
            state.check_seen(value, known)
        known.node = node
        known.seen_at = state.calls
        if state.has_levels and is_wrapped(value):
            node.meta[WRAPPED] = True
        if deciders != () and value.dim() > 0:
            known.sized_by = (shape_of(state, node),) if deciders is None else deciders
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


# --- writes ---


def _note_writes(state: TracingState, written: Any) -> None:
    """A recorded call wrote to these tensors."""
    for tensor in iter_given(written):
        state.note_write(tensor)


def _note_changes(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Arguments whose version moved were changed by this very call: before it they were checked."""
    given = iter_given((args, kwargs)) if rule.writes or kwargs else args
    for tensor in given:
        if isinstance(tensor, torch.Tensor):
            known = state.values.find(tensor)
            if known is None:
                continue
            if known.version is None and rule.opaque:  # nothing would tell
                state.note_write(tensor)
            if known.version != version_of(tensor):
                if state.force_outplace and not rule.writes:
                    raise Refused(
                        "no-outplace-form", f"force_outplace: `{rule.name}` changes its argument."
                    )
                if not state.force_outplace:
                    state.note_write(tensor)
                known.version, known.seen_at = version_of(tensor), state.calls


_CAST = Call("call_method", "to", "to")


def _dtype_of_result(
    rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype | None:
    """The dtype to cast to, where the out-of-place form would compute another."""
    written, *others = iter_given((args, kwargs))
    promoted = any(torch.result_type(written, other) != written.dtype for other in others)
    return written.dtype if promoted or rule.name in RESULT_IS_CAST else None


def _out_of_place(
    state: TracingState, rule: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """The out-of-place form of a call. Raises Refused where it would mean something else."""
    plain = find_out_of_place(rule) if args and "out" not in kwargs else None
    if plain is None:
        raise Refused(
            "no-outplace-form", f"force_outplace: `{rule.name}` has no out-of-place form."
        )
    written = next(iter_given((args, kwargs)))
    for other, known in state.values.live():
        if other is not written and other.layout is torch.strided:
            if storage_of(other) == storage_of(written):
                name = known.node.name if known.node else next(iter(known.sources))
                raise Refused(
                    "outplace-alias",
                    f"force_outplace: `{rule.name}` writes to memory that another live tensor "
                    f"({name}) shares; out of place that tensor would keep its value.",
                )
    return plain
