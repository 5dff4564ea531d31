"""Spellings: calls that torch computes for one size alone, in terms of calls that leave it open.

`torch.linspace(0, 1, n)` takes n for a plain int. Where a size or a number that such a call depends
on is open, the shadow asks the spelling for the form of the result, and compilers get the spelling
in the call's place. The run, and the back end "eager", make the call itself: a spelling may round
otherwise.

A spelling is given real tensors, fake ones, or a graph's proxies, so it asks them nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tripwire.tracing.open.symbols import expression_of, is_open_symbol
from tripwire.tracing.state import FACTS, NodeFacts
from tripwire.values.classes import is_exactly
from tripwire.values.numbers import OpenInt, is_taken

SPELLED = "tripwire_spelled"  # in a node's meta: its spelling
Spelling = Callable[..., Any]
_LARGER: Callable[[Any, Any], Any] = torch.sym_max
FindFake = Callable[[torch.Tensor], Any]  # None: all of its sizes are fixed


def find_spelling(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], find: FindFake
) -> Spelling | None:
    """How to write a call of which something is open; None: as it is."""
    look = _LOOKS.get(func)
    return None if look is None or not args else look(find, *args, **kwargs)


def find_form(
    func: Callable[..., Any], args: Sequence[Any], results: Sequence[torch.Tensor], find: FindFake
) -> Spelling | None:
    """What tells the form of a call's results, where no other calls can stand for it."""
    look = _FORMS.get(func)
    return None if look is None else look(func, args, results, find)


def spell_calls(graph: fx.Graph) -> None:
    """Put spellings in the place of their calls."""
    proxy: Any = functools.partial(fx.Proxy, tracer=fx.proxy.GraphAppendingTracer(graph))
    for node in list(graph.nodes):
        spelling: Spelling | None = node.meta.get(SPELLED)
        if spelling is None:
            continue
        before = node.prev
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), proxy)
        with graph.inserting_before(node):
            made = spelling(*args, **kwargs).node
        facts: NodeFacts = node.meta[FACTS]
        steps = {k: v for k, v in node.meta.items() if k != SPELLED}
        steps[FACTS] = facts._replace(memory=(), written=())
        while before.next is not node:
            before = before.next
            before.meta = dict(steps)
        made.meta[FACTS] = facts
        node.replace_all_uses_with(made)
        graph.erase_node(node)


# --- evenly spaced numbers ---


def _look_at_linspace(
    find: FindFake,
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    **options: Any,
) -> Spelling | None:
    dtype = dtype or torch.get_default_dtype()
    if options or not (is_exactly(start, int, float) and is_exactly(end, int, float)):
        return None
    if not _is_open_int(steps) or not dtype.is_floating_point:
        return None
    return functools.partial(_spell_linspace, kind=dtype)


def _spell_linspace(
    start: float, end: float, steps: Any, *, kind: torch.dtype, device: Any = None, **_: Any
) -> Any:
    places = torch.arange(steps, dtype=torch.float64, device=device)
    step = (end - start) / _LARGER(steps - 1, 1)
    return (places * step + start).to(kind)


# --- classes as rows of zeros and a one ---


def _look_at_one_hot(find: FindFake, tensor: Any, num_classes: Any = -1) -> Spelling | None:
    if not _is_open_int(num_classes):
        return None
    return functools.partial(_spell_one_hot, device=tensor.device)


def _spell_one_hot(tensor: Any, num_classes: Any, *, device: torch.device) -> Any:
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=device)).to(torch.int64)


# --- pools over the whole of a tensor ---


def _look_at_pool(
    dims: int,
    spelling: Spelling,
    find: FindFake,
    tensor: Any,
    kernel_size: Any,
    *args: Any,
    **how: Any,
) -> Spelling | None:
    sizes = kernel_size if is_exactly(kernel_size, tuple, list, torch.Size) else [kernel_size]
    fake = find(tensor)
    if args or (how and how != _UNSAID) or fake is None or len(sizes) != dims:
        return None
    whole = fake.size()[-dims:]
    if not any(map(_is_open_int, sizes)) or not all(map(_are_equal, sizes, whole)):
        return None
    return spelling


def _look_at_max1(find: FindFake, tensor: Any, *args: Any, **how: Any) -> Spelling | None:
    found = _look_at_pool(1, _spell_max1, find, tensor, *args, **how)
    if found is None and find(tensor) is not None and not how.get("return_indices"):
        return _spell_max_by_places
    return found


# What torch.nn.functional says where nothing was said.
_UNSAID = {
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}


def _spell_max1(tensor: Any, kernel_size: Any, **_: Any) -> Any:
    return torch.max(tensor, -1, keepdim=True)[0]


def _spell_max_by_places(*args: Any, return_indices: bool = False, **how: Any) -> Any:
    """`max_pool1d` itself needs sizes (torch 2.13)."""
    return functional.max_pool1d_with_indices(*args, **how)[0]


def _spell_max2(tensor: Any, kernel_size: Any, **_: Any) -> Any:
    return torch.max(tensor.flatten(-2), -1, keepdim=True)[0].unsqueeze(-1)


def _spell_mean1(tensor: Any, kernel_size: Any) -> Any:
    return tensor.mean(-1, keepdim=True)


def _spell_mean2(tensor: Any, kernel_size: Any) -> Any:
    return tensor.mean((-2, -1), keepdim=True)


# --- forms ---


def _look_at_layers(
    func: Callable[..., Any],
    args: Sequence[Any],
    results: Sequence[torch.Tensor],
    find: FindFake,
) -> Spelling | None:
    """Recurrent layers: torch goes through the sequence in Python, and so needs its length.

    An LSTM without gradient is one call to a library.
    """
    if len(args) != 9 or results[0].dim() != 3:  # a packed sequence
        return None
    fake, batch_first = find(args[0]), args[-1]
    if fake is None or not is_open_symbol(fake.size(1 if batch_first else 0)):
        return None
    if func == torch.lstm and not results[0].requires_grad:
        return None
    return functools.partial(_form_layers, is_turned=not results[0].is_contiguous())


def _form_layers(
    given: Any,
    states: Any,
    weights: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    is_turned: bool,
) -> tuple[torch.Tensor, ...]:
    states = states if is_exactly(states, tuple, list) else (states,)
    first, second, _ = given.size()
    width = states[0].size(2) * (2 if bidirectional else 1)
    if is_turned:
        output = states[0].new_empty((second, first, width)).transpose(0, 1)
    else:
        output = states[0].new_empty((first, second, width))
    return output, *map(torch.empty_like, states)


def _look_at_ctc(
    func: Callable[..., Any], args: Sequence[Any], results: Sequence[torch.Tensor], find: FindFake
) -> Spelling:
    return functools.partial(_form_ctc, is_mean=not results[0].dim())


def _form_ctc(log_probs: Any, *_: Any, is_mean: bool, **how: Any) -> torch.Tensor:
    made: torch.Tensor = log_probs.new_empty(() if is_mean else (log_probs.size(1),))
    return made


_FORMS: dict[Callable[..., Any], Callable[..., Spelling | None]] = {
    **dict.fromkeys((torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu), _look_at_layers),
    **dict.fromkeys((torch.ctc_loss, functional.ctc_loss), _look_at_ctc),
}


def _is_open_int(number: object) -> bool:
    return is_exactly(number, OpenInt) and not is_taken(number) and is_open_symbol(number.symbol)  # type: ignore[attr-defined]


def _are_equal(number: Any, size: Any) -> bool:
    """Whether they are always equal: nobody is asked."""
    symbol = number.symbol if is_exactly(number, OpenInt) else number
    return bool(expression_of(symbol) == expression_of(size))


_LOOKS: dict[Callable[..., Any], Callable[..., Spelling | None]] = {
    torch.linspace: _look_at_linspace,
    torch._C._nn.one_hot: _look_at_one_hot,
    functional.max_pool1d: _look_at_max1,
    functional.max_pool2d: functools.partial(_look_at_pool, 2, _spell_max2),
    torch.avg_pool1d: functools.partial(_look_at_pool, 1, _spell_mean1),
    torch._C._nn.avg_pool2d: functools.partial(_look_at_pool, 2, _spell_mean2),
}
